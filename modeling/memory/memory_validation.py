# SPDX-License-Identifier: Apache-2.0
"""Checks of a memory's fields, where one is made by hand, loaded, saved or read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...configuration.configuration_compressor import POSITION_LAYOUTS
from .carriers import PAIR_FIELDS, carrier_tensors, scale_tensors
from .memory_quantization import dtype_of_keys, num_blocks, quantization_of, width_of

_ID_DTYPES = (torch.bool, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def is_memory(value: Any) -> bool:
    """Return whether it is a `CompressedContext`: this package's, or that of a model which brings its own code."""
    return any(kind.__name__ == "CompressedContext" for kind in type(value).__mro__)


def check_memory_fields(memory: Any, finite: bool = False) -> None:
    """Check types, shapes and values of the fields of a `CompressedContext`; see its `validate`."""
    if (memory.embeddings is None) == (memory.key_values is None):
        raise ValueError("a CompressedContext holds either embeddings or key_values, exactly one of them")
    tensors, scales = _checked_carrier(memory), scale_tensors(memory)
    rows, slots = tensors[0].shape[0], tensors[0].shape[-2]
    shapes: dict[str, tuple[int, ...]] = {"attention_mask": (rows, slots), "position_ids": (rows, slots)}
    optional: dict[str, tuple[int, ...]] = {"question_fingerprints": (rows,)}
    if memory.key_values is not None:
        optional |= {name: (rows, slots, _num_heads(memory)) for name in PAIR_FIELDS}
    shapes |= {"num_context_tokens": (rows,)} | ({"ratio": (rows,)} if isinstance(memory.ratio, Tensor) else {})
    shapes |= {name: shape for name, shape in optional.items() if vars(memory)[name] is not None}
    for name, shape in shapes.items():
        tensor = vars(memory)[name]
        if not isinstance(tensor, Tensor) or tensor.dtype not in _ID_DTYPES:
            kind = tensor.dtype if isinstance(tensor, Tensor) else repr(tensor)
            raise TypeError(f"{name} must be an integer tensor, got {kind}")
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must have shape {shape} to fit the {memory.carrier}, got {tuple(tensor.shape)}")
    if memory.position_layout not in POSITION_LAYOUTS:
        raise ValueError(f"position_layout must be one of {list(POSITION_LAYOUTS)}, got {memory.position_layout!r}")
    devices = {tensor.device for tensor in [*tensors, *scales, *(vars(memory)[name] for name in shapes)]}
    if len(devices) > 1:
        raise ValueError(f"all tensors of a memory must be on one device, got {sorted(map(str, devices))}")
    if not memory.attention_mask.is_meta:
        _refuse_values(memory, finite)


def check_served_form(carrier: str, position_layout: str) -> None:
    """Raise `ValueError` if a server of the decoder alone cannot read memories of this form; it says why."""
    if carrier != "embeddings":
        raise ValueError(
            "servers take embeddings only, and memories of this kind are keys and values of every layer: their own "
            "compressor alone can read them"
        )
    if position_layout == "enhanced":
        raise ValueError(
            "servers number embeddings 0, 1, 2, ..., and under the position layout 'enhanced' slots stand where their "
            "tokens stood: only contiguous positions can be served"
        )


def _checked_carrier(memory: Any) -> list[Tensor]:
    """The embeddings, or keys and values of all layers, of one shape and with the scales and frequencies they need."""
    name, dims = memory.carrier, 3 if memory.key_values is None else 4
    pairs, tensors = memory.key_values or (), carrier_tensors(memory)
    for tensor in tensors:
        dtype = tensor.dtype
        if not dtype.is_floating_point and (quantization_of(dtype) is None or memory.scales is None):
            raise TypeError(f"{name} must be floating-point tensors, or integers with `scales`, got {dtype}")
        if tensor.dim() != dims:
            raise ValueError(f"{name} must have {dims} dimensions, got shape {tuple(tensor.shape)}")
    shapes = {(*tensor.shape[:-1], width_of(tensor)) for tensor in tensors}
    dtypes = {(keys.dtype, values.dtype) for keys, values in pairs}
    if len(shapes) > 1 or len(dtypes) > 1 or any(keys != dtype_of_keys(values) for keys, values in dtypes):
        kinds = ", ".join(sorted(map(str, shapes | dtypes)))
        raise ValueError(f"key_values must have one shape and dtype in all layers, got {kinds}")
    if memory.scales is not None:
        wanted = [((*tensor.shape[:-1], num_blocks(width_of(tensor))), torch.float16) for tensor in tensors]
        if [(tuple(scales.shape), scales.dtype) for scales in scale_tensors(memory)] != wanted:
            raise ValueError(f"scales must be float16, of shapes {[shape for shape, _ in wanted]} to fit the {name}")
    frequencies, width = memory.inverse_frequencies, width_of(tensors[0])
    if frequencies is not None and (not pairs or frequencies.shape != (width / 2,)):
        raise ValueError(
            f"inverse_frequencies of key_values have shape ({width // 2},), got {tuple(frequencies.shape)}"
        )
    if memory.coarsest_ratios is not None and (memory.head_ids is None or memory.coarsest_ratios.dtype != torch.uint8):
        raise ValueError("coarsest_ratios must be uint8, beside head_ids")
    return tensors


def _num_heads(memory: Any) -> int:
    """Key/value heads in all layers of a memory of key/values."""
    return len(memory.key_values) * memory.key_values[0][0].shape[1]


def _refuse_values(memory: Any, finite: bool) -> None:
    """Raise a `ValueError` for the first wrong value of a memory's fields, by one wait for the device."""
    mask, heads, frequencies = memory.attention_mask.long(), memory.head_ids, memory.inverse_frequencies
    flags = {
        "attention_mask must hold ones and zeros": (mask != 0) & (mask != 1),
        "attention_mask must have the real slots of each row first, the padding slots after them": (
            mask[:, 1:] > mask[:, :-1]
        ),
        "num_context_tokens must be zero or more": memory.num_context_tokens < 0,
        "position_ids must be zero or more in every real slot": (memory.position_ids < 0) & (mask == 1),
        "ratio must be 1 or more in every row": torch.as_tensor(memory.ratio, device=mask.device) < 1,
    }
    if frequencies is not None:
        flags["inverse_frequencies must be finite"] = ~frequencies.isfinite()
    if heads is not None:
        flags["head_ids must be those of the heads of all layers"] = (heads < 0) | (heads >= _num_heads(memory))
    if finite:
        # Integers are.
        carrier = scale_tensors(memory) if quantization_of(memory.dtype) else carrier_tensors(memory)
        flags[
            f"{memory.carrier} must be finite, and hold NaN or infinite values: the model that made them has "
            "overflowed, or its weights are not finite"
        ] = ~torch.stack([tensor.isfinite().all() for tensor in carrier])
    is_wrong = torch.stack([flag.any().to(mask.device) for flag in flags.values()]).tolist()
    for reason, flag in zip(flags, is_wrong, strict=True):
        if flag:
            raise ValueError(reason)
