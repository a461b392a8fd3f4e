# SPDX-License-Identifier: Apache-2.0
"""Configuration of TCP-AE, the traditional compression paradigm's autoencoder."""

from typing import Any

from .configuration_memory_tokens import MEMORY_STARTS
from .configuration_shallow_encoder import ShallowEncoderConfig
from .field_checks import int_between, one_of
from .layer_shape import perceptron_flops


class TCPAutoencoderConfig(ShallowEncoderConfig):
    r"""
    The baseline of the GMSA paper (Appendix F, Figure 7): the states of learned tokens behind the context, aligned by
    a multilayer perceptron. Encoder and training are GMSA's.

    Args:
        appended_tokens: Learned tokens behind the context, at least 1; a context of n tokens takes the first ceil(n /
            r). 128 serve the 512 tokens that the paper restores, at ratio 4.
        memory_start: Start values of these tokens, see [`MemoryTokensConfig`].
        kwargs: fields of [`ShallowEncoderConfig`] and [`CompressorConfig`].
    """

    model_type = "tcp_autoencoder_compressor"
    card_fields = {**ShallowEncoderConfig.card_fields, "appended_tokens": "Learned tokens behind the context"}

    def __init__(self, appended_tokens: int = 128, memory_start: str = "embedding_statistics", **kwargs: Any):
        self.appended_tokens = int_between("appended_tokens", appended_tokens, 1)
        self.memory_start = one_of("memory_start", memory_start, MEMORY_STARTS)
        super().__init__(**kwargs)

    @property
    def num_memory_tokens(self) -> int:  # type: ignore[override]
        """Learned tokens behind the context."""
        return self.appended_tokens

    def chunk_memory_tokens(self, num_tokens: int, ratio: int) -> int:
        """A learned token for every slot."""
        return self.chunk_slots(num_tokens, ratio)

    def chunk_flops(self, num_tokens: int, ratio: int) -> int:
        """Operations of the encoder and of the perceptron."""
        widths = self.get_encoder_config().hidden_size, self.hidden_size
        return super().chunk_flops(num_tokens, ratio) + perceptron_flops(self.chunk_slots(num_tokens, ratio), *widths)
