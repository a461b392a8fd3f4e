# SPDX-License-Identifier: Apache-2.0
"""StreamingLLM: attention sinks and the latest tokens (https://arxiv.org/abs/2309.17453)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..configuration.configuration_streaming_llm import StreamingLLMConfig
from .compressor.backbone import Chunks
from .compressor.causal_lm import CompressorForCausalLM
from .compressor.key_value_selection import KeyValueSelectionModel, ReadContext


class StreamingLLMModel(KeyValueSelectionModel):
    """Keeps the keys and values of a context's first tokens and of its latest ones, in every layer and head."""

    config_class = StreamingLLMConfig

    def __init__(self, config: StreamingLLMConfig):
        super().__init__(config)
        self.post_init()

    def priorities(self, read: ReadContext, num_slots: Tensor, num_question_tokens: Tensor | None) -> Tensor:
        # Section 3.2, Figure 4: the rolling cache holds the attention sinks and the most recent tokens ...
        is_sink = read.position_ids < self._num_sinks(num_slots)
        return (read.position_ids + is_sink * read.is_context.shape[1]).float()

    def slot_positions(self, slot_mask: Tensor, chunks: Chunks, counts: Sequence[int]) -> Tensor:
        # ... and positions are those within the cache: 0, 1, 2, 3, 6, 7, 8 of a text become 0 to 6.
        if self.config.position_layout == "default":
            return super().slot_positions(slot_mask, chunks, counts)
        slot, num_slots = torch.arange(slot_mask.shape[1], device=slot_mask.device), slot_mask.sum(dim=1)
        num_dropped = (torch.tensor(chunks.lengths, device=slot_mask.device) - num_slots)[:, None]
        return (slot + num_dropped * (slot >= self._num_sinks(num_slots))) * slot_mask

    def _num_sinks(self, num_slots: Tensor) -> Tensor:
        """`(batch_size, 1)`: the latest token stays, however few places there are."""
        return (num_slots[:, None] - 1).clamp(min=0, max=self.config.num_sinks)


class StreamingLLMForCausalLM(CompressorForCausalLM):
    """[`StreamingLLMModel`] with the decoder's LM head."""

    model_class = StreamingLLMModel
