# SPDX-License-Identifier: Apache-2.0
"""What the fields of a memory must be like."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .position_layout import POSITION_LAYOUTS
from .carriers import PAIR_FIELDS, carrier_tensors, scale_tensors
from .memory_quantization import dtype_of_keys, num_blocks, quantization_of, width_of

_INTEGER_DTYPES = (torch.bool, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


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
    carrier_shape = _carrier_of_embeddings(memory) if memory.key_values is None else _carrier_of_key_values(memory)
    _check_integers(memory, "attention_mask", memory.attention_mask, carrier_shape)
    _check_integers(memory, "position_ids", memory.position_ids, carrier_shape)
    _check_integers(memory, "num_context_tokens", memory.num_context_tokens, carrier_shape[:1])
    if memory.question_fingerprints is not None:
        _check_integers(memory, "question_fingerprints", memory.question_fingerprints, carrier_shape[:1])
    of_pairs = {name: getattr(memory, name) for name in PAIR_FIELDS if getattr(memory, name) is not None}
    _check_of_pairs(memory, of_pairs, carrier_shape)
    if isinstance(memory.ratio, Tensor):
        _check_integers(memory, "ratio", memory.ratio, carrier_shape[:1])
    elif isinstance(memory.ratio, bool) or not isinstance(memory.ratio, int):
        raise TypeError(f"ratio must be an int or a LongTensor with one value for each row, got {memory.ratio!r}")
    elif memory.ratio < 1:
        raise ValueError(f"ratio must be 1 or more, got {memory.ratio}")
    if not isinstance(memory.model_id, str):
        raise TypeError(f"model_id must be a string, got {memory.model_id!r}")
    if memory.position_layout not in POSITION_LAYOUTS:
        raise ValueError(
            f"position_layout must be one of {', '.join(POSITION_LAYOUTS)}, got {memory.position_layout!r}"
        )
    integers = [memory.attention_mask, memory.position_ids, memory.num_context_tokens]
    integers += [memory.ratio] if isinstance(memory.ratio, Tensor) else []
    integers += of_pairs.values()
    _check_scales(memory)
    devices = {tensor.device for tensor in carrier_tensors(memory) + scale_tensors(memory) + integers}
    if len(devices) > 1:
        raise ValueError(f"all tensors of a memory must be on one device, got {sorted(map(str, devices))}")
    if not memory.attention_mask.is_meta:
        refuse_values(memory, torch.stack(value_flags(memory, finite)).tolist())


def _carrier_of_embeddings(memory: Any) -> tuple[int, int]:
    _check_carrier_tensor(memory, "embeddings", memory.embeddings, "(batch_size, num_slots, hidden_size)")
    if memory.inverse_frequencies is not None:
        raise ValueError("inverse_frequencies belong to key_values, embeddings have none")
    return tuple(memory.embeddings.shape[:2])


def _carrier_of_key_values(memory: Any) -> tuple[int, int]:
    layers = memory.key_values
    if not isinstance(layers, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in layers):
        raise TypeError("key_values must be a tuple with one pair of keys and values for each layer")
    if not layers:
        raise ValueError("key_values must have at least one layer")
    for tensor in carrier_tensors(memory):
        _check_carrier_tensor(memory, "key_values", tensor, "(batch_size, num_key_value_heads, num_slots, head_dim)")
    widths = {(*tensor.shape[:-1], width_of(tensor)) for tensor in carrier_tensors(memory)}
    dtypes = {(keys.dtype, values.dtype) for keys, values in layers}
    if len(widths | dtypes) > 2 or any(keys != dtype_of_keys(values) for keys, values in dtypes):
        found = sorted(map(str, widths | dtypes))
        raise ValueError(f"key_values must have one shape and dtype in all layers, got {', '.join(found)}")
    (batch_size, _, length, _), head_dim = layers[0][0].shape, width_of(layers[0][0])
    frequencies = memory.inverse_frequencies
    if frequencies is not None and not (isinstance(frequencies, Tensor) and frequencies.is_floating_point()):
        kind = getattr(frequencies, "dtype", repr(frequencies))
        raise TypeError(f"inverse_frequencies must be a floating-point tensor, got {kind}")
    if frequencies is not None and frequencies.shape != (head_dim / 2,):
        raise ValueError(
            f"inverse_frequencies must have shape ({head_dim // 2},), half of the head dimension, "
            f"got {tuple(frequencies.shape)}"
        )
    return batch_size, length


def _check_of_pairs(memory: Any, of_pairs: dict[str, Any], carrier_shape: tuple[int, int]) -> None:
    for name, tensor in of_pairs.items():
        if memory.key_values is None:
            raise ValueError(f"{name} belong to key_values, embeddings have none")
        _check_integers(memory, name, tensor, (*carrier_shape, num_heads_of(memory)))
    ratios = memory.coarsest_ratios
    if ratios is not None and memory.head_ids is None:
        raise ValueError("coarsest_ratios belong to head_ids, which are not given")
    if ratios is not None and ratios.dtype != torch.uint8:
        raise TypeError(f"coarsest_ratios must be uint8, got {ratios.dtype}")


def num_heads_of(memory: Any) -> int:
    """Key/value heads in all layers of a memory of key/values."""
    return len(memory.key_values) * memory.key_values[0][0].shape[1]


def _check_integers(memory: Any, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if not isinstance(tensor, Tensor) or tensor.dtype not in _INTEGER_DTYPES:
        raise TypeError(f"{name} must be an integer tensor, got {getattr(tensor, 'dtype', repr(tensor))}")
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(
            f"{name} must have shape {tuple(shape)} to fit the {memory.carrier}, got {tuple(tensor.shape)}"
        )


def value_flags(memory: Any, finite: bool = False) -> list[Tensor]:
    """What may be wrong with the values of a memory's fields, without a wait for the device.

    Args:
        memory: a `CompressedContext`.
        finite: look for NaN and infinite values in what carries the memory, too.

    Returns:
        truth values, tensors without dimensions, for [`refuse_values`].
    """
    mask = memory.attention_mask.long()
    carrier: list[Tensor] = []
    if finite:
        # Integers are.
        carrier = scale_tensors(memory) if quantization_of(memory.dtype) else carrier_tensors(memory)
    return [
        ((mask != 0) & (mask != 1)).any(),
        (mask[:, 1:] > mask[:, :-1]).any(),
        (memory.num_context_tokens < 0).any(),
        ((memory.position_ids < 0) & (mask == 1)).any(),
        _has_endless_frequencies(memory),
        (torch.as_tensor(memory.ratio, device=mask.device) < 1).any(),
        _has_unknown_heads(memory),
        ~torch.stack([mask.new_ones((), dtype=torch.bool), *(tensor.isfinite().all() for tensor in carrier)]).all(),
    ]


def _has_endless_frequencies(memory: Any) -> Tensor:
    frequencies = memory.inverse_frequencies
    if frequencies is None:
        return memory.attention_mask.new_zeros((), dtype=torch.bool)
    return (~frequencies.isfinite()).any().to(memory.attention_mask.device)


def _has_unknown_heads(memory: Any) -> Tensor:
    if memory.head_ids is None:
        return memory.attention_mask.new_zeros((), dtype=torch.bool)
    return ((memory.head_ids < 0) | (memory.head_ids >= num_heads_of(memory))).any()


def refuse_values(memory: Any, flags: Sequence[int]) -> None:
    """Raise a `ValueError` for the first of [`value_flags`] that is true."""
    reasons = (
        "attention_mask must hold ones and zeros",
        "attention_mask must have the real slots of each row first, the padding slots after them",
        "num_context_tokens must be zero or more",
        "position_ids must be zero or more in every real slot",
        "inverse_frequencies must be finite",
        "ratio must be 1 or more in every row",
        "head_ids must be 0 to "
        f"{num_heads_of(memory) - 1 if memory.head_ids is not None else 0}, the heads of all layers",
        f"{memory.carrier} must be finite, and hold NaN or infinite values: the model that made them has overflowed, "
        "or its weights are not finite",
    )
    for flag, reason in zip(flags, reasons, strict=True):
        if flag:
            raise ValueError(reason)


def _check_carrier_tensor(memory: Any, name: str, tensor: Tensor, shape: str) -> None:
    dtype = getattr(tensor, "dtype", None)
    if not isinstance(tensor, Tensor) or not (tensor.is_floating_point() or quantization_of(tensor.dtype)):
        raise TypeError(
            f"{name} must be floating-point tensors, or int8, uint8 or int16 with `scales`, got {dtype or tensor!r}"
        )
    if tensor.dim() != shape.count(",") + 1:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
    if tensor.is_floating_point() != (memory.scales is None):
        raise TypeError(
            f"{name} of {dtype} {'have' if memory.scales is None else 'has no'} `scales`: give both, or none"
        )


def _check_scales(memory: Any) -> None:
    """A quantised carrier needs float16 scales of the right shapes, structured as the carrier is."""
    if memory.scales is None:
        return
    if memory.key_values is None:
        fits = isinstance(memory.scales, Tensor)
    else:
        fits = isinstance(memory.scales, tuple) and len(memory.scales) == len(memory.key_values)
        fits = fits and all(isinstance(pair, tuple) and len(pair) == 2 for pair in memory.scales)
    if not fits or not all(isinstance(t, Tensor) and t.dtype == torch.float16 for t in scale_tensors(memory)):
        raise TypeError("scales must be float16 tensors, one for embeddings, a pair for each layer of key_values")
    for tensor, scales in zip(carrier_tensors(memory), scale_tensors(memory), strict=True):
        wanted = (*tensor.shape[:-1], num_blocks(width_of(tensor)))
        if tuple(scales.shape) != wanted:
            raise ValueError(f"scales must have shape {wanted} to fit the {memory.carrier}, got {tuple(scales.shape)}")
