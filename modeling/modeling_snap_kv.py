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
from .memory.compressed_context import CompressedContext


class SnapKVModel(KeyValueSelectionModel):
    r"""
    Keeps, in each layer and key/value head, the keys and values that the last tokens attend to most.

    With `question_placement="encoder"` these are the question's: `compress` takes `question_input_ids`
    `(batch_size or 1, num_question_tokens)` and `question_attention_mask`, the text that will follow the memory.
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

    def extra_inputs(self, arguments: dict[str, Any], text: Any = None) -> dict[str, Any]:
        """Take out the question: ids and mask that `compress` is given, or the text that `generate` goes on from."""
        asked = [arguments.pop(name, None) for name in ("question_input_ids", "question_attention_mask")]
        if asked[0] is None and self.config.compresses_questions and text is not None:
            asked = text
        return {} if asked[0] is None else {"question": asked}

    def compress_rows(
        self, context: TokenRows, ratios: Sequence[Any], *args: Any, **extras: Any
    ) -> list[CompressedContext]:
        """See [`CompressorBackbone.compress_rows`]; a memory answers no question but the one that it is made with."""
        question = extras.get("question")
        if question is None and self.config.compresses_questions:
            raise ValueError(
                "this compressor reads a context together with its question (`question_placement='encoder'`): "
                "`compress(..., question_input_ids=...)`, or ask with `generate`"
            )
        if question is None:
            return super().compress_rows(context, ratios)
        (ids, mask), num_rows = question, len(context.input_ids)
        asked = question_rows(ids, mask, num_rows, self.config, self.config.vocab_size)
        memories = super().compress_rows(context, ratios, question=asked)
        fingerprints = question_fingerprints(asked.input_ids, asked.attention_mask).expand(num_rows)
        for memory in memories:
            memory.question_fingerprints = fingerprints.clone()
        return memories


class SnapKVForCausalLM(CompressorForCausalLM):
    """[`SnapKVModel`] with the decoder's LM head."""

    model_class = SnapKVModel
