# SPDX-License-Identifier: Apache-2.0
"""What is trained when: lengths that grow from point to point, ratios and tasks that change at a step."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from typing import Any

from ..data.prompts import TASKS


def check_length_schedule(schedule: Sequence[Sequence[float]], minimum: int) -> list[tuple[float, int]]:
    """(fraction of training, tokens) pairs in order, fractions from 0 to 1 and each length at least `minimum`;
    `ValueError` otherwise."""
    try:
        points = [(float(fraction), int(length)) for fraction, length in schedule]
    except (TypeError, ValueError):
        points = []
    is_allowed = all(0 <= fraction <= 1 and length >= minimum for fraction, length in points)
    if not points or points != sorted(points) or not is_allowed:
        raise ValueError(
            "length_schedule must be a list of [fraction of training, tokens] in order, fractions from 0 to 1 and "
            f"each with at least {minimum} tokens, got {schedule!r}"
        )
    return points


def scheduled_length(points: Sequence[tuple[float, int]], fraction: float) -> int:
    """Length limit after a fraction of the training, linear between the points and constant outside them."""
    position = bisect.bisect_right(points, (fraction, math.inf))
    if position == 0 or position == len(points):
        return points[min(position, len(points) - 1)][1]
    (x0, y0), (x1, y1) = points[position - 1], points[position]
    return round(y0 + (y1 - y0) * (fraction - x0) / (x1 - x0))


def check_ratio_schedule(schedule: Sequence[Sequence[Any]]) -> list[tuple[float, list[int]]]:
    """(fraction of training, ratios) pairs in order, the first at 0; `ValueError` otherwise."""

    def is_ratio(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= 1

    return _check_changes("ratio_schedule", schedule, is_ratio, "ratios", "ratios at least 1")


def check_task_schedule(schedule: Sequence[Sequence[Any]]) -> list[tuple[float, list[str]]]:
    """(fraction of training, tasks) pairs in order, the first at 0; `ValueError` otherwise."""
    points = _check_changes("task_schedule", schedule, TASKS.__contains__, "tasks", f"tasks of {', '.join(TASKS)}")
    for _, tasks in points:
        if len(set(tasks)) < len(tasks):
            raise ValueError(
                f"task_schedule: {tasks} names a task twice; how often a task comes, the tasks of each source say"
            )
    return points


def _check_changes(
    name: str, schedule: Any, is_allowed: Callable[[Any], bool], kind: str, allowed: str
) -> list[tuple[float, list[Any]]]:
    try:
        points = [(float(fraction), list(values)) for fraction, values in schedule]
    except (TypeError, ValueError):
        points = []
    fractions = [fraction for fraction, _ in points]
    in_order = fractions[:1] == [0] and fractions == sorted(set(fractions)) and all(0 <= x < 1 for x in fractions)
    if not in_order or not all(values and all(map(is_allowed, values)) for _, values in points):
        raise ValueError(
            f"{name} must be a list of [fraction of training, [{kind}]] in order, the first fraction 0 and all "
            f"below 1, {allowed}, got {schedule!r}"
        )
    return points
