# SPDX-License-Identifier: Apache-2.0
"""What the fields of a memory must be like: checked where one is made by hand, loaded, saved or read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...configuration.configuration_compressor import POSITION_LAYOUTS
from .carriers import PAIR_FIELDS, carrier_tensors, scale_tensors
from .memory_quantization import dtype_of_keys, num_blocks, quantization_of, width_of

_ID_DTYPES = (torch.bool, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def is_memory(value: Any) -> bool:
    """Whether it is a `CompressedContext`: this package's, or that of a model which brings its own code."""
    return any(kind.__name__ == "CompressedContext" for kind in type(value).__mro__)


def check_memory_fields(memory: Any, finite: bool = False) -> None:
    """Check types, shapes and values of a memory's fields.

    Args:
        memory: a `CompressedContext`. Its file imports this one, so this one cannot name the class.
        finite: Refuse NaN and infinite values in what carries the memory, too.

    Raises:
        TypeError: A field has the wrong type or dtype.
        ValueError: The shapes do not fit together, or a value is out of range.
    """
    if (memory.embeddings is None) == (memory.key_values is None):
        raise ValueError("a CompressedContext holds either embeddings or key_values, exactly one of them")
    tensors, scales = _checked_carrier(memory), scale_tensors(memory)
    rows, slots = tensors[0].shape[0], tensors[0].shape[-2]
    shapes: dict[str, tuple[int, ...]] = {"attention_mask": (rows, slots), "position_ids": (rows, slots)}
    optional: dict[str, tuple[int, ...]] = {"question_fingerprints": (rows,)}
    if memory.key_values is not None:
        optional |= {name: (rows, slots, num_heads_of(memory)) for name in PAIR_FIELDS}
    shapes |= {"num_context_tokens": (rows,)} | ({"ratio": (rows,)} if isinstance(memory.ratio, Tensor) else {})
    shapes |= {name: shape for name, shape in optional.items() if getattr(memory, name) is not None}
    for name, shape in shapes.items():
        tensor = getattr(memory, name)
        if not isinstance(tensor, Tensor) or tensor.dtype not in _ID_DTYPES:
            raise TypeError(f"{name} must be an integer tensor, got {getattr(tensor, 'dtype', repr(tensor))}")
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must have shape {shape} to fit the {memory.carrier}, got {tuple(tensor.shape)}")
    if not isinstance(memory.ratio, (int, Tensor)):
        raise TypeError(f"ratio must be an int or a LongTensor with one value for each row, got {memory.ratio!r}")
    if not isinstance(memory.model_id, str):
        raise TypeError(f"model_id must be a string, got {memory.model_id!r}")
    if memory.position_layout not in POSITION_LAYOUTS:
        raise ValueError(
            f"position_layout must be one of {', '.join(POSITION_LAYOUTS)}, got {memory.position_layout!r}"
        )
    devices = {tensor.device for tensor in [*tensors, *scales, *(getattr(memory, name) for name in shapes)]}
    if len(devices) > 1:
        raise ValueError(f"all tensors of a memory must be on one device, got {sorted(map(str, devices))}")
    if not memory.attention_mask.is_meta:
        refuse_values(memory, torch.stack(value_flags(memory, finite)).tolist())


