# SPDX-License-Identifier: Apache-2.0
"""Configuration of TCP-AE, the autoencoder of the traditional compression paradigm."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedConfig

from .configuration_shallow_encoder import ShallowEncoderConfig
from .field_checks import int_between
from .layer_shape import perceptron_flops


class TCPAutoencoderConfig(ShallowEncoderConfig):
    r"""
    The baseline of the GMSA paper (Appendix F, Figure 7): the states of learned tokens behind the context, aligned by
    a multilayer perceptron. Encoder and training are GMSA's.

    Args:
        appended_tokens (`int`, defaults to 128):
            Learned tokens behind the context, at least 1; a context of n tokens takes the first ceil(n / r). 128 serve
            the 512 tokens that the paper restores, at ratio 4.
        kwargs: fields of [`ShallowEncoderConfig`] and [`CompressorConfig`].
    """

    model_type = "tcp_autoencoder_compressor"

    def __init__(self, appended_tokens: int = 128, **kwargs: Any):
        super().__init__(appended_tokens=int_between("appended_tokens", appended_tokens, 1), **kwargs)

    @classmethod
    def for_base(
        cls, base: PreTrainedConfig, ratios: Sequence[int], *, max_context_tokens: int | None = None, **fields: Any
    ) -> Any:
        """See [`ShallowEncoderConfig.for_base`]; with as many learned tokens as the longest context takes."""
        if max_context_tokens is not None:
            fields["appended_tokens"] = -(-max_context_tokens // min(ratios))
        return super().for_base(base, ratios, **fields)

    def chunk_flops(self, num_tokens: int, ratio: int) -> int:
        """Operations of the encoder and of the perceptron."""
        widths = self.get_encoder_config().hidden_size, self.hidden_size
        return super().chunk_flops(num_tokens, ratio) + perceptron_flops(self.chunk_slots(num_tokens, ratio), *widths)
