# SPDX-License-Identifier: Apache-2.0
"""GMSA ("GMSA: Enhancing Context Compression via Group Merging and Layer Semantic Alignment")."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from transformers import initialization as init

from ..configuration.configuration_gmsa import GMSAConfig
from .compressor.modeling_compressor import CompressorForCausalLM
from .compressor.shallow_encoder import ShallowEncoderModel
from .parts.float32_layers import Float32Linear
from .parts.layer_semantic_alignment import LayerSemanticAlignment
from .parts.pooling import mean_pool


class GMSAModel(ShallowEncoderModel):
    r"""
    Averages r neighbouring states of a shallow encoder, and takes them to the decoder's input through blocks like its
    lowest.

    Args:
        config ([`GMSAConfig`]): the configuration.
    """

    config_class = GMSAConfig

    def __init__(self, config: GMSAConfig):
        super().__init__(config)
        encoder_width = config.get_encoder_config().hidden_size
        self.width_map = None
        if encoder_width != config.hidden_size:
            self.width_map = Float32Linear(encoder_width, config.hidden_size, bias=False)
        self.layer_semantic_alignment = None
        if config.lsa_layers:
            self.layer_semantic_alignment = LayerSemanticAlignment(config.decoder_config, config.lsa_layers)
            # Section 3.2: initialized with the weights from the first k_LSA layers of the decoder.
            self.layer_semantic_alignment.copy_blocks(self.language_model)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if module is self.width_map:
            # It keeps the size of vectors whatever their width.
            init.normal_(module.weight, std=module.in_features**-0.5)
        else:
            super()._init_weights(module)

    def start_from_base(self) -> None:
        if self.layer_semantic_alignment is not None:
            self.layer_semantic_alignment.start_from(self.language_model)

    def encode(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, ratios: Sequence[int | Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        if self.config.appended_tokens:
            # Table 4, "w/o Group Merging".
            return super().encode(input_ids, attention_mask, position_ids, ratios)
        if input_ids.shape[1] == 0:
            return [self.no_slots(input_ids) for _ in ratios]
        # Equation 2: H = Encoder_k(X).
        hidden_states = self.encoder_states(input_ids, attention_mask, position_ids)
        return [self._merged(hidden_states, attention_mask, ratio) for ratio in ratios]

    def _merged(self, hidden_states: Tensor, attention_mask: Tensor, ratio: int | Tensor) -> tuple[Tensor, Tensor]:
        # Section 3.1: H~ = [1 / L_G sum H_{G_1}, ..., 1 / L_G sum H_{G_N}], L_G = r; the last group by its own length.
        merged, mask = mean_pool(hidden_states, attention_mask, ratio)
        return self.soft_tokens(merged, mask), mask

    def align(self, summary: Tensor) -> Tensor:
        if self.width_map is not None:
            summary = self.width_map(summary)
        if self.layer_semantic_alignment is None:
            return summary
        # Equation 3: m~ = F_{k_LSA}(H~).
        aligned = self.layer_semantic_alignment(summary, self.dtype)
        return self.language_model.norm(aligned) if self.config.lsa_final_norm else aligned


class GMSAForCausalLM(CompressorForCausalLM):
    r"""
    [`GMSAModel`] with the decoder's LM head, which reads [m~; X_ins; x] (equation 4) or [m~; q; a] (equation 5).

    The loss is -log p(x_i | m~, X_ins, x_<i) (equation 4) where the text is the context's, and
    -log p(a_i | m~, q, a_<i) (equation 8) where it is an answer, as a mean over tokens. In the second stage
    (`training_stage="keft"`) exactly the W_Q, W_K and W_V of equation 6 train; equation 7 is the decoder's own
    attention, whose d is that of a head.

    Args:
        config ([`GMSAConfig`]): the configuration.
    """

    config_class = GMSAConfig
    model_class = GMSAModel
    _keep_in_fp32_modules_strict = GMSAModel._keep_in_fp32_modules_strict
    method_parameters = GMSAModel.method_parameters
