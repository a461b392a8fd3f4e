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
    ratio_condition,
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

    Averages are plain means: a large data set weighs no more than a small one. Teacher-normalised scores are taken per
    data set and then averaged; data sets that the full context does not help have none. The interval of an average
    follows from those of its data sets, which are independent.

    Args:
        model: name of the model (a Hub id or a folder's last part).
        bounds: where "no_context" and "full_context" come from: "teacher" or "own_decoder".
        rows: the scores, one for each data set, task and condition.
        num_parameters: the model's parameters, for plots by size.
        settings: options of the evaluation.
        environment: hardware and versions, see `environment`.
        answers: what every sample got, see `SampleAnswers`; kept out of the report's file.
        held_out: by model, whether documents of this report trained or chose it, see `check_held_out`.
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

    def macro_average(self, task: str, metric: str, domain: str | None = None) -> dict[str, float]:
        """Condition -> mean of a metric over the data sets (of one domain)."""
        datasets = self.datasets(task, domain)
        return {
            condition: _mean([self.score(dataset, task, condition, metric) for dataset in datasets])
            for condition in self.conditions(task)
        }

    def macro_average_interval(self, task: str, metric: str, domain: str | None = None) -> dict[str, Interval]:
        """Condition -> 95 % interval of `macro_average`, of conditions whose data sets all have one."""
        weights = _equal_weights(self.datasets(task, domain))
        return self._intervals(task, metric, weights, self.macro_average(task, metric, domain))

    def teacher_normalized(self, task: str, metric: str, domain: str | None = None) -> dict[str, float]:
        """Condition -> teacher-normalised score per data set, then averaged (NaN where no data set defines it).

        Source: mean-pooling paper, section 5.1, Metrics.
        """
        undefined = self.undefined_datasets(task, metric)
        shares: dict[str, float] = {}
        for condition in self.conditions(task):
            shares[condition] = _mean(
                [
                    teacher_normalized(
                        self.score(dataset, task, condition, metric),
                        full=self.score(dataset, task, FULL_CONTEXT, metric),
                        none=self.score(dataset, task, NO_CONTEXT, metric),
                    )
                    for dataset in self.datasets(task, domain)
                    if dataset not in undefined
                ]
            )
        return shares

    def undefined_datasets(self, task: str, metric: str) -> list[str]:
        """Data sets where the full context does not help, so that there is no teacher-normalised score."""
        return [
            dataset
            for dataset in self.datasets(task)
            if not helps(metric, *(self.score(dataset, task, name, metric) for name in (FULL_CONTEXT, NO_CONTEXT)))
        ]

    def domain_gap(self, task: str, metric: str) -> dict[int, float]:
        """Ratio -> in-domain minus out-of-domain teacher-normalised score; positive means worse out of domain.

        Source: mean-pooling paper, appendix B, Figure 3b.
        """
        inside, outside = (self.teacher_normalized(task, metric, domain) for domain in DOMAINS)
        return {
            ratio: inside[name] - outside[name] for ratio in self.ratios(task) for name in [ratio_condition(ratio)]
        }

    def averages(self, task: str, metric: str) -> dict[str, dict[str, Average]]:
        """All averages of a metric, by name and condition, each with its 95 % interval."""
        domains = [domain for domain in DOMAINS if self.datasets(task, domain)]
        found: dict[str, dict[str, Average]] = {}

        def note(name: str, values: Mapping[str, float], intervals: Mapping[str, Interval]) -> None:
            found[name] = {condition: (value, intervals.get(condition)) for condition, value in values.items()}

        note("macro_average", self.macro_average(task, metric), self.macro_average_interval(task, metric))
        if {NO_CONTEXT, FULL_CONTEXT} <= set(self.conditions(task)):
            undefined = self.undefined_datasets(task, metric)
            defined = {
                domain: [name for name in self.datasets(task, domain) if name not in undefined] for domain in DOMAINS
            }
            shares = self.teacher_normalized(task, metric)
            weights = _equal_weights([*defined["in"], *defined["out"]])
            note("teacher_normalized", shares, self._retention_intervals(task, metric, weights, shares))
            if len(domains) == 2:
                gap = {ratio_condition(ratio): value for ratio, value in self.domain_gap(task, metric).items()}
                weights = {**_equal_weights(defined["in"]), **_equal_weights(defined["out"], -1)}
                both = weights if all(defined.values()) else {}
                note("domain_gap", gap, self._retention_intervals(task, metric, both, gap))
        for domain in domains if len(domains) == 2 else ():
            values = self.macro_average(task, metric, domain)
            note(f"{domain}_domain", values, self.macro_average_interval(task, metric, domain))
        return found

    def mean_differences(self, task: str, metric: str) -> dict[tuple[str, str], Average]:
        """(Condition, alternative at as many positions) -> their mean difference over all data sets of a task."""
        datasets, found = self.datasets(task), {}
        pairs = dict.fromkeys(
            (row.condition, other) for row in self.rows if row.task == task for other in row.differences
        )
        for condition, other in pairs:
            rows = [row for row in self.rows if (row.task, row.condition) == (task, condition)]
            entries = [row.differences[other] for row in rows if other in row.differences]
            if len(entries) == len(datasets) and all(entry["metric"] == metric for entry in entries):
                mean = _mean([entry["difference"] for entry in entries])
                interval = interval_of_mean(mean, [entry["interval"] for entry in entries])
                found[condition, other] = mean, None if math.isnan(interval[0]) else interval
        return found

    def _retention_intervals(
        self, task: str, metric: str, weights: Mapping[str, float], shares: Mapping[str, float]
    ) -> dict[str, Interval]:
        """Condition -> interval of a weighted sum of teacher-normalised scores, of which rows have the percentage."""
        if any(row.main_metric != metric for row in self.rows if row.task == task):
            return {}
        intervals = self._intervals(task, RETENTION, weights, {name: 100 * share for name, share in shares.items()})
        return {name: (low / 100, high / 100) for name, (low, high) in intervals.items()}

    def _intervals(
        self, task: str, name: str, weights: Mapping[str, float], averages: Mapping[str, float]
    ) -> dict[str, Interval]:
        """Condition -> interval of a weighted sum over data sets; left out where one has none."""
        found = {}
        for condition, average in averages.items():
            rows = [self.row(dataset, task, condition) for dataset in weights]
            ends = [row.intervals[name] for row in rows if row is not None and name in row.intervals]
            if ends and len(ends) == len(rows):
                interval = ends[0] if len(ends) == 1 else interval_of_mean(average, ends, list(weights.values()))
                if not math.isnan(interval[0]):
                    found[condition] = interval
        return found

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


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _equal_weights(datasets: Sequence[str], sign: int = 1) -> dict[str, float]:
    return dict.fromkeys(datasets, sign / max(1, len(datasets)))
