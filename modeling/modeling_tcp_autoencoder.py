# SPDX-License-Identifier: Apache-2.0
"""TCP-AE, the traditional compression paradigm's autoencoder (GMSA, Appendix F and Figure 7)."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import initialization as init

from ..configuration.configuration_tcp_autoencoder import TCPAutoencoderConfig
from .compressor.modeling_compressor import CompressorForCausalLM
from .compressor.shallow_encoder import ShallowEncoderModel
from .parts.float32_layers import Float32Linear


class TCPAutoencoderModel(ShallowEncoderModel):
    r"""
    A shallow encoder reads the context and then learned tokens, whose last hidden states go through a multilayer
    perceptron.

    Args:
        config ([`TCPAutoencoderConfig`]): the configuration.
    """

    config_class = TCPAutoencoderConfig

    def __init__(self, config: TCPAutoencoderConfig):
        super().__init__(config)
        self.slot_mlp = nn.Sequential(
            Float32Linear(config.get_encoder_config().hidden_size, config.hidden_size),
            nn.GELU(),
            Float32Linear(config.hidden_size, config.hidden_size),
        )
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Float32Linear):
            init.xavier_uniform_(module.weight)
            init.zeros_(module.bias)
        else:
            super()._init_weights(module)

    def align(self, summary: Tensor) -> Tensor:
        # Figure 7: coarse-grained semantic alignment.
        return self.slot_mlp(summary)


class TCPAutoencoderForCausalLM(CompressorForCausalLM):
    r"""
    [`TCPAutoencoderModel`] with the decoder's LM head.

    Args:
        config ([`TCPAutoencoderConfig`]): the configuration.
    """

    config_class = TCPAutoencoderConfig
    model_class = TCPAutoencoderModel
    _keep_in_fp32_modules_strict = TCPAutoencoderModel._keep_in_fp32_modules_strict
    method_parameters = TCPAutoencoderModel.method_parameters
