# SPDX-License-Identifier: Apache-2.0
"""Contexts in chunks: cut before the encoder, joined after it, with position ids for both sides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..memory.compressed_context import KeyValues
from ..parts.packing import right_padded, take_places

Slots = Tensor | KeyValues


@dataclass
class Chunks:
    """Contexts cut into chunks that are compressed independently, all in one batch.

    Args:
        input_ids, attention_mask: `(batch_size * chunks_per_row, chunk_length)`, right-padded.
        position_ids: Same shape; positions of the context tokens by the layout.
        starts: `(batch_size * chunks_per_row,)`, context tokens in front of each chunk.
        lengths: Real tokens of each chunk, known on the host.
        chunks_per_row: Number of chunks of the longest row; shorter rows have empty ones.
        inputs_embeds: `(batch_size * chunks_per_row, chunk_length, hidden_size)`, what the encoder reads in place of
            the ids' own embeddings; `None` for these.
    """

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    starts: Tensor
    lengths: list[int]
    chunks_per_row: int
    inputs_embeds: Tensor | None = None

    def take(self, rows: Sequence[int]) -> Chunks:
        """Return some of the chunks without columns of pads alone; they are no longer those of whole contexts."""
        index = torch.tensor(rows, dtype=torch.long, device=self.input_ids.device)
        lengths = [self.lengths[row] for row in rows]
        tensors = {name: value[index] for name, value in vars(self).items() if isinstance(value, Tensor)}
        tensors = {name: value[:, : max(lengths)] if value.dim() > 1 else value for name, value in tensors.items()}
        return replace(self, **tensors, lengths=lengths, chunks_per_row=1)

    @property
    def is_full(self) -> bool:
        """Return whether there are no pads."""
        return min(self.lengths) == self.input_ids.shape[1]


def cut(
    input_ids: Tensor,
    attention_mask: Tensor,
    lengths: Sequence[int],
    chunk_size: int | None,
    layout: str,
    passages: Sequence[Sequence[int]] | None = None,
) -> Chunks:
    """Cut contexts into chunks of `chunk_size` real tokens; the last one of a row, or of a passage, may be short.

    Args:
        input_ids, attention_mask: `(batch_size, num_tokens)`, padded anywhere.
        lengths: Real tokens of each row.
        chunk_size: `None`: one chunk whatever the length.
        layout: "default" restarts the positions in each chunk at 0; "uniform" and "enhanced" count on from 1 (EPL,
            Tables 1 and 12).
        passages: Tokens of each passage of each row; `None`: a row is one passage.
    """
    device, num_tokens = input_ids.device, input_ids.shape[1]
    if any(length != num_tokens for length in lengths):
        input_ids = right_padded(input_ids, attention_mask)
    size = chunk_size or max(1, num_tokens)
    passages = passages or [[length] for length in lengths]
    rows = [[min(size, n - start) for n in row for start in range(0, n, size)] for row in passages]
    chunks_per_row = max(1, max(map(len, rows)))
    rows = [row + [0] * (chunks_per_row - len(row)) for row in rows]
    in_chunks, of_chunks = torch.tensor(rows, device=device), [n for row in rows for n in row]
    starts = (in_chunks.cumsum(dim=1) - in_chunks).reshape(-1)
    mask = first_places(of_chunks, device)
    position_ids = torch.arange(mask.shape[1], device=device).expand(mask.shape)
    places = (position_ids + starts[:, None]).clamp(max=num_tokens - 1)
    input_ids = input_ids.gather(1, places.reshape(len(rows), -1)).reshape(places.shape) * mask
    if layout != "default":
        position_ids = position_ids + starts[:, None] + 1
    return Chunks(input_ids, mask, position_ids, starts, of_chunks, chunks_per_row)


def first_places(counts: Sequence[int], device: torch.device) -> Tensor:
    """Return the mask `(len(counts), max(counts))` of so many left-aligned places in each row."""
    places = torch.arange(max(counts), device=device)
    return (places < torch.tensor(counts, device=device)[:, None]).long()


def gathered(parts: Sequence[Any], order: Sequence[int]) -> Any:
    """Bring the slots of groups of chunks into the order of all chunks, with zeros for chunks in no group; `order` has
    each chunk's place among those of all groups, or their number where it is in none."""
    first = parts[0]
    if is_dataclass(first) and not isinstance(first, type):
        return replace(first, **{name: gathered([vars(part)[name] for part in parts], order) for name in vars(first)})
    if not isinstance(first, Tensor):
        layers = [zip(*of_layer, strict=True) for of_layer in zip(*parts, strict=True)]
        return tuple(tuple(gathered(states, order) for states in of_layer) for of_layer in layers)
    width = max(part.shape[-2] for part in parts)
    parts = [torch.nn.functional.pad(part, (0, 0, 0, width - part.shape[-2])) for part in parts]
    if sum(map(len, parts)) in order:
        parts = [*parts, parts[0].new_zeros((1, *parts[0].shape[1:]))]
    joined = torch.cat(list(parts)) if len(parts) > 1 else parts[0]
    if list(order) == list(range(len(joined))):
        return joined
    return joined.index_select(0, torch.tensor(order, device=joined.device))


