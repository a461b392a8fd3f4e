# SPDX-License-Identifier: Apache-2.0
"""The common part of the configurations of GMSA and of its baseline, TCP-AE."""

import copy
from typing import Any

from transformers import PreTrainedConfig

from .configuration_compressor import CompressorConfig
from .field_checks import int_between, lora_or, one_of
from .layer_shape import layer_kinds

AUTOENCODING, KEFT = "autoencoding", "keft"
# W_Q, W_K and W_V of every decoder layer, one by one or in one map; their biases belong to them.
QUERY_KEY_VALUE = (
    r"(^|\.)language_model\.layers\.\d+\.(.+\.)?"
    r"(q_proj|k_proj|v_proj|qkv_proj|query_key_value)\.(base_layer\.)?(weight|bias)$"
)
# Section 4.3 of GMSA's paper.
_ENCODER_LAYERS = 8


class ShallowEncoderConfig(CompressorConfig):
    r"""
    An encoder of a few layers with weights of its own, slots that a trained module aligns with the decoder's input,
    and training in two stages.

    Args:
        compression_ratios: Section 4.1: a ratio is drawn for each sample.
        encoder_config: Configuration of the model whose first layers encode, of any width and family; the decoder's if
            not given. It is cut to `encoder_layers`.
        encoder_layers: First layers of that model that encode, followed by its final norm (section 3.1 and Figure 5).
            If not given, 8 of a model of at least 16 layers, and a quarter of a smaller one's.
        encoder_lora: The authors' code. Defaults to rank 128, alpha 32, dropout 0.05 on all linear maps.
        training_stage: `"autoencoding"` (section 3.3): the encoder's adapter and the method's parts train, the decoder
            is frozen. `"keft"` (section 3.4, knowledge extraction fine-tuning): the decoder's query, key and value
            maps train, whole, and all else is frozen. It is part of the checkpoint.
        bos_before_text: GMSA's rows have no BOS on either side: [m~; X_ins; x] (equation 4).
        kwargs: fields of [`CompressorConfig`].
    """

    card_fields = {
        **CompressorConfig.card_fields,
        "encoder_layers": "Encoder layers",
        "training_stage": "Last stage of training",
    }

    def __init__(
        self,
        compression_ratios: int | list[int] | tuple[int, ...] = (4, 8),
        encoder_layers: int | None = None,
        encoder_lora: dict[str, Any] | str | None = "default",
        training_stage: str = AUTOENCODING,
        bos_before_text: bool = False,
        **kwargs: Any,
    ):
        self.training_stage = one_of("training_stage", training_stage, (AUTOENCODING, KEFT))
        default_lora = {"rank": 128, "alpha": 32.0, "dropout": 0.05, "target_modules": "all-linear"}
        super().__init__(
            compression_ratios=compression_ratios,
            encoder_lora=lora_or(encoder_lora, default_lora),
            bos_before_text=bos_before_text,
            **kwargs,
        )
        encoder = self.get_encoder_config()
        num_layers = encoder.num_hidden_layers
        if encoder_layers is None:
            encoder_layers = _ENCODER_LAYERS if num_layers >= 2 * _ENCODER_LAYERS else -(-num_layers // 4)
        self.encoder_layers = int_between("encoder_layers", encoder_layers, 1, num_layers)
        self.encoder_config = first_layers(encoder, self.encoder_layers)

    @property
    def stage_parameters(self) -> tuple[str, ...] | None:  # type: ignore[override]
        """In knowledge extraction fine-tuning W_Q, W_K and W_V of every decoder layer (GMSA, equation 6)."""
        return (QUERY_KEY_VALUE,) if self.training_stage == KEFT else None


def first_layers(config: PreTrainedConfig, num_layers: int) -> PreTrainedConfig:
    """A copy of a language model's configuration with its first `num_layers` layers."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = num_layers
    # Some families have layers of several kinds, named one by one.
    if kinds := layer_kinds(config):
        config.layer_types = kinds[:num_layers]
    return config
