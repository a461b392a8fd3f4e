# SPDX-License-Identifier: Apache-2.0
"""GMSA ("GMSA: Enhancing Context Compression via Group Merging and Layer Semantic Alignment")."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from transformers import initialization as init

from ..configuration.configuration_gmsa import GMSAConfig
from .compressor.causal_lm import CompressorForCausalLM
from .compressor.chunking import Chunks
from .compressor.memory_token_compressor import MemoryTokenModel
from .parts.float32_layers import Float32Linear
from .parts.layer_semantic_alignment import LayerSemanticAlignment
from .parts.pooling import mean_pool


class GMSAModel(MemoryTokenModel):
    r"""
    Averages r neighbouring states of a shallow encoder, and takes them to the decoder's input through blocks like its
    lowest.

    Args:
        config ([`GMSAConfig`]): the configuration.
    """

    config_class = GMSAConfig
    method_parts = (*MemoryTokenModel.method_parts, "width_map")

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

    @property
    def pools_windows(self) -> bool:  # type: ignore[override]  # an ablation does not
        return self.memory_embeddings is None

    @property
    def method_parameters(self) -> tuple[str, ...]:
        """Blocks of layer semantic alignment train, and where they do not, they have the decoder's type."""
        return (*super().method_parameters, r"(^|\.)layer_semantic_alignment\.")

    def _init_weights(self, module: nn.Module) -> None:
        if module is self.width_map:
            # It keeps the size of vectors whatever their width.
            init.normal_(module.weight, std=module.in_features**-0.5)
        else:
            super()._init_weights(module)

    def start_from_base(self) -> None:
        if self.layer_semantic_alignment is not None:
            self.layer_semantic_alignment.start_from(self.language_model)

    def encode(self, chunks: Chunks, ratios: Sequence[int | Tensor]) -> list[Tensor]:
        if self.memory_embeddings is None:
            # Equation 2: H = Encoder_k(X).
            inputs = (chunks.input_ids, chunks.attention_mask, chunks.position_ids)
            states = self.encoder_states(*inputs, is_full=chunks.is_full, is_right_padded=True)
            # Section 3.1: H~ = [1 / L_G sum H_{G_1}, ..., 1 / L_G sum H_{G_N}], L_G = r; the last group by its length.
            merged = [mean_pool(states, chunks.attention_mask, ratio, chunks.lengths)[0] for ratio in ratios]
        else:
            # Table 4, "w/o Group Merging": learned tokens behind the context take the groups' place.
            merged = [states for rows in self.memory_rows(chunks, ratios) for states in self.token_states(rows)]
        return [self.align(summary).to(self.dtype) for summary in merged]

    def align(self, summary: Tensor) -> Tensor:
        """Slots of merged states, `(num_chunks, num_slots, hidden_size)`."""
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

    model_class = GMSAModel
