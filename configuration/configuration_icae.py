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
        kwargs: fields of [`MemoryTokensConfig`] and [`CompressorConfig`].
    """

    model_type = "icae_compressor"

    def __init__(self, **kwargs: Any):
        # A configuration class without an `__init__` would be made a dataclass.
        super().__init__(**kwargs)
