# SPDX-License-Identifier: Apache-2.0
"""PCC ("Pretraining Context Compressor for Large Language Models with Embedding-Based Memory")."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import initialization as init

from ..configuration.configuration_pcc import PCCConfig
from .compressor.causal_lm import CompressorForCausalLM
from .compressor.memory_token_compressor import MemoryRows, MemoryTokenModel
from .parts.base_pass import Float32Linear, Float32RMSNorm, perceptron


class PCCModel(MemoryTokenModel):
    r"""
    A compressor reads each segment and memory tokens behind it, and a converter takes their last hidden states to the
    input of a frozen language model, which reads [BOS; <mem>; slots; </mem>; ...].
    """

    config_class = PCCConfig
    method_parts = (*MemoryTokenModel.method_parts, "converter")
    checked_architectures = (*MemoryTokenModel.checked_architectures, "gpt2")

    def __init__(self, config: PCCConfig):
        super().__init__(config)
        if config.train_encoder and self.encoder_model is None:
            raise ValueError("`train_encoder` needs an encoder of its own: the decoder's weights are frozen")
        encoder_width = config.get_encoder_config().hidden_size
        norm = Float32RMSNorm(encoder_width, eps=1e-6)
        self.converter = nn.Sequential(norm, *perceptron(encoder_width, config.hidden_size))
        self.post_init()

    @property
    def method_parameters(self) -> tuple[str, ...]:
        """The converter, memory tokens, <mem>, </mem> and [AE]; beside them adapters, or the whole compressor."""
        compressor = (r"(^|\.)encoder_model\.",) if self.config.train_encoder else ()
        return (*super().method_parameters, *compressor)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Float32Linear):
            # As torch starts any linear map, in the authors' code.
            bound = module.in_features**-0.5
            init.uniform_(module.weight, -bound, bound)
            init.uniform_(module.bias, -bound, bound)
        elif isinstance(module, Float32RMSNorm):
            init.ones_(module.weight)
        else:
            super()._init_weights(module)

    def read_memory(self, rows: MemoryRows) -> list[Tensor]:
        # Compressor: the memory tokens' last hidden states. Converter: W_2 GELU(W_1 RMSNorm(h) + b_1) + b_2.
        return [self.converter(states).to(self.dtype) for states in self.token_states(rows)]


class PCCForCausalLM(CompressorForCausalLM):
    """[`PCCModel`] with the decoder's LM head."""

    model_class = PCCModel
