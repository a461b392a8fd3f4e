# SPDX-License-Identifier: Apache-2.0
"""Schedules over a training: how long contexts are, and which ratios and tasks are trained when."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from typing import Any

from ..data.prompts import TASKS


def check_length_schedule(schedule: Sequence[Sequence[float]]) -> list[tuple[float, int]]:
    """Return (fraction of training, tokens) pairs; `ValueError` unless they are in order and allowed."""
    try:
        points = [(float(fraction), int(length)) for fraction, length in schedule]
    except (TypeError, ValueError):
        points = []
    is_allowed = all(0 <= fraction <= 1 and length >= 1 for fraction, length in points)
    if not points or points != sorted(points) or not is_allowed:
        raise ValueError(
            "length_schedule must be a list of [fraction of training, tokens] in order, fractions from 0 to 1 and at "
            f"least 1 token, got {schedule!r}"
        )
    return points


def scheduled_length(points: Sequence[tuple[float, int]], fraction: float) -> int:
    """Length limit after a fraction of the training, linear between the points and constant outside them."""
    position = bisect.bisect_right(points, (fraction, math.inf))
    if position == 0 or position == len(points):
        return points[min(position, len(points) - 1)][1]
    (x0, y0), (x1, y1) = points[position - 1], points[position]
    return round(y0 + (y1 - y0) * (fraction - x0) / (x1 - x0))


def check_task_schedule(schedule: Sequence[Sequence[Any]]) -> list[tuple[float, list[str]]]:
    """Return (fraction of training, tasks) pairs; `ValueError` unless they are in order and allowed."""
    return check_changes("task_schedule", schedule, TASKS.__contains__)


def check_changes(
    name: str, schedule: Sequence[Sequence[Any]], is_allowed: Callable[[Any], bool]
) -> list[tuple[float, list[Any]]]:
    """Return (fraction of training, values) pairs; `ValueError` unless fractions rise from 0 with allowed values."""
    try:
        points = [(float(fraction), list(values)) for fraction, values in schedule]
    except (TypeError, ValueError):
        points = []
    fractions = [fraction for fraction, _ in points]
    in_order = fractions[:1] == [0] and fractions == sorted(set(fractions)) and fractions[-1] < 1
    if not in_order or not all(values and all(map(is_allowed, values)) for _, values in points):
        raise ValueError(
            f"{name} must be a list of [fraction of training, values] in order, the first fraction 0 and all below 1, "
            f"and each value allowed, got {schedule!r}"
        )
    return points
