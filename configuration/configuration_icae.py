# SPDX-License-Identifier: Apache-2.0
"""Configuration of ICAE."""

from typing import Any

from .configuration_memory_tokens import MemoryTokensConfig


class ICAEConfig(MemoryTokensConfig):
    r"""
    In-context autoencoder: the memory tokens' last hidden states are the slots.

    The position layouts are those of "Position IDs Matter: An Enhanced Position Layout for Efficient Context
    Compression in Large Language Models" (EPL): `position_layout` is `"default"`, `"uniform"` or `"enhanced"`.

    Args:
        chunk_markers: Whether the encoder reads a learned vector in front of each chunk and one behind it, as PISCO's
            does <ENC> and EOS.
        kwargs: fields of [`MemoryTokensConfig`] and [`CompressorConfig`].
    """

    model_type = "icae_compressor"

    def __init__(self, chunk_markers: bool = False, **kwargs: Any):
        self.chunk_markers = chunk_markers
        super().__init__(**kwargs)

    @property
    def card_text(self) -> str:
        """PISCO's with separators, a decoder that has learned to read, and all memory tokens in every chunk."""
        is_pisco = self.markers_per_chunk and self.decoder_lora is not None and self.memory_tokens == "fixed"
        return "pisco" if is_pisco else super().card_text
