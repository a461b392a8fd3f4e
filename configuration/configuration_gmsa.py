# SPDX-License-Identifier: Apache-2.0
"""Configuration of GMSA."""

from typing import Any

from .configuration_shallow_encoder import ShallowEncoderConfig
from .field_checks import int_between
from .layer_shape import linear_flops, stack_flops


class GMSAConfig(ShallowEncoderConfig):
    r"""
    Group merging and layer semantic alignment ("GMSA: Enhancing Context Compression via Group Merging and Layer
    Semantic Alignment").

    The paper's ablations (Table 4 but for group merging, Figures 5 and 6) are values of this configuration: without
    layer semantic alignment: `lsa_layers=0`; other depths: `lsa_layers` and `encoder_layers`; without autoencoding:
    `training_stage="keft"` from the start. (Without knowledge extraction fine-tuning: the checkpoint of the first
    stage.)

    Args:
        lsa_layers: Blocks of layer semantic alignment, k_LSA in equation 3: copies of the decoder's first ones. 0: the
            merged states are the slots.
        lsa_final_norm: Whether the decoder's final norm, frozen, follows these blocks, as in the authors' code. The
            paper names none.
        kwargs: fields of [`ShallowEncoderConfig`] and [`CompressorConfig`].
    """

    model_type = "gmsa_compressor"
    card_fields = {**ShallowEncoderConfig.card_fields, "lsa_layers": "Blocks of layer semantic alignment"}

    def __init__(self, lsa_layers: int = 1, lsa_final_norm: bool = True, **kwargs: Any):
        self.lsa_final_norm = lsa_final_norm
        super().__init__(**kwargs)
        self.lsa_layers = int_between("lsa_layers", lsa_layers, 0, self.num_hidden_layers)

    def chunk_flops(self, num_tokens: int, ratio: int) -> int:
        """F^Encoder(L) + F^LSA(ceil(L / r)) (section 4.3), and a map between widths where there is one."""
        encoder, slots = self.get_encoder_config(), self.chunk_slots(num_tokens, ratio)
        is_wide = encoder.hidden_size != self.hidden_size
        width_map = linear_flops(slots, encoder.hidden_size, self.hidden_size) if is_wide else 0
        return (
            super().chunk_flops(num_tokens, ratio)
            + width_map
            + stack_flops(self.decoder_config, slots, self.lsa_layers)
        )
