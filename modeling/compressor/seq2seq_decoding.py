# SPDX-License-Identifier: Apache-2.0
"""An encoder-decoder's decoder behind a memory: its cross-attention reads slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions, Seq2SeqLMOutput

from ..memory.compressed_context import CompressedContext
from ..parts.packing import splice
from .input_checks import (
    check_cached_mask,
    check_keywords,
    check_mask,
    check_memory,
    check_memory_ratio,
    check_text,
    check_token_ids,
)


def readable_slots(memory: CompressedContext) -> tuple[Tensor, Tensor]:
    """Slots and mask for cross-attention, in which each row has something to look at.

    A row without slots gets one of zeros. T5's key and value maps have no bias, so nothing comes of it: the row reads
    as if there were no cross-attention, alone as in a batch.

    Args:
        memory: slots in `embeddings`.

    Returns:
        Slots `(batch_size, num_slots, hidden_size)` and mask `(batch_size, num_slots)`, at least one place wide.
    """
    slots, mask = memory.embeddings, memory.attention_mask
    if mask.shape[1] == 0:
        slots, mask = (torch.nn.functional.pad(x, (0,) * 2 * (x.dim() - 2) + (0, 1)) for x in (slots, mask))
    mask = mask.clone()
    mask[:, 0] = 1
    return slots, mask


class Seq2SeqDecodingMixin:
    """`forward` of a model with an encoder that compresses (`model`), a T5 stack (`decoder`) and an `lm_head`."""

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """The labels one place to the right, behind the start token; what has no label becomes a pad."""
        shifted = labels.roll(1, dims=-1)
        shifted[:, 0] = self.config.decoder_start_token_id
        return shifted.masked_fill(shifted == -100, self.config.pad_token_id)

    def text_states(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        memory: CompressedContext | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """The decoder's states behind a memory, as they go into the LM head.

        Args:
            input_ids: Text `(batch_size, num_text_tokens)`, the decoder's start token first.
            attention_mask: its mask; pads may stand anywhere. With a cache it covers the text in the cache, too.
            memory: one row for each text, or one for all of them.
            past_key_values: the decoder's cache.
            kwargs: handed to T5's decoder stack.

        Returns:
            `last_hidden_state` of shape `(batch_size, num_text_tokens, hidden_size)`, and the cache.

        Raises:
            ValueError: a text row without tokens, unknown token ids, a mask of the wrong shape, or a memory of another
                model, width or batch size.
        """
        cached = 0 if past_key_values is None else int(past_key_values.get_seq_length())
        if cached:
            # The cache holds a row's pads in front.
            mask = check_cached_mask(attention_mask, input_ids, cached).sort(dim=1).values
            sequence = None
        else:
            mask = check_mask("attention_mask", attention_mask, "input_ids", input_ids)
            check_text(mask)
            input_ids = check_token_ids("input_ids", input_ids, mask, self.config.vocab_size, {})
            # Relative positions count places: no pad may stand between two tokens.
            sequence = splice(mask[:, :0], mask)
            input_ids, mask = sequence.arrange(input_ids), sequence.attention_mask
        slots = readable_slots(check_memory(memory, self.model, input_ids))
        outputs = self._decode(input_ids, mask, *slots, past_key_values=past_key_values, **kwargs)
        if sequence is not None:
            outputs.last_hidden_state = sequence.text_states(outputs.last_hidden_state)
            if outputs.hidden_states is not None:
                outputs.hidden_states = tuple(sequence.text_states(states) for states in outputs.hidden_states)
        return outputs

    def _decode(
        self, input_ids: Tensor, attention_mask: Tensor | None, slots: Tensor, slot_mask: Tensor, **kwargs: Any
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        if kwargs.get("use_cache") is None:
            kwargs["use_cache"] = self.config.use_cache and not self.training
        outputs = self.decoder(
            inputs_embeds=self.get_input_embeddings()(input_ids),
            attention_mask=attention_mask,
            encoder_hidden_states=slots,
            encoder_attention_mask=slot_mask,
            **kwargs,
        )
        if self.config.decoder_config.scale_decoder_outputs:
            # T5 before v1.1, whose output table is the input's.
            outputs.last_hidden_state = outputs.last_hidden_state * self.config.hidden_size**-0.5
        return outputs

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Sequence[Tensor] | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        context_input_ids: Tensor | None = None,
        context_attention_mask: Tensor | None = None,
        memory: CompressedContext | None = None,
        ratio: int | Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput:
        r"""
        Predict a text from a context, in one of two forms.

        As any encoder-decoder: `input_ids` are the context, and `labels` the decoder's next tokens. Or, as every
        compressor here, with `memory` or `context_input_ids`: `input_ids` are the decoder's text, its start token
        first, and `labels` are aligned with it and shifted inside.

        Args:
            input_ids: `(batch_size, num_tokens)`, the context, or in the second form the text.
            attention_mask: same shape; beside `encoder_outputs` the mask of their slots.
            decoder_input_ids: `(batch_size, num_text_tokens)`, first form; the labels, shifted, if not given.
            decoder_attention_mask: same shape.
            encoder_outputs: first form, in place of `input_ids`: slots `(batch_size, num_slots, hidden_size)` first.
            past_key_values: the decoder's cache.
            labels: `(batch_size, num_text_tokens)`, -100 where no loss is wanted.
            context_input_ids: second form, contexts `(batch_size, num_context_tokens)` to compress first.
            context_attention_mask: their mask.
            memory: second form, contexts that are already compressed; one row serves any number of texts.
            ratio: ratio for the contexts, as in `compress`; beside a memory, its own or none.
            use_cache: whether to return the cache; in evaluation mode as the configuration says if not given.
            logits_to_keep: compute only the last so many logits, or those at these indices; 0 for all.

        Returns:
            `logits` of shape `(batch_size, num_text_tokens, vocab_size)`, `loss` if there are labels, the cache, and
            the slots as `encoder_last_hidden_state`.

        Raises:
            ValueError: no context, two of them, no text, or what `compress` and `text_states` refuse.
        """
        check_keywords(kwargs)
        return_dict = kwargs.pop("return_dict", None)
        loss_arguments = {name: kwargs.pop(name) for name in ("num_items_in_batch",) if name in kwargs}
        decoding = {"past_key_values": past_key_values, "use_cache": use_cache, **kwargs}
        if memory is not None or context_input_ids is not None:
            if decoder_input_ids is not None or input_ids is None:
                raise ValueError("with `memory` or `context_input_ids` the decoder's text is `input_ids`")
            memory = self._memory(memory, context_input_ids, context_attention_mask, ratio)
            outputs = self.text_states(input_ids, attention_mask, memory, **decoding)
            slots = memory.embeddings
        else:
            check_memory_ratio(None, None if encoder_outputs is None else ratio, context_attention_mask)
            slots, slot_mask = self._slots(encoder_outputs, input_ids, attention_mask, ratio)
            if decoder_input_ids is None:
                if labels is None:
                    raise ValueError("give `decoder_input_ids` or `labels`: the decoder has nothing to read")
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
            loss_arguments["shift_labels"] = None if labels is None else labels.contiguous()
            outputs = self._decode(decoder_input_ids, decoder_attention_mask, slots, slot_mask, **decoding)
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, keep, :])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **loss_arguments)
        result = Seq2SeqLMOutput(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            decoder_hidden_states=outputs.hidden_states,
            decoder_attentions=outputs.attentions,
            cross_attentions=outputs.cross_attentions,
            encoder_last_hidden_state=slots,
        )
        return result if return_dict in (None, True) else result.to_tuple()

    def _memory(
        self,
        memory: CompressedContext | None,
        context_input_ids: Tensor | None,
        context_attention_mask: Tensor | None,
        ratio: int | Tensor | None,
    ) -> CompressedContext:
        if context_input_ids is None:
            check_memory_ratio(memory, ratio, context_attention_mask)
            return memory
        if memory is not None:
            raise ValueError("give either `context_input_ids` or `memory`, not both")
        return self.model._compress(context_input_ids, context_attention_mask, [ratio], prefix="context_")[0]

    def _slots(
        self,
        encoder_outputs: Sequence[Tensor] | None,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        ratio: int | Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Slots and mask, from the encoder or as they come."""
        if encoder_outputs is not None:
            slots = encoder_outputs[0]
            return slots, slots.new_ones(slots.shape[:2]) if attention_mask is None else attention_mask
        if input_ids is None:
            raise ValueError("give a context: `input_ids`, `context_input_ids`, `memory` or `encoder_outputs`")
        return readable_slots(self.model._compress(input_ids, attention_mask, [ratio])[0])