def _checked_carrier(memory: Any) -> list[Tensor]:
    """The embeddings, or keys and values of all layers, of one shape and with the scales and frequencies they need."""
    name, dims = memory.carrier, 3 if memory.key_values is None else 4
    pairs = memory.key_values or ()
    if memory.key_values is not None and (
        not isinstance(pairs, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs)
    ):
        raise TypeError("key_values must be a tuple with one pair of keys and values for each layer")
    tensors = carrier_tensors(memory)
    if not tensors:
        raise ValueError("key_values must have at least one layer")
    for tensor in tensors:
        dtype = getattr(tensor, "dtype", None)
        if dtype is None or not (dtype.is_floating_point or (quantization_of(dtype) and memory.scales is not None)):
            raise TypeError(
                f"{name} must be floating-point tensors, or integers with `scales`, got {dtype or tensor!r}"
            )
        if tensor.dim() != dims:
            raise ValueError(f"{name} must have {dims} dimensions, got shape {tuple(tensor.shape)}")
    shapes = {(*tensor.shape[:-1], width_of(tensor)) for tensor in tensors}
    dtypes = {(keys.dtype, values.dtype) for keys, values in pairs}
    if len(shapes) > 1 or len(dtypes) > 1 or any(keys != dtype_of_keys(values) for keys, values in dtypes):
        found = ", ".join(sorted(map(str, shapes | dtypes)))
        raise ValueError(f"key_values must have one shape and dtype in all layers, got {found}")
    if memory.scales is not None:
        wanted = [((*tensor.shape[:-1], num_blocks(width_of(tensor))), torch.float16) for tensor in tensors]
        if [(tuple(scales.shape), scales.dtype) for scales in scale_tensors(memory)] != wanted:
            raise ValueError(f"scales must be float16, of shapes {[shape for shape, _ in wanted]} to fit the {name}")
    frequencies, width = memory.inverse_frequencies, width_of(tensors[0])
    if frequencies is not None and (not pairs or frequencies.shape != (width / 2,)):
        raise ValueError(
            f"inverse_frequencies belong to key_values and must have shape ({width // 2},), half of the head "
            f"dimension, got {tuple(frequencies.shape)}"
        )
    if memory.coarsest_ratios is not None and (memory.head_ids is None or memory.coarsest_ratios.dtype != torch.uint8):
        raise ValueError("coarsest_ratios must be uint8, beside head_ids")
    return tensors


def num_heads_of(memory: Any) -> int:
    """Key/value heads in all layers of a memory of key/values."""
    return len(memory.key_values) * memory.key_values[0][0].shape[1]


def value_flags(memory: Any, finite: bool = False) -> list[Tensor]:
    """What may be wrong with the values of a memory's fields, without a wait for the device.

    Args:
        memory: a `CompressedContext`.
        finite: look for NaN and infinite values in what carries the memory, too.

    Returns:
        truth values, tensors without dimensions, for [`refuse_values`].
    """
    mask, heads, frequencies = memory.attention_mask.long(), memory.head_ids, memory.inverse_frequencies
    no = mask.new_zeros((), dtype=torch.bool)
    carrier: list[Tensor] = []
    if finite:
        # Integers are.
        carrier = scale_tensors(memory) if quantization_of(memory.dtype) else carrier_tensors(memory)
    return [
        ((mask != 0) & (mask != 1)).any(),
        (mask[:, 1:] > mask[:, :-1]).any(),
        (memory.num_context_tokens < 0).any(),
        ((memory.position_ids < 0) & (mask == 1)).any(),
        no if frequencies is None else (~frequencies.isfinite()).any().to(mask.device),
        (torch.as_tensor(memory.ratio, device=mask.device) < 1).any(),
        no if heads is None else ((heads < 0) | (heads >= num_heads_of(memory))).any(),
        ~torch.stack([~no, *(tensor.isfinite().all() for tensor in carrier)]).all(),
    ]


def refuse_values(memory: Any, flags: Sequence[int]) -> None:
    """Raise a `ValueError` for the first of [`value_flags`] that is true."""
    reasons = (
        "attention_mask must hold ones and zeros",
        "attention_mask must have the real slots of each row first, the padding slots after them",
        "num_context_tokens must be zero or more",
        "position_ids must be zero or more in every real slot",
        "inverse_frequencies must be finite",
        "ratio must be 1 or more in every row",
        "head_ids must be those of the heads of all layers",
        f"{memory.carrier} must be finite, and hold NaN or infinite values: the model that made them has overflowed, "
        "or its weights are not finite",
    )
    for flag, reason in zip(flags, reasons, strict=True):
        if flag:
            raise ValueError(reason)
