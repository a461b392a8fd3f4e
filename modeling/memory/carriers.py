# SPDX-License-Identifier: Apache-2.0
"""What carries a memory: embeddings, or keys and values of each layer, and beside integers their scales.

A memory is a `CompressedContext`, whose file imports this one, so that this one cannot name the class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .memory_quantization import GROUP_SIZES, dequantize_tensor, quantize_tensor

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


def map_carrier(memory: Any, function: Callable[[Tensor, int, int], Tensor]) -> dict[str, Any]:
    """The carrier's field and `scales` after a function of each tensor.

    Args:
        memory: any.
        function: of a tensor, its dimension of the slots, and how many neighbouring slots share an entry there.
    """
    span = GROUP_SIZES[memory.quantization] if memory.quantization else 1
    fields: dict[str, Any] = {}
    for name, keys_span in ((memory.carrier, 1), ("scales", span)):
        value = getattr(memory, name)
        if isinstance(value, tuple):
            fields[name] = tuple((function(k, 2, keys_span), function(v, 2, 1)) for k, v in value)
        elif value is not None:
            fields[name] = function(value, 1, 1)
    return fields


def key_values_name(num_layers: int, num_heads: int, head_dim: int) -> str:
    """Key/values in words, as `CompressedContext.carrier_name` gives them."""
    return f"key/values of {num_layers} layers with {num_heads} heads of {head_dim}"


def num_bytes(memory: Any) -> int:
    """Bytes of a memory's real slots, with their scales and what is said of each pair."""
    num_slots, sizes = memory.num_slots.cpu(), []

    def count(tensor: Tensor, slot_dim: int, span: int) -> Tensor:
        heads = tensor.shape[1] if slot_dim == 2 else 1
        entries = int(((num_slots + span - 1) // span).sum())
        sizes.append(entries * heads * tensor.shape[-1] * tensor.element_size())
        return tensor

    map_carrier(memory, count)
    for of_pairs in (getattr(memory, name) for name in PAIR_FIELDS):
        if of_pairs is not None:
            count(of_pairs, 1, 1)
    return sum(sizes)


def quantized_fields(memory: Any, quantization: str) -> dict[str, Any]:
    """The carrier of a `CompressedContext` and its `scales` in "int8" or "int4"; see [`quantize_tensor`]."""

    def both(tensor: Tensor, is_keys: bool = False) -> tuple[Tensor, Tensor]:
        return quantize_tensor(tensor, memory.attention_mask, quantization, is_keys)

    if memory.embeddings is not None:
        return dict(zip(("embeddings", "scales"), both(memory.embeddings), strict=True))
    layers = [(both(keys, is_keys=True), both(values)) for keys, values in memory.key_values]
    return {
        name: tuple((keys[part], values[part]) for keys, values in layers)
        for part, name in enumerate(("key_values", "scales"))
    }


def dequantized_fields(memory: Any) -> dict[str, Any]:
    """The carrier of a quantised `CompressedContext` in float32, without `scales`."""
    if memory.embeddings is not None:
        return {"embeddings": dequantize_tensor(memory.embeddings, memory.scales, is_keys=False), "scales": None}
    layers = zip(memory.key_values, memory.scales, strict=True)
    key_values = tuple(
        (dequantize_tensor(keys, by_channel, is_keys=True), dequantize_tensor(values, by_slot, is_keys=False))
        for (keys, values), (by_channel, by_slot) in layers
    )
    return {"key_values": key_values, "scales": None}


def check_range(memory: Any, dtype: torch.dtype) -> None:
    """Raise a `ValueError` if a finite value of what carries a memory does not fit in a floating-point type."""
    largest = torch.finfo(dtype).max
    for tensor in carrier_tensors(memory) if largest < torch.finfo(memory.dtype).max else ():
        magnitudes = tensor.detach().abs()
        found = magnitudes.where(magnitudes.isfinite(), 0).max().item() if tensor.numel() else 0.0
        if found > largest:
            raise ValueError(f"the memory holds values up to {found:.4g}, {dtype} ends at {largest:.4g}")
