# SPDX-License-Identifier: Apache-2.0
"""Pictures of scores: by ratio, model size, domain and length.

A figure has its own canvas: neither pyplot nor matplotlib's global settings are touched.
"""

import math
import os
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from .report import EvaluationReport
from .rows import FULL_CONTEXT, NO_CONTEXT, ratio_condition, ratio_of

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKERS = "osD^vPX"
# Letters beside each other under the axes.
_LEGEND_WIDTH = 90
_LABELS = {
    "f1": "F1",
    "rouge1": "ROUGE-1",
    "rouge2": "ROUGE-2",
    "rougeL": "ROUGE-L",
    "rougeLsum": "ROUGE-Lsum",
    "bleu": "BLEU",
    "perplexity": "perplexity (lower is better)",
}


def write_plots(report: EvaluationReport, folder: str | Path, others: Sequence[EvaluationReport] = ()) -> list[Path]:
    """Draw each task's main metric by ratio, by domain where there are two, and by model size beside others."""
    folder, paths = Path(folder), []
    for task in report.tasks():
        metric = report.main_metric(task)
        paths.append(plot_quality_by_ratio(report, task, metric, folder / f"{task}_by_ratio.png"))
        has_bounds = {NO_CONTEXT, FULL_CONTEXT} <= set(report.conditions(task))
        if has_bounds and report.datasets(task, "in") and report.datasets(task, "out"):
            paths.append(plot_domain_gap(report, task, metric, folder / f"{task}_domain_gap.png"))
        if others:
            path = folder / f"{task}_by_model_size.png"
            paths.append(plot_quality_by_model_size([report, *others], task, metric, path))
        if needles := [name for name in report.datasets(task) if name.startswith("needles, ")]:
            paths.append(plot_needles(report, needles, folder / "needles.png"))
    return paths


def plot_quality_by_ratio(report: EvaluationReport, task: str, metric: str, path: str | os.PathLike[str]) -> Path:
    """Draw a metric, averaged over data sets, against the compression ratio, between both bounds.

    Returns:
        The path. Each ratio's 95 % interval is a vertical line.
    """
    places = {ratio_condition(ratio): float(ratio) for ratio in report.ratios(task)}
    if not places:
        raise ValueError(f"the report of {report.model!r} has no ratio for task {task!r}; tasks: {report.tasks()}")
    average, intervals = report.macro_average(task, metric), report.macro_average_interval(task, metric)
    figure, axes = line_figure(f"{_title(task)} by compression ratio", _label(metric))
    points = list(places.values()), [average[name] for name in places]
    axes.plot(*points, color=COLOURS[0], marker=MARKERS[0], label=report.model)
    for name, place in places.items():
        if name in intervals:
            axes.vlines(place, *intervals[name], color=COLOURS[0], linewidth=1.0, alpha=0.6)
    for name, style in ((FULL_CONTEXT, "--"), (NO_CONTEXT, ":")):
        if name in average:
            label = name.replace("_", " ")
            axes.axhline(average[name], color=COLOURS[0], linestyle=style, linewidth=1.2, label=label)
    _value_axis(axes, metric)
    _log_axis(axes, sorted(places.values()), lambda value: f"{value:.3g}x")
    axes.set_xlabel("compression ratio (context tokens per slot)")
    return save_with_legend(figure, axes, path)


def plot_quality_by_model_size(
    reports: Sequence[EvaluationReport], task: str, metric: str, path: str | os.PathLike[str]
) -> Path:
    """Draw a metric, averaged over data sets, against the number of parameters, one line per ratio."""
    figure, axes = line_figure(f"{_title(task)} by model size", _label(metric))
    ordered = sorted(reports, key=lambda report: report.num_parameters or 0)
    averages = [report.macro_average(task, metric) for report in ordered]
    ratios = sorted({ratio for report in ordered for ratio in report.ratios(task)})
    lines = [(FULL_CONTEXT, "full context", "black", "--", "_")]
    for index, ratio in enumerate(ratios):
        colour, marker = COLOURS[index % (len(COLOURS) - 1)], MARKERS[index % len(MARKERS)]
        lines.append((ratio_condition(ratio), f"{ratio}x", colour, "-", marker))
    lines.append((NO_CONTEXT, "no context", "black", ":", "_"))
    for condition, label, colour, style, marker in lines:
        points = [
            (report.num_parameters, average[condition])
            for report, average in zip(ordered, averages, strict=True)
            if condition in average
        ]
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, linestyle=style, marker=marker, label=label)
    _value_axis(axes, metric)
    _log_axis(axes, sorted({report.num_parameters or 0 for report in ordered}), _size)
    axes.set_xlabel("parameters")
    return save_with_legend(figure, axes, path)


