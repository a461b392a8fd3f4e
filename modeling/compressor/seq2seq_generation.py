# SPDX-License-Identifier: Apache-2.0
"""`generate` of an encoder-decoder with a memory: the decoder's cross-attention reads slots."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from ..memory.compressed_context import CompressedContext
from ..parts.packing import left_padded
from .input_checks import check_mask, check_memory, check_memory_ratio, check_text, check_token_ids
from .question_conditioning import check_question, question_in_front, with_start
from .seq2seq_decoding import readable_slots


class Seq2SeqGenerationMixin:
    """`generate` behind memories; everything else is `GenerationMixin`'s."""

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
            inputs: The question, or the context, `(batch_size, num_tokens)`; also accepted as `input_ids`. With a
                memory or context it may be left out, if there is nothing to ask.
            input_ids: The same.
            attention_mask: Its mask; pads may stand on either side.
            memory: A compressed context; one row serves any number of questions.
            context_input_ids: Contexts `(batch_size, num_context_tokens)` to compress first, in place of `memory`.
            context_attention_mask: Their mask.
            ratio: Ratio for the contexts, as in `compress`; beside a memory, its own or none.
            kwargs: Arguments of `transformers.GenerationMixin.generate`.

        Returns:
            As `GenerationMixin.generate`: the question and new tokens; or, of a context alone, as for any
            encoder-decoder, the start token and new tokens.

        Raises:
            ValueError: neither memory nor context, both of them, a ratio or mask of contexts where there is none to
                compress, a question without tokens, another question than the memory was compressed with, or
                `decoder_input_ids` beside a memory or context; see also `compress`.
        """
        if inputs is not None and input_ids is not None:
            raise ValueError("give the tokens either as `inputs` or as `input_ids`, not both")
        input_ids = inputs if input_ids is None else input_ids
        # Some tokenizers add it; T5 has no use for it.
        kwargs.pop("token_type_ids", None)
        if memory is not None or context_input_ids is not None:
            context = (context_input_ids, context_attention_mask)
            return self._answer(input_ids, attention_mask, memory, context, ratio, kwargs)
        check_memory_ratio(None, None, context_attention_mask)
        if input_ids is None:
            if "encoder_outputs" in kwargs:
                check_memory_ratio(None, ratio, None)
                return super().generate(attention_mask=attention_mask, **kwargs)
            raise ValueError("give a context, as `input_ids` or `context_input_ids`, or a `memory`")
        memory = self.model._compress(input_ids, attention_mask, [ratio])[0]
        return self._generate_from(memory, kwargs)

    def _generate_from(self, memory: CompressedContext, kwargs: dict[str, Any]) -> Any:
        slots, slot_mask = readable_slots(memory)
        encoder_outputs = BaseModelOutput(last_hidden_state=slots)
        return super().generate(encoder_outputs=encoder_outputs, attention_mask=slot_mask, **kwargs)

    def _answer(
        self,
        question: Tensor | None,
        question_mask: Tensor | None,
        memory: CompressedContext | None,
        context: tuple[Tensor | None, Tensor | None],
        ratio: int | Tensor | None,
        kwargs: dict[str, Any],
    ) -> Any:
        """Question and new tokens."""
        if memory is not None and context[0] is not None:
            raise ValueError("give either `context_input_ids` or `memory`, not both")
        if given := [n for n in ("decoder_input_ids", "decoder_attention_mask") if kwargs.get(n) is not None]:
            raise ValueError(
                f"with `memory` or `context_input_ids` the decoder's text is `input_ids`; leave out {', '.join(given)}"
            )
        if memory is not None:
            check_memory_ratio(memory, ratio, context[1])
        start, in_encoder = self.config.decoder_start_token_id, self.config.compresses_questions
        has_question = question is not None
        if not has_question:
            num_rows = memory.batch_size if memory is not None else len(context[0])
            question, question_mask = torch.full((num_rows, 1), start, device=self.device), None
        question_mask = check_mask("attention_mask", question_mask, "input_ids", question)
        check_text(question_mask)
        question = check_token_ids("input_ids", question, question_mask, self.config.vocab_size, {})
        if memory is None:
            if in_encoder:
                context = question_in_front(*context, question, question_mask, self.config)[:2]
            memory = self.model._compress(*context, [ratio], prefix="context_")[0]
        elif in_encoder:
            memory = check_memory(memory, self.model, question)
            check_question(memory, question, question_mask, self.config)
        memory = check_memory(memory, self.model, question)
        ids, mask = with_start(question, question_mask, self.config)
        if in_encoder:
            ids, mask = question.new_full((len(question), 1), start), question_mask.new_ones(len(question), 1)
        output = self._generate_from(memory, {**kwargs, "decoder_input_ids": ids, "decoder_attention_mask": mask})
        shown = left_padded(question, question_mask)[:, : question.shape[1] if has_question else 0]
        return _with_question(output, shown, ids.shape[1])


def _with_question(output: Any, question: Tensor, width: int) -> Any:
    """The output with the question in the place of the first `width` tokens, which the decoder started from."""
    sequences = output if isinstance(output, Tensor) else output.sequences
    question = question.repeat_interleave(len(sequences) // len(question), dim=0)
    sequences = torch.cat([question, sequences[:, width:]], dim=1)
    if isinstance(output, Tensor):
        return sequences
    output.sequences = sequences
    return output
