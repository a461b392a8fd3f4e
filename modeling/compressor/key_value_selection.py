# SPDX-License-Identifier: Apache-2.0
"""Memories that are some of a context's own keys and values: the common part of StreamingLLM, SnapKV and KVzip."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from ..memory.compressed_context import KeyValues
from ..memory.key_value_memory import inverse_frequencies
from ..parts.base_pass import copy_with_shared_weights
from ..parts.packing import left_padded
from ..parts.position_layout import moved_pairs
from .backbone import Chunks, slot_counts
from .modeling_compressor import CompressorModel
from .validation import TokenRows


@dataclass
class ReadContext:
    """Contexts as the base has read them, pads in front; a question may stand behind each.

    Args:
        key_values: rotated keys and values of each layer, `(batch_size, num_heads, num_places, head_dim)`.
        is_context: `(batch_size, num_places)` bool, neither pads nor questions.
        position_ids: `(batch_size, num_places)`, from 0 on in each row.
        attentions: of each layer, from the last places to all, `(batch_size, num_query_heads, num_last, num_places)`.
        scores: of each layer, how much each place is to stay, `(batch_size, num_heads, num_places)`, of a method that
            reads the contexts once more.
    """

    key_values: KeyValues
    is_context: Tensor
    position_ids: Tensor
    attentions: tuple[Tensor, ...] = field(default=())
    scores: tuple[Tensor, ...] = field(default=())


class KeyValueSelectionModel(CompressorModel):
    r"""
    A compressor whose memory is the keys and values of some of a context's tokens, as the base has made them. A method
    says which (`priorities`), and how many last tokens' attention it asks for (`num_last_tokens`).
    """

    slot_origin = "kept"

    @property
    def num_last_tokens(self) -> int:
        """Tokens at the end of a reading whose attention tells which places stay; 0 where none does."""
        return 0

    def priorities(
        self, read: ReadContext, num_slots: Tensor, num_question_tokens: Tensor | None
    ) -> Sequence[Tensor] | Tensor:
        """Rank the places: the highest stay.

        Args:
            read: the contexts.
            num_slots: `(batch_size,)`, places that stay in each.
            num_question_tokens: `(batch_size,)`, of the questions behind them; `None` where there are none.

        Returns:
            `(batch_size, num_places)` for all layers and heads, or for each layer `(batch_size, num_key_value_heads,
            num_places)`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say which keys and values stay")

    # Nothing trains: which places stay has no gradient, and what they hold is the base's.
    @torch.no_grad()
    def encode(
        self, chunks: Chunks, ratios: Sequence[int | Tensor], question: TokenRows | None = None
    ) -> list[KeyValues]:
        read = self._read(chunks, question)
        asked = None if question is None else question.attention_mask.sum(dim=1).expand(len(chunks.lengths))
        places = [self._places(read, slot_counts(self.config, chunks.lengths, ratio), asked) for ratio in ratios]
        return [self._select(read, of_ratio) for of_ratio in places]

    @torch.no_grad()
    def kept_tokens(self, chunks: Chunks, ratio: int | Tensor) -> Sequence[Tensor]:
        """Return the places of the tokens that stay of contexts without pads, in the order of the text.

        Returns:
            For each layer `(num_chunks, num_heads, num_slots)`; one head stands for all that keep the same.
        """
        return self._places(self._read(chunks, None), slot_counts(self.config, chunks.lengths, ratio), None)

    def slot_positions(self, slot_mask: Tensor, chunks: Chunks, counts: Sequence[int]) -> Tensor:
        """Return the slots' positions in front of the text, `(batch_size, num_slots)`.

        Under the enhanced layout heads may have kept different places: these are spread over the whole context.
        """
        if self.config.position_layout == "enhanced":
            # The layout counts from 1; the base alone, and so its keys, from 0.
            return (super().slot_positions(slot_mask, chunks, counts) - 1) * slot_mask
        return (slot_mask.cumsum(dim=1) - 1) * slot_mask

    def _read(self, chunks: Chunks, question: TokenRows | None) -> ReadContext:
        """Read contexts once with the base, the last tokens behind the cache of the others."""
        ids, mask = chunks.input_ids, chunks.attention_mask
        is_context = mask
        if question is not None:
            asked, asked_mask = (rows.expand(len(ids), -1) for rows in (question.input_ids, question.attention_mask))
            is_context = torch.cat([mask, torch.zeros_like(asked_mask)], dim=1)
            ids, mask = torch.cat([ids, asked], dim=1), torch.cat([mask, asked_mask], dim=1)
        # A sliding window counts places: no pad may stand between two tokens.
        ids, is_context = left_padded(ids, mask), left_padded(is_context, mask).bool()
        mask = mask.sort(dim=1).values
        position_ids = (mask.cumsum(dim=1) - 1).clamp(min=0)
        border, cache = ids.shape[1] - min(self.num_last_tokens, ids.shape[1]), DynamicCache()

        def read(reader: CompressorModel, start: int, end: int, **wanted: Any) -> Any:
            arguments = {"attention_mask": mask[:, :end], "position_ids": position_ids[:, start:end], **wanted}
            return reader.encoder_outputs(ids[:, start:end], cache=cache, **arguments)

        if border:
            read(self, 0, border)
        attentions = ()
        if border < ids.shape[1]:
            reader: CompressorModel = self
            if self.language_model.config._attn_implementation != "eager":
                # A twin with the one implementation of attention that returns its weights.
                reader = copy_with_shared_weights(self)
                reader.language_model.set_attn_implementation("eager")
            attentions = read(reader, border, ids.shape[1], output_attentions=True).attentions
        # Under autocast rotated keys are float32 and values are not.
        pairs = tuple((layer.keys.to(self.dtype), layer.values.to(self.dtype)) for layer in cache.layers)
        return ReadContext(pairs, is_context, position_ids, attentions)

    def _places(
        self, read: ReadContext, counts: Sequence[int], num_question_tokens: Tensor | None
    ) -> Sequence[Tensor]:
        """Return the places that stay in each layer, see `kept_places`."""
        num_slots = torch.tensor(counts, device=read.is_context.device)
        priorities = self.priorities(read, num_slots, num_question_tokens)
        if isinstance(priorities, Tensor):
            return [kept_places(priorities[:, None], read.is_context, num_slots, max(counts))] * len(read.key_values)
        return [kept_places(layer, read.is_context, num_slots, max(counts)) for layer in priorities]

    def _select(self, read: ReadContext, places: Sequence[Tensor]) -> KeyValues:
        """Return keys and values of the places that stay, in the order of the text."""
        kept = [
            (keys.take_along_dim(at[..., None], dim=2), values.take_along_dim(at[..., None], dim=2))
            for (keys, values), at in zip(read.key_values, places, strict=True)
        ]
        if self.config.position_layout != "default":
            return tuple(kept)
        frequencies = inverse_frequencies(self.language_model)
        if frequencies is None:
            raise ValueError(
                "`position_layout='default'` moves keys to other positions, and the rotary embedding of a base of "
                f"type {self.config.decoder_config.model_type!r} does not tell how: take 'enhanced'"
            )
        # Keys move from their positions to 0, 1, ..., of all layers by one wait for the device.
        positions = torch.cat([read.position_ids[:, None].take_along_dim(at, dim=2) for at in places])
        offsets = torch.arange(positions.shape[2], device=positions.device) - positions
        keys, values = (torch.cat(states) for states in zip(*kept, strict=True))
        ((keys, values),) = moved_pairs([(keys, values)], offsets, frequencies)
        return tuple(zip(keys.chunk(len(kept)), values.chunk(len(kept)), strict=True))


def kept_places(priority: Tensor, is_context: Tensor, num_slots: Tensor, width: int) -> Tensor:
    """Return the `num_slots` context places of highest priority in each row and head, in ascending order.

    Of equal priorities, `(batch_size, num_heads, num_places)`, the first place stays. The result is `(batch_size,
    num_heads, width)`; behind a row's own places stand any others.
    """
    priority = priority.masked_fill(~is_context[:, None], -torch.inf)
    rank = priority.argsort(dim=2, descending=True, stable=True).argsort(dim=2)
    is_dropped = rank >= num_slots[:, None, None]
    return is_dropped.int().argsort(dim=2, stable=True)[:, :, :width]
