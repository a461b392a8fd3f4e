# SPDX-License-Identifier: Apache-2.0
"""Ratios of a set from predicted ones (semi-dynamic compression ratios, arXiv 2603.25926)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def nearest_ratios(log_ratios: Tensor, ratios: Sequence[int], measure: str) -> Tensor:
    """The ratio of a set that is nearest to each predicted one; of two as near, the lower.

    Args:
        log_ratios: log2 of the predicted ratios, any shape.
        ratios: the set.
        measure: "ratio": between the ratios, so that 6 parts 4 and 8; "log_ratio": between their logarithms, which are
            parted by 5.66.

    Returns:
        A LongTensor of the same shape.
    """
    candidates = torch.tensor(sorted(ratios), device=log_ratios.device)
    places = candidates.float() if measure == "ratio" else candidates.float().log2()
    values = log_ratios.exp2() if measure == "ratio" else log_ratios
    # By the middles between neighbours: far outside the set all distances are alike.
    return candidates[torch.bucketize(values, (places[:-1] + places[1:]) / 2)]


def row_ratios(chunk_ratios: Tensor, lengths: Sequence[int], counts: Sequence[int], chunks_per_row: int) -> Tensor:
    """The ratio of each context, of whose chunks each has its own: as of memories of the chunks that are joined.

    Args:
        chunk_ratios: `(batch_size * chunks_per_row,)`.
        lengths: tokens of each chunk.
        counts: slots of each chunk.
        chunks_per_row: chunks of each context.

    Returns:
        `(batch_size,)`: the chunks' common ratio, or else ceil(tokens / slots).
    """
    if chunks_per_row == 1:
        return chunk_ratios
    chunks = list(zip(chunk_ratios.tolist(), lengths, counts, strict=True))
    found = []
    for start in range(0, len(chunks), chunks_per_row):
        row = chunks[start : start + chunks_per_row]
        # Behind a context's own chunks stand empty ones, up to those of the longest.
        own = [chunk for chunk in row if chunk[1]] or row[:1]
        distinct = {ratio for ratio, _, _ in own}
        num_tokens, num_slots = sum(length for _, length, _ in own), sum(count for _, _, count in own)
        found.append(distinct.pop() if len(distinct) == 1 else -(-num_tokens // num_slots))
    return torch.tensor(found, device=chunk_ratios.device)
