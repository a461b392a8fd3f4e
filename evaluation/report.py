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

BOUNDS = ("teacher", "own_decoder")
_FORMAT_VERSION = 1
# What is read from a file; the averages follow from the rows.
_SAVED = ("model", "bounds", "num_parameters", "settings", "environment", "held_out", "documents")
# Value and 95 % interval, `None` where a data set has none.
Average = tuple[float, tuple[float, float] | None]


@dataclass
class EvaluationReport:
    """All rows of one model's evaluation, and the averages over data sets.

    Averages are plain means: a large data set weighs no more than a small one, and several seeds of a data set are
    averaged first. Teacher-normalised scores are taken per data set and then averaged; data sets that the full context
    does not help have none. The interval of an average follows from those of its data sets, which are independent.

    Args:
        model: name of the model (a Hub id or a folder's last part).
        bounds: where "no_context" and "full_context" come from: "teacher" or "own_decoder".
        rows: the scores.
        num_parameters: the model's parameters, for plots by size.
        settings: options of the evaluation.
        environment: hardware and versions, see `environment`.
        answers: what every sample got, see `SampleAnswers`; kept out of the report's file.
        held_out: by model, whether documents of this report trained or chose it, see `check_held_out`.
        documents: data set -> the ids of its documents, see `document_id`.

    Raises:
        ValueError: bounds that are not allowed, or two rows for the same data set, task, condition and seed.
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

    def __post_init__(self) -> None:
        if self.bounds not in BOUNDS:
            raise ValueError(f"bounds must be one of {BOUNDS}, got {self.bounds!r}")
        rows, self.rows = self.rows, []
        for row in rows:
            self.add(row)

    def add(self, row: EvaluationRow) -> None:
        """Append a row; raises `ValueError` when there is one for its data set, task, condition and seed already."""
        if any(row.key == other.key for other in self.rows):
            raise ValueError(f"the report has a row for (dataset, task, condition, seed) = {row.key} already")
        self.rows.append(row)

    def tasks(self) -> list[str]:
        """Tasks in the order of their first row."""
        return list(dict.fromkeys(row.task for row in self.rows))

    def conditions(self, task: str) -> list[str]:
        """Conditions of a task, see `ordered_conditions`."""
        return ordered_conditions(row.condition for row in self.rows if row.task == task)

    def ratios(self, task: str) -> list[int | str]:
        """Compression ratios that a task was evaluated at, ascending, and behind them "auto" if it was."""
        names = self.conditions(task)
        numbers = [ratio for name in names if (ratio := ratio_of(name)) is not None]
        return [*numbers, *(["auto"] if ratio_condition("auto") in names else [])]

    def reached_ratio(self, task: str, dataset: str | None = None) -> float | None:
        """Context tokens a slot at ratio "auto", the mean of all data sets unless one is named; `None` if unknown."""
        reached = [
            row.costs.get("reached_ratio")
            for row in self.rows
            if (row.task, row.condition) == (task, ratio_condition("auto")) and dataset in (None, row.dataset)
        ]
        known = [ratio for ratio in reached if ratio is not None]
        return math.fsum(known) / len(known) if known and len(known) == len(reached) else None

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
        """A score, averaged over its seeds; raises `ValueError` when the report does not have it."""
        rows = self._rows_of(dataset, task, condition)
        values = [row.metrics[metric] for row in rows if metric in row.metrics]
        if not values:
            raise ValueError(f"the report has no {metric!r} of {dataset!r}, task {task!r}, condition {condition!r}")
        return math.fsum(values) / len(values)

    def macro_average(self, task: str, metric: str, domain: str | None = None) -> dict[str, float]:
        """Condition -> mean of a metric over the data sets (of one domain)."""
        datasets = self._datasets_to_average(task, domain)
        return {
            condition: math.fsum(self.score(dataset, task, condition, metric) for dataset in datasets) / len(datasets)
            for condition in self.conditions(task)
        }

    def macro_average_interval(
        self, task: str, metric: str, domain: str | None = None
    ) -> dict[str, tuple[float, float]]:
        """Condition -> 95 % interval of `macro_average`, of conditions whose data sets all have one."""
        weights = _equal_weights(self.datasets(task, domain))
        return self._intervals(task, metric, weights, self.macro_average(task, metric, domain))

    def teacher_normalized(self, task: str, metric: str, domain: str | None = None) -> dict[str, float]:
        """Condition -> teacher-normalised score per data set, then averaged (NaN where no data set defines it).

        Source: mean-pooling paper, section 5.1, Metrics.
        """
        undefined = self.undefined_datasets(task, metric)
        datasets = [name for name in self._datasets_to_average(task, domain) if name not in undefined]
        shares = {
            condition: [
                teacher_normalized(
                    self.score(dataset, task, condition, metric),
                    full=self.score(dataset, task, FULL_CONTEXT, metric),
                    none=self.score(dataset, task, NO_CONTEXT, metric),
                )
                for dataset in datasets
            ]
            for condition in self.conditions(task)
        }
        return {name: math.fsum(values) / len(values) if values else math.nan for name, values in shares.items()}

    def undefined_datasets(self, task: str, metric: str) -> list[str]:
        """Data sets where the full context does not help, so that there is no teacher-normalised score."""
        return [
            dataset
            for dataset in self.datasets(task)
            if not helps(
                metric,
                full=self.score(dataset, task, FULL_CONTEXT, metric),
                none=self.score(dataset, task, NO_CONTEXT, metric),
            )
        ]

    def domain_gap(self, task: str, metric: str) -> dict[int | str, float]:
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
        has_bounds = {NO_CONTEXT, FULL_CONTEXT} <= set(self.conditions(task))
        found: dict[str, dict[str, Average]] = {}

        def note(name: str, values: Mapping[str, float], intervals: Mapping[str, tuple[float, float]]) -> None:
            found[name] = {condition: (value, intervals.get(condition)) for condition, value in values.items()}

        note("macro_average", self.macro_average(task, metric), self.macro_average_interval(task, metric))
        if has_bounds:
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
            rows = [row for dataset in datasets for row in self._rows_of(dataset, task, condition)]
            entries = [row.differences[other] for row in rows if other in row.differences]
            if len(rows) == len(entries) == len(datasets) and all(entry["metric"] == metric for entry in entries):
                mean = math.fsum(entry["difference"] for entry in entries) / len(entries)
                interval = interval_of_mean(mean, [entry["interval"] for entry in entries])
                found[condition, other] = mean, None if math.isnan(interval[0]) else interval
        return found

    def _retention_intervals(
        self, task: str, metric: str, weights: Mapping[str, float], shares: Mapping[str, float]
    ) -> dict[str, tuple[float, float]]:
        """Condition -> interval of a weighted sum of teacher-normalised scores, of which rows have the percentage."""
        if any(row.main_metric != metric for row in self.rows if row.task == task):
            return {}
        intervals = self._intervals(task, RETENTION, weights, {name: 100 * share for name, share in shares.items()})
        return {name: (low / 100, high / 100) for name, (low, high) in intervals.items()}

    def _intervals(
        self, task: str, name: str, weights: Mapping[str, float], averages: Mapping[str, float]
    ) -> dict[str, tuple[float, float]]:
        """Condition -> interval of a weighted sum over data sets; left out where one has none or several seeds."""
        found = {}
        for condition, average in averages.items():
            rows = [self._rows_of(dataset, task, condition) for dataset in weights]
            ends = [row.intervals[name] for of_set in rows for row in of_set if row.intervals.get(name) is not None]
            if not ends or any(len(of_set) != 1 for of_set in rows) or len(ends) != len(rows):
                continue
            interval = ends[0] if len(ends) == 1 else interval_of_mean(average, ends, list(weights.values()))
            if interval is not None and not math.isnan(interval[0]):
                found[condition] = interval
        return found

    def _rows_of(self, dataset: str, task: str, condition: str) -> list[EvaluationRow]:
        wanted = (dataset, task, condition)
        return [row for row in self.rows if (row.dataset, row.task, row.condition) == wanted]

    def _datasets_to_average(self, task: str, domain: str | None) -> list[str]:
        if not (datasets := self.datasets(task, domain)):
            where = "" if domain is None else f" in domain {domain!r}"
            raise ValueError(f"the report has no data set for task {task!r}{where}; tasks: {self.tasks()}")
        return datasets

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON values: NaN is `null`, an infinite score the string "inf"."""
        averages = {}
        for task in self.tasks():
            # Where a data set lacks a condition, there are none.
            with suppress(ValueError):
                metric = self.main_metric(task)
                averages[task] = {"metric": metric, **self.averages(task, metric)}
        content = {name: getattr(self, name) for name in _SAVED}
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


def _equal_weights(datasets: Sequence[str], sign: int = 1) -> dict[str, float]:
    return dict.fromkeys(datasets, sign / max(1, len(datasets)))
