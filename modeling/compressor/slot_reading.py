# SPDX-License-Identifier: Apache-2.0
"""What a language model reads of a memory and a text: slots and text as one sequence, or text behind cached slots."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.cache_utils import Cache

from ..memory.compressed_context import CompressedContext
from ..memory.key_value_memory import aligned_right, check_sliding_window, filled_cache
from ..parts.packing import PackedSequence, pack, reads_falling_ids_as_packed, text_positions, through_first
from .backbone import CompressorBackbone
from .memory_checks import warn_about_positions
from .token_rows import TokenRows, check_cached_mask, check_no_new_pads


class SlotReader(CompressorBackbone):
    """The part of [`CompressorModel`] that stands between memories and its language model."""

    # One vector for each of the configuration's task tokens.
    task_embeddings: nn.Parameter | None

    def joint_inputs(
        self,
        text: TokenRows,
        context: TokenRows,
        ratio: int | str | Tensor | None,
        position_ids: Tensor | None,
        offset: Tensor | None,
        beside: dict[str, Any],
    ) -> tuple[dict[str, Any], PackedSequence] | None:
        """Contexts and texts as one sequence for the language model, in the form of `first_inputs`; `None`, as by
        default, where a context is compressed first.

        Args:
            text: one row for each context, see `text_rows`.
            context: see `context_rows`.
            ratio: as in `forward`.
            position_ids: the text's, counted within it.
            offset: `text_position_offset`, computed if not given.
            beside: see `beside_contexts`.
        """
        return None

    def first_inputs(
        self,
        text: TokenRows,
        position_ids: Tensor | None,
        memory: CompressedContext | None,
        offset: Tensor | None,
        is_full: bool = False,
        longest: int | None = None,
    ) -> tuple[dict[str, Any], PackedSequence | None]:
        """Slots and text as one sequence for the language model; text alone where the cache holds the slots.

        Args:
            text: checked, see `text_rows`.
            position_ids: the text's, counted within it.
            memory: one row for each text.
            offset: `text_position_offset`, computed if not given.
            is_full: whether all slots are known to be real.
            longest: slots and text tokens of the longest row, where no cache goes on from this pass; rows are then no
                wider, and pads stand behind them.
        """
        config, input_ids, text_mask = self.config, text.input_ids, text.attention_mask
        positions = text_positions(text_mask) if position_ids is None else position_ids.expand_as(input_ids)
        embeddings = self._embed_text(input_ids)
        if memory is None:
            sequence = pack(text_mask[:, :0], text_mask, is_full=text.is_full)
            return sequence.inputs(embeddings, positions), sequence
        if offset is None:
            offset = self.text_position_offset(memory, input_ids, text_mask)
        warn_about_positions(config.decoder_config, memory, offset, max(text.lengths))
        if memory.embeddings is None:
            slot_mask = self.cached_slot_mask(memory)
            check_sliding_window(config.decoder_config, slot_mask.shape[1], text_mask.shape[1])
            return {
                "inputs_embeds": embeddings,
                "attention_mask": torch.cat([slot_mask, text_mask], dim=1),
                "position_ids": (positions + offset[:, None]) * text_mask,
                "is_full": is_full and text.is_full,
            }, None
        moves_first = self._moves_first(input_ids, text_mask)
        memory_positions = memory.position_ids
        text_offset = offset[:, None].expand_as(positions)
        if moves_first is not None:
            text_offset = text_offset * ~moves_first
            shift = moves_first.sum(dim=1, keepdim=True)
            if config.position_layout == "enhanced":
                # Its context starts at position 1.
                shift = (shift - 1).clamp(min=0)
            memory_positions = memory_positions + shift
        pad_in_front = bool(self.num_pads_in_front(memory))
        is_full = is_full and text.is_full
        pads = (longest, longest is not None)
        sequence = pack(memory.attention_mask, text_mask, moves_first, pad_in_front, is_full, *pads)
        joined = torch.cat([memory.embeddings.to(embeddings.dtype), embeddings], dim=1)
        return sequence.inputs(joined, torch.cat([memory_positions, positions + text_offset], dim=1)), sequence

    def next_inputs(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        memory: CompressedContext | None,
        offset: Tensor | None,
        cache: Cache,
    ) -> dict[str, Any]:
        """Text that follows what is in the cache, slots and the text so far; arguments as of `forward`."""
        if memory is not None and len(memory) != len(input_ids):
            raise ValueError(
                f"`memory` has {len(memory)} rows, `input_ids` has {len(input_ids)}: behind a cache give a row for "
                "each text (`memory.repeat_interleave`)"
            )
        num_cached = int(cache.get_seq_length()) - self.num_places(memory)
        text_mask = check_cached_mask(attention_mask, input_ids, num_cached)
        may_have_pads = memory is not None and memory.carrier == "key_values"
        # In a step of generation it would wait for the device.
        if input_ids.shape[1] > 1 and not may_have_pads:
            check_no_new_pads(text_mask, input_ids.shape[1])
        if position_ids is None:
            position_ids = text_positions(text_mask)[:, -input_ids.shape[1] :]
        if memory is not None:
            if offset is None:
                raise ValueError("with a cache, `text_position_offset` must say where the text starts; see `generate`")
            position_ids = position_ids + offset[:, None]
        return {
            "inputs_embeds": self._embed_text(input_ids),
            "attention_mask": _as_long_as(cache, self._cached_mask(memory, text_mask)),
            "position_ids": position_ids,
            "is_full": input_ids.shape[1] == 1 or not may_have_pads,
        }

    def _cached_mask(self, memory: CompressedContext | None, text_mask: Tensor) -> Tensor:
        """The mask `(batch_size, num_slots + num_text_tokens)` of what is in the cache and of the new text."""
        if memory is not None and memory.carrier == "key_values":
            # The slots came first, and then the text as it was given.
            slot_mask = self.cached_slot_mask(memory)
            check_sliding_window(self.config.decoder_config, slot_mask.shape[1], text_mask.shape[1])
            return torch.cat([slot_mask, text_mask], dim=1)
        if memory is not None:
            pads = text_mask.new_zeros(len(text_mask), self.num_pads_in_front(memory))
            text_mask = torch.cat([pads, memory.attention_mask, text_mask], dim=1)
        # The cache holds a row's pads in front, so only their number matters.
        return text_mask.sort(dim=1).values

    def cache_of_slots(self, memory: CompressedContext, is_full: bool, cache: Cache | None, use_cache: bool) -> Cache:
        """A cache that starts with a memory of key/values, the one given or a new one."""
        return filled_cache(aligned_right(memory, is_full), cache, use_cache)

    def cached_slot_mask(self, memory: CompressedContext) -> Tensor:
        """Which places of such a cache hold slots, `(batch_size, num_places)`."""
        return memory.attention_mask.sort(dim=1).values

    def num_pads_in_front(self, memory: CompressedContext) -> int:
        """Pads, 0 or 1, that every row needs in front of its slots beside its own; see `pack`."""
        falls = memory.position_layout == "enhanced" and memory.carrier == "embeddings"
        return int(falls and reads_falling_ids_as_packed(self.config.decoder_config, memory.batch_size))

    def num_places(self, memory: CompressedContext | None) -> int:
        """Places that a memory takes in the cache in front of the text."""
        return 0 if memory is None else memory.attention_mask.shape[1] + self.num_pads_in_front(memory)

    def text_position_offset(self, memory: CompressedContext, input_ids: Tensor, text_mask: Tensor | None) -> Tensor:
        """Position of each row's first text token (EPL, Tables 2, 3 and 13 to 15).

        Args:
            memory: the slots in front of the text.
            input_ids: `(batch_size, num_text_tokens)`; under the enhanced layout its first token tells the task.
            text_mask: `(batch_size, num_text_tokens)`, or `None` for all ones.

        Returns:
            `(batch_size,)`: the number of slots; under the enhanced layout 0 for a reconstruction, which starts with
            its own token ([AE]), and the number of context tokens for everything else.
        """
        if memory.position_layout != "enhanced":
            return memory.num_slots
        autoencoding = self.config.reconstruction_token_id
        if autoencoding is None:
            return memory.num_context_tokens
        first = torch.zeros_like(memory.num_slots) if text_mask is None else text_mask.argmax(dim=1)
        starts_with_ae = input_ids.gather(1, first[:, None])[:, 0] == autoencoding
        return memory.num_context_tokens * ~starts_with_ae

    def num_in_front(self, input_ids: Tensor) -> int:
        """Most tokens that a text without pads has in front of the slots; one pass has to read them and the slots."""
        moved = self._moves_first(input_ids, torch.ones_like(input_ids))
        return 0 if moved is None else int(moved.sum(dim=1).max())

    def _moves_first(self, input_ids: Tensor, text_mask: Tensor) -> Tensor | None:
        """Which text tokens stand in front of the slots, `(batch_size, num_text_tokens)` bool; `None` for none."""
        opening, bos = self.config.slots_after_ids, self.config.bos_token_id
        if opening:
            return through_first(input_ids, text_mask, opening)
        if not self.config.bos_before_slots or bos is None:
            return None
        is_first = (text_mask.cumsum(dim=1) == 1) & text_mask.bool()
        return is_first & (input_ids == bos)

    def _embed_text(self, input_ids: Tensor) -> Tensor:
        table = self.get_input_embeddings()
        if self.task_embeddings is None:
            return table(input_ids)
        embeddings = table(input_ids.clamp(max=self.config.vocab_size - 1))
        for row, task_id in enumerate(self.config.task_token_ids.values()):
            task = self.task_embeddings[row].to(embeddings.dtype)
            embeddings = torch.where((input_ids == task_id)[:, :, None], task, embeddings)
        return embeddings


def _as_long_as(cache: Cache, attention_mask: Tensor) -> Tensor:
    """A mask with zeros behind it up to the length of a fixed cache, so that every pass over a token has one shape.

    One compiled graph then serves all of them; the places behind the text are masked by causality already.
    """
    if not cache.is_compileable:
        return attention_mask
    length = max(layer.max_cache_len for layer in cache.layers)
    return functional.pad(attention_mask, (0, max(0, length - attention_mask.shape[1])))
