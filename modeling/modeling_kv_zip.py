# SPDX-License-Identifier: Apache-2.0
"""KVzip: what a second reading of the context attends to (https://arxiv.org/abs/2505.23416)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..configuration.configuration_kv_zip import KVZipConfig
from .compressor.backbone import Chunks, slot_counts
from .compressor.causal_lm import CompressorForCausalLM
from .compressor.headwise_reading import HeadwiseModel
from .compressor.key_value_selection import KeyValueSelectionModel, ReadContext
from .compressor.validation import TokenRows
from .memory.compressed_context import KeyValues
from .memory.headwise_pairs import HeadwisePairs, kept_pairs


class KVZipModel(KeyValueSelectionModel, HeadwiseModel):
    """Keeps the keys and values that the base attends to most when it reads the context a second time."""

    config_class = KVZipConfig

    def __init__(self, config: KVZipConfig):
        super().__init__(config)
        if config.head_budgets == "shared":
            self.read_by_heads()
        self.post_init()

    def _read(self, chunks: Chunks, question: TokenRows | None) -> ReadContext:
        read = super()._read(chunks, question)
        # S_l,h,i = max over repeated tokens and the query heads of h of their attention to i.
        mask, lengths = read.is_context.long(), read.is_context.sum(dim=1)
        scores = self.repeated_attention(read.key_values, mask, lengths, chunks, self.config.repeat_size)
        return replace(read, scores=scores)

    def priorities(self, read: ReadContext, num_slots: Tensor, num_question_tokens: Tensor | None) -> Sequence[Tensor]:
        return read.scores

    @torch.no_grad()
    def encode(self, chunks: Chunks, ratios: Sequence[int | Tensor], question: TokenRows | None = None) -> list[Any]:
        if self.config.head_budgets == "uniform":
            return super().encode(chunks, ratios, question)
        # Non-uniform budgets: the pairs of the highest scores stay, whatever layer and head they are of.
        read = self._read(chunks, question)
        return [self._shared(read, read.key_values, chunks, ratio) for ratio in ratios]

    @torch.no_grad()
    def kept_tokens(self, chunks: Chunks, ratio: int | Tensor) -> Sequence[Tensor]:
        """See [`KeyValueSelectionModel.kept_tokens`]; with shared budgets the tokens of the pairs that stand in each
        layer's place of the memory, which may be another layer's."""
        if self.config.head_budgets == "uniform":
            return super().kept_tokens(chunks, ratio)
        read = self._read(chunks, None)
        tokens = [read.position_ids[:, None, :, None].expand(*keys.shape[:3], 1) for keys, _ in read.key_values]
        kept = self._shared(read, tuple(zip(tokens, tokens, strict=True)), chunks, ratio)
        return [of_layer[..., 0] for of_layer, _ in kept.key_values]

    def slot_positions(self, slot_mask: Tensor, chunks: Chunks, counts: Sequence[int]) -> Tensor:
        if self.config.head_budgets == "uniform":
            return super().slot_positions(slot_mask, chunks, counts)
        # That of the first token: which tokens the pairs of a slot are of, their heads settle.
        return torch.zeros_like(slot_mask)

    def _shared(self, read: ReadContext, key_values: KeyValues, chunks: Chunks, ratio: int | Tensor) -> HeadwisePairs:
        """Of `key_values` what stays."""
        scores = torch.stack(read.scores, dim=1).flatten(1, 2)
        return kept_pairs(key_values, scores, read.is_context, slot_counts(self.config, chunks.lengths, ratio))


class KVZipForCausalLM(CompressorForCausalLM):
    """[`KVZipModel`] with the decoder's LM head."""

    model_class = KVZipModel
