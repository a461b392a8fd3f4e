# SPDX-License-Identifier: Apache-2.0
# Written by context-compressors from its modules, whose names stand above their parts.

from __future__ import annotations

from torch import Tensor

from .compressor_base import CompressorForCausalLM, MemoryRows, MemoryTokenModel
from .configuration_icae import ICAEConfig


# modeling/modeling_icae.py

class ICAEModel(MemoryTokenModel):
    r"""
    In-context autoencoder: reads `[S(i); M(i)]` with an adapted encoder and carries the memory tokens' last hidden
    states over to the frozen decoder.
    """

    config_class = ICAEConfig

    def __init__(self, config: ICAEConfig):
        super().__init__(config)
        widths = config.get_encoder_config().hidden_size, config.hidden_size
        if widths[0] != widths[1]:
            raise ValueError(f"ICAE has no map between widths: the encoder has {widths[0]}, the decoder {widths[1]}")
        self.post_init()

    def read_memory(self, rows: MemoryRows) -> list[Tensor]:
        # Equation 1: M~(i), KV(i) = LLM([S(i); M(i)] | theta_LoRA); ICAE carries M~ over.
        return self.token_states(rows)


class ICAEForCausalLM(CompressorForCausalLM):
    """[`ICAEModel`] with the decoder's LM head."""

    model_class = ICAEModel
