# SPDX-License-Identifier: Apache-2.0
"""TCP-AE, the traditional compression paradigm's autoencoder (GMSA, Appendix F and Figure 7)."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import initialization as init

from ..configuration.configuration_tcp_autoencoder import TCPAutoencoderConfig
from .compressor.causal_lm import CompressorForCausalLM
from .compressor.memory_token_compressor import MemoryRows, MemoryTokenModel
from .parts.base_pass import Float32Linear, perceptron


class TCPAutoencoderModel(MemoryTokenModel):
    r"""
    A shallow encoder reads the context and then learned tokens, whose last hidden states go through a multilayer
    perceptron.
    """

    config_class = TCPAutoencoderConfig
    method_parts = (*MemoryTokenModel.method_parts, "slot_mlp")

    def __init__(self, config: TCPAutoencoderConfig):
        super().__init__(config)
        self.slot_mlp = nn.Sequential(*perceptron(config.get_encoder_config().hidden_size, config.hidden_size))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Float32Linear):
            init.xavier_uniform_(module.weight)
            init.zeros_(module.bias)
        else:
            super()._init_weights(module)

    def read_memory(self, rows: MemoryRows) -> list[Tensor]:
        # Figure 7: the learned tokens' states, and coarse-grained semantic alignment.
        return [self.slot_mlp(states).to(self.dtype) for states in self.token_states(rows)]


class TCPAutoencoderForCausalLM(CompressorForCausalLM):
    """[`TCPAutoencoderModel`] with the decoder's LM head."""

    model_class = TCPAutoencoderModel
