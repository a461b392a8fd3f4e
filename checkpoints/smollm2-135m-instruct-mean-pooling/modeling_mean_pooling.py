# SPDX-License-Identifier: Apache-2.0
# Written by context-compressors from its modules, whose names stand above their parts.

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from transformers import initialization as init

from .compressor_base import Chunks, CompressorForCausalLM, CompressorModel, Float32Linear, mean_pool
from .configuration_mean_pooling import MeanPoolingConfig


# modeling/modeling_mean_pooling.py

class MeanPoolingModel(CompressorModel):
    """Averages r neighbouring hidden states of a bidirectional encoder into one slot."""

    config_class = MeanPoolingConfig
    slot_origin = "windows"
    method_parts = ("slot_projection", "slot_mlp")

    def __init__(self, config: MeanPoolingConfig):
        super().__init__(config)
        encoder_width = config.get_encoder_config().hidden_size
        self.slot_projection = None
        if config.linear_after_pooling:
            self.slot_projection = Float32Linear(encoder_width, config.hidden_size, bias=False)
        elif encoder_width != config.hidden_size and config.normed_mlp_size is None:
            raise ValueError(f"widths of {encoder_width} and {config.hidden_size} need `linear_after_pooling=True`")
        self.slot_mlp = None
        if config.normed_mlp_size is not None:
            up = Float32Linear(encoder_width, config.normed_mlp_size, bias=config.normed_mlp_bias)
            down = Float32Linear(config.normed_mlp_size, config.hidden_size, bias=config.normed_mlp_bias)
            self.slot_mlp = nn.Sequential(nn.RMSNorm(encoder_width, eps=1e-6), up, nn.GELU(), down)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if module is self.slot_projection:
            (init.zeros_ if self.config.embedding_residual else init.eye_)(module.weight)
        elif self.config.embedding_residual and self.slot_mlp is not None and module is self.slot_mlp[3]:
            init.zeros_(module.weight)
        elif isinstance(module, nn.RMSNorm):
            init.ones_(module.weight)
        else:
            super()._init_weights(module)

    def encode(self, chunks: Chunks, ratios: Sequence[int | Tensor]) -> list[Tensor]:
        # Section 4.1: h_1 ... h_L, with full self-attention; the ablation "No Encoder" pools token embeddings.
        if self.config.encoder_type == "embeddings":
            hidden_states = self._embed_text(chunks.input_ids)
        else:
            inputs = (chunks.input_ids, chunks.attention_mask, chunks.position_ids)
            is_causal = self.config.encoder_attention == "causal"
            output = self.encoder_outputs(*inputs, is_causal=is_causal, is_full=chunks.is_full, is_right_padded=True)
            hidden_states = output.last_hidden_state
        slots = []
        for ratio in ratios:
            # Equations 3 and 4: S_k = {(k-1)r + 1, ..., min(kr, L)},  z_k = 1 / |S_k| sum_{i in S_k} h_i.
            pooled = mean_pool(hidden_states, chunks.attention_mask, ratio, chunks.lengths)[0]
            # Section 5.1: a learned matrix W is applied to f_c(T, r).
            learned = self.slot_projection if self.slot_mlp is None else self.slot_mlp
            slots.append(pooled if learned is None else learned(pooled.float()).to(pooled.dtype))
        return slots


class MeanPoolingForCausalLM(CompressorForCausalLM):
    """[`MeanPoolingModel`] with the decoder's LM head."""

    model_class = MeanPoolingModel
