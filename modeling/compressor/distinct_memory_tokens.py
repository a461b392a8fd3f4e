# SPDX-License-Identifier: Apache-2.0
"""Memory tokens that each have a vector of their own, as ICAE and 500xCompressor have them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import initialization as init

from .memory_token_compressor import MemoryTokenModel

if TYPE_CHECKING:
    from ...configuration.configuration_memory_tokens import MemoryTokensConfig
    from ...configuration.configuration_shallow_encoder import ShallowEncoderConfig


class DistinctMemoryTokenModel(MemoryTokenModel):
    r"""
    All chunks share the same |M| learned memory tokens M (EPL, section 3.1.1).

    Args:
        config ([`MemoryTokensConfig`] or [`ShallowEncoderConfig`]): the configuration.
    """

    def __init__(self, config: MemoryTokensConfig | ShallowEncoderConfig):
        super().__init__(config)
        self.memory_embeddings = None
        if config.num_memory_tokens:
            self._init_memory_embeddings(config.num_memory_tokens)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is not self or self.memory_embeddings is None:
            return
        if self.config.memory_start == "standard_normal":
            init.normal_(self.memory_embeddings)
        else:
            self._init_like_embeddings(self.memory_embeddings, self.encoder_backbone)

    def memory_counts(self, lengths: Tensor, ratio: int | Tensor) -> Tensor:
        """ceil(n / r), or with `memory_tokens="fixed"` ceil(L / r) for every chunk that is not empty."""
        if self.config.memory_tokens == "fixed":
            lengths = torch.where(lengths > 0, self.config.chunk_size, 0)
        return super().memory_counts(lengths, ratio)

    def memory_vectors(self, num_memory_tokens: int) -> Tensor:
        available = len(self.memory_embeddings)
        if num_memory_tokens > available:
            raise ValueError(
                f"the context needs {num_memory_tokens} memory tokens, the checkpoint has {available}: take a ratio "
                f"of {min(self.config.compression_ratios)} or higher"
            )
        return self.memory_embeddings[:num_memory_tokens]
