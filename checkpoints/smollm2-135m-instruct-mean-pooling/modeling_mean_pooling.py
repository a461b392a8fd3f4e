# SPDX-License-Identifier: Apache-2.0
"""Mean pooling ("Simple Context Compression: Mean-Pooling and Multi-Ratio Training")."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from transformers import initialization as init

from .configuration_mean_pooling import MeanPoolingConfig
from .causal_lm import CompressorForCausalLM
from .chunking import Chunks
from .modeling_compressor import CompressorModel
from .pooling import mean_pool, window_sizes


class MeanPoolingModel(CompressorModel):
    r"""
    Averages r neighbouring hidden states of a bidirectional encoder into one slot.

    Args:
        config ([`MeanPoolingConfig`]): the configuration.
    """

    config_class = MeanPoolingConfig
    pools_windows = True
    method_parts = ("slot_projection", "slot_perceptron")

    def __init__(self, config: MeanPoolingConfig):
        super().__init__(config)
        encoder_width = config.get_encoder_config().hidden_size
        self.slot_projection = None
        if config.linear_after_pooling:
            self.slot_projection = nn.Linear(encoder_width, config.hidden_size, bias=False)
        elif encoder_width != config.hidden_size:
            raise ValueError(
                f"the encoder has width {encoder_width}, the decoder {config.hidden_size}: "
                "`linear_after_pooling` must be True"
            )
        self.slot_perceptron = None
        if config.mlp_after_pooling:
            width = config.hidden_size
            self.slot_perceptron = nn.Sequential(nn.Linear(encoder_width, width), nn.GELU(), nn.Linear(width, width))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if module is self.slot_projection:
            (init.zeros_ if self.config.embedding_residual else init.eye_)(module.weight)
        elif self.slot_perceptron is not None and module is self.slot_perceptron[2]:
            init.zeros_(module.weight)
            init.zeros_(module.bias)
        else:
            super()._init_weights(module)

    def encode(self, chunks: Chunks, ratios: Sequence[int | Tensor]) -> list[Tensor]:
        # Section 4.1: h_1 ... h_L, with full self-attention; the ablation "No Encoder" pools token embeddings.
        embeddings = None
        if self.config.encoder_type == "embeddings" or self.config.embedding_residual:
            embeddings = self._embed_text(chunks.input_ids)
        hidden_states: Any = embeddings
        if self.config.encoder_type == "language_model":
            inputs = (chunks.input_ids, chunks.attention_mask, chunks.position_ids)
            is_causal = self.config.encoder_attention == "causal"
            hidden_states = self.encoder_states(*inputs, is_causal=is_causal)
        return [self._slots(hidden_states, embeddings, chunks, ratio) for ratio in ratios]

    def _slots(self, hidden_states: Tensor, embeddings: Tensor | None, chunks: Chunks, ratio: int | Tensor) -> Tensor:
        # Equations 3 and 4: S_k = {(k-1)r + 1, ..., min(kr, L)},  z_k = 1 / |S_k| sum_{i in S_k} h_i.
        tokens = (chunks.attention_mask, ratio, chunks.lengths)
        slots = mean_pool(hidden_states, *tokens)[0]
        # Section 5.1: a learned matrix W is applied to f_c(T, r).
        if self.slot_projection is not None:
            pooled = slots.float()
            slots = functional.linear(pooled, self.slot_projection.weight.float())
            if self.slot_perceptron is not None:
                slots = slots + self.slot_perceptron(pooled)
            if embeddings is not None and self.config.embedding_residual:
                # A sum of |S_k| vectors over sqrt(|S_k|) is about as large as one of them.
                sizes = window_sizes(chunks.attention_mask.sum(dim=1), ratio, slots.shape[1])
                slots = slots + mean_pool(embeddings.float(), *tokens)[0] * sizes.sqrt()[:, :, None]
            slots = slots.to(hidden_states.dtype)
        return slots


class MeanPoolingForCausalLM(CompressorForCausalLM):
    r"""
    [`MeanPoolingModel`] with the decoder's LM head.

    Args:
        config ([`MeanPoolingConfig`]): the configuration.
    """

    model_class = MeanPoolingModel
