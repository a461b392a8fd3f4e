# SPDX-License-Identifier: Apache-2.0
"""Contexts behind an opening, such as a chat's: where their chunks stand when they are read, and where texts do."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache

from .compressed_context import CompressedContext, KeyValues
from .key_value_memory import inverse_frequencies
from .packing import PackedSequence, text_positions
from .position_layout import rotated, rotation
from .chunking import Chunks, cut
from .headwise_reading import HeadwiseModel
from .input_checks import check_context_length
from .token_rows import TokenRows


class OpenedContextModel(HeadwiseModel):
    """A compressor whose base reads contexts behind the configuration's `opening_ids`, which are in no memory.

    Keys keep their places, and the text goes on behind the context. Of a context with more tokens than the base has
    positions each chunk is read right behind the opening; its keys are turned to their places in the document, so that
    memories are joined as ever, and when a text reads them all chunks stand at the same positions (Parallel Context
    Windows, https://arxiv.org/abs/2212.10947).
    """

    @property
    def first_slot_position(self) -> int:  # type: ignore[override]
        """Tokens of the opening, which every context is read behind."""
        return len(self.config.opening_ids)

    def chunks_of(self, context: TokenRows) -> Chunks:
        config = self.config
        rows = (context.input_ids, context.attention_mask, context.lengths)
        chunks = cut(*rows, config.chunk_size, config.position_layout, context.passages)
        positions = max(chunks.lengths) if self._can_move else max(context.lengths)
        check_context_length(config.decoder_config, positions + self.first_slot_position, config.chunk_size)
        is_long = [n > self._most_positions for n in context.lengths for _ in range(chunks.chunks_per_row)]
        if any(is_long):
            # No base reads farther than its positions: the chunks of these are read right behind the opening.
            starts = chunks.starts.where(torch.tensor(is_long, device=chunks.starts.device), 0)
            chunks.position_ids = chunks.position_ids - starts[:, None]
        return chunks

    def opened(self, chunks: Chunks) -> tuple[Tensor, Tensor, Tensor]:
        """Token ids, mask and positions of the opening and the chunks behind it, `(num_chunks, num_places)` each."""
        num_chunks, ids = len(chunks.lengths), chunks.input_ids
        opening = torch.tensor(self.config.opening_ids, dtype=torch.long, device=ids.device).expand(num_chunks, -1)
        mask = torch.cat([torch.ones_like(opening), chunks.attention_mask], dim=1)
        places = torch.arange(opening.shape[1], device=ids.device).expand_as(opening)
        # The layout counts from 1, the base from 0.
        position_ids = torch.cat([places, chunks.position_ids - 1 + opening.shape[1]], dim=1)
        return torch.cat([opening, ids], dim=1), mask, position_ids

    @property
    def _most_positions(self) -> int:
        """Tokens of a context that have positions of their own behind the opening."""
        limit = self.config.max_position_embeddings
        return sys.maxsize if limit is None else limit - self.first_slot_position

    @property
    def _can_move(self) -> bool:
        return inverse_frequencies(self.encoder_backbone) is not None

    def moves(self, chunks: Chunks) -> Tensor | None:
        """How far behind the place where it was read each chunk stands in its document, `(num_chunks,)`; `None` if all
        were read in their places."""
        rows = range(0, len(chunks.lengths), chunks.chunks_per_row)
        if max(sum(chunks.lengths[row : row + chunks.chunks_per_row]) for row in rows) <= self._most_positions:
            return None
        return chunks.starts + 1 - chunks.position_ids[:, 0]

    def in_their_places(self, key_values: KeyValues, moves: Tensor) -> KeyValues:
        """Keys and values of chunks, moved by `moves`."""
        return _moved(key_values, moves, inverse_frequencies(self.encoder_backbone))

    def slot_positions(self, slot_mask: Tensor, chunks: Chunks, counts: Sequence[int]) -> Tensor:
        """That of each chunk's first token: which of its tokens the pairs of a slot are of, their heads settle."""
        of_slots = [chunk for chunk, count in enumerate(counts) for _ in range(count)]
        starts = chunks.starts[torch.tensor(of_slots, dtype=torch.long, device=slot_mask.device)] + 1
        return torch.zeros_like(slot_mask).masked_scatter(slot_mask.bool(), starts)

    def _starts_and_lengths(self, memory: CompressedContext) -> tuple[Tensor, Tensor]:
        """Where the chunk of each slot is read, as in `position_ids`, and the positions that each row takes: keys keep
        their places, unless a context has more tokens than the base positions."""
        starts, lengths, num_slots = memory.position_ids, memory.num_context_tokens, memory.attention_mask.shape[1]
        is_short = isinstance(memory.ratio, int) and num_slots * memory.ratio <= self._most_positions
        if is_short or not num_slots or memory.inverse_frequencies is None:
            return starts, lengths
        return same_starts(memory, lengths > self._most_positions)

    def cache_of_slots(self, memory: CompressedContext, is_full: bool, cache: Cache | None, use_cache: bool) -> Cache:
        starts, _ = self._starts_and_lengths(memory)
        if starts is not memory.position_ids:
            pairs = _moved(memory.key_values or (), starts - memory.position_ids, memory.inverse_frequencies)
            memory = replace(memory, key_values=pairs, position_ids=starts, check=False)
        return super().cache_of_slots(memory, is_full, cache, use_cache)

    def text_position_offset(self, memory: CompressedContext, input_ids: Tensor, text_mask: Tensor | None) -> Tensor:
        offset = self._starts_and_lengths(memory)[1] + self.first_slot_position
        mask = torch.ones_like(input_ids) if text_mask is None else text_mask[:, -input_ids.shape[1] :]
        moved = self._moves_first(input_ids, mask)
        return offset if moved is None else offset - moved.sum(dim=1)

    def first_inputs(
        self,
        text: TokenRows,
        position_ids: Tensor | None,
        memory: CompressedContext | None,
        offset: Tensor | None,
        is_full: bool = False,
        longest: int | None = None,
    ) -> tuple[dict[str, Any], PackedSequence | None]:
        inputs, sequence = super().first_inputs(text, position_ids, memory, offset, is_full, longest)
        moved = None if memory is None else self._moves_first(text.input_ids, text.attention_mask)
        if moved is not None:
            # The text's own opening ends where the one that the context was read behind does.
            ids = text_positions(text.attention_mask) if position_ids is None else position_ids
            ids = ids + self.first_slot_position - moved.sum(dim=1, keepdim=True)
            inputs["position_ids"] = torch.where(moved, ids, inputs["position_ids"])
        return inputs, sequence


def same_starts(memory: CompressedContext, is_long: Tensor) -> tuple[Tensor, Tensor]:
    """Where the chunks of long contexts start once all of them stand at the same positions (Parallel Context Windows).

    Args:
        memory: whose `position_ids` are the first positions of the slots' chunks, counted from 1.
        is_long: `(batch_size,)` bool, the rows whose chunks do.

    Returns:
        `position_ids` `(batch_size, num_slots)` as above, and the positions that each row takes, `(batch_size,)`: of
        these rows as many as their longest chunk has tokens.
    """
    starts, lengths, is_real = memory.position_ids, memory.num_context_tokens, memory.attention_mask.bool()
    ends = pad(starts, (0, 1))[:, 1:].where(pad(is_real, (0, 1))[:, 1:], lengths[:, None] + 1)
    longest = (ends - starts).masked_fill(~is_real, 0).amax(dim=1)
    return starts.masked_fill(is_long[:, None] & is_real, 1), longest.where(is_long, lengths)


def _moved(key_values: KeyValues, moves: Tensor, frequencies: Tensor | None) -> KeyValues:
    """Pairs at other positions, see [`rotation`]."""
    if not key_values or frequencies is None:
        return key_values
    tables = rotation(moves, frequencies, key_values[0][0])
    return tuple((rotated(keys, tables), values) for keys, values in key_values)
