# SPDX-License-Identifier: Apache-2.0
"""`generate` with a memory: the context is compressed once, and its slots stand in the cache in front of the text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.generation import LogitsProcessorList

from .compressed_context import CompressedContext
from .key_value_memory import num_cached_slots
from .packing import left_padded
from .input_checks import check_ids, check_mask, check_memory, check_memory_ratio, check_text


class _TaskTokensAsBOS(LogitsProcessorList):
    """Processors that look up a score for each token so far; task tokens outside the vocabulary have none."""

    stand_in = 0

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        return super().__call__(input_ids.masked_fill(input_ids >= scores.shape[-1], self.stand_in), scores, **kwargs)


class MemoryGenerationMixin:
    """The overrides of `GenerationMixin` that a memory needs; everything else is the library's."""

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
        """Generate text after slots and a question.

        Args:
            inputs: The question, `(batch_size, num_text_tokens)`; also accepted as `input_ids`.
            input_ids: The same.
            attention_mask: Its mask; pads may stand on either side, and right padding becomes left padding.
            memory: A compressed context; one row serves any number of questions.
            context_input_ids: Contexts `(batch_size, num_context_tokens)` to compress first, in place of `memory`.
            context_attention_mask: Their mask.
            ratio: Ratio for them, as in `compress`; beside a memory, its own or none.
            kwargs: Arguments of `transformers.GenerationMixin.generate`.

        Returns:
            As `GenerationMixin.generate`: question and new tokens; slots never appear.

        Raises:
            ValueError: no question, one without tokens, context and memory together, a ratio or mask of contexts
                where there is none to compress, a filled cache with a memory or context, a cache with slots without
                its memory, or pads in a question that is read in chunks (`prefill_chunk_size`); see also `compress`.
        """
        question = inputs if input_ids is None else input_ids
        if question is None:
            raise ValueError("`input_ids` are needed: the question, or at least one token such as BOS")
        if inputs is not None and input_ids is not None:
            raise ValueError("give the question either as `inputs` or as `input_ids`, not both")
        if context_input_ids is not None and memory is not None:
            raise ValueError("give either `context_input_ids` or `memory`, not both")
        check_ids("input_ids", question)
        if attention_mask is None:
            attention_mask = self._mask_of_pads(question, kwargs)
        if attention_mask is not None:
            attention_mask = check_mask("attention_mask", attention_mask, "input_ids", question)
            check_text(attention_mask)
            self._check_chunks(attention_mask, kwargs)
            if kwargs.get("position_ids") is not None:
                kwargs["position_ids"] = left_padded(kwargs["position_ids"].expand_as(question), attention_mask)
            question, attention_mask = (left_padded(x, attention_mask) for x in (question, attention_mask))
        if context_input_ids is not None:
            memory = self.model._compress(context_input_ids, context_attention_mask, [ratio], prefix="context_")[0]
        else:
            check_memory_ratio(memory, ratio, context_attention_mask)
        # The library would cut the question by the cache's length, which counts the slots.
        cache = kwargs.get("past_key_values")
        if memory is None and num_cached_slots(cache):
            raise ValueError(
                f"`past_key_values` holds the {num_cached_slots(cache)} slots of a memory: give the memory and the "
                "whole text once more, without the cache"
            )
        if memory is not None:
            if cache is not None and cache.get_seq_length():
                raise ValueError("`past_key_values` must be empty when `generate` starts with a memory or a context")
            memory = check_memory(memory, self.model, question)
            kwargs["memory"] = memory
            kwargs["text_position_offset"] = self.model.text_position_offset(memory, question, attention_mask)
        # Some tokenizers add it; the decoder has no use for it.
        kwargs.pop("token_type_ids", None)
        return super().generate(question, attention_mask=attention_mask, **kwargs)

    def _setting(self, name: str, arguments: dict[str, Any]) -> Any:
        """What the library takes for a field: an argument, the caller's configuration, or else the model's."""
        given = arguments.get(name, getattr(arguments.get("generation_config"), name, None))
        return getattr(self.generation_config, name, None) if given is None else given

    def _mask_of_pads(self, question: Tensor, arguments: dict[str, Any]) -> Tensor | None:
        """The mask of a question with pads that came without one, which the library would find too late for us."""
        pad, eos = self._setting("pad_token_id", arguments), self._setting("eos_token_id", arguments)
        if (
            pad is None
            or pad in (eos if isinstance(eos, (list, tuple)) else [eos])
            or not bool((question == pad).any())
        ):
            return None
        return (question != pad).long()

    def _check_chunks(self, attention_mask: Tensor, arguments: dict[str, Any]) -> None:
        size = self._setting("prefill_chunk_size", arguments)
        if size and not bool(attention_mask.all()):
            raise ValueError(
                f"`prefill_chunk_size` ({size}) needs questions of one length, without pads: leave it out, or "
                "generate row by row"
            )

    def _get_logits_processor(self, *args: Any, **kwargs: Any) -> LogitsProcessorList:
        processors = super()._get_logits_processor(*args, **kwargs)
        if max(self.config.task_token_ids.values(), default=-1) < self.config.vocab_size:
            return processors
        processors = _TaskTokensAsBOS(processors)
        processors.stand_in = self.config.bos_token_id or 0
        return processors

    def _expand_inputs_for_generation(
        self,
        expand_size: int = 1,
        is_encoder_decoder: bool = False,
        input_ids: Tensor | None = None,
        **model_kwargs: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        memory = model_kwargs.get("memory")
        if memory is not None and expand_size > 1:
            model_kwargs["memory"] = memory.repeat_interleave(expand_size)
        return super()._expand_inputs_for_generation(
            expand_size=expand_size, is_encoder_decoder=is_encoder_decoder, input_ids=input_ids, **model_kwargs
        )

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> Any:
        memory = model_kwargs.get("memory")
        places = self.model.num_places(memory)
        return super()._prepare_cache_for_generation(
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length + places
        )

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, past_key_values: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        # With its cache hidden, the library leaves the mask two-dimensional; `forward` puts the slots' mask in front.
        model_inputs = super().prepare_inputs_for_generation(input_ids, past_key_values=None, **kwargs)
        model_inputs["past_key_values"] = past_key_values
        return model_inputs
