# SPDX-License-Identifier: Apache-2.0
"""StreamingLLM: attention sinks and the latest tokens (https://arxiv.org/abs/2309.17453)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..configuration.configuration_streaming_llm import StreamingLLMConfig
from .compressor.causal_lm import CompressorForCausalLM
from .compressor.key_value_selection import KeyValueSelectionModel, ReadContext
from .memory.compressed_context import CompressedContext


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

    def slot_position_ids(self, memory: CompressedContext) -> Tensor:
        # ... and positions are those within the cache: 0, 1, 2, 3, 6, 7, 8 of a text become 0 to 6.
        if self.config.position_layout == "default":
            return super().slot_position_ids(memory)
        slot = torch.arange(memory.attention_mask.shape[1], device=memory.device)
        num_dropped = (memory.num_context_tokens - memory.num_slots)[:, None]
        return slot + num_dropped * (slot >= self._num_sinks(memory.num_slots))

    def _num_sinks(self, num_slots: Tensor) -> Tensor:
        """`(batch_size, 1)`: the latest token stays, however few places there are."""
        return (num_slots[:, None] - 1).clamp(min=0, max=self.config.num_sinks)


class StreamingLLMForCausalLM(CompressorForCausalLM):
    """[`StreamingLLMModel`] with the decoder's LM head."""

    model_class = StreamingLLMModel