def with_markers(slots: Tensor, counts: Sequence[int], before: Tensor, after: Tensor) -> tuple[Tensor, list[int]]:
    """Put vectors `(num_markers, hidden_size)` in front of the left-aligned slots of each chunk, and behind them.

    A chunk without slots has none. Returns slots and markers, and how many there are in each chunk.
    """
    around = [markers.to(slots.dtype).expand(len(counts), -1, -1) for markers in (before, after)]
    joined = torch.cat([around[0], slots[:, : max(counts)], around[1]], dim=1)
    num_markers = len(before) + len(after)
    totals = [count + num_markers if count else 0 for count in counts]
    if min(counts) < max(counts):
        mask = first_places(counts, slots.device)
        marks = mask[:, :1].expand(-1, num_markers)
        mask = torch.cat([marks[:, : len(before)], mask, marks[:, len(before) :]], dim=1)
        joined = take_places(joined, mask.argsort(dim=1, stable=True, descending=True))
    return joined, totals


def join(slots: Slots, counts: Sequence[int], chunks_per_row: int) -> tuple[Slots, Tensor]:
    """Join the chunks' left-aligned slots row by row, without gaps.

    Args:
        slots: `(batch_size * chunks_per_row, slots_per_chunk, hidden_size)`; or for each layer keys and values
            `(batch_size * chunks_per_row, num_heads, slots_per_chunk, head_dim)`.
        counts: Slots of each chunk.

    Returns:
        Slots `(batch_size, num_slots, hidden_size)`, or keys and values likewise, zeros at padding slots, and their
        mask.
    """
    mask = first_places(counts, slots.device if isinstance(slots, Tensor) else slots[0][0].device)
    slots = _of_each(slots, lambda states: states[..., : max(counts), :])
    if min(counts) != max(counts):
        pads = (mask == 0)[:, :, None]
        slots = _of_each(slots, lambda states: states.masked_fill(pads if states.dim() == 3 else pads[:, None], 0))
    if chunks_per_row == 1:
        return slots, mask
    mask = mask.reshape(-1, chunks_per_row * mask.shape[1])
    num_slots = max(sum(counts[start : start + chunks_per_row]) for start in range(0, len(counts), chunks_per_row))
    order = mask.argsort(dim=1, stable=True, descending=True)[:, :num_slots]

    def in_rows(states: Tensor) -> Tensor:
        # `(batch_size, num_heads, chunks_per_row, slots_per_chunk, head_dim)`, or the same without heads.
        chunks = states.unflatten(0, (-1, chunks_per_row)).movedim(1, -3)
        return take_places(chunks.flatten(-3, -2), order, dim=states.dim() - 2)

    return _of_each(slots, in_rows), mask.gather(1, order)


def _of_each(slots: Slots, function: Callable[[Tensor], Tensor]) -> Slots:
    """Apply a function to embeddings, or to the keys and values of each layer."""
    if isinstance(slots, Tensor):
        return function(slots)
    return tuple((function(keys), function(values)) for keys, values in slots)
