# SPDX-License-Identifier: Apache-2.0
"""SnapKV: what the last tokens attend to (https://arxiv.org/abs/2404.14469)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..configuration.configuration_snap_kv import SnapKVConfig
from .compressor.causal_lm import CompressorForCausalLM
from .compressor.key_value_selection import KeyValueSelectionModel, ReadContext
from .compressor.question_conditioning import check_question, question_fingerprints, question_rows
from .compressor.validation import TokenRows
from .memory.compressed_context import CompressedContext, KeyValues


class SnapKVModel(KeyValueSelectionModel):
    r"""
    Keeps, in each layer and key/value head, the keys and values that the last tokens attend to most.

    Args:
        config ([`SnapKVConfig`]): the configuration.
    """

    config_class = SnapKVConfig

    def __init__(self, config: SnapKVConfig):
        super().__init__(config)
        self.post_init()

    @property
    def num_last_tokens(self) -> int:
        """L_obs, the observation window."""
        return self.config.window_size

    def priorities(self, read: ReadContext, num_slots: Tensor, num_question_tokens: Tensor | None) -> Sequence[Tensor]:
        if num_question_tokens is None:
            # L_obs at the end of the context, which the paper's memories are longer than.
            size = self.config.window_size
            window = torch.where(num_slots > size, size, (num_slots // 2).clamp(min=1))
        else:
            window = num_question_tokens.clamp(max=self.config.window_size)
        places = torch.arange(read.is_context.shape[1], device=num_slots.device)
        is_window = places >= len(places) - window[:, None]
        is_prefix = read.is_context & ~is_window
        votes = [self._votes(weights, is_window, is_prefix) for weights in read.attentions]
        # Section 4.1: the window's own keys and values follow those that it has chosen, and all of them stay.
        return [vote.masked_fill(is_window[:, None], torch.inf) for vote in votes]

    def _votes(self, attention: Tensor, is_window: Tensor, is_prefix: Tensor) -> Tensor:
        """`(batch_size, num_key_value_heads, num_places)`; `attention` is one layer's of [`ReadContext`]."""
        queries = is_window[:, -attention.shape[2] :].float()
        # Equation 1: C = sum over the window of W_obs[:, i, :], as a mean, which has the same order.
        share = queries / queries.sum(dim=1, keepdim=True).clamp(min=1)
        votes = torch.einsum("bhqn,bq->bhn", attention.float(), share) * is_prefix[:, None]
        # Section 4.2: neighbours stay together, by a pool over the votes.
        size = self.config.kernel_size
        pool = functional.avg_pool1d if self.config.pooling == "average" else functional.max_pool1d
        votes = pool(votes, kernel_size=size, stride=1, padding=size // 2)
        # The query heads of a key/value head vote together, since they read the same keys.
        return votes.unflatten(1, (-1, attention.shape[1] // self.config.decoder_config.num_key_value_heads)).mean(2)

    def encode(
        self, chunks: Any, ratios: Sequence[int | Tensor], question: TokenRows | None = None
    ) -> list[KeyValues]:
        if question is None and self.config.compresses_questions:
            raise ValueError(
                "this compressor reads a context together with its question (`question_placement='encoder'`): "
                "`compress(..., question_input_ids=...)`, or ask with `generate`"
            )
        return super().encode(chunks, ratios, question)

    def first_inputs(
        self, text: TokenRows, position_ids: Tensor | None, memory: CompressedContext | None, *args: Any, **kwargs: Any
    ) -> Any:
        """See [`CompressorModel.first_inputs`]; a memory that was compressed with a question answers no other one."""
        if memory is not None and self.config.compresses_questions:
            check_question(memory, text.input_ids, text.attention_mask, may_go_on=True)
        return super().first_inputs(text, position_ids, memory, *args, **kwargs)

    def num_in_front(self, input_ids: Tensor) -> int:
        # The first pass reads the whole question, which it checks.
        return input_ids.shape[1] if self.config.compresses_questions else super().num_in_front(input_ids)

    def beside_contexts(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The question, as `compress` has checked it."""
        return {"question": arguments.pop("question")} if isinstance(arguments.get("question"), TokenRows) else {}

    def compress(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        ratio: int | Tensor | Sequence[int] | None = None,
        allow_untrained_ratio: bool = True,
        question_input_ids: Tensor | None = None,
        question_attention_mask: Tensor | None = None,
        **unused: Any,
    ) -> CompressedContext | list[CompressedContext]:
        """Compress contexts into keys and values; see [`CompressorBackbone.compress`], and:

        Args:
            question_input_ids: `(batch_size or 1, num_question_tokens)`, needed with `question_placement="encoder"`:
                the text that will follow the memory, whose last tokens choose what stays. The memory answers no other
                one.
            question_attention_mask: its mask.

        Raises:
            ValueError: a question where the configuration has none, or none where it needs one.
        """
        if question_input_ids is None:
            return super().compress(input_ids, attention_mask, ratio, allow_untrained_ratio, **unused)
        asked = (question_input_ids, question_attention_mask, len(input_ids))
        question = question_rows(*asked, self.config, self.config.vocab_size)
        memories = super().compress(
            input_ids, attention_mask, ratio, allow_untrained_ratio, question=question, **unused
        )
        fingerprints = question_fingerprints(question.input_ids, question.attention_mask).expand(len(input_ids))
        for memory in memories if isinstance(memories, list) else [memories]:
            memory.question_fingerprints = fingerprints.clone()
        return memories


class SnapKVForCausalLM(CompressorForCausalLM):
    r"""
    [`SnapKVModel`] with the decoder's LM head.

    Args:
        config ([`SnapKVConfig`]): the configuration.
    """

    model_class = SnapKVModel

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
        """See [`CompressorForCausalLM.generate`]; with `question_placement="encoder"` a context is compressed with the
        question.
        """
        question = inputs if input_ids is None else input_ids
        context = {"context_input_ids": context_input_ids, "context_attention_mask": context_attention_mask}
        is_alone = memory is None and self.config.compresses_questions
        if is_alone and context_input_ids is not None and isinstance(question, Tensor):
            if attention_mask is None:
                attention_mask = self._mask_of_pads(question, kwargs)
            asked = {"question_input_ids": question, "question_attention_mask": attention_mask}
            memory = self.compress(context_input_ids, context_attention_mask, ratio, **asked)
            context, ratio = {}, None
        return super().generate(
            inputs, input_ids=input_ids, attention_mask=attention_mask, memory=memory, ratio=ratio, **context, **kwargs
        )
