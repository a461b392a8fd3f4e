# SPDX-License-Identifier: Apache-2.0
"""DeCAL's decoder, which looks at slots by cross-attention: `forward` and `generate` behind a memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.generation import BaseStreamer, GenerationMixin, StoppingCriteriaList
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPastAndCrossAttentions, Seq2SeqLMOutput

from .compressor.backbone import CompressorHead
from .compressor.question_conditioning import check_question, own_tokens, question_in_front, with_start
from .compressor.validation import (
    cached_text_mask,
    check_keywords,
    check_source,
    fitted_memory,
    fitted_text_and_memory,
    measure_rows,
)
from .memory.compressed_context import CompressedContext
from .parts.attention_masks import seeing_mask, with_sight
from .parts.base_precision import head_logits
from .parts.cache_name import CACHE
from .parts.packing import left_padded, pack

# What a caller may ask of encoder and decoder beside their last states.
_OUTPUTS = ("output_hidden_states", "output_attentions")


def readable_slots(memory: CompressedContext) -> tuple[Tensor, Tensor]:
    """Return slots `(batch_size, num_slots, hidden_size)` and their mask for cross-attention, at least one a row.

    A row without slots gets one of zeros. T5's key and value maps have no bias, so nothing comes of it: the row reads
    as if there were no cross-attention, alone as in a batch.
    """
    slots: Tensor = memory.embeddings  # type: ignore[assignment]  # `fitted_memory` has looked at the carrier
    mask = memory.attention_mask
    if mask.shape[1] == 0:
        slots, mask = (torch.nn.functional.pad(x, (0,) * 2 * (x.dim() - 2) + (0, 1)) for x in (slots, mask))
    mask = mask.clone()
    mask[:, 0] = 1
    return slots, mask


class CompressorForConditionalGeneration(CompressorHead, GenerationMixin):
    """A backbone that compresses (`model`), a decoder stack with cross-attention (`decoder`) and an `lm_head`.

    A method builds these three; encoder and decoder share a table of token embeddings, which is the encoder's.
    """

    decoder: PreTrainedModel
    lm_head: nn.Linear

    def get_encoder(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Return the encoder alone, which is what `AutoModel` loads."""
        return self.model

    def get_decoder(self) -> nn.Module:
        """Return the decoder stack."""
        return self.decoder

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Shift labels one place to the right, behind the start token; what has no label becomes a pad."""
        shifted = labels.roll(1, dims=-1)
        shifted[:, 0] = self.config.decoder_start_token_id
        return shifted.masked_fill(shifted == -100, self.config.pad_token_id)

    def text_states(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        memory: CompressedContext | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Run the decoder over a text behind a memory: states `(batch_size, num_text_tokens, hidden_size)`.

        Args:
            input_ids: Text `(batch_size, num_text_tokens)`, the decoder's start token first.
        """
        cached = 0 if cache is None else int(cache.get_seq_length())
        sequence = None
        if cached:
            # The cache holds a row's pads in front.
            mask = cached_text_mask(attention_mask, input_ids, cached)
            mask = mask.sort(dim=1).values
            memory = fitted_memory(memory, self.model, input_ids)
        else:
            text = self.model.text_rows(input_ids, attention_mask)
            memory, *_ = fitted_text_and_memory(text, memory, self.model)
            # Relative positions count places: no pad may stand between two tokens.
            sequence = pack(text.attention_mask[:, :0], text.attention_mask, is_full=text.is_full)
            input_ids, mask = sequence.arrange(text.input_ids), sequence.attention_mask
        is_full = sequence is None or sequence.is_full
        outputs = self._decode(input_ids, mask, *readable_slots(memory), cache, is_full, **kwargs)
        if sequence is not None:
            sequence.cut_to_text(outputs)
        return outputs

    def _decode(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        slots: Tensor,
        slot_mask: Tensor,
        cache: Cache | None,
        is_full: bool = False,
        **kwargs: Any,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        if kwargs.get("use_cache") is None:
            kwargs["use_cache"] = self.config.use_cache and not self.training
        embeddings = self.get_input_embeddings()(input_ids)
        if not is_full:
            own = {CACHE: cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache}
            # With a static cache the library gives a mask of four dimensions.
            attention_mask = with_sight(seeing_mask(self.decoder, attention_mask, inputs_embeds=embeddings, **own))
        outputs = self.decoder(
            inputs_embeds=embeddings,
            attention_mask=attention_mask,
            encoder_hidden_states=slots,
            encoder_attention_mask=slot_mask,
            **{CACHE: cache},
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
        cache: Cache | None = None,
        labels: Tensor | None = None,
        context_input_ids: Tensor | None = None,
        context_attention_mask: Tensor | None = None,
        memory: CompressedContext | None = None,
        ratio: int | Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        context_chunk_lengths: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput:
        r"""
        Predict a text from a context, in one of two forms.

        As any encoder-decoder: `input_ids` are the context `(batch_size, num_tokens)`, and `labels` the decoder's next
        tokens. Or, as every compressor here, with `memory` or `context_input_ids`: `input_ids` are the decoder's text,
        its start token first, and `labels` are aligned with it and shifted inside.

        Args:
            decoder_input_ids, decoder_attention_mask: first form, `(batch_size, num_text_tokens)`; the labels,
                shifted, if not given.
            encoder_outputs: first form, in place of `input_ids`: slots `(batch_size, num_slots, hidden_size)` first,
                whose mask `attention_mask` then is.
            context_input_ids, context_attention_mask, memory, ratio, context_chunk_lengths: second form, as of
                [`CompressorModel.forward`].
            cache, labels, use_cache, logits_to_keep, past_key_values: as of [`CompressorForCausalLM.forward`].

        Returns:
            `logits` of shape `(batch_size, num_text_tokens, vocab_size)`, `loss` if there are labels, the cache, and
            the slots as `encoder_last_hidden_state`. `encoder_hidden_states` and `encoder_attentions` are those of
            what the encoder reads, latents and tokens, with a row for each chunk of a context.
        """
        check_keywords(kwargs)
        cache = past_key_values if cache is None else cache
        has_text = memory is not None or context_input_ids is not None
        return_dict = kwargs.pop("return_dict", None)
        loss_arguments = {name: kwargs.pop(name) for name in ("num_items_in_batch",) if name in kwargs}
        decoding = {"use_cache": use_cache, **kwargs}
        asked = {name: kwargs.get(name, getattr(self.config, name)) for name in _OUTPUTS}
        encoder: Any = BaseModelOutput()
        if has_text:
            if decoder_input_ids is not None or input_ids is None:
                raise ValueError("with `memory` or `context_input_ids` the decoder's text is `input_ids`")
            check_source(context_input_ids, memory, ratio, context_attention_mask, context_chunk_lengths)
            if context_input_ids is not None:
                context = (context_input_ids, context_attention_mask, "context_input_ids", context_chunk_lengths)
                memory, encoder = self._encoded(asked, ratio, *context)
            outputs = self.text_states(input_ids, attention_mask, memory, cache, **decoding)
            slots = None if memory is None else memory.embeddings
        else:
            others = (None if encoder_outputs is None else ratio, context_attention_mask, context_chunk_lengths)
            check_source(None, None, *others)
            if encoder_outputs is None:
                if input_ids is None:
                    raise ValueError("give a context: `input_ids`, `context_input_ids`, `memory` or `encoder_outputs`")
                memory, encoder = self._encoded(asked, ratio, input_ids, attention_mask)
                slots, slot_mask = readable_slots(memory)
            else:
                slots = encoder_outputs[0]
                encoder = encoder_outputs if isinstance(encoder_outputs, BaseModelOutput) else BaseModelOutput()
                slot_mask = slots.new_ones(slots.shape[:2]) if attention_mask is None else attention_mask
            if decoder_input_ids is None:
                if labels is None:
                    raise ValueError("give `decoder_input_ids` or `labels`: the decoder has nothing to read")
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
            loss_arguments["shift_labels"] = None if labels is None else labels.contiguous()
            outputs = self._decode(decoder_input_ids, decoder_attention_mask, slots, slot_mask, cache, **decoding)
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = head_logits(self.lm_head, outputs.last_hidden_state[:, keep, :])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **loss_arguments)
        result = Seq2SeqLMOutput(
            loss=loss,
            logits=logits,
            **{CACHE: outputs.get(CACHE)},
            decoder_hidden_states=outputs.hidden_states,
            decoder_attentions=outputs.attentions,
            cross_attentions=outputs.cross_attentions,
            encoder_last_hidden_state=slots,
            encoder_hidden_states=encoder.hidden_states,
            encoder_attentions=encoder.attentions,
        )
        return result if return_dict in (None, True) else result.to_tuple()

    def _encoded(self, asked: dict[str, Any], ratio: Any, *context: Any) -> tuple[CompressedContext, Any]:
        """Compress contexts, given as to `context_rows`; return the encoder's outputs, too, if any of `_OUTPUTS` is
        asked for."""
        passes: list[Any] = []
        extras = {"passes": passes, **asked} if any(asked.values()) else {}
        memory = self.model.context_memory(self.model.context_rows(*context), ratio, **extras)
        return memory, passes[0] if passes else BaseModelOutput()

    @torch.no_grad()
    def generate(
        self,
        inputs: Tensor | None = None,
        *,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        memory: CompressedContext | None = None,
        context_input_ids: Tensor | None = None,
        context_attention_mask: Tensor | None = None,
        ratio: int | Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Generate from a context: either as any encoder-decoder does, or a question's answer behind slots.

        With `memory` or `context_input_ids`, `input_ids` are the question; the decoder reads it behind its start
        token, unless the configuration places questions in the encoder. A start token in front of a question and an
        EOS behind it, as T5's tokenizers add it, are not read. Without them `input_ids` are the context.

        Args:
            inputs, input_ids: The question, or the context, `(batch_size, num_tokens)`. With a memory or context it
                may be left out, if there is nothing to ask.
            attention_mask, memory, context_input_ids, context_attention_mask, ratio, kwargs: as of
                [`CompressorForCausalLM.generate`].

        Returns:
            As `GenerationMixin.generate`: the question and new tokens; or, of a context alone, as for any
            encoder-decoder, the start token and new tokens.
        """
        input_ids = inputs if input_ids is None else input_ids
        # Some tokenizers add it; T5 has no use for it.
        kwargs.pop("token_type_ids", None)
        cache, older = (kwargs.pop(name, None) for name in ("cache", "past_key_values"))
        cache = older if cache is None else cache
        if cache is not None:
            kwargs[CACHE] = cache
        # An assistant drafts without the memory, and chunks would be cut from the slots' mask.
        for name in ("assistant_model", "prefill_chunk_size"):
            if self._setting(name, kwargs) is not None:
                raise ValueError(f"`{name}` does not go with an encoder-decoder: leave it out")
        if memory is not None or context_input_ids is not None:
            context = (context_input_ids, context_attention_mask)
            return self._answer(input_ids, attention_mask, memory, context, ratio, kwargs)
        check_source(None, None, None, context_attention_mask)
        if input_ids is None:
            if "encoder_outputs" in kwargs:
                check_source(None, None, ratio, None)
                return super().generate(attention_mask=attention_mask, **kwargs)
            raise ValueError("give a context, as `input_ids` or `context_input_ids`, or a `memory`")
        return self._generate_from(*self._encoded(self._asked(kwargs), ratio, input_ids, attention_mask), kwargs)

    def _asked(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the names of `_OUTPUTS` that generation shall return."""
        returns = self._setting("return_dict_in_generate", kwargs)
        return {name: returns and self._setting(name, kwargs) for name in _OUTPUTS}

    def _generate_from(self, memory: CompressedContext, encoder: Any, kwargs: dict[str, Any]) -> Any:
        slots, slot_mask = readable_slots(memory)
        encoder_outputs = BaseModelOutput(slots, encoder.hidden_states, encoder.attentions)
        return super().generate(encoder_outputs=encoder_outputs, attention_mask=slot_mask, **kwargs)

    def _answer(
        self,
        question: Tensor | None,
        question_mask: Tensor | None,
        memory: CompressedContext | None,
        context: tuple[Any, Any],
        ratio: int | Tensor | None,
        kwargs: dict[str, Any],
    ) -> Any:
        """Answer questions behind a memory: questions and new tokens."""
        chunk_lengths = kwargs.pop("context_chunk_lengths", None)
        check_source(context[0], memory, ratio, context[1], chunk_lengths)
        start, in_encoder = self.config.decoder_start_token_id, self.config.compresses_questions
        has_question = question is not None
        if question is None:
            num_rows = memory.batch_size if memory is not None else len(context[0])
            question, question_mask = torch.full((num_rows, 1), start, device=self.device), None
        rows = self.model.text_rows(question, question_mask)
        measure_rows(rows)
        question, question_mask = rows.input_ids, rows.attention_mask
        encoder: Any = BaseModelOutput()
        if memory is None:
            if in_encoder:
                context = question_in_front(*context, question, question_mask, self.config, chunk_lengths)[:2]
            source = (*context, "context_input_ids", chunk_lengths)
            memory, encoder = self._encoded(self._asked(kwargs), ratio, *source)
        elif in_encoder:
            memory = fitted_memory(memory, self.model, question)
            check_question(memory, question, own_tokens(question, question_mask, self.config))
        memory, *_ = fitted_text_and_memory(rows, memory, self.model)
        ids, mask = with_start(question, question_mask, self.config)
        if in_encoder:
            ids, mask = question.new_full((len(question), 1), start), question_mask.new_ones(len(question), 1)
        shown = left_padded(question, question_mask)[:, : question.shape[1] if has_question else 0]

        def as_shown(sequences: Tensor) -> Tensor:
            """Sequences with the question in the place of what the decoder starts from."""
            own = shown.repeat_interleave(len(sequences) // len(shown), dim=0)
            return torch.cat([own, sequences[:, ids.shape[1] :]], dim=1)

        if kwargs.get("streamer") is not None:
            kwargs["streamer"] = _QuestionStreamer(kwargs["streamer"], as_shown)
        if kwargs.get("stopping_criteria") is not None:
            kwargs["stopping_criteria"] = StoppingCriteriaList(
                lambda sequences, *args, criterion=criterion, **more: criterion(as_shown(sequences), *args, **more)
                for criterion in kwargs["stopping_criteria"]
            )
        kwargs |= {"decoder_input_ids": ids, "decoder_attention_mask": mask}
        output = self._generate_from(memory, encoder, kwargs)
        if isinstance(output, Tensor):
            return as_shown(output)
        output.sequences = as_shown(output.sequences)
        return output


class _QuestionStreamer(BaseStreamer):
    """A streamer whose first tokens are those that `as_shown` makes of what the decoder starts from."""

    def __init__(self, streamer: BaseStreamer, as_shown: Callable[[Tensor], Tensor]):
        self.streamer = streamer
        self.as_shown: Callable[[Tensor], Tensor] | None = as_shown

    def put(self, value: Tensor) -> None:
        if self.as_shown is not None:
            value, self.as_shown = self.as_shown(value), None
        self.streamer.put(value)

    def end(self) -> None:
        self.streamer.end()
