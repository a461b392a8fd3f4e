# SPDX-License-Identifier: Apache-2.0
"""Result rows of an evaluation, their averages, and the file that holds them."""

import json
import math
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..reporting.environment import environment
from ..reporting.result_files import write_results
from .average_intervals import AverageIntervals
from .benchmark_metrics import BENCHMARK_SCORE
from .bootstrap import helps
from .metrics import teacher_normalized
from .rows import (
    DOMAINS,
    FULL_CONTEXT,
    MAIN_METRICS,
    NO_CONTEXT,
    EvaluationRow,
    SampleAnswers,
    number_of,
    ordered_conditions,
    plain_json,
    ratio_condition,
    ratio_of,
    row_from,
)

BOUNDS = ("teacher", "own_decoder")
_FORMAT_VERSION = 1
# Where the intervals of averages come from.
RESAMPLES, OF_DATA_SETS = "resamples", "intervals of the data sets"
# Of averages in a file, what holds no numbers.
_IN_WORDS = ("metric", "intervals_from", "undefined_datasets")


@dataclass
class EvaluationReport:
    """All rows of one model's evaluation, and the averages over data sets.

    Scores of several seeds are averaged within a data set first. Averages over data sets are plain means ("macro"): a
    large data set weighs no more than a small one. Teacher-normalised scores are taken **per data set and then
    averaged**, which differs from normalising the macro average; data sets where full context and no context score the
    same have no normalised score and are left out of its average (`undefined_datasets` names them).

    Averages have 95 % intervals, see `AverageIntervals`. A report's file has those of its tasks' main metrics.

    Attributes:
        resamples: (data set, task, condition, seed, metric) -> resampled scores of a main metric, `(num_resamples,)`;
            kept out of the report's file, which has the intervals that they give.

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
    resamples: dict[tuple[str, str, str, int, str], np.ndarray] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    # Task -> its averages in the file that the report was read from, until it gets another row.
    _of_file: dict[str, dict[str, Any]] = field(default_factory=dict, init=False, repr=False, compare=False)

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
        self._of_file.pop(row.task, None)

    def take_over(self, earlier: "EvaluationReport") -> None:
        """Append an earlier report's rows, with what is known of their resamples; raises `ValueError` as `add`."""
        for row in earlier.rows:
            self.add(row)
        self.resamples |= earlier.resamples
        self._of_file |= earlier._of_file

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
        found = [
            row.costs.get("reached_ratio")
            for row in self.rows
            if (row.task, row.condition) == (task, ratio_condition("auto")) and dataset in (None, row.dataset)
        ]
        known = [ratio for ratio in found if ratio is not None]
        return math.fsum(known) / len(known) if known and len(known) == len(found) else None

    def datasets(self, task: str, domain: str | None = None) -> list[str]:
        """Data sets of a task, of one domain or of both."""
        rows = (row for row in self.rows if row.task == task and domain in (None, row.domain))
        return list(dict.fromkeys(row.dataset for row in rows))

    def score(self, dataset: str, task: str, condition: str, metric: str) -> float:
        """A score, averaged over its seeds; raises `ValueError` when the report does not have it."""
        values = [
            row.metrics[metric]
            for row in self.rows
            if (row.dataset, row.task, row.condition) == (dataset, task, condition) and metric in row.metrics
        ]
        if not values:
            raise ValueError(f"the report has no {metric!r} of {dataset!r}, task {task!r}, condition {condition!r}")
        return math.fsum(values) / len(values)

    def macro_average(self, task: str, metric: str, domain: str | None = None) -> dict[str, float]:
        """Condition -> mean of a metric over the data sets (of one domain).

        Raises:
            ValueError: a data set lacks a condition or the metric, so that the means could not be compared.
        """
        datasets = self._datasets_to_average(task, domain)
        return {
            condition: math.fsum(self.score(dataset, task, condition, metric) for dataset in datasets) / len(datasets)
            for condition in self.conditions(task)
        }

    def macro_average_interval(
        self, task: str, metric: str, domain: str | None = None
    ) -> dict[str, tuple[float, float]]:
        """Condition -> 95 % interval of `macro_average`.

        Conditions are left out where a data set has no interval, or more than one seed.
        """
        name = "macro_average_interval" if domain is None else f"{domain}_domain_interval"
        if name in (saved := self._averages_of_file(task, metric)):
            return saved[name]
        datasets = self.datasets(task, domain)
        return self._intervals(task, metric).of_scores(self.macro_average(task, metric, domain), datasets)

    def teacher_normalized(self, task: str, metric: str, domain: str | None = None) -> dict[str, float]:
        """Condition -> teacher-normalised score per data set, then averaged (NaN where no data set defines it).

        Source: mean-pooling paper, section 5.1, Metrics.

        Raises:
            ValueError: a data set lacks a condition, the metric, or one of the two bounds.
        """
        datasets = self._datasets_to_average(task, domain)
        undefined = self.undefined_datasets(task, metric)
        result = {}
        for condition in self.conditions(task):
            shares = [
                teacher_normalized(
                    self.score(dataset, task, condition, metric),
                    full=self.score(dataset, task, FULL_CONTEXT, metric),
                    none=self.score(dataset, task, NO_CONTEXT, metric),
                )
                for dataset in datasets
                if dataset not in undefined
            ]
            result[condition] = math.fsum(shares) / len(shares) if shares else math.nan
        return result

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

        Raises:
            ValueError: a domain has no data set.
        """
        inside, outside = (self.teacher_normalized(task, metric, domain) for domain in DOMAINS)
        return {
            ratio: inside[name] - outside[name] for ratio in self.ratios(task) for name in [ratio_condition(ratio)]
        }

    def averages(self, task: str, metric: str) -> dict[str, Any]:
        """All averages of a metric, each with its 95 % intervals, where there are any, under its name and `_interval`.

        Returns:
            By condition: `macro_average`; `teacher_normalized_per_dataset_then_averaged` where there are both bounds,
            with `undefined_datasets`; `in_domain`, `out_domain` and `domain_gap` where there are two domains. Of
            several data sets also, by condition and alternative, their mean `differences`, and `intervals_from`: where
            intervals come from, the "resamples" or the "intervals of the data sets".

        Raises:
            ValueError: a data set lacks a condition or the metric.
        """
        if saved := self._averages_of_file(task, metric):
            return {name: values for name, values in saved.items() if name != "metric"}
        domains = [domain for domain in DOMAINS if self.datasets(task, domain)]
        intervals, datasets = self._intervals(task, metric), self.datasets(task)
        result: dict[str, Any] = {}

        def note(name: str, values: dict[str, float], ends: dict[str, tuple[float, float]]) -> None:
            result[name] = values
            if ends:
                result[f"{name}_interval"] = ends

        note("macro_average", self.macro_average(task, metric), self.macro_average_interval(task, metric))
        if {NO_CONTEXT, FULL_CONTEXT} <= set(self.conditions(task)):
            normalized, undefined = self.teacher_normalized(task, metric), self.undefined_datasets(task, metric)
            inside, outside = ([n for n in self.datasets(task, domain) if n not in undefined] for domain in DOMAINS)
            name = "teacher_normalized_per_dataset_then_averaged"
            note(name, normalized, intervals.of_normalized(normalized, [*inside, *outside]))
            result["undefined_datasets"] = undefined
            if len(domains) == 2:
                gap = {ratio_condition(ratio): gap for ratio, gap in self.domain_gap(task, metric).items()}
                known = inside and outside
                note("domain_gap", gap, intervals.of_normalized(gap, inside, outside) if known else {})
        for domain in domains if len(domains) == 2 else ():
            ends = self.macro_average_interval(task, metric, domain)
            note(f"{domain}_domain", self.macro_average(task, metric, domain), ends)
        if len(datasets) > 1:
            result["differences"] = intervals.mean_differences(datasets)
            result["intervals_from"] = RESAMPLES if intervals.of_resamples else OF_DATA_SETS
        return result

    def _averages_of_file(self, task: str, metric: str) -> dict[str, Any]:
        """What the report's file said, where nothing came to it since."""
        saved = self._of_file.get(task, {})
        return saved if saved.get("metric") == metric else {}

    def _intervals(self, task: str, metric: str) -> AverageIntervals:
        return AverageIntervals([row for row in self.rows if row.task == task], self.resamples, metric)

    def _all_averages(self) -> dict[str, dict[str, Any]]:
        """Task -> averages of its main metric, of tasks with several data sets that can be averaged."""
        found = {}
        for task in self.tasks():
            # Where a data set lacks a condition, there are none.
            with suppress(ValueError):
                if len(self.datasets(task)) > 1 and self.metric_names(task):
                    metric = self.main_metric(task)
                    found[task] = {"metric": metric, **self.averages(task, metric)}
        return found

    def _datasets_to_average(self, task: str, domain: str | None) -> list[str]:
        if domain is not None and domain not in DOMAINS:
            raise ValueError(f"domain must be one of {DOMAINS} or None, got {domain!r}")
        if not (datasets := self.datasets(task, domain)):
            where = "" if domain is None else f" in domain {domain!r}"
            raise ValueError(f"the report has no data set for task {task!r}{where}; tasks: {self.tasks()}")
        return datasets

    def metric_names(self, task: str) -> list[str]:
        """Metrics of a task, in the order of their first row."""
        return list(dict.fromkeys(name for row in self.rows if row.task == task for name in row.metrics))

    def main_metric(self, task: str) -> str:
        """The metric that stands for a task: the benchmarks' own where each data set has one."""
        rows = [row for row in self.rows if row.task == task]
        if all(BENCHMARK_SCORE in row.metrics for row in rows):
            return BENCHMARK_SCORE
        return MAIN_METRICS.get(task, self.metric_names(task)[0])

    def to_dict(self) -> dict[str, Any]:
        """The rows as plain JSON values: NaN is `null`, an infinite score the string "inf"."""
        content = {
            "format_version": _FORMAT_VERSION,
            "model": self.model,
            "num_parameters": self.num_parameters,
            "bounds": self.bounds,
            "settings": self.settings,
            "environment": self.environment,
            "held_out": self.held_out,
            "documents": self.documents,
            "rows": [asdict(row) for row in self.rows],
            "averages": self._all_averages(),
        }
        return plain_json(content)

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
            names = ("model", "bounds", "num_parameters", "settings", "environment")
            later = {name: content.get(name, {}) for name in ("held_out", "documents")}
            report = cls(rows=rows, **{name: content[name] for name in names}, **later)
            report._of_file = _read_averages("", content.get("averages", {}))
            return report
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not an evaluation report: {error}") from error


def _read_averages(name: str, value: Any) -> Any:
    """Averages as JSON holds them, as numbers."""
    if name in _IN_WORDS:
        return value
    if isinstance(value, dict):
        return {key: _read_averages(key, item) for key, item in value.items()}
    return tuple(map(number_of, value)) if isinstance(value, list) else number_of(value)
