# SPDX-License-Identifier: Apache-2.0
"""Batches of rows of similar length, so that little is computed for pads."""

from __future__ import annotations

from collections.abc import Sequence


def length_batches(
    lengths: Sequence[int], batch_size: int | None = None, batch_tokens: int | None = None
) -> list[list[int]]:
    """Cut rows into batches by length, the longest first: what does not fit is found at once.

    Args:
        lengths: tokens of each row.
        batch_size: rows in a batch at most.
        batch_tokens: tokens in a batch at most, pads included; a longer row is a batch of its own.

    Returns:
        For each batch the indices of its rows, in their order.
    """
    batches: list[list[int]] = []
    longest = 0
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        size = len(batches[-1]) + 1 if batches else 0
        if not size or size > (batch_size or size) or size * longest > (batch_tokens or size * longest):
            batches.append([])
            longest = lengths[row]
        batches[-1].append(row)
    return [sorted(batch) for batch in batches]
