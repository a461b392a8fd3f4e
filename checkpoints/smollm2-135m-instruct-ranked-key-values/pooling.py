# SPDX-License-Identifier: Apache-2.0
"""Mean pooling of neighbouring token vectors into slots (mean pooling paper, equations 3 and 4)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_INTEGER_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def num_slots(num_tokens: int | Tensor, ratio: int | Tensor) -> int | Tensor:
    """Number of slots that a context of `num_tokens` tokens is pooled into, `ceil(num_tokens / ratio)`.

    Args:
        num_tokens: Count of real tokens, an int or an integer tensor of counts, zero or more.
        ratio: Tokens per slot, an int or an integer tensor that broadcasts with `num_tokens`, one or more.

    Returns:
        An int if both arguments are ints, otherwise a LongTensor.

    Raises:
        TypeError: An argument is neither an int nor an integer tensor.
        ValueError: A count below zero or a ratio below one.
    """
    num_tokens = _checked_integer("num_tokens", num_tokens, minimum=0)
    ratio = _checked_integer("ratio", ratio, minimum=1)
    return (num_tokens + ratio - 1) // ratio


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

    Raises:
        TypeError: `hidden_states` is not floating point, the mask is neither bool nor integer, or the ratio is neither
            an int nor an integer tensor.
        ValueError: A shape does not fit, or a ratio is below 1.
    """
    mask = _checked_mask(hidden_states, attention_mask)
    ratio = _checked_ratio(ratio, hidden_states)
    counts = mask.sum(dim=1)
    slot_counts = (counts + ratio - 1) // ratio
    if lengths is not None and isinstance(ratio, int):
        total_slots, is_left_aligned = -(-max(lengths) // ratio), True
        is_full = min(lengths) == mask.shape[1]
    else:
        total_slots, is_left_aligned, is_full = _shape_facts(mask, counts, slot_counts)
    slot_index = torch.arange(total_slots, device=mask.device)
    slot_mask = slot_index < slot_counts[:, None]

    if isinstance(ratio, int):
        tokens = _left_aligned(hidden_states, mask, counts, total_slots * ratio, is_left_aligned, is_full)
        sums = tokens.unflatten(1, (total_slots, ratio)).sum(dim=2, dtype=_sum_dtype(hidden_states))
    else:
        sums = _ragged_window_sums(hidden_states, mask, ratio, total_slots)
    sizes = window_sizes(counts, ratio, total_slots)
    return (sums / sizes[:, :, None]).to(hidden_states.dtype), slot_mask.long()


def window_sizes(num_tokens: Tensor, ratio: int | Tensor, num_slots: int) -> Tensor:
    """Tokens in each slot's window, |S_k| of equation 3.

    Args:
        num_tokens: Real tokens of each row, `(batch_size,)`.
        ratio: Tokens per slot, one int for all rows or a LongTensor `(batch_size,)`.
        num_slots: Slots of the longest row.

    Returns:
        `(batch_size, num_slots)`; 1 for padding slots.
    """
    ratios = ratio if isinstance(ratio, int) else ratio[:, None]
    slot_index = torch.arange(num_slots, device=num_tokens.device)
    return (num_tokens[:, None] - slot_index * ratios).clamp(min=1).clamp(max=ratios)


def _left_aligned(
    hidden_states: Tensor, mask: Tensor, counts: Tensor, length: int, is_left_aligned: bool, is_full: bool
) -> Tensor:
    """Real tokens first in every row, zeros after them, `(batch_size, length, hidden_size)`."""
    num_tokens = hidden_states.shape[1]
    if is_left_aligned:
        tokens = hidden_states[:, :length]
    else:
        order = (~mask).to(torch.uint8).argsort(dim=1, stable=True)[:, :length]
        row_starts = torch.arange(mask.shape[0], device=mask.device)[:, None] * num_tokens
        flat_order = (order + row_starts).flatten()
        tokens = hidden_states.flatten(0, 1).index_select(0, flat_order).unflatten(0, order.shape)
    if not is_full:
        # Filled rather than multiplied: what stands at a pad may be infinite or NaN.
        is_pad = torch.arange(tokens.shape[1], device=mask.device) >= counts[:, None]
        tokens = tokens.masked_fill(is_pad[:, :, None], 0)
    if length > tokens.shape[1]:
        tokens = torch.nn.functional.pad(tokens, (0, 0, 0, length - tokens.shape[1]))
    return tokens


def _ragged_window_sums(hidden_states: Tensor, mask: Tensor, ratio: Tensor, total_slots: int) -> Tensor:
    """Window sums where each row has its own ratio, `(batch_size, total_slots, hidden_size)`."""
    batch_size, _, hidden_size = hidden_states.shape
    rank = mask.long().cumsum(dim=1) - 1
    row_starts = torch.arange(batch_size, device=mask.device)[:, None] * total_slots
    slot_of_token = (rank // ratio[:, None] + row_starts)[mask]
    sums = hidden_states.new_zeros((batch_size * total_slots, hidden_size), dtype=_sum_dtype(hidden_states))
    return sums.index_add(0, slot_of_token, hidden_states[mask].to(sums.dtype)).unflatten(0, (batch_size, total_slots))


def _shape_facts(mask: Tensor, counts: Tensor, slot_counts: Tensor) -> tuple[int, bool, bool]:
    """Largest slot count, whether all pads stand right, whether there are none: one device synchronisation for all."""
    if mask.numel() == 0:
        return 0, True, True
    # A row is left-aligned if no real token follows a pad.
    is_left_aligned = ~(mask[:, 1:] & ~mask[:, :-1]).any()
    facts = torch.stack([slot_counts.max(), is_left_aligned.long(), (counts == mask.shape[1]).all().long()])
    total_slots, left_aligned, full = facts.tolist()
    return total_slots, bool(left_aligned), bool(full)


def _sum_dtype(hidden_states: Tensor) -> torch.dtype:
    return torch.float32 if hidden_states.dtype in (torch.float16, torch.bfloat16) else hidden_states.dtype


def _checked_mask(hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
    if not isinstance(hidden_states, Tensor) or hidden_states.dtype not in _FLOAT_DTYPES:
        found = getattr(hidden_states, "dtype", type(hidden_states).__name__)
        raise TypeError(f"hidden_states must be a tensor of float16, bfloat16, float32 or float64, got {found}")
    if hidden_states.dim() != 3:
        raise ValueError(
            f"hidden_states must have shape (batch_size, num_tokens, hidden_size), got {tuple(hidden_states.shape)}"
        )
    if not isinstance(attention_mask, Tensor) or attention_mask.dtype not in (torch.bool, *_INTEGER_DTYPES):
        found = getattr(attention_mask, "dtype", type(attention_mask).__name__)
        raise TypeError(f"attention_mask must be a bool or integer tensor, got {found}")
    if attention_mask.shape != hidden_states.shape[:2]:
        raise ValueError(
            f"attention_mask must have shape {tuple(hidden_states.shape[:2])} like hidden_states, "
            f"got {tuple(attention_mask.shape)}"
        )
    return attention_mask.to(device=hidden_states.device) != 0


def _checked_ratio(ratio: int | Tensor, hidden_states: Tensor) -> int | Tensor:
    """The ratio as an int, or as a LongTensor beside the states if its rows differ."""
    ratio = _checked_integer("ratio", ratio, minimum=1)
    if isinstance(ratio, int):
        # One window of all tokens is the same for every ratio above their number, and needs no longer padding.
        return min(ratio, max(1, hidden_states.shape[1]))
    if ratio.shape != hidden_states.shape[:1]:
        raise ValueError(
            f"ratio must be an int or have shape ({hidden_states.shape[0]},), one for each row, "
            f"got shape {tuple(ratio.shape)}"
        )
    values = set(ratio.tolist())
    return _checked_ratio(values.pop(), hidden_states) if len(values) == 1 else ratio.to(hidden_states.device)


def _checked_integer(name: str, value: int | Tensor, minimum: int) -> int | Tensor:
    if isinstance(value, Tensor) and value.dtype in _INTEGER_DTYPES:
        if value.numel() and int(value.min()) < minimum:
            raise ValueError(f"{name} must be {minimum} or more in every row, got {value.tolist()}")
        return value.long()
    if isinstance(value, bool) or not isinstance(value, int):
        found = f"a tensor of {value.dtype}" if isinstance(value, Tensor) else repr(value)
        raise TypeError(f"{name} must be an int or an integer tensor, got {found}")
    if value < minimum:
        raise ValueError(f"{name} must be {minimum} or more, got {value}")
    return value
