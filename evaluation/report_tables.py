# SPDX-License-Identifier: Apache-2.0
"""An evaluation's report as Markdown."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..reporting.tables import markdown_table
from .answer_kinds import ANSWER_KINDS
from .average_intervals import main_metric_of
from .bootstrap import verdict
from .report import OF_DATA_SETS, EvaluationReport
from .rows import RETENTION, EvaluationRow

# Name in the rows -> title in tables.
_COSTS = {"slots": "slots", "memory_bytes": "bytes", "decoder_positions": "positions"}
_COSTS |= {"cache_bytes": "cache bytes", "reached_ratio": "tokens a slot"}
_SECONDS = {"compress": "seconds to compress", "answer": "seconds to answer"}


def report_markdown(report: EvaluationReport) -> str:
    """The report as Markdown: per task one table of all rows and one of the averages of its main metric."""
    parts = [f"# {report.model}", f"Bounds (no_context, full_context): {report.bounds}."]
    if any(row.intervals for row in report.rows):
        parts.append("In brackets: 95 % bootstrap intervals over documents.")
    parts += reservations(report)
    for task in report.tasks():
        parts += [f"## {task}", _rows_table(report, task), _averages_table(report, task)]
        parts += filter(None, [_kinds_table(report, task), _differences_table(report, task)])
    return "\n\n".join(parts) + "\n"


def _rows_table(report: EvaluationReport, task: str) -> str:
    metrics = report.metric_names(task)
    order = {condition: index for index, condition in enumerate(report.conditions(task))}
    datasets = report.datasets(task)
    rows = sorted(
        (row for row in report.rows if row.task == task),
        key=lambda row: (datasets.index(row.dataset), row.seed, order[row.condition]),
    )
    costs = [name for name in _COSTS if any(name in row.costs for row in rows)]
    seconds = [name for name in _SECONDS if any(name in row.seconds for row in rows)]
    kept = [RETENTION] if any(row.retention is not None for row in rows) else []
    header = ["data set", "domain", "seed", "condition", "samples", "documents", "truncated"]
    body = [
        [row.dataset, row.domain, row.seed, row.condition, row.num_samples, row.num_documents or "-"]
        + [row.num_truncated, *(_with_interval(row.metrics.get(metric), row, metric) for metric in metrics)]
        + [_with_interval(row.retention, row, RETENTION) for _ in kept]
        + [_text(row.costs.get(name)) for name in costs]
        + [_text(row.seconds.get(name)) for name in seconds]
        for row in rows
    ]
    titles = [*(_COSTS[name] for name in costs), *(_SECONDS[name] for name in seconds)]
    return markdown_table([*header, *metrics, *kept, *titles], body)


def _kinds_table(report: EvaluationReport, task: str) -> str | None:
    """The main metric by kind of answer."""
    rows = [row for row in report.rows if row.task == task and row.by_kind]
    kinds = [kind for kind in ANSWER_KINDS if any(kind in row.by_kind for row in rows)]
    if not kinds:
        return None
    body = []
    for row in rows:
        found = [row.by_kind.get(kind, {}) for kind in kinds]
        cells = [_text(kind.get(main_metric_of(row))) + _brackets(kind.get("interval")) for kind in found]
        cells = [f"{cell}, {kind['num_samples']}" if kind else "-" for cell, kind in zip(cells, found, strict=True)]
        body.append([_titled(row, rows), row.seed, row.condition, *cells])
    title = f"{_main_metrics(rows)} by kind of answer, and how many questions ask for one"
    return f"{title}\n\n" + markdown_table(["data set", "seed", "condition", *kinds], body)


def _differences_table(report: EvaluationReport, task: str) -> str | None:
    """Slots beside text at the same number of positions, on the same questions."""
    rows = [row for row in report.rows if row.task == task and row.differences]
    body = [
        [
            *(_titled(row, rows), row.seed, row.condition, other, row.num_samples, row.num_documents or "-"),
            _text(found["difference"]) + _brackets(found["interval"]),
            verdict(found["interval"], found["metric"]),
        ]
        for row in rows
        for other, found in row.differences.items()
    ]
    if not body:
        return None
    metric = report.main_metric(task)
    for condition, others in report.averages(task, metric).get("differences", {}).items():
        for other, found in others.items():
            cells = [_text(found["difference"]) + _brackets(found["interval"]), verdict(found["interval"], metric)]
            body.append(["mean over data sets", "-", condition, other, "-", "-", *cells])
    title = f"{_main_metrics(rows)}: slots less text at the same number of positions, on the same questions"
    header = ["data set", "seed", "slots", "text", "samples", "documents", "difference", "slots are"]
    return f"{title}\n\n" + markdown_table(header, body)


def _main_metrics(rows: Sequence[EvaluationRow]) -> str:
    return " and ".join(dict.fromkeys(map(main_metric_of, rows)))


def _titled(row: EvaluationRow, rows: Sequence[EvaluationRow]) -> str:
    """A row's data set, with its metric where other rows have another one."""
    several = len({main_metric_of(other) for other in rows}) > 1
    return f"{row.dataset}, {main_metric_of(row)}" if several else row.dataset


