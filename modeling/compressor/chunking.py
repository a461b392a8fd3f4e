# SPDX-License-Identifier: Apache-2.0
"""Contexts in chunks: cut before the encoder, joined after it, with position ids for both sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
        input_ids: `(batch_size * chunks_per_row, chunk_length)`, right-padded.
        attention_mask: Same shape.
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
        """Some of the chunks, which are then not those of whole contexts, without columns of pads alone."""
        index = torch.tensor(rows, dtype=torch.long, device=self.input_ids.device)
        lengths = [self.lengths[row] for row in rows]
        found = {name: value[index] for name, value in vars(self).items() if isinstance(value, Tensor)}
        found = {name: value[:, : max(lengths)] if value.dim() > 1 else value for name, value in found.items()}
        return replace(self, **found, lengths=lengths, chunks_per_row=1)

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
        input_ids: `(batch_size, num_tokens)`, padded anywhere.
        attention_mask: Same shape.
        lengths: Real tokens of each row.
        chunk_size: Tokens per chunk, `None` for one chunk whatever the length.
        layout: "default" restarts the positions in each chunk at 0; "uniform" and "enhanced" count on from 1 (EPL,
            Tables 1 and 12).
        passages: Tokens of each passage of each row, which are cut apart from each other.

    Returns:
        The chunks.
    """
    batch_size, num_tokens = input_ids.shape
    if any(length != num_tokens for length in lengths):
        input_ids, attention_mask = (right_padded(tensor, attention_mask) for tensor in (input_ids, attention_mask))
    longest = max(lengths)
    if passages is not None:
        return _cut_passages(input_ids, passages, chunk_size or max(1, longest), layout)
    length = min(chunk_size or longest, longest)
    chunks_per_row = -(-longest // length) if length else 1
    pad = chunks_per_row * length - num_tokens
    # A negative pad cuts columns off that hold pads only.
    input_ids = torch.nn.functional.pad(input_ids, (0, pad)).reshape(batch_size * chunks_per_row, length)
    attention_mask = torch.nn.functional.pad(attention_mask, (0, pad)).reshape(batch_size * chunks_per_row, length)
    starts = (torch.arange(chunks_per_row, device=input_ids.device) * length).repeat(batch_size)
    position_ids = torch.arange(length, device=input_ids.device).expand(input_ids.shape)
    if layout != "default":
        position_ids = position_ids + starts[:, None] + 1
    in_chunks = [max(0, min(length, row - start * length)) for row in lengths for start in range(chunks_per_row)]
    return Chunks(input_ids, attention_mask, position_ids, starts, in_chunks, chunks_per_row)


def _cut_passages(input_ids: Tensor, passages: Sequence[Sequence[int]], chunk_size: int, layout: str) -> Chunks:
    """`cut` where chunks end with passages, too, of right-padded rows."""
    device = input_ids.device
    rows = [[min(chunk_size, n - start) for n in row for start in range(0, n, chunk_size)] for row in passages]
    chunks_per_row = max(1, max(map(len, rows)))
    rows = [row + [0] * (chunks_per_row - len(row)) for row in rows]
    in_chunks, lengths = torch.tensor(rows, device=device), [n for row in rows for n in row]
    starts = (in_chunks.cumsum(dim=1) - in_chunks).reshape(-1)
    attention_mask = first_places(lengths, device)
    position_ids = torch.arange(attention_mask.shape[1], device=device).expand(attention_mask.shape)
    places = (position_ids + starts[:, None]).clamp(max=input_ids.shape[1] - 1)
    input_ids = input_ids.gather(1, places.reshape(len(rows), -1)).reshape(places.shape) * attention_mask
    if layout != "default":
        position_ids = position_ids + starts[:, None] + 1
    return Chunks(input_ids, attention_mask, position_ids, starts, lengths, chunks_per_row)


def first_places(counts: Sequence[int], device: torch.device) -> Tensor:
    """The mask `(len(counts), max(counts))` of so many left-aligned places in each row."""
    places = torch.arange(max(counts), device=device)
    return (places < torch.tensor(counts, device=device)[:, None]).long()


def gathered(parts: Sequence[Any], order: Sequence[int]) -> Any:
    """What groups of chunks have, in the order of all chunks.

    Args:
        parts: for each group `(num_chunks_of_group, ...)`, or for each layer keys and values.
        order: for each chunk its place among those of all groups, or their number where it is in none.

    Returns:
        `(len(order), ...)`, or for each layer keys and values; zeros for chunks that are in no group.
    """
    first = parts[0]
    if not isinstance(first, Tensor):
        layers = [zip(*of_layer, strict=True) for of_layer in zip(*parts, strict=True)]
        return tuple(tuple(gathered(states, order) for states in of_layer) for of_layer in layers)
    # Slots stand last but one, in embeddings as in keys and values; groups have unlike numbers of them.
    width = max(part.shape[-2] for part in parts)
    parts = [torch.nn.functional.pad(part, (0, 0, 0, width - part.shape[-2])) for part in parts]
    num_read = sum(len(part) for part in parts)
    if num_read in order:
        parts = [*parts, parts[0].new_zeros((1, *parts[0].shape[1:]))]
    joined = torch.cat(list(parts)) if len(parts) > 1 else parts[0]
    if list(order) == list(range(len(joined))):
        return joined
    return joined.index_select(0, torch.tensor(order, device=joined.device))


def with_markers(slots: Tensor, counts: Sequence[int], before: Tensor, after: Tensor) -> tuple[Tensor, list[int]]:
    """Put the same vectors in front of the slots of each chunk, and behind them; a chunk without slots has none.

    Args:
        slots: `(num_chunks, slots_per_chunk, hidden_size)`, left-aligned.
        counts: Slots of each chunk.
        before: `(num_before, hidden_size)`.
        after: `(num_after, hidden_size)`.

    Returns:
        `(num_chunks, num_before + max(counts) + num_after, hidden_size)`, left-aligned, and how many there are in each
        chunk.
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


def join(slots: Tensor | KeyValues, counts: Sequence[int], chunks_per_row: int) -> tuple[Tensor | KeyValues, Tensor]:
    """Join the chunks' slots row by row, without gaps.

    Args:
        slots: `(batch_size * chunks_per_row, slots_per_chunk, hidden_size)`, left-aligned; or for each layer keys and
            values `(batch_size * chunks_per_row, num_heads, slots_per_chunk, head_dim)`.
        counts: Slots of each chunk.
        chunks_per_row: Number of chunks of each row.

    Returns:
        Slots `(batch_size, num_slots, hidden_size)`, left-aligned, or keys and values likewise, zeros at padding
        slots, and their mask `(batch_size, num_slots)`.
    """
    device = slots.device if isinstance(slots, Tensor) else slots[0][0].device
    slot_mask = first_places(counts, device)
    if isinstance(slots, Tensor):
        slots = slots[:, : max(counts)]
    if min(counts) != max(counts):
        pads = slot_mask == 0
        if isinstance(slots, Tensor):
            slots = slots.masked_fill(pads[:, :, None], 0)
        else:
            pads = pads[:, None, :, None]
            slots = tuple((keys.masked_fill(pads, 0), values.masked_fill(pads, 0)) for keys, values in slots)
    if chunks_per_row == 1:
        return slots, slot_mask
    batch_size = slot_mask.shape[0] // chunks_per_row
    slot_mask = slot_mask.reshape(batch_size, -1)
    num_slots = max(sum(counts[start : start + chunks_per_row]) for start in range(0, len(counts), chunks_per_row))
    order = slot_mask.argsort(dim=1, stable=True, descending=True)[:, :num_slots]
    slot_mask = slot_mask.gather(1, order)
    if isinstance(slots, Tensor):
        return take_places(slots.reshape(batch_size, -1, slots.shape[-1]), order), slot_mask
    pairs = ((_join_heads(keys, batch_size, order), _join_heads(values, batch_size, order)) for keys, values in slots)
    return tuple(pairs), slot_mask


def _join_heads(states: Tensor, batch_size: int, order: Tensor) -> Tensor:
    """`join` for the keys or values of one layer."""
    heads, head_dim = states.shape[1], states.shape[3]
    rows = states.reshape(batch_size, -1, *states.shape[1:]).transpose(1, 2)
    return take_places(rows.reshape(batch_size, heads, -1, head_dim), order, dim=2)
