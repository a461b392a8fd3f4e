# SPDX-License-Identifier: Apache-2.0
"""Configuration of 500xCompressor."""

from typing import Any

from .configuration_memory_tokens import MemoryTokensConfig
from .field_checks import check_left_out


class FiveHundredXConfig(MemoryTokensConfig):
    r"""
    500xCompressor: the memory tokens' keys and values of every layer are carried over. A reconstruction starts with
    the learned token [AE], as in EPL; the authors' own code starts it with BOS.

    Args:
        kwargs: fields of [`MemoryTokensConfig`] and [`CompressorConfig`].
    """

    model_type = "five_hundred_x_compressor"
    carrier = "key_values"
    # `embedding_residual` adds pooled embeddings to the memory tokens, whose adapted maps make keys and values.
    maps_slots = True

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        check_left_out(
            self, ("bos_before_slots", "slots_after_ids"), "keys and values are made before the text is known"
        )
