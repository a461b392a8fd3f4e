# SPDX-License-Identifier: Apache-2.0
"""Configuration of the mean-pooling compressor."""

from typing import Any

from .configuration_compressor import CompressorConfig
from .field_checks import check_left_out, lora_or, one_of, positive_int_or_none
from .layer_shape import linear_flops


class MeanPoolingConfig(CompressorConfig):
    """Mean pooling of a bidirectional encoder's last hidden states ("Simple Context Compression: Mean-Pooling and
    Multi-Ratio Training").

    The paper's ablations (Table 3) are values of this configuration: fixed decoder: `decoder_lora=None`; fixed
    encoder: `encoder_lora=None`; no encoder: `encoder_type="embeddings"`; without the linear layer:
    `linear_after_pooling=False`. Ratio sampling is a value of the training recipe: `ratio_mode: per_sample`.

    Args:
        compression_ratios: The ratios of section 5.1.
        encoder_lora, decoder_lora: Table 6; encoder and decoder have separate LoRA weights. Default to rank 16, alpha
            16 on all linear maps; an encoder of embeddings has none.
        linear_after_pooling: Whether a learned map W (hidden_size x hidden_size, the identity at the start) follows
            the pooling.
        normed_mlp_size: Width of a perceptron in W's place: RMS norm, linear map, GELU, linear map, without biases. It
            goes with `linear_after_pooling=False`.
        normed_mlp_bias: Whether its linear maps have biases (LCLM's code).
        encoder_type: `"language_model"`: the encoder's last hidden states are pooled; `"embeddings"`: the decoder's
            token embeddings.
        encoder_attention: Attention inside the encoder, `"bidirectional"` as in section 4.1 or `"causal"`.
        kwargs: fields of [`CompressorConfig`].
    """

    model_type = "mean_pooling_compressor"

    def __init__(
        self,
        compression_ratios: int | list[int] | tuple[int, ...] = (4, 8, 16, 32, 64, 128),
        encoder_lora: dict[str, Any] | str | None = "default",
        decoder_lora: dict[str, Any] | str | None = "default",
        linear_after_pooling: bool = True,
        normed_mlp_size: int | None = None,
        normed_mlp_bias: bool = False,
        encoder_type: str = "language_model",
        encoder_attention: str = "bidirectional",
        **kwargs: Any,
    ):
        self.linear_after_pooling = linear_after_pooling
        self.normed_mlp_size = positive_int_or_none("normed_mlp_size", normed_mlp_size)
        self.normed_mlp_bias = normed_mlp_bias
        if self.linear_after_pooling and normed_mlp_size is not None:
            raise ValueError(f"`normed_mlp_size` needs `linear_after_pooling=False`, got {normed_mlp_size!r}")
        self.encoder_type = one_of("encoder_type", encoder_type, ("language_model", "embeddings"))
        self.encoder_attention = one_of("encoder_attention", encoder_attention, ("bidirectional", "causal"))
        super().__init__(
            compression_ratios=compression_ratios,
            encoder_lora=lora_or(encoder_lora, {} if encoder_type == "language_model" else None),
            decoder_lora=lora_or(decoder_lora, {}),
            **kwargs,
        )
        if self.encoder_type == "embeddings":
            check_left_out(self, ("encoder_lora", "encoder_config"), "`encoder_type='embeddings'` has no encoder")

    @property
    def has_encoder(self) -> bool:  # type: ignore[override]
        """Return whether hidden states are pooled, and not token embeddings."""
        return self.encoder_type == "language_model"

    @property
    def maps_slots(self) -> bool:  # type: ignore[override]
        """See [`CompressorConfig.maps_slots`]."""
        return self.linear_after_pooling or self.normed_mlp_size is not None

    def chunk_flops(self, num_tokens: int, ratio: int) -> int:
        """Operations of the encoder, and of the linear map or perceptron."""
        total = super().chunk_flops(num_tokens, ratio) if self.has_encoder else 0
        slots, width = self.chunk_slots(num_tokens, ratio), self.get_encoder_config().hidden_size
        total += linear_flops(slots, width, self.hidden_size) if self.linear_after_pooling else 0
        if self.normed_mlp_size is not None:
            total += linear_flops(slots, width + self.hidden_size, self.normed_mlp_size)
        return total
