# SPDX-License-Identifier: Apache-2.0
"""Which number type a machine computes fastest in."""

from __future__ import annotations

import time

import torch

# Tokens by width by feed-forward width of a small language model.
_SHAPE = (256, 576, 1536)


def fastest_dtype(device: torch.device | str) -> torch.dtype:
    """bfloat16 where matrix products are faster in it than in float32, else float32.

    Processors with instructions for bfloat16 take half as long or less; on all others it takes several times as long.

    Args:
        device: where the model runs; it is measured there, in some milliseconds.
    """
    times = {dtype: _seconds(dtype, torch.device(device)) for dtype in (torch.float32, torch.bfloat16)}
    return min(times, key=times.__getitem__)


def _seconds(dtype: torch.dtype, device: torch.device) -> float:
    """Seconds of a matrix product, the least of several, since other programs only add to it."""
    rows, inner, columns = _SHAPE
    left = torch.ones(rows, inner, dtype=dtype, device=device)
    right = torch.ones(columns, inner, dtype=dtype, device=device)
    times = []
    for _ in range(8):
        start = time.perf_counter()
        torch.nn.functional.linear(left, right)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times)
