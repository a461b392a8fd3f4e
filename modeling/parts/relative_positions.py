# SPDX-License-Identifier: Apache-2.0
"""Explicit positions in T5's relative bias, and the positions of latents among their tokens (DeCAL, section 3)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.t5.modeling_t5 import T5Attention


def latent_position_ids(token_counts: Tensor, latent_mask: Tensor, ratio: int | Tensor) -> Tensor:
    """Position of each latent, the integer mean of the positions of its tokens (DeCAL, section 3).

    Args:
        token_counts: `(batch_size,)`, real tokens of each row, at the positions 0, 1, ....
        latent_mask: `(batch_size, num_latents)`, left-aligned ones for real latents.
        ratio: Tokens per latent, an int or a LongTensor `(batch_size,)`.

    Returns:
        `(batch_size, num_latents)`, the mean rounded down; 0 where there is no latent.
    """
    ratio = ratio[:, None] if isinstance(ratio, Tensor) else ratio
    first = torch.arange(latent_mask.shape[1], device=latent_mask.device) * ratio
    last = torch.minimum(first + ratio, token_counts[:, None]) - 1
    return torch.div(first + last, 2, rounding_mode="floor") * latent_mask


def relative_position_bias(
    bias_table: nn.Embedding, position_ids: Tensor, num_buckets: int, max_distance: int
) -> Tensor:
    """T5's bidirectional relative bias between tokens at any positions; T5 itself counts them 0, 1, ....

    Args:
        bias_table: T5's `relative_attention_bias`, `(num_buckets, num_heads)`.
        position_ids: `(batch_size, length)`.
        num_buckets: T5's `relative_attention_num_buckets`.
        max_distance: T5's `relative_attention_max_distance`.

    Returns:
        `(batch_size, num_heads, length, length)`; a batch size of 1 if all rows have the same positions.
    """
    if len(position_ids) > 1 and bool((position_ids == position_ids[:1]).all()):
        position_ids = position_ids[:1]
    relative_position = position_ids[:, None, :] - position_ids[:, :, None]
    buckets = T5Attention._relative_position_bucket(
        relative_position, bidirectional=True, num_buckets=num_buckets, max_distance=max_distance
    )
    return _look_up(bias_table, buckets).permute(0, 3, 1, 2)


def _look_up(table: nn.Embedding, ids: Tensor) -> Tensor:
    """`table(ids)`, also where FSDP2 shares the table out: it is T5's first block's, and read outside of that."""
    if not hasattr(table.weight, "full_tensor"):
        return table(ids)
    from torch.distributed.tensor import Partial

    # Every process reads other texts: as everywhere in FSDP, what trains is the mean of their gradients.
    weight: Any = table.weight
    mean = [Partial("avg")] * weight.device_mesh.ndim
    return functional.embedding(ids, weight.full_tensor(grad_placements=mean))


def mask_bias(bias: Tensor, token_mask: Tensor, causal: bool = False) -> Tensor:
    """The bias with the lowest number where a token may not be seen.

    Args:
        bias: `(batch_size or 1, num_heads, length, length)`; overwritten if it has a row for each of the mask's.
        token_mask: `(batch_size, length)`, one for real tokens; a row without any sees its pads.
        causal: Whether a token sees nothing of what stands behind it.

    Returns:
        `(batch_size or 1, num_heads, length, length)`.
    """
    # Nothing is read of a row of pads alone; a softmax over nothing would still send NaN into the gradients.
    seen = (token_mask.bool() | ~token_mask.bool().any(dim=1, keepdim=True))[:, None, None, :]
    if causal:
        seen = seen & torch.ones(bias.shape[-2:], dtype=torch.bool, device=bias.device).tril()
    elif bool(seen.all()):
        return bias
    lowest = torch.finfo(bias.dtype).min
    if bias.shape[0] == len(seen):
        # A bias for each row is the largest tensor of long contexts: there is no second one.
        return bias.masked_fill_(~seen, lowest)
    return torch.where(seen, bias, lowest)
