# SPDX-License-Identifier: Apache-2.0
"""Compression tokens, the baseline of "Simple Context Compression: Mean-Pooling and Multi-Ratio Training"."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import initialization as init

from ..configuration.configuration_compression_tokens import CompressionTokensConfig
from .compressor.causal_lm import CompressorForCausalLM
from .compressor.memory_token_compressor import MemoryRows, MemoryTokenModel
from .parts.base_pass import Float32Linear


class CompressionTokensModel(MemoryTokenModel):
    """Copies of one learned token behind the context, whose last hidden states become the slots."""

    config_class = CompressionTokensConfig
    method_parts = (*MemoryTokenModel.method_parts, "slot_projection")

    def __init__(self, config: CompressionTokensConfig):
        super().__init__(config)
        self.has_bidirectional_memory = config.token_attention == "bidirectional"
        encoder_width = config.get_encoder_config().hidden_size
        self.slot_projection = None
        if config.linear_after_encoder:
            self.slot_projection = Float32Linear(encoder_width, config.hidden_size, bias=False)
        elif encoder_width != config.hidden_size:
            raise ValueError(f"widths of {encoder_width} and {config.hidden_size} need `linear_after_encoder=True`")
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if module is self.slot_projection:
            init.eye_(module.weight)
            return
        super()._init_weights(module)

    def read_memory(self, rows: MemoryRows) -> list[Tensor]:
        # Section 3: the encoder reads t_1 ... t_L, c_1 ... c_ceil(L/r); the states of the c_k are the slots.
        states = self.token_states(rows)
        if self.slot_projection is None:
            return states
        # Section 5.1: a learned matrix W follows.
        return [self.slot_projection(slots).to(slots.dtype) for slots in states]


class CompressionTokensForCausalLM(CompressorForCausalLM):
    """[`CompressionTokensModel`] with the decoder's LM head."""

    model_class = CompressionTokensModel