def plot_domain_gap(report: EvaluationReport, task: str, metric: str, path: str | os.PathLike[str]) -> Path:
    """Draw in-domain minus out-of-domain teacher-normalised score, a bar for each ratio.

    Source: mean-pooling paper, appendix B, Figure 3b.
    """
    label = _label(metric).partition(" (")[0]
    figure, axes = line_figure(
        f"{_title(task)}: gap between domains", f"in-domain minus out-of-domain\n(teacher-normalised {label})"
    )
    gaps = report.domain_gap(task, metric)
    # An undefined gap is no bar of height zero, but no bar.
    shown = {place: gap for place, gap in enumerate(gaps.values()) if math.isfinite(gap)}
    axes.bar(list(shown), list(shown.values()), 0.8, color=COLOURS[0], label=report.model)
    axes.axhline(0.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(gaps)), [f"{ratio}x" for ratio in gaps])
    axes.set_xlabel("compression ratio")
    return save_with_legend(figure, axes, path)


def plot_needles(report: EvaluationReport, datasets: Sequence[str], path: str | os.PathLike[str]) -> Path:
    """Draw the share of answers that the outputs contain as a heat map, by data set (down) and condition (across)."""
    task, metric = "question_answering", "substring_accuracy"
    conditions = report.conditions(task)
    shares = [[report.score(name, task, condition, metric) for condition in conditions] for name in datasets]
    figure = blank_figure(2.5 + 0.7 * len(conditions), 1.6 + 0.45 * len(datasets))
    axes = figure.add_subplot()
    axes.imshow(shares, aspect="auto", cmap="viridis", vmin=0, vmax=100)
    for row, values in enumerate(shares):
        for column, share in enumerate(values):
            colour = "black" if share > 60 else "white"
            axes.text(column, row, f"{share:.0f}", ha="center", va="center", color=colour, fontsize=9)
    names = [f"{ratio_of(name)}x" if ratio_of(name) else name.replace("_", "\n") for name in conditions]
    axes.set_xticks(range(len(conditions)), names, fontsize=8)
    axes.set_yticks(range(len(datasets)), list(datasets), fontsize=8)
    axes.set_title(f"{report.model}: needles found, %", fontsize=10)
    return save_figure(figure, path)


def _value_axis(axes: Axes, metric: str) -> None:
    low, high = axes.dataLim.intervaly
    if metric == "perplexity" and high > 4 * low:
        # Without context it can be a hundred times that with; on a linear axis the ratios would all lie on one line.
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _log_axis(axes: Axes, values: Sequence[float], text: Callable[[float], str]) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(list(values)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))
    # The margin also keeps the axis of a single value from running from 0 to infinity.
    axes.set_xlim(values[0] / 1.25, values[-1] * 1.25)


def _size(value: float) -> str:
    for unit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:.3g}{letter}"
    return f"{value:g}"


def _label(metric: str) -> str:
    return _LABELS.get(metric, metric.replace("_", " "))


def _title(task: str) -> str:
    return task.replace("_", " ").capitalize()


def blank_figure(width: float, height: float) -> Figure:
    """An empty figure of a width and height in inches."""
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def line_figure(title: str, label: str) -> tuple[Figure, Axes]:
    """A figure for lines or bars with a title and a vertical label, and its axes."""
    figure = blank_figure(7.0, 4.5)
    axes = figure.add_subplot()
    axes.set_title(title)
    axes.set_ylabel(label)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save_with_legend(figure: Figure, axes: Axes, path: str | os.PathLike[str]) -> Path:
    """Put the legend beside the axes, so that it never covers a line, and write the PNG file; returns its path."""
    handles, labels = axes.get_legend_handles_labels()
    labels = [textwrap.fill(label, _LEGEND_WIDTH) for label in labels]
    columns = max(1, min(3, _LEGEND_WIDTH // max(map(len, labels))))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    return save_figure(figure, path)


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Write a PNG file and the folders that it needs; returns its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
    return path
