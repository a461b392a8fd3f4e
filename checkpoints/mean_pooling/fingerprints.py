# SPDX-License-Identifier: Apache-2.0
"""Names for weights: a fingerprint that is the same in float32 and bfloat16, and an exact checksum."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def fingerprint(
    model: nn.Module, dtype: torch.dtype = torch.bfloat16, stored: Mapping[str, Tensor] | None = None
) -> str:
    """Sixteen hexadecimal digits from a few values of every parameter, the same in float32 and bfloat16.

    Not in float16, which rounds float32's values to others before they are bfloat16's.

    Args:
        model: the model; parameters are read in the order of their names.
        dtype: type that the values go through first, where another fingerprint was taken in it.
        stored: by name, what parameters were loaded from, to be read in their place.

    Raises:
        ValueError: a parameter is offloaded.
    """
    digest = hashlib.sha256()
    parts = []
    for name, parameter in sorted(model.named_parameters(), key=lambda item: item[0]):
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        if parameter.is_meta:
            raise ValueError(f"{name} is offloaded, so this model cannot name its memories: load it whole")
        values = _few_values(whole(parameter.detach()))
        source = None if stored is None else stored.get(name)
        if source is not None and source.shape == parameter.shape:
            source = _few_values(source).to(values.device)
            values = source if source.to(values.dtype).equal(values) else values
        parts.append(values.to(dtype).to(torch.bfloat16).float())
    if parts:
        digest.update(torch.cat([part.cpu() for part in parts]).numpy().tobytes())
    return digest.hexdigest()[:16]


def _few_values(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(-1)
    return flat[:: max(1, flat.numel() // 8)][:8]


def version(tensor: Tensor) -> tuple[Any, ...]:
    """What is another after the tensor has got other values, without a look at them: place, shape, changes in place.

    Args:
        tensor: any tensor; what is written through its `data` is not seen.
    """
    # A quantized or shared-out weight may be a class of its own, without a place in memory.
    place = tensor.data_ptr() if type(tensor) in (Tensor, nn.Parameter) else id(tensor)
    # Tensors made in inference mode count no versions.
    return place, tuple(tensor.shape), -1 if tensor.is_inference() else tensor._version


def checksum(tensor: Tensor) -> int | None:
    """The sum of a tensor's bits, eight bytes at a time; `None` for one without floating-point values at hand.

    Args:
        tensor: any tensor; a change of one value changes the sum.
    """
    # A quantized weight may be a class of its own.
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta or not tensor.is_floating_point():
        return None
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()
    in_words = flat.numel() * flat.element_size() // 8 * 8 // flat.element_size()
    # Words of eight bytes are summed many times faster than single values.
    return int(flat[:in_words].view(torch.int64).sum()) + int(flat[in_words:].view(torch.uint8).sum())


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, gathered where FSDP has shared it out among processes."""
    if torch.distributed.is_available():
        from torch.distributed.tensor import DTensor

        if isinstance(tensor, DTensor):
            return tensor.full_tensor()
    return tensor
