# SPDX-License-Identifier: Apache-2.0
"""Mean pooling ("Simple Context Compression: Mean-Pooling and Multi-Ratio Training")."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional
from transformers import initialization as init

from ..configuration.configuration_mean_pooling import MeanPoolingConfig
from .modeling_compressor import CompressorForCausalLM, CompressorModel, CompressorPreTrainedModel
from .pooling import mean_pool


class MeanPoolingModel(CompressorModel):
    r"""
    Averages r neighbouring hidden states of a bidirectional encoder into one slot.

    Args:
        config ([`MeanPoolingConfig`]): the configuration.
    """

    config_class = MeanPoolingConfig
    _keep_in_fp32_modules_strict = [*CompressorPreTrainedModel._keep_in_fp32_modules_strict, "slot_projection"]
    method_parameters = (*CompressorPreTrainedModel.method_parameters, r"(^|\.)slot_projection\.")

    def __init__(self, config: MeanPoolingConfig):
        super().__init__(config)
        self._has_encoder = config.encoder_type == "language_model"
        encoder_width = config.get_encoder_config().hidden_size
        self.slot_projection = None
        if config.linear_after_pooling:
            self.slot_projection = nn.Linear(encoder_width, config.hidden_size, bias=False)
        elif encoder_width != config.hidden_size:
            raise ValueError(
                f"the encoder has width {encoder_width}, the decoder {config.hidden_size}: "
                "`linear_after_pooling` must be True"
            )
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if module is self.slot_projection:
            init.eye_(module.weight)
        else:
            super()._init_weights(module)

    def encode(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, ratios: Sequence[int | Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        # Section 4.1: h_1 ... h_L, with full self-attention; the ablation "No Encoder" pools token embeddings.
        if self.config.encoder_type == "embeddings":
            hidden_states = self._embed_text(input_ids)
        else:
            is_causal = self.config.encoder_attention == "causal"
            hidden_states = self.encoder_states(input_ids, attention_mask, position_ids, is_causal=is_causal)
        return [self._slots(hidden_states, attention_mask, ratio) for ratio in ratios]

    def _slots(self, hidden_states: Tensor, attention_mask: Tensor, ratio: int | Tensor) -> tuple[Tensor, Tensor]:
        # Equations 3 and 4: S_k = {(k-1)r + 1, ..., min(kr, L)},  z_k = 1 / |S_k| sum_{i in S_k} h_i.
        slots, slot_mask = mean_pool(hidden_states, attention_mask, ratio)
        # Section 5.1: a learned matrix W is applied to f_c(T, r).
        if self.slot_projection is not None:
            slots = functional.linear(slots.float(), self.slot_projection.weight.float()).to(slots.dtype)
        return slots, slot_mask


class MeanPoolingForCausalLM(CompressorForCausalLM):
    r"""
    [`MeanPoolingModel`] with the decoder's LM head.

    Args:
        config ([`MeanPoolingConfig`]): the configuration.
    """

    config_class = MeanPoolingConfig
    model_class = MeanPoolingModel
    _keep_in_fp32_modules_strict = MeanPoolingModel._keep_in_fp32_modules_strict
    method_parameters = MeanPoolingModel.method_parameters
