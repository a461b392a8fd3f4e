# SPDX-License-Identifier: Apache-2.0
"""Configuration of the mean-pooling compressor."""

from typing import Any

from .configuration_compressor import CompressorConfig
from .field_checks import boolean, lora_or, one_of
from .layer_shape import linear_flops, perceptron_flops

ENCODER_TYPES = ("language_model", "embeddings")
ENCODER_ATTENTIONS = ("bidirectional", "causal")


class MeanPoolingConfig(CompressorConfig):
    r"""
    Mean pooling of a bidirectional encoder's last hidden states ("Simple Context Compression: Mean-Pooling and
    Multi-Ratio Training").

    The paper's ablations (Table 3) are values of this configuration: fixed decoder: `decoder_lora=None`; fixed
    encoder: `encoder_lora=None`; no encoder: `encoder_type="embeddings"`; without the linear layer:
    `linear_after_pooling=False`. (Ratio sampling is a value of the training recipe: `ratio_mode: per_sample`.)

    Args:
        compression_ratios (`int` or sequence of `int`, defaults to `(4, 8, 16, 32, 64, 128)`):
            The ratios of section 5.1.
        encoder_lora (`dict` or `None`, defaults to rank 16, alpha 16 on all linear maps):
            Table 6.
        decoder_lora (`dict` or `None`, defaults to rank 16, alpha 16 on all linear maps):
            Table 6; encoder and decoder have separate LoRA weights.
        linear_after_pooling (`bool`, defaults to `True`):
            Whether a learned map W (hidden_size x hidden_size, the identity at the start) follows the pooling.
        embedding_residual (`bool`, defaults to `False`):
            Whether the sum of the window's token embeddings, over the square root of their number, is added to each
            slot, and W starts at zero. Slots are then as large as token embeddings; the paper's, which start as last
            hidden states, were 15 times as large on SmolLM2-135M-Instruct.
        mlp_after_pooling (`bool`, defaults to `False`):
            Whether a perceptron of two layers (hidden_size wide, GELU, zero at the start) is added to W's output.
        encoder_type (`str`, defaults to `"language_model"`):
            What is pooled: the encoder's last hidden states, or `"embeddings"`, the decoder's token embeddings.
        encoder_attention (`str`, defaults to `"bidirectional"`):
            Attention inside the encoder, `"bidirectional"` as in section 4.1 or `"causal"`.
        kwargs: fields of [`CompressorConfig`].
    """

    model_type = "mean_pooling_compressor"

    def __init__(
        self,
        compression_ratios: int | list[int] | tuple[int, ...] = (4, 8, 16, 32, 64, 128),
        encoder_lora: dict[str, Any] | str | None = "default",
        decoder_lora: dict[str, Any] | str | None = "default",
        linear_after_pooling: bool = True,
        embedding_residual: bool = False,
        mlp_after_pooling: bool = False,
        encoder_type: str = "language_model",
        encoder_attention: str = "bidirectional",
        **kwargs: Any,
    ):
        self.linear_after_pooling = boolean("linear_after_pooling", linear_after_pooling)
        self.embedding_residual = boolean("embedding_residual", embedding_residual)
        self.mlp_after_pooling = boolean("mlp_after_pooling", mlp_after_pooling)
        if not self.linear_after_pooling and (embedding_residual or mlp_after_pooling):
            raise ValueError(
                "`embedding_residual` and `mlp_after_pooling` go with `linear_after_pooling=True`, got "
                f"{embedding_residual!r} and {mlp_after_pooling!r}"
            )
        self.encoder_type = one_of("encoder_type", encoder_type, ENCODER_TYPES)
        self.encoder_attention = one_of("encoder_attention", encoder_attention, ENCODER_ATTENTIONS)
        super().__init__(
            compression_ratios=compression_ratios,
            encoder_lora=lora_or(encoder_lora, {} if encoder_type == "language_model" else None),
            decoder_lora=lora_or(decoder_lora, {}),
            **kwargs,
        )
        # A merged checkpoint's encoder is a copy of the decoder, and reads the same tokens.
        is_another = self.get_encoder_config().vocab_size != self.vocab_size or self.encoder_name_or_path is not None
        if self.embedding_residual and is_another:
            raise ValueError(
                "`embedding_residual` adds the decoder's embeddings of the same tokens: it must be False with another "
                f"language model as encoder ({self.encoder_name_or_path or self.get_encoder_config().model_type!r})"
            )
        if self.encoder_type == "embeddings" and (self.encoder_lora is not None or self.encoder_config is not None):
            raise ValueError(
                "`encoder_type='embeddings'` has no encoder: `encoder_lora` and `encoder_config` must be None, got "
                f"{self.encoder_lora!r} and {type(self.encoder_config).__name__}"
            )

    @property
    def has_encoder(self) -> bool:
        """Whether hidden states are pooled, and not token embeddings."""
        return self.encoder_type == "language_model"

    def chunk_flops(self, num_tokens: int, ratio: int) -> int:
        """Operations of the encoder, of the linear map and of the perceptron."""
        total = super().chunk_flops(num_tokens, ratio) if self.has_encoder else 0
        sizes = self.chunk_slots(num_tokens, ratio), self.get_encoder_config().hidden_size, self.hidden_size
        total += linear_flops(*sizes) if self.linear_after_pooling else 0
        return total + (perceptron_flops(*sizes) if self.mlp_after_pooling else 0)
