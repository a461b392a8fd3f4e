# SPDX-License-Identifier: Apache-2.0
"""Result rows of an evaluation, their averages, and the file that holds them."""

import json
import math
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..reporting.environment import environment
from ..reporting.result_files import write_results
from .benchmark_metrics import BENCHMARK_SCORE
from .bootstrap import helps, interval_of_mean
from .metrics import teacher_normalized
from .rows import (
    DOMAINS,
    FULL_CONTEXT,
    NO_CONTEXT,
    EvaluationRow,
    SampleAnswers,
    ordered_conditions,
    plain_json,
    ratio_condition,
    ratio_of,
    row_from,
)

BOUNDS = ("teacher", "own_decoder")
# One metric per task stands for it where there is room for only one, in tables of averages and in plots; a benchmark's
# own score comes first.
MAIN_METRICS = {
    "question_answering": "f1",
    "summarisation": "rougeL",
    "reconstruction": "token_accuracy",
    "continuation": "perplexity",
}
_FORMAT_VERSION = 1


@dataclass
class EvaluationReport:
    """All rows of one model's evaluation, and the averages over data sets.

    Scores of several seeds are averaged within a data set first. Averages over data sets are plain means ("macro"): a
    large data set weighs no more than a small one. Teacher-normalised scores are taken **per data set and then
    averaged**, which differs from normalising the macro average; data sets where full context and no context score the
    same have no normalised score and are left out of its average (`undefined_datasets` names them).

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
        """Condition -> 95 % interval of `macro_average`, see `interval_of_mean`.

        Conditions are left out where a data set has no interval, or more than one seed.
        """
        averages, found = self.macro_average(task, metric, domain), {}
        datasets = self.datasets(task, domain)
        for condition, average in averages.items():
            ends = [
                row.intervals.get(metric, (math.nan, math.nan))
                for row in self.rows
                if (row.task, row.condition) == (task, condition) and row.dataset in datasets
            ]
            interval = interval_of_mean(average, ends)
            if len(ends) == len(datasets) and math.isfinite(interval[0]):
                found[condition] = interval
        return found

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
        """All averages of a metric: macro, teacher-normalised, both per domain, and the gap where there are two."""
        domains = [domain for domain in DOMAINS if self.datasets(task, domain)]
        result: dict[str, Any] = {"macro_average": self.macro_average(task, metric)}
        if intervals := self.macro_average_interval(task, metric):
            result["macro_average_interval"] = intervals
        if {NO_CONTEXT, FULL_CONTEXT} <= set(self.conditions(task)):
            result["teacher_normalized_per_dataset_then_averaged"] = self.teacher_normalized(task, metric)
            result["undefined_datasets"] = self.undefined_datasets(task, metric)
            if len(domains) == 2:
                result["domain_gap"] = {
                    ratio_condition(ratio): gap for ratio, gap in self.domain_gap(task, metric).items()
                }
        for domain in domains if len(domains) == 2 else ():
            result[f"{domain}_domain"] = self.macro_average(task, metric, domain)
        return result

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
            return cls(rows=rows, **{name: content[name] for name in names}, **later)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not an evaluation report: {error}") from error
