# SPDX-License-Identifier: Apache-2.0
"""An evaluation's report as Markdown."""

import math
from collections.abc import Mapping
from typing import Any

from ..reporting.tables import markdown_table
from .bootstrap import verdict
from .report import EvaluationReport
from .rows import RETENTION

_COSTS = ("slots", "memory_bytes", "decoder_positions", "cache_bytes")
_SECONDS = ("compress", "answer")


def report_markdown(report: EvaluationReport) -> str:
    """The report as Markdown: per task one table of all rows and one of the averages of its main metric."""
    parts = [f"# {report.model}", f"Bounds (no_context, full_context): {report.bounds}."]
    if any(row.intervals for row in report.rows):
        parts.append("In brackets: 95 % bootstrap intervals over documents.")
    parts += reservations(report)
    for task in report.tasks():
        parts += [f"## {task}", _rows_table(report, task), _averages_table(report, task)]
        parts += filter(None, [_differences_table(report, task)])
    return "\n\n".join(parts) + "\n"


def _rows_table(report: EvaluationReport, task: str) -> str:
    metrics = report.metric_names(task)
    conditions, datasets = report.conditions(task), report.datasets(task)
    rows = sorted(
        (row for row in report.rows if row.task == task),
        key=lambda row: (datasets.index(row.dataset), conditions.index(row.condition)),
    )
    costs = [name for name in _COSTS if any(name in row.costs for row in rows)]
    seconds = [name for name in _SECONDS if any(name in row.seconds for row in rows)]
    kept = [RETENTION] if any(row.retention is not None for row in rows) else []
    header = ["data set", "domain", "condition", "samples", "documents", "truncated"]
    body = [
        [row.dataset, row.domain, row.condition, row.num_samples, row.num_documents or "-"]
        + [row.num_truncated, *(_cell(row.metrics.get(metric), row.intervals.get(metric)) for metric in metrics)]
        + [_cell(row.retention, row.intervals.get(RETENTION)) for _ in kept]
        + [_text(row.costs.get(name)) for name in costs]
        + [_text(row.seconds.get(name)) for name in seconds]
        for row in rows
    ]
    titles = [*(name.replace("_", " ") for name in costs), *(f"seconds to {name}" for name in seconds)]
    return markdown_table([*header, *metrics, *kept, *titles], body)


def _differences_table(report: EvaluationReport, task: str) -> str | None:
    """Compare slots with text at the same number of positions, on the same questions."""
    rows = [row for row in report.rows if row.task == task and row.differences]
    body = [
        [
            *(row.dataset, row.condition, other, entry["metric"], row.num_samples),
            *(row.num_documents or "-", _cell(entry["difference"], entry["interval"])),
            verdict(entry["interval"], entry["metric"]),
        ]
        for row in rows
        for other, entry in row.differences.items()
    ]
    if not body:
        return None
    metric = report.main_metric(task)
    means = report.mean_differences(task, metric) if len(report.datasets(task)) > 1 else {}
    for (condition, other), (difference, interval) in means.items():
        cells = [_cell(difference, interval), verdict(interval or (math.nan, math.nan), metric)]
        body.append(["mean over data sets", condition, other, metric, "-", "-", *cells])
    header = ["data set", "slots", "text", "metric", "samples", "documents", "difference", "slots are"]
    title = "Slots less text at the same number of positions, on the same questions"
    return f"{title}:\n\n" + markdown_table(header, body)


def _averages_table(report: EvaluationReport, task: str) -> str:
    metric = report.main_metric(task)
    averages = report.averages(task, metric)
    body = [
        [condition, *(_cell(*averages[name].get(condition, (None, None))) for name in averages)]
        for condition in report.conditions(task)
    ]
    lines = [f"Averages of {metric}; teacher-normalised scores are taken per data set, then averaged."]
    undefined = report.undefined_datasets(task, metric) if "teacher_normalized" in averages else []
    if undefined:
        lines.append(f"Without a teacher-normalised score (the full context does not help): {', '.join(undefined)}.")
    header = ["condition", *(name.replace("_", " ") for name in averages)]
    return "\n".join([*lines, "", markdown_table(header, body)])


def reservations(report: EvaluationReport) -> list[str]:
    """Return sentences about documents that are not held out, rounded memories and rows left out."""
    lines = held_out_lines(report.held_out)
    if report.settings.get("memory_dtype"):
        lines.append(f"Memories are rounded to {report.settings['memory_dtype']}.")
    if left_out := report.settings.get("left_out"):
        counts = "; ".join(f"{number:,} of {name}" for name, number in left_out.items())
        limit = report.settings.get("max_context_tokens")
        longer = f"of more than {limit:,} tokens" if limit else "that are too long"
        lines.append(f"Left out, with contexts {longer}: {counts}.")
    return lines


def held_out_lines(held_out: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a sentence for each model about the documents that `compare_sources` compared."""
    lines = []
    for model, facts in held_out.items():
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


def _cell(value: float | None, interval: tuple[float, float] | None) -> str:
    """A score with its interval, if there is one."""
    text = _text(value)
    if text == "-" or interval is None or math.isnan(interval[0]):
        return text
    return f"{text} [{_text(interval[0])}, {_text(interval[1])}]"


def _text(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "-"
    if abs(value) >= 10_000:
        return f"{value:,.0f}"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.2f}"
