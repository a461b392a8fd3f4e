# SPDX-License-Identifier: Apache-2.0
"""A compressor with the decoder's LM head: training loss, and `generate` behind slots."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin, LogitsProcessorList
from transformers.modeling_outputs import CausalLMOutputWithPast

from ...configuration.configuration_compressor import CompressorConfig
from ..memory.compressed_context import CompressedContext
from ..memory.key_value_memory import num_cached_slots
from ..parts.base_pass import CACHE, head_logits
from ..parts.lora import DECODER, check_adapters, merge_lora
from ..parts.packing import left_padded
from .backbone import CompressorHead
from .modeling_compressor import CompressorModel
from .validation import check_source, fitted_memory, token_rows


class _TaskTokensAsBOS(LogitsProcessorList):
    """Processors that look up a score for each token so far; task tokens outside the vocabulary have none."""

    stand_in = 0

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        return super().__call__(input_ids.masked_fill(input_ids >= scores.shape[-1], self.stand_in), scores, **kwargs)


class CompressorForCausalLM(CompressorHead, GenerationMixin):
    r"""
    A compressor with the decoder's LM head: training loss and `generate`.

    A method's class only names its backbone in `model_class`.
    """

    model_class: type[CompressorModel] = CompressorModel

    def __init__(self, config: CompressorConfig):
        super().__init__(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        table = self.get_input_embeddings()
        place = next(path for path, module in self.named_modules() if module is table)
        self._tied_weights_keys = {"lm_head.weight": f"{place}.weight"}
        self.post_init()

    def base_language_model(self) -> AbstractContextManager[None]:
        """See [`CompressorModel.base_language_model`]."""
        return self.model.base_language_model()

    @torch.no_grad()
    def decoder_language_model(self) -> PreTrainedModel:
        """Return a copy of the decoder as a plain language model, its adapters merged: for a server."""
        check_adapters(self)
        # Copies: the encoder's adapters may sit on the same weights, and stay there.
        decoder = copy.deepcopy(self.model.language_model)
        merge_lora(decoder, DECODER)
        with torch.device("meta"):
            plain: Any = AutoModelForCausalLM.from_config(copy.deepcopy(self.config.decoder_config))
        setattr(plain, plain.base_model_prefix, decoder)
        plain.set_output_embeddings(copy.deepcopy(self.lm_head))
        plain.tie_weights()
        plain.generation_config = copy.deepcopy(self.generation_config)
        plain.requires_grad_(False)
        return plain.to(self.dtype).eval()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        labels: Tensor | None = None,
        context_input_ids: Tensor | None = None,
        context_attention_mask: Tensor | None = None,
        memory: CompressedContext | None = None,
        ratio: int | Tensor | None = None,
        use_cache: bool | None = None,
        text_position_offset: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        context_chunk_lengths: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        r"""
        Read slots and text and predict the text's next tokens; arguments as [`CompressorModel.forward`], and:

        Args:
            labels: `(batch_size, num_text_tokens)`, -100 where no loss is wanted; shifted inside.
            logits_to_keep: Compute only the last so many logits, or those at these indices; 0 for all.

        Returns:
            `logits` of shape `(batch_size, num_text_tokens, vocab_size)`, `loss` if there are labels, and the cache.
        """
        return_dict = kwargs.pop("return_dict", None)
        num_items = kwargs.pop("num_items_in_batch", None)
        own_losses: list[Tensor] = []
        if self.model.has_own_loss and self.training and labels is not None and context_input_ids is not None:
            kwargs["own_losses"] = own_losses
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=past_key_values if cache is None else cache,
            context_input_ids=context_input_ids,
            context_attention_mask=context_attention_mask,
            memory=memory,
            ratio=ratio,
            use_cache=use_cache,
            text_position_offset=text_position_offset,
            context_chunk_lengths=context_chunk_lengths,
            **kwargs,
        )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.text_logits(outputs.last_hidden_state[:, keep, :])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, num_items_in_batch=num_items)
            # A row's own loss counts as its targets do, so that any split of a step into calls has one gradient.
            targets = (labels[:, 1:] != -100).sum(dim=1)
            for of_rows in own_losses:
                loss = loss + (of_rows * targets).sum() / (targets.sum() if num_items is None else num_items)
        result = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            **{CACHE: outputs.get(CACHE)},
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
        return result if return_dict in (None, True) else result.to_tuple()

    def text_logits(self, hidden_states: Tensor) -> Tensor:
        """Logits `(batch_size, num_tokens, vocab_size)` of the backbone's last states."""
        logits = head_logits(self.lm_head, hidden_states)
        cap = getattr(self.config.decoder_config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    # --- `GenerationMixin` with a memory ---

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
        context_chunk_lengths: Tensor | None = None,
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
            context_chunk_lengths: Lengths of their passages, `(batch_size, num_passages)`, as in `compress`.
            kwargs: Arguments of `transformers.GenerationMixin.generate`, and what the method reads beside contexts.
                A `prefill_chunk_size` grows to hold what a text has in front of the slots.

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
        check_source(context_input_ids, memory, ratio, context_attention_mask, context_chunk_lengths)
        # The library would cut the question by the cache's length, which counts the slots.
        cache, older = (kwargs.pop(name, None) for name in ("cache", "past_key_values"))
        cache = older if cache is None else cache
        if attention_mask is None:
            attention_mask = self._mask_of_pads(question, kwargs)
        if attention_mask is not None:
            attention_mask = token_rows(question, attention_mask).attention_mask
            if not bool(attention_mask.all()):
                if size := self._setting("prefill_chunk_size", kwargs):
                    raise ValueError(f"`prefill_chunk_size` ({size}) needs questions of one length: leave it out")
                if kwargs.get("position_ids") is not None:
                    kwargs["position_ids"] = left_padded(kwargs["position_ids"].expand_as(question), attention_mask)
                question, attention_mask = (left_padded(x, attention_mask) for x in (question, attention_mask))
        if context_input_ids is not None:
            contexts = (context_input_ids, context_attention_mask, "context_input_ids", context_chunk_lengths)
            extras = self.model.extra_inputs(kwargs, (question, attention_mask))
            memory = self.model.context_memory(self.model.context_rows(*contexts), ratio, **extras)
        if memory is None and num_cached_slots(cache):
            raise ValueError(f"`cache` holds {num_cached_slots(cache)} slots: give their memory in place of it")
        if memory is not None:
            if cache is not None and cache.get_seq_length():
                raise ValueError("`cache` must be empty when `generate` starts with a memory or a context")
            for name in ("assistant_model", "assistant_early_exit"):
                if self._setting(name, kwargs) is not None:
                    raise ValueError(f"`{name}` drafts without the memory: leave it out")
            memory = fitted_memory(memory, self.model, question)
            kwargs["memory"] = memory
            if size := self._setting("prefill_chunk_size", kwargs):
                kwargs["prefill_chunk_size"] = max(size, self.model.num_in_front(question))
            kwargs["text_position_offset"] = self.model.text_position_offset(memory, question, attention_mask)
        if cache is not None:
            kwargs[CACHE] = cache
        # Some tokenizers add it; the decoder has no use for it.
        kwargs.pop("token_type_ids", None)
        return super().generate(question, attention_mask=attention_mask, **kwargs)

    def _mask_of_pads(self, question: Tensor, arguments: dict[str, Any]) -> Tensor | None:
        """The mask of a question with pads that came without one; the library would make it behind our checks."""
        pad, eos = self._setting("pad_token_id", arguments), self._setting("eos_token_id", arguments)
        if (
            pad is None
            or pad in (eos if isinstance(eos, (list, tuple)) else [eos])
            or not bool((question == pad).any())
        ):
            return None
        return (question != pad).long()

    def _get_logits_processor(self, *args: Any, **kwargs: Any) -> LogitsProcessorList:
        processors = super()._get_logits_processor(*args, **kwargs)
        if max(self.config.task_token_ids.values(), default=-1) < self.config.vocab_size:
            return processors
        processors = _TaskTokensAsBOS(processors)
        processors.stand_in = self.config.bos_token_id or 0
        return processors

    def _expand_inputs_for_generation(self, expand_size: int = 1, **arguments: Any) -> tuple[Tensor, dict[str, Any]]:
        if expand_size > 1 and arguments.get("memory") is not None:
            arguments["memory"] = arguments["memory"].repeat_interleave(expand_size)
        return super()._expand_inputs_for_generation(expand_size=expand_size, **arguments)

    def _prepare_cache_for_generation(self, settings: Any, model_kwargs: dict[str, Any], *args: Any) -> Any:
        *others, max_cache_length = args
        max_cache_length += self.model.num_places(model_kwargs.get("memory"))
        return super()._prepare_cache_for_generation(settings, model_kwargs, *others, max_cache_length)

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, cache: Any = None, past_key_values: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        # With its cache hidden, the library leaves the mask two-dimensional; `forward` puts the slots' mask in front.
        model_inputs = super().prepare_inputs_for_generation(input_ids, **{CACHE: None}, **kwargs)
        model_inputs["cache"] = past_key_values if cache is None else cache
        return model_inputs
