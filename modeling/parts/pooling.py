# SPDX-License-Identifier: Apache-2.0
"""Mean pooling of neighbouring token vectors into slots (mean pooling paper, equations 3 and 4)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from .packing import take_places


def mean_pool(
    hidden_states: Tensor, attention_mask: Tensor, ratio: int | Tensor, lengths: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """Average each window of `ratio` neighbouring real tokens into one slot (mean pooling, equations 3 and 4).

    Windows count real tokens only, wherever the pads stand, so a row gives the same slots alone, in a batch, padded
    left or right. The last window of a row is averaged over the tokens it has. Sums of half types run in float32.

    Args:
        hidden_states: Token vectors of shape `(batch_size, num_tokens, hidden_size)`, floating point.
        attention_mask: Shape `(batch_size, num_tokens)`, bool or integer, nonzero for real tokens.
        ratio: Tokens per slot, one int for all rows or a LongTensor of shape `(batch_size,)`, each at least 1.
        lengths: Number of real tokens of each row, where all rows are known to be right-padded. One ratio for all rows
            then needs no wait for the device.

    Returns:
        The slots of shape `(batch_size, num_slots, hidden_size)` in the dtype of `hidden_states`, left-aligned,
        padding slots zero, and the slot mask, a LongTensor of shape `(batch_size, num_slots)` of ones and zeros,
        where `num_slots` is the largest `ceil(real tokens / ratio)` of the batch and may be zero.
    """
    mask = attention_mask != 0
    if lengths is None:
        order = mask.long().argsort(dim=1, stable=True, descending=True)
        hidden_states, mask = take_places(hidden_states, order), mask.gather(1, order)
        lengths = mask.sum(dim=1).tolist()
    # Columns of pads alone are cut off.
    width, counts = max(lengths, default=0), mask.sum(dim=1)
    hidden_states, mask = hidden_states[:, :width], mask[:, :width]
    if isinstance(ratio, Tensor) and len(set(of_rows := ratio.tolist())) == 1:
        ratio = int(of_rows[0])
    if isinstance(ratio, int):
        # One window of all tokens is the same for every ratio above their number, and needs no longer padding.
        ratio = min(ratio, max(1, width))
        of_rows = [ratio] * len(lengths)
    num_slots = max((-(-length // own) for length, own in zip(lengths, of_rows, strict=True)), default=0)
    if min(lengths, default=width) < width:
        # Filled rather than multiplied: what stands at a pad may be infinite or NaN.
        hidden_states = hidden_states.masked_fill(~mask[:, :, None], 0)
    dtype = torch.promote_types(hidden_states.dtype, torch.float32)
    if isinstance(ratio, int):
        tokens = functional.pad(hidden_states, (0, 0, 0, num_slots * ratio - width))
        sums = tokens.unflatten(1, (num_slots, ratio)).sum(dim=2, dtype=dtype)
    else:
        ratio = ratio.to(mask.device)
        slot_of_token = torch.arange(width, device=mask.device) // ratio[:, None]
        sums = hidden_states.new_zeros((len(mask), num_slots, hidden_states.shape[2]), dtype=dtype)
        places = slot_of_token.clamp(max=num_slots - 1)[:, :, None].expand(hidden_states.shape)
        sums = sums.scatter_add(1, places, hidden_states.to(dtype))
    sizes = window_sizes(counts, ratio, num_slots)
    slot_mask = torch.arange(num_slots, device=mask.device) < (-(-counts // ratio))[:, None]
    return (sums / sizes[:, :, None]).to(hidden_states.dtype), slot_mask.long()


def pooled_embeddings(
    embeddings: Tensor, attention_mask: Tensor, ratio: int | Tensor, lengths: Sequence[int], width: int
) -> Tensor:
    """Return |S_k|^(-1/2) sum_{i in S_k} E(x_i) of right-padded rows, `(batch_size, width, hidden_size)`, with zeros
    where there are fewer windows than `width`. Such a sum is about as large as one embedding."""
    pooled = mean_pool(embeddings, attention_mask, ratio, lengths)[0]
    pooled = pooled * window_sizes(attention_mask.sum(dim=1), ratio, pooled.shape[1]).sqrt()[:, :, None]
    return functional.pad(pooled, (0, 0, 0, max(0, width - pooled.shape[1])))[:, :width]


def window_sizes(num_tokens: Tensor, ratio: int | Tensor, num_slots: int) -> Tensor:
    """Return the tokens in each slot's window, |S_k| of equation 3, `(batch_size, num_slots)`; 1 for padding slots."""
    ratio = ratio if isinstance(ratio, int) else ratio[:, None]
    slot_index = torch.arange(num_slots, device=num_tokens.device)
    return (num_tokens[:, None] - slot_index * ratio).clamp(min=1).clamp(max=ratio)
