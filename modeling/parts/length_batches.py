# SPDX-License-Identifier: Apache-2.0
"""Batches of rows of similar length, so that little is computed for pads."""

from __future__ import annotations

import math
from collections.abc import Sequence

# So few that they are not worth another pass.
_FREE_PADS = 512


def length_batches(
    lengths: Sequence[int],
    batch_size: int | None = None,
    batch_tokens: int | None = None,
    most_padding: float = math.inf,
    counts: Sequence[int] | None = None,
    in_order: bool = False,
) -> list[list[int]]:
    """Cut rows into batches by length, the longest first, and return the rows of each: what does not fit is found at
    once.

    Args:
        lengths: tokens of each row.
        batch_size: rows in a batch at most.
        batch_tokens: tokens in a batch at most, pads included; a longer row is a batch of its own.
        most_padding: pads in a batch for each token at most, but for 512 pads, which take no time.
        counts: for how many rows each stands; those of one are never parted, and may alone be more than `batch_size`.
        in_order: whether batches are of neighbours.
    """
    order = range(len(lengths)) if in_order else sorted(range(len(lengths)), key=lambda row: -lengths[row])
    batches: list[list[int]] = []
    size = longest = total = 0
    for row in order:
        count = 1 if counts is None else counts[row]
        if batches:
            size, longest, total = size + count, max(longest, lengths[row]), total + count * lengths[row]
            padded = size * longest
            is_full = size > (batch_size or size) or padded > (batch_tokens or padded)
            if not is_full and padded - total <= max(_FREE_PADS, most_padding * total):
                batches[-1].append(row)
                continue
        batches.append([row])
        size, longest, total = count, lengths[row], count * lengths[row]
    return [sorted(batch) for batch in batches]
