# SPDX-License-Identifier: Apache-2.0
"""Pictures of scores: by ratio, and needles by length. Neither pyplot nor global settings are touched."""

import os
import textwrap
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from PIL import Image

from .bootstrap import is_lower_better
from .report import EvaluationReport
from .rows import FULL_CONTEXT, NO_CONTEXT, ratio_condition, ratio_of

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKERS = "osD^vPX"
# Letters in a line under the axes.
_LEGEND_WIDTH = 90


def write_plots(report: EvaluationReport, folder: str | Path) -> list[Path]:
    """Draw each task's main metric by ratio, and needles by length."""
    folder, paths = Path(folder), []
    for task in report.tasks():
        metric = report.main_metric(task)
        paths.append(plot_quality_by_ratio(report, task, metric, folder / f"{task}_by_ratio.png"))
        if needles := [name for name in report.datasets(task) if name.startswith("needles, ")]:
            paths.append(plot_needles(report, needles, folder / "needles.png"))
    return paths


def plot_quality_by_ratio(report: EvaluationReport, task: str, metric: str, path: str | os.PathLike[str]) -> Path:
    """Draw a metric, averaged over data sets, by compression ratio between both bounds, with 95 % intervals."""
    places = {ratio_condition(ratio): float(ratio) for ratio in report.ratios(task)}
    if not places:
        raise ValueError(f"the report of {report.model!r} has no ratio for task {task!r}; tasks: {report.tasks()}")
    average = report.averages(task, metric)["macro_average"]
    title = f"{task.replace('_', ' ').capitalize()} by compression ratio"
    figure, axes = line_figure(title, metric.replace("_", " ") + " (lower is better)" * is_lower_better(metric))
    points = list(places.values()), [average[name][0] for name in places]
    axes.plot(*points, color=COLOURS[0], marker=MARKERS[0], label=report.model)
    for name, place in places.items():
        if interval := average[name][1]:
            axes.vlines(place, *interval, color=COLOURS[0], linewidth=1.0, alpha=0.6)
    for name, style in ((FULL_CONTEXT, "--"), (NO_CONTEXT, ":")):
        if name in average:
            label = name.replace("_", " ")
            axes.axhline(average[name][0], color=COLOURS[0], linestyle=style, linewidth=1.2, label=label)
    low, high = axes.dataLim.intervaly
    if metric == "perplexity" and high > 4 * low:
        # Without context it can be a hundred times that with; on a linear axis the ratios would all lie on one line.
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    values = sorted(places.values())
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(values))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}x"))
    # The margin also keeps the axis of a single value from running from 0 to infinity.
    axes.set_xlim(values[0] / 1.25, values[-1] * 1.25)
    axes.set_xlabel("compression ratio (context tokens per slot)")
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


def blank_figure(width: float, height: float) -> Figure:
    """Return an empty figure of a width and height in inches."""
    return Figure(figsize=(width, height), dpi=150, layout="constrained")


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
    """Put the legend outside the axes, so that it never covers a line, and write the PNG file; returns its path."""
    handles, labels = axes.get_legend_handles_labels()
    labels = [textwrap.fill(label, _LEGEND_WIDTH) for label in labels]
    columns = max(1, min(3, _LEGEND_WIDTH // max(map(len, labels))))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    return save_figure(figure, path)


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Write a PNG file of 128 colours, a third of the size, and the folders that it needs; returns its path."""
    path, pixels = Path(path), BytesIO()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(pixels, format="png")
    with Image.open(pixels) as image:
        image.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(path, format="png", optimize=True)
    return path
