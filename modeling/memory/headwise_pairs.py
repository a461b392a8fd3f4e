# SPDX-License-Identifier: Apache-2.0
"""Pairs of key and value that stay of all heads together: which ones do, and at which coarser ratios they still would.

A memory of n slots holds n pairs for each head of each layer on average. All pairs of a chunk, head behind head and
each head's in the order of the text, fill the usual shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..parts.packing import take_places
from .carriers import KeyValues
from .compressed_context import CompressedContext

# It stands for itself and all above; a byte holds no more.
_MOST_RATIO = torch.iinfo(torch.uint8).max


@dataclass
class HeadwisePairs:
    """Pairs that stay of contexts where heads keep unlike numbers of them; the fields are those of
    `CompressedContext`."""

    key_values: KeyValues
    head_ids: Tensor
    coarsest_ratios: Tensor


def kept_pairs(key_values: KeyValues, scores: Tensor, mask: Tensor, counts: Sequence[int]) -> HeadwisePairs:
    """Keep the pairs of highest score, of all heads of all layers together; of equal ones the first.

    Args:
        key_values: for each layer keys and values `(batch_size, num_heads, num_places, head_dim)`.
        scores: `(batch_size, num_layers * num_heads, num_places)`.
        mask: `(batch_size, num_places)`, places that may stay.
        counts: slots of each row, each of as many pairs as there are heads in all layers.
    """
    num_heads = scores.shape[1]
    order = scores.masked_fill(mask[:, None] == 0, -torch.inf).flatten(1).argsort(dim=1, descending=True, stable=True)
    places = torch.arange(order.shape[1], device=order.device).expand_as(order)
    # In which slot each pair would be if slots were filled in the order of the scores.
    slots = torch.empty_like(order).scatter_(1, order, places).view_as(scores) // num_heads
    # Of ceil(n / r) slots it is in one where r <= (n - 1) / slot.
    ratios = (mask.long().sum(dim=1) - 1)[:, None, None] // slots.clamp(min=1)
    ratios = ratios.where(slots > 0, _MOST_RATIO).clamp(min=0, max=_MOST_RATIO).to(torch.uint8)
    num_slots = torch.tensor(counts, device=scores.device)[:, None]
    is_real = torch.arange(max(counts), device=scores.device) < num_slots
    chosen = _chosen(slots < num_slots[:, :, None], torch.zeros_like(mask, dtype=torch.long), is_real)
    heads = torch.arange(num_heads, device=scores.device, dtype=torch.int16)[:, None].expand_as(scores)
    of_pairs = (_of_chosen(each, chosen, is_real) for each in (heads, ratios))
    return HeadwisePairs(_taken(key_values, chosen, is_real), *of_pairs)


def coarser_pairs(memory: Any, ratio: int) -> CompressedContext:
    """Return a memory with `coarsest_ratios` at a coarser ratio; see [`CompressedContext.at_ratio`]."""
    finest = int(torch.as_tensor(memory.ratio).max()) if len(memory) else 1
    if not finest <= ratio <= _MOST_RATIO:
        raise ValueError(f"`ratio` must be from {finest}, the memory's own, to {_MOST_RATIO}, got {ratio}")
    # Slots of one chunk have one position.
    places = memory.position_ids
    chunks = (places.diff(dim=1, prepend=places[:, :1]) != 0).cumsum(dim=1)
    is_kept = ((memory.coarsest_ratios >= ratio) & memory.attention_mask[:, :, None].bool()).mT
    counts = is_kept.sum(dim=(1, 2)) // is_kept.shape[1]
    num_slots = int(counts.max()) if len(memory) else 0
    is_real = torch.arange(num_slots, device=memory.device) < counts[:, None]
    chosen = _chosen(is_kept, chunks, is_real)
    # Of a joined memory parts may be coarser already.
    reached = (memory.num_context_tokens + counts - 1) // counts.clamp(min=1)
    return replace(
        memory,
        key_values=_taken(memory.key_values, chosen, is_real),
        scales=None if memory.scales is None else _taken(memory.scales, chosen, is_real),
        head_ids=_of_chosen(memory.head_ids.mT, chosen, is_real),
        coarsest_ratios=_of_chosen(memory.coarsest_ratios.mT, chosen, is_real),
        attention_mask=is_real.long(),
        position_ids=places.gather(1, chosen[:, 0] % max(1, places.shape[1])) * is_real,
        ratio=reached.clamp(min=ratio) if bool((reached > ratio).any()) else ratio,
        check=False,
    )


def _chosen(is_kept: Tensor, chunks: Tensor, is_real: Tensor) -> Tensor:
    """Return the pair at each place of a memory, `(batch_size, num_heads, num_slots)`: by chunk, then by head.

    `is_kept` is `(batch_size, num_heads, num_places)`, in each chunk a multiple of `num_heads`; `chunks` are numbers
    of the chunks of places, `(batch_size, num_places)`, in rising order, and `is_real` is `(batch_size, num_slots)`.
    """
    _, num_heads, num_places = is_kept.shape
    # What is dropped stands behind all.
    chunks = chunks[:, None].where(is_kept, num_places).flatten(1)
    order = chunks.argsort(dim=1, stable=True)
    # Of each slot the chunk, and its first slot and the end of its slots.
    chunks = chunks.gather(1, order)[:, ::num_heads][:, : is_real.shape[1]].contiguous()
    first, end = (torch.searchsorted(chunks, chunks, right=is_end)[:, None] for is_end in (False, True))
    slots = torch.arange(is_real.shape[1], device=order.device)
    heads = torch.arange(num_heads, device=order.device)[:, None]
    ranks = first * num_heads + heads * (end - first) + slots - first
    return order.gather(1, ranks.where(is_real[:, None], 0).flatten(1)).view_as(ranks)


def _taken(key_values: KeyValues, chosen: Tensor, is_real: Tensor) -> KeyValues:
    """The chosen pairs in the shape of a memory."""
    layers, heads = len(key_values), key_values[0][0].shape[1]
    sides = []
    for of_layers in zip(*key_values, strict=True):
        states = torch.stack(of_layers, dim=1).flatten(1, 3)
        states = take_places(states, chosen.flatten(1)).unflatten(1, (layers, heads, is_real.shape[1]))
        sides.append(states.masked_fill(~is_real[:, None, None, :, None], 0).unbind(1))
    return tuple(zip(*sides, strict=True))


def _of_chosen(of_pairs: Tensor, chosen: Tensor, is_real: Tensor) -> Tensor:
    """Take what is said of pairs `(batch_size, num_heads, num_places)` for the chosen ones, as a memory has it."""
    taken = of_pairs.flatten(1).gather(1, chosen.flatten(1)).view_as(chosen)
    return taken.mT.masked_fill(~is_real[:, :, None], 0)


CompressedContext.coarser_pairs = coarser_pairs
