# SPDX-License-Identifier: Apache-2.0
"""Result rows of an evaluation, their averages, and the file that holds them."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..reporting.environment import environment
from ..reporting.result_files import write_results
from .bootstrap import helps, interval_of_mean
from .metrics import teacher_normalized
from .rows import (
    BENCHMARK_SCORE,
    DOMAINS,
    FULL_CONTEXT,
    MAIN_METRICS,
    NO_CONTEXT,
    RETENTION,
    EvaluationRow,
    SampleAnswers,
    ordered_conditions,
    plain_json,
    ratio_of,
    row_from,
)

_FORMAT_VERSION = 1
# What is read from a file; the averages follow from the rows.
_SAVED = ("model", "bounds", "num_parameters", "settings", "environment", "held_out", "documents")
Interval = tuple[float, float]
# Value and 95 % interval, `None` where a data set has none.
Average = tuple[float, Interval | None]


@dataclass
class EvaluationReport:
    """All rows of one model's evaluation, and the averages over data sets.

    Averages are plain means over data sets, whose intervals are independent. Data sets that the full context does not
    help have no teacher-normalised score.

    Args:
        bounds: where "no_context" and "full_context" come from: "teacher" or "own_decoder".
        answers: what every sample got; kept out of the report's file.
        held_out: by model, whether documents of this report trained or chose it, see `compare_sources`.
        documents: data set -> the ids of its documents, see `document_id`.
    """

    model: str
    bounds: str = "own_decoder"
    rows: list[EvaluationRow] = field(default_factory=list)
    num_parameters: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=environment)
    answers: list[SampleAnswers] = field(default_factory=list, repr=False)
    held_out: dict[str, dict[str, Any]] = field(default_factory=dict)
    documents: dict[str, str] = field(default_factory=dict, repr=False)

    def row(self, dataset: str, task: str, condition: str) -> EvaluationRow | None:
        """Return a row, or `None` where there is none."""
        wanted = (dataset, task, condition)
        return next((row for row in self.rows if (row.dataset, row.task, row.condition) == wanted), None)

    def tasks(self) -> list[str]:
        """Tasks in the order of their first row."""
        return list(dict.fromkeys(row.task for row in self.rows))

    def conditions(self, task: str) -> list[str]:
        """Conditions of a task, see `ordered_conditions`."""
        return ordered_conditions(row.condition for row in self.rows if row.task == task)

    def ratios(self, task: str) -> list[int]:
        """Compression ratios that a task was evaluated at, ascending."""
        return [ratio for name in self.conditions(task) if (ratio := ratio_of(name)) is not None]

    def datasets(self, task: str, domain: str | None = None) -> list[str]:
        """Data sets of a task, of one domain or of both."""
        rows = (row for row in self.rows if row.task == task and domain in (None, row.domain))
        return list(dict.fromkeys(row.dataset for row in rows))

    def metric_names(self, task: str) -> list[str]:
        """Metrics of a task, in the order of their first row."""
        return list(dict.fromkeys(name for row in self.rows if row.task == task for name in row.metrics))

    def main_metric(self, task: str) -> str:
        """The metric that stands for a task: the benchmarks' own where each data set has one."""
        rows = [row for row in self.rows if row.task == task]
        if all(BENCHMARK_SCORE in row.metrics for row in rows):
            return BENCHMARK_SCORE
        return MAIN_METRICS.get(task, self.metric_names(task)[0])

    def score(self, dataset: str, task: str, condition: str, metric: str) -> float:
        """Return a score; raises `ValueError` when the report does not have it."""
        row = self.row(dataset, task, condition)
        if row is None or metric not in row.metrics:
            raise ValueError(f"the report has no {metric!r} of {dataset!r}, task {task!r}, condition {condition!r}")
        return row.metrics[metric]

    def undefined_datasets(self, task: str, metric: str) -> list[str]:
        """Data sets where the full context does not help, so that there is no teacher-normalised score."""
        return [
            dataset
            for dataset in self.datasets(task)
            if not helps(metric, *(self.score(dataset, task, name, metric) for name in (FULL_CONTEXT, NO_CONTEXT)))
        ]

    def averages(self, task: str, metric: str) -> dict[str, dict[str, Average]]:
        """Return the averages of a metric and their intervals, by name and condition (mean pooling, Figure 3b)."""
        conditions = self.conditions(task)
        domains = {domain: self.datasets(task, domain) for domain in DOMAINS}
        averages = {"macro_average": self._weighted(task, metric, conditions, _equal_weights(self.datasets(task)))}
        if {NO_CONTEXT, FULL_CONTEXT} <= set(conditions):
            undefined = self.undefined_datasets(task, metric)
            inside, outside = (
                _equal_weights([name for name in datasets if name not in undefined]) for datasets in domains.values()
            )
            shares = _equal_weights([*inside, *outside])
            averages["teacher_normalized"] = self._weighted(task, metric, conditions, shares, is_share=True)
            if all(domains.values()):
                gap = inside | {name: -weight for name, weight in outside.items()} if inside and outside else {}
                names = [name for name in conditions if ratio_of(name) is not None]
                averages["domain_gap"] = self._weighted(task, metric, names, gap, is_share=True)
        if all(domains.values()):
            for domain, datasets in domains.items():
                averages[f"{domain}_domain"] = self._weighted(task, metric, conditions, _equal_weights(datasets))
        return averages

    def _weighted(
        self, task: str, metric: str, conditions: Sequence[str], weights: Mapping[str, float], is_share: bool = False
    ) -> dict[str, Average]:
        """Condition -> weighted sum over data sets of a score, or of its teacher-normalised share."""
        # Of a share, rows have the interval of the main metric's, in percent.
        name, scale = (RETENTION, 100) if is_share else (metric, 1)
        has_intervals = not is_share or all(row.main_metric == metric for row in self.rows if row.task == task)
        weighted: dict[str, Average] = {}
        for condition in conditions:
            scores = {dataset: self.score(dataset, task, condition, metric) for dataset in weights}
            if is_share:
                for dataset, score in scores.items():
                    full, none = (self.score(dataset, task, bound, metric) for bound in (FULL_CONTEXT, NO_CONTEXT))
                    scores[dataset] = teacher_normalized(score, full, none)
            mean = math.fsum(weights[dataset] * scores[dataset] for dataset in weights) if weights else math.nan
            rows = [row for dataset in weights if (row := self.row(dataset, task, condition)) is not None]
            ends = [[end / scale for end in row.intervals[name]] for row in rows if name in row.intervals]
            interval = None
            if has_intervals and ends and len(ends) == len(weights):
                low, high = ends[0] if len(ends) == 1 else self._interval_of_mean(mean, ends, weights)
                interval = None if math.isnan(low) else (low, high)
            weighted[condition] = mean, interval
        return weighted

    def mean_differences(self, task: str, metric: str) -> dict[tuple[str, str], Average]:
        """(Condition, alternative at as many positions) -> their mean difference over all data sets of a task."""
        datasets, differences = self.datasets(task), {}
        pairs = dict.fromkeys(
            (row.condition, other) for row in self.rows if row.task == task for other in row.differences
        )
        for condition, other in pairs:
            rows = [row for row in self.rows if (row.task, row.condition) == (task, condition)]
            entries = [row.differences[other] for row in rows if other in row.differences]
            if len(entries) == len(datasets) and all(entry["metric"] == metric for entry in entries):
                mean = math.fsum(entry["difference"] for entry in entries) / len(entries)
                ends = [entry["interval"] for entry in entries]
                interval = self._interval_of_mean(mean, ends, _equal_weights(datasets))
                differences[condition, other] = mean, None if math.isnan(interval[0]) else interval
        return differences

    def _interval_of_mean(self, mean: float, ends: Sequence[Any], weights: Mapping[str, float]) -> tuple[float, float]:
        documents = [name for dataset in weights for name in self.documents.get(dataset, "").split()]
        return interval_of_mean(mean, ends, list(weights.values()), len(set(documents)) == len(documents))

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON values: NaN is `null`, an infinite score the string "inf"."""
        averages = {}
        for task in self.tasks():
            # Where a data set lacks a condition, there are none.
            with suppress(ValueError):
                metric = self.main_metric(task)
                averages[task] = {"metric": metric, **self.averages(task, metric)}
        content = {name: vars(self)[name] for name in _SAVED}
        rows = [asdict(row) for row in self.rows]
        return plain_json({"format_version": _FORMAT_VERSION, **content, "rows": rows, "averages": averages})

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the report as a JSON file with four significant digits, folders included, and return its path."""
        return write_results(self.to_dict(), path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "EvaluationReport":
        """Read a report that `save` wrote; raises `ValueError` for any other file."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            if content["format_version"] != _FORMAT_VERSION:
                raise ValueError(f"format_version must be {_FORMAT_VERSION}, got {content['format_version']!r}")
            rows = [row_from(row) for row in content["rows"]]
            return cls(rows=rows, **{name: content[name] for name in _SAVED if name in content})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not an evaluation report: {error}") from error


def _equal_weights(datasets: Sequence[str]) -> dict[str, float]:
    return dict.fromkeys(datasets, 1 / max(1, len(datasets)))
