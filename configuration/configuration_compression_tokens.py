# SPDX-License-Identifier: Apache-2.0
"""Configuration of compression tokens."""

from typing import Any

from .configuration_compressor import CompressorConfig
from .field_checks import lora_or, one_of
from .layer_shape import linear_flops


class CompressionTokensConfig(CompressorConfig):
    """One learned token, repeated ceil(n / r) times behind the context: the baseline of "Simple Context Compression:
    Mean-Pooling and Multi-Ratio Training" (section 3).

    Args:
        compression_ratios: The ratios of section 5.1.
        encoder_lora, decoder_lora: Table 6; encoder and decoder have separate LoRA weights. Default to rank 16, alpha
            16 on all linear maps.
        token_attention: Whether a copy sees the copies in front of it only (`"causal"`) or all of them
            (`"bidirectional"`, which needs eager or sdpa attention). The context is causal, and every copy sees it
            whole.
        linear_after_encoder: Whether a learned map (hidden_size x hidden_size, the identity at the start) follows the
            encoder.
        chunk_markers: Whether the encoder reads a learned vector in front of each chunk and one behind it.
        kwargs: fields of [`CompressorConfig`].
    """

    model_type = "compression_tokens_compressor"
    card_fields = {**CompressorConfig.card_fields, "token_attention": "Attention among the copies"}

    def __init__(
        self,
        compression_ratios: int | list[int] | tuple[int, ...] = (4, 8, 16, 32, 64, 128),
        encoder_lora: dict[str, Any] | str | None = "default",
        decoder_lora: dict[str, Any] | str | None = "default",
        token_attention: str = "causal",
        linear_after_encoder: bool = True,
        chunk_markers: bool = False,
        **kwargs: Any,
    ):
        self.token_attention = one_of("token_attention", token_attention, ("causal", "bidirectional"))
        self.linear_after_encoder = linear_after_encoder
        self.chunk_markers = chunk_markers
        super().__init__(
            compression_ratios=compression_ratios,
            encoder_lora=lora_or(encoder_lora, {}),
            decoder_lora=lora_or(decoder_lora, {}),
            **kwargs,
        )

    @property
    def card_text(self) -> str:
        """COCOM's with separators and without the linear map."""
        return "cocom" if self.markers_per_chunk and not self.linear_after_encoder else super().card_text

    def chunk_memory_tokens(self, num_tokens: int, ratio: int) -> int:
        """A copy for every slot."""
        return self.chunk_slots(num_tokens, ratio)

    def chunk_flops(self, num_tokens: int, ratio: int) -> int:
        """Operations of the encoder and of the linear map."""
        widths = self.get_encoder_config().hidden_size, self.hidden_size
        slots = self.chunk_slots(num_tokens, ratio) if self.linear_after_encoder else 0
        return super().chunk_flops(num_tokens, ratio) + linear_flops(slots, *widths)
