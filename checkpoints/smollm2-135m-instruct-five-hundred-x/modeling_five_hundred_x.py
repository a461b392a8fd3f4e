# SPDX-License-Identifier: Apache-2.0
# Written by context-compressors from its modules, whose names stand above their parts.

from __future__ import annotations

from .compressor_base import (
    CompressorForCausalLM, KeyValues, MemoryRows, MemoryTokenModel, check_same_key_values, linear_maps
)
from .configuration_five_hundred_x import FiveHundredXConfig


# modeling/modeling_five_hundred_x.py

class FiveHundredXModel(MemoryTokenModel):
    r"""
    500xCompressor: reads `[S(i); M(i)]` with an adapted encoder and carries the memory tokens' keys and values of
    every layer over to the frozen decoder.
    """

    config_class = FiveHundredXConfig

    def __init__(self, config: FiveHundredXConfig):
        super().__init__(config)
        check_same_key_values(config)
        self.post_init()

    def encoder_lora_exclusions(self) -> list[str]:
        """Maps behind the last layer's keys and values: nothing that they do reaches the decoder."""
        last = f"layers.{self.config.get_encoder_config().num_hidden_layers - 1}"
        if last not in dict(self.encoder_backbone.named_modules()):
            raise ValueError(
                f"the last of the encoder's `layers` trains its keys and values alone, and "
                f"{type(self.encoder_backbone).__name__} has no `layers`: take another base"
            )
        maps = linear_maps(self.encoder_backbone.get_submodule(last))
        return [f"{last}.{path}" for path, name in maps if name not in ("k_proj", "v_proj", "qkv_proj")]

    def read_memory(self, rows: MemoryRows) -> list[KeyValues]:
        # Equation 1: M~(i), KV(i) = LLM([S(i); M(i)] | theta_LoRA); 500xCompressor carries KV over.
        return self.token_key_values(rows)


class FiveHundredXForCausalLM(CompressorForCausalLM):
    """[`FiveHundredXModel`] with the decoder's LM head."""

    model_class = FiveHundredXModel
