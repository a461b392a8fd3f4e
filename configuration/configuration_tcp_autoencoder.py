# SPDX-License-Identifier: Apache-2.0
"""Configuration of TCP-AE, the autoencoder of the traditional compression paradigm."""

from typing import Any

from .configuration_shallow_encoder import ShallowEncoderConfig, int_between


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
