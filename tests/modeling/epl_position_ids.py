# SPDX-License-Identifier: Apache-2.0
"""Position ids of EPL's tables, chunk by chunk."""

from collections.abc import Sequence

import torch
from torch import Tensor

from context_compressors.modeling.parts.position_layout import uniform_memory_ids


def encoder_position_ids(length: int, count: int, layout: str, start: int = 0) -> tuple[Tensor, Tensor]:
    """Return the ids of a chunk's `length` tokens and `count` memory tokens in the encoder (Tables 1 and 12)."""
    first = 0 if layout == "default" else start + 1
    spread = layout != "default" and count > 0
    memory = uniform_memory_ids(first, length, count) if spread else length + torch.arange(count)
    return torch.arange(first, first + length), memory


def decoder_position_ids(
    lengths: Sequence[int], counts: Sequence[int], num_text_tokens: int, layout: str, carrier: str, task: str
) -> tuple[Tensor, Tensor]:
    """Return the ids of all chunks' memory and of the text in the decoder (Tables 2, 3 and 13 to 15)."""
    starts = [sum(lengths[:n]) for n in range(len(lengths))]
    chunks = zip(lengths, counts, starts, strict=True)
    encoded = torch.cat([encoder_position_ids(length, count, layout, start)[1] for length, count, start in chunks])
    first = sum(counts)
    memory = encoded if layout == "enhanced" or carrier == "key_values" else torch.arange(first)
    if layout == "enhanced":
        first = 0 if task == "reconstruction" else sum(lengths)
    return memory, torch.arange(first, first + num_text_tokens)
