# SPDX-License-Identifier: Apache-2.0
"""95 % intervals of a report's averages over data sets."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .benchmark_metrics import BENCHMARK_SCORE
from .bootstrap import interval_of_mean, percentile_interval
from .metrics import teacher_normalized
from .rows import FULL_CONTEXT, MAIN_METRICS, NO_CONTEXT, RETENTION, EvaluationRow

Interval = tuple[float, float]
# (Data set, task, condition, seed, metric) -> resampled scores, `(num_resamples,)`.
Resamples = Mapping[tuple[str, str, str, int, str], np.ndarray]
# What a data set adds to an average: its resampled scores, where they are known, and its own interval.
_Part = tuple[np.ndarray | None, Interval]

_NOT_KNOWN = (math.nan, math.nan)


def main_metric_of(row: EvaluationRow) -> str:
    """What a row's differences, kinds and retention are of."""
    return BENCHMARK_SCORE if BENCHMARK_SCORE in row.metrics else MAIN_METRICS.get(row.task, "")


class AverageIntervals:
    """Intervals of averages of one metric over data sets.

    Each data set draws its documents by itself, and its resampled scores are averaged with those of the other data
    sets one by one. Where a data set's are not known, as of a report that was read from a file, all intervals are made
    of the data sets' own, see `interval_of_mean`. That of one data set is its own. Averages over a data set without an
    interval, or with several seeds, have none.

    Args:
        rows: the rows of one task.
        resamples: what is known of their resamples.
        metric: such as "f1".

    Attributes:
        of_resamples: whether the resamples of all rows are known.
    """

    def __init__(self, rows: Sequence[EvaluationRow], resamples: Resamples, metric: str):
        self._rows, self._resamples, self._metric = rows, resamples, metric
        self.of_resamples = all((*row.key, metric) in resamples for row in rows)

    def of_scores(self, averages: Mapping[str, float], datasets: Sequence[str]) -> dict[str, Interval]:
        """Condition -> interval of its mean score.

        Args:
            averages: condition -> mean score.
            datasets: that it is the mean of.
        """

        def part(row: EvaluationRow) -> _Part:
            scores = self._scores(row)
            return None if scores is None else scores[0], row.intervals.get(self._metric, _NOT_KNOWN)

        return self._by_condition(averages, dict.fromkeys(datasets, 1 / max(1, len(datasets))), part)

    def of_normalized(
        self, averages: Mapping[str, float], datasets: Sequence[str], less: Sequence[str] = ()
    ) -> dict[str, Interval]:
        """Condition -> interval of its mean teacher-normalised score; the bounds, 0 and 1 by definition, have none.

        Args:
            averages: condition -> mean teacher-normalised score.
            datasets: that it is the mean of.
            less: data sets whose mean is taken off.
        """
        if not datasets:
            return {}
        weights = dict.fromkeys(datasets, 1 / len(datasets)) | dict.fromkeys(less, -1 / max(1, len(less)))

        def part(row: EvaluationRow) -> _Part:
            scores = self._scores(row, FULL_CONTEXT, NO_CONTEXT)
            retention = row.intervals.get(RETENTION, _NOT_KNOWN)
            low, high = retention if main_metric_of(row) == self._metric else _NOT_KNOWN
            return None if scores is None else teacher_normalized(*scores), (low / 100, high / 100)

        compressed = {name: value for name, value in averages.items() if name not in (NO_CONTEXT, FULL_CONTEXT)}
        return self._by_condition(compressed, weights, part)

    def mean_differences(self, datasets: Sequence[str]) -> dict[str, dict[str, dict[str, Any]]]:
        """Condition -> alternative at the same number of positions -> `metric`, mean `difference` and `interval`.

        Args:
            datasets: means are over these; a pair that one of them lacks is left out.
        """
        result: dict[str, dict[str, dict[str, Any]]] = {}
        for condition, other in dict.fromkeys((row.condition, name) for row in self._rows for name in row.differences):
            rows = [row for name in datasets if (row := self._row(name, condition)) is not None]
            found = [row.differences.get(other, {}) for row in rows]
            if len(rows) < len(datasets) or any(entry.get("metric") != self._metric for entry in found):
                continue
            parts: list[_Part] = []
            for row, entry in zip(rows, found, strict=True):
                pair = self._scores(row, other)
                parts.append((None if pair is None else pair[0] - pair[1], entry["interval"]))
            mean = math.fsum(entry["difference"] for entry in found) / len(found)
            interval = _interval(mean, parts, [1 / len(found)] * len(found))
            of_pair = {"metric": self._metric, "difference": mean, "interval": interval}
            result.setdefault(condition, {})[other] = of_pair
        return result

    def _by_condition(
        self, averages: Mapping[str, float], weights: Mapping[str, float], part: Any
    ) -> dict[str, Interval]:
        found = {}
        for condition, average in averages.items():
            rows = [row for name in weights if (row := self._row(name, condition)) is not None]
            if rows and len(rows) == len(weights):
                interval = _interval(average, [part(row) for row in rows], list(weights.values()))
                if not math.isnan(interval[0]):
                    found[condition] = interval
        return found

    def _row(self, dataset: str, condition: str) -> EvaluationRow | None:
        """A row; `None` where it is not there, or there are several seeds."""
        rows = [row for row in self._rows if (row.dataset, row.condition) == (dataset, condition)]
        return rows[0] if len(rows) == 1 else None

    def _scores(self, row: EvaluationRow, *others: str) -> list[np.ndarray] | None:
        """Resampled scores of a row and of other conditions on its data set; `None` where they are not known."""
        keys = [(row.dataset, row.task, name, row.seed, self._metric) for name in (row.condition, *others)]
        is_known = self.of_resamples and all(key in self._resamples for key in keys)
        return [self._resamples[key] for key in keys] if is_known else None


def _interval(average: float, parts: Sequence[_Part], weights: Sequence[float]) -> Interval:
    """The interval of a weighted sum of data sets; NaN where one of them has none."""
    ends = [interval for _, interval in parts]
    if len(parts) == 1 or any(math.isnan(low) for low, _ in ends):
        return ends[0] if len(parts) == 1 else _NOT_KNOWN
    resampled = [scores for scores, _ in parts if scores is not None]
    if len(resampled) < len(parts):
        return interval_of_mean(average, ends, weights)
    # Infinite perplexities have no difference.
    with np.errstate(invalid="ignore"):
        return percentile_interval(np.array(weights) @ np.stack(resampled))
