# SPDX-License-Identifier: Apache-2.0
"""The tensors that carry a memory: embeddings, or keys and values of each layer, and beside integers their scales.

A memory is a `CompressedContext`, whose file imports this one, so that this one cannot name the class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .memory_quantization import QUANTIZATIONS, dequantize_tensor, quantize_tensor

KeyValues = tuple[tuple[Tensor, Tensor], ...]
# Fields of memories whose heads keep unlike numbers of pairs, with an entry for each.
PAIR_FIELDS = ("head_ids", "coarsest_ratios")


def carrier_tensors(memory: Any) -> list[Tensor]:
    """The embeddings alone, or keys and values of the first layer, the second and so on."""
    return _tensors(memory.embeddings if memory.key_values is None else memory.key_values)


def scale_tensors(memory: Any) -> list[Tensor]:
    """One for each of [`carrier_tensors`]; none of a memory that is not quantised."""
    return _tensors(memory.scales)


def _tensors(value: Tensor | KeyValues | None) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for pair in value or () for tensor in pair]


def map_carrier(memory: Any, function: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """The carrier's field and `scales` after a function of each tensor, whose last dimension but one is the slots."""
    fields: dict[str, Any] = {}
    for name in (memory.carrier, "scales"):
        value = vars(memory)[name]
        if isinstance(value, tuple):
            fields[name] = tuple((function(keys), function(values)) for keys, values in value)
        elif value is not None:
            fields[name] = function(value)
    return fields


def num_bytes(memory: Any) -> int:
    """Bytes of a memory's real slots, with their scales and what is said of each pair."""
    of_pairs = (vars(memory)[name] for name in PAIR_FIELDS)
    tensors = [
        *carrier_tensors(memory),
        *scale_tensors(memory),
        *(tensor for tensor in of_pairs if tensor is not None),
    ]
    of_slot = sum(tensor.shape[1:-2].numel() * tensor.shape[-1] * tensor.element_size() for tensor in tensors)
    return int(memory.num_slots.sum()) * of_slot


def quantized_fields(memory: Any, quantization: str) -> dict[str, Any]:
    """The carrier of a `CompressedContext` and its `scales` in a form of `QUANTIZATIONS`; see [`quantize_tensor`]."""
    mask, (of_keys, of_others) = memory.attention_mask, QUANTIZATIONS[quantization]
    if memory.embeddings is not None:
        return dict(zip(("embeddings", "scales"), quantize_tensor(memory.embeddings, mask, of_others), strict=True))
    layers = [
        (quantize_tensor(keys, mask, of_keys), quantize_tensor(values, mask, of_others))
        for keys, values in memory.key_values
    ]
    return {
        name: tuple((keys[part], values[part]) for keys, values in layers)
        for part, name in enumerate(("key_values", "scales"))
    }


def dequantized_fields(memory: Any) -> dict[str, Any]:
    """The carrier of a quantised `CompressedContext` in float32, without `scales`."""
    if memory.embeddings is not None:
        return {"embeddings": dequantize_tensor(memory.embeddings, memory.scales), "scales": None}
    layers = zip(memory.key_values, memory.scales, strict=True)
    key_values = tuple(tuple(map(dequantize_tensor, pair, scales)) for pair, scales in layers)
    return {"key_values": key_values, "scales": None}


def check_range(memory: Any, dtype: torch.dtype) -> None:
    """Raise a `ValueError` if a finite value of what carries a memory does not fit in a floating-point type."""
    largest = torch.finfo(dtype).max
    for tensor in carrier_tensors(memory) if largest < torch.finfo(memory.dtype).max else ():
        magnitudes = tensor.detach().abs()
        largest_value = magnitudes.where(magnitudes.isfinite(), 0).max().item() if tensor.numel() else 0.0
        if largest_value > largest:
            raise ValueError(f"the memory holds values up to {largest_value:.4g}, {dtype} ends at {largest:.4g}")
