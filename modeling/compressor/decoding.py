# SPDX-License-Identifier: Apache-2.0
"""Slots and text through the decoder's backbone, on the first pass and on every later one with a cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast

from ..memory.compressed_context import CompressedContext
from ..memory.key_value_memory import (
    aligned_right,
    check_sliding_window,
    filled_cache,
    note_cached_slots,
)
from ..parts.call_views import for_one_call
from ..parts.lora import DECODER
from ..parts.packing import SplicedSequence, reads_falling_ids_as_packed, splice, text_positions, through_first
from .input_checks import (
    check_cached_mask,
    check_keywords,
    check_mask,
    check_memory,
    check_memory_ratio,
    check_text,
    check_token_ids,
    warn_about_positions,
)


class DecodingMixin:
    """`forward` of every compressor's backbone."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        context_input_ids: Tensor | None = None,
        context_attention_mask: Tensor | None = None,
        memory: CompressedContext | None = None,
        ratio: int | Tensor | None = None,
        use_cache: bool | None = None,
        text_position_offset: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        r"""
        Read slots and text.

        Args:
            input_ids: Text `(batch_size, num_text_tokens)`: task token or BOS, question, answer.
            attention_mask: `(batch_size, num_text_tokens)`; pads may stand on either side. With a cache it covers the
                text in the cache, too.
            position_ids: `(batch_size, num_text_tokens)`, counted within the text; pads do not count.
            past_key_values: A cache; a non-empty one already holds the slots.
            context_input_ids: Contexts `(batch_size, num_context_tokens)` to compress first.
            context_attention_mask: Their mask.
            memory: Contexts that are already compressed; one row serves any number of texts.
            ratio: Ratio for `context_input_ids`, as in `compress`; beside a memory, its own or none.
            use_cache: Whether to return the cache; as the configuration says if not given.
            text_position_offset: `(batch_size,)`, position of the first text token; computed from the memory and the
                text's task token if not given.
            kwargs: Handed to the language model.

        Returns:
            `last_hidden_state` of shape `(batch_size, num_text_tokens, hidden_size)`, and the cache.

        Raises:
            ValueError: context and memory together, a ratio or mask of contexts where there is none to compress, a
                text row without tokens, unknown token ids, a mask of the wrong shape, a memory of another model,
                width or batch size, or a filled cache in training with gradient checkpointing.
        """
        if context_input_ids is not None and memory is not None:
            raise ValueError("give either `context_input_ids` or `memory`, not both")
        if input_ids is None:
            raise ValueError(
                "`input_ids` are needed, the text that follows the slots (`inputs_embeds` is not supported)"
            )
        check_keywords(kwargs)
        if kwargs.pop("inputs_embeds", None) is not None:
            raise ValueError("`inputs_embeds` is not supported: give `input_ids`")
        if context_input_ids is not None:
            memory = self._compress(context_input_ids, context_attention_mask, [ratio], prefix="context_")[0]
        else:
            check_memory_ratio(memory, ratio, context_attention_mask)
        cached = 0 if past_key_values is None else int(past_key_values.get_seq_length())
        if self._drops_caches:
            if cached:
                raise ValueError("in training with gradient checkpointing layers read no filled `past_key_values`")
            past_key_values = None
        if memory is not None and not cached:
            memory = check_memory(memory, self, input_ids)
        if cached:
            inputs = self._next_inputs(input_ids, attention_mask, position_ids, memory, text_position_offset, cached)
            inputs["attention_mask"] = _as_long_as(past_key_values, inputs["attention_mask"])
            sequence = None
        else:
            inputs, sequence = self._first_inputs(
                input_ids, attention_mask, position_ids, memory, text_position_offset
            )
        use_cache = self._wants_cache(use_cache)
        return_dict = kwargs.pop("return_dict", None)
        reads_key_values = memory is not None and memory.carrier == "key_values"
        if reads_key_values and not cached:
            past_key_values = filled_cache(aligned_right(memory), past_key_values, use_cache)
        with self._adapter(self.language_model, DECODER):
            outputs = for_one_call(self.language_model)(
                **inputs, past_key_values=past_key_values, use_cache=use_cache, **kwargs
            )
        if not cached:
            note_cached_slots(outputs.past_key_values, self.num_places(memory))
        if not use_cache:
            # Some backbones hand back the cache that they were given.
            outputs.past_key_values = None
        if sequence is not None:
            outputs.last_hidden_state = sequence.text_states(outputs.last_hidden_state)
            if outputs.hidden_states is not None:
                outputs.hidden_states = tuple(sequence.text_states(states) for states in outputs.hidden_states)
        return outputs if return_dict in (None, True) else outputs.to_tuple()

    def _wants_cache(self, use_cache: bool | None) -> bool:
        use_cache = self.config.use_cache if use_cache is None else use_cache
        return use_cache and not self._drops_caches

    @property
    def _drops_caches(self) -> bool:
        # Checkpointed layers take no cache that is written to, and would silently do without the memory in it.
        return self.training and self.language_model.is_gradient_checkpointing

    def _first_inputs(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        memory: CompressedContext | None,
        offset: Tensor | None,
    ) -> tuple[dict[str, Tensor], SplicedSequence | None]:
        """Slots and text as one sequence for the language model; text alone where the cache holds the slots."""
        text_mask = check_mask("attention_mask", attention_mask, "input_ids", input_ids)
        check_text(text_mask)
        config = self.config
        input_ids = check_token_ids("input_ids", input_ids, text_mask, config.vocab_size, config.task_token_ids)
        positions = text_positions(text_mask) if position_ids is None else position_ids.expand_as(input_ids)
        embeddings = self._embed_text(input_ids)
        if memory is None:
            sequence = splice(text_mask[:, :0], text_mask)
            return self._arranged(sequence, embeddings, positions), sequence
        if offset is None:
            offset = self.text_position_offset(memory, input_ids, text_mask)
        warn_about_positions(config.decoder_config, int((offset + text_mask.sum(dim=1)).max()))
        if memory.carrier == "key_values":
            slot_mask = memory.attention_mask.sort(dim=1).values
            check_sliding_window(config.decoder_config, slot_mask.shape[1], text_mask.shape[1])
            return {
                "inputs_embeds": embeddings,
                "attention_mask": torch.cat([slot_mask, text_mask], dim=1),
                "position_ids": (positions + offset[:, None]) * text_mask,
            }, None
        moves_first = self._moves_first(input_ids, text_mask)
        memory_positions = memory.position_ids
        text_offset = offset[:, None].expand_as(positions)
        if moves_first is not None:
            text_offset = text_offset * ~moves_first
            shift = moves_first.sum(dim=1, keepdim=True)
            if self.config.position_layout == "enhanced":
                # Its context starts at position 1.
                shift = (shift - 1).clamp(min=0)
            memory_positions = memory_positions + shift
        sequence = splice(
            memory.attention_mask, text_mask, moves_first, pad_in_front=bool(self.num_pads_in_front(memory))
        )
        joined = torch.cat([memory.embeddings.to(embeddings.dtype), embeddings], dim=1)
        return self._arranged(
            sequence, joined, torch.cat([memory_positions, positions + text_offset], dim=1)
        ), sequence

    @staticmethod
    def _arranged(sequence: SplicedSequence, embeddings: Tensor, positions: Tensor) -> dict[str, Tensor]:
        return {
            "inputs_embeds": sequence.arrange(embeddings),
            "attention_mask": sequence.attention_mask,
            "position_ids": sequence.arrange(positions) * sequence.attention_mask,
        }

    def _next_inputs(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        memory: CompressedContext | None,
        offset: Tensor | None,
        cached: int,
    ) -> dict[str, Tensor]:
        """Text that follows what is in the cache: slots, then the text so far."""
        text_mask = check_cached_mask(attention_mask, input_ids, cached - self.num_places(memory))
        if position_ids is None:
            position_ids = text_positions(text_mask)[:, -input_ids.shape[1] :]
        if memory is not None:
            if offset is None:
                raise ValueError("with a cache, `text_position_offset` must say where the text starts; see `generate`")
            position_ids = position_ids + offset[:, None]
        return {
            "inputs_embeds": self._embed_text(input_ids),
            "attention_mask": self._cached_mask(memory, text_mask),
            "position_ids": position_ids,
        }

    def _cached_mask(self, memory: CompressedContext | None, text_mask: Tensor) -> Tensor:
        """The mask `(batch_size, num_slots + num_text_tokens)` of what is in the cache and of the new text."""
        if memory is not None and memory.carrier == "key_values":
            # The slots came first, and then the text as it was given.
            check_sliding_window(self.config.decoder_config, memory.attention_mask.shape[1], text_mask.shape[1])
            return torch.cat([memory.attention_mask.sort(dim=1).values, text_mask], dim=1)
        if memory is not None:
            pads = text_mask.new_zeros(len(text_mask), self.num_pads_in_front(memory))
            text_mask = torch.cat([pads, memory.attention_mask, text_mask], dim=1)
        # The cache holds a row's pads in front, so only their number matters.
        return text_mask.sort(dim=1).values

    def num_pads_in_front(self, memory: CompressedContext) -> int:
        """Pads, 0 or 1, that every row needs in front of its slots beside its own; see `splice`."""
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