def _averages_table(report: EvaluationReport, task: str) -> str:
    metric = report.main_metric(task)
    averages = report.averages(task, metric)
    undefined = averages.pop("undefined_datasets", [])
    titles = {
        "macro_average": "all data sets",
        "teacher_normalized_per_dataset_then_averaged": "teacher-normalised",
        "in_domain": "in-domain",
        "out_domain": "out-of-domain",
        "domain_gap": "gap (teacher-normalised)",
    }
    shown = [name for name in averages if name in titles]
    ends = {name: averages.get(f"{name}_interval", {}) for name in shown}
    body = [
        [condition, *(_text(averages[name].get(condition)) + _brackets(ends[name].get(condition)) for name in shown)]
        for condition in report.conditions(task)
    ]
    lines = [f"Averages of {metric}; teacher-normalised scores are taken per data set, then averaged."]
    if averages.get("intervals_from") == OF_DATA_SETS and any(ends.values()):
        lines.append("Their intervals are made of those of the data sets, as of independent ones.")
    if undefined:
        lines.append(f"Without a teacher-normalised score (the full context does not help): {', '.join(undefined)}.")
    return "\n".join([*lines, "", markdown_table(["condition", *(titles[name] for name in shown)], body)])


def reservations(report: EvaluationReport) -> list[str]:
    """What the scores must not be read without, a sentence each: documents, rounded memories, rows left out."""
    lines = held_out_lines(report.held_out)
    if report.settings.get("memory_dtype"):
        lines.append(f"Memories are rounded to {report.settings['memory_dtype']}.")
    if left_out := report.settings.get("left_out"):
        counts = "; ".join(f"{number:,} of {name}" for name, number in left_out.items())
        limit = report.settings.get("max_context_tokens")
        longer = f"of more than {limit:,} tokens" if limit else "that are too long"
        lines.append(f"Left out, with contexts {longer}: {counts}.")
    return lines


def held_out_lines(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What `check_held_out` found, for people: a sentence for each model."""
    lines = []
    for model, facts in found.items():
        if facts["record"] == "none" and not facts.get("shared"):
            lines.append(f"Whether {model} was trained on these documents is unknown: it has no record of its own.")
            continue
        counts = f"{facts['trained']:,} that trained {model} and the {facts['chose']:,} that chose it"
        if facts["record"] != "whole":
            counts += ", as far as these are recorded"
        shared = [
            f"{number} of {dataset} {part}"
            for dataset, parts in facts["shared"].items()
            for part, number in parts.items()
        ]
        if shared:
            lines.append(
                f"**Not held out**: among the {counts}, are documents that are scored here: {', '.join(shared)}."
            )
        else:
            lines.append(f"Held out: no document here is among the {counts}.")
    return lines


def _with_interval(value: float | None, row: EvaluationRow, metric: str) -> str:
    text = _text(value)
    return text if text == "-" else text + _brackets(row.intervals.get(metric))


def _brackets(interval: tuple[float, float] | None) -> str:
    if interval is None or math.isnan(interval[0]):
        return ""
    return f" [{_text(interval[0])}, {_text(interval[1])}]"


def _text(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "-"
    if abs(value) >= 10_000:
        return f"{value:,.0f}"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.2f}"
