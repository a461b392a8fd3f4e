# SPDX-License-Identifier: Apache-2.0
"""Pictures of scores: by ratio, model size and domain, of needles, and training curves."""

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from .figures import COLOURS, MARKERS, blank_figure, line_figure, save_figure, save_with_legend
from .report import EvaluationReport
from .rows import FULL_CONTEXT, NO_CONTEXT, ascending, ratio_condition, ratio_of

if TYPE_CHECKING:
    from .curves import Curve
    from .needles import NeedleGrid

_LABELS = {
    "f1": "F1",
    "exact_match": "exact match",
    "substring_accuracy": "substring accuracy",
    "rouge1": "ROUGE-1",
    "rouge2": "ROUGE-2",
    "rougeL": "ROUGE-L",
    "rougeLsum": "ROUGE-Lsum",
    "bleu": "BLEU",
    "token_accuracy": "token accuracy",
    "perplexity": "perplexity (lower is better)",
}


def plot_quality_by_ratio(
    reports: Sequence[EvaluationReport], task: str, metric: str, path: str | os.PathLike[str]
) -> Path:
    """Draw a metric, averaged over data sets, against the compression ratio, one line per model.

    Args:
        reports: one per model; each must have the task with at least one ratio.
        task: such as "question_answering".
        metric: such as "f1".
        path: PNG file to write; folders are made.

    Returns:
        The path. No context is drawn dotted and full context dashed, in the model's colour, and each ratio's 95 %
        interval as a vertical line. Ratio "auto" is a star at the ratio that its memories reached.

    Raises:
        ValueError: no reports, or one without the task, the metric or any ratio.
    """
    _check(reports, task)
    figure, axes = line_figure(f"{_title(task)} by compression ratio", _label(metric))
    for index, report in enumerate(reports):
        average = report.macro_average(task, metric)
        places, colour = _places(report, task), COLOURS[index % len(COLOURS)]
        scores = {name: average[name] for name in places}
        selected = scores.pop(ratio_condition("auto"), None)
        axes.plot(
            [places[name] for name in scores],
            list(scores.values()),
            color=colour,
            marker=MARKERS[index % len(MARKERS)],
            label=report.model,
        )
        if selected is not None:
            place, label = places[ratio_condition("auto")], "ratio auto" if len(reports) == 1 else None
            axes.plot([place], [selected], color=colour, linestyle="", marker="*", markersize=11, label=label)
        intervals = report.macro_average_interval(task, metric)
        for name, place in places.items():
            if name in intervals:
                axes.vlines(place, *intervals[name], color=colour, linewidth=1.0, alpha=0.6)
        for name, style in ((FULL_CONTEXT, "--"), (NO_CONTEXT, ":")):
            if name in average:
                label = f"{name.replace('_', ' ')} ({_bounds(report)})" if len(reports) == 1 else None
                axes.axhline(average[name], color=colour, linestyle=style, linewidth=1.2, label=label)
    if len(reports) > 1:
        # One entry for all models: each bound has its model's colour.
        axes.plot([], [], color="grey", linestyle="--", label="full context")
        axes.plot([], [], color="grey", linestyle=":", label="no context")
        if any("auto" in report.ratios(task) for report in reports):
            axes.plot([], [], color="grey", linestyle="", marker="*", markersize=11, label="ratio auto")
    _value_axis(axes, metric)
    _ratio_axis(axes, {place for report in reports for place in _places(report, task).values()})
    return save_with_legend(figure, axes, path)


def plot_quality_by_model_size(
    reports: Sequence[EvaluationReport], task: str, metric: str, path: str | os.PathLike[str]
) -> Path:
    """Draw a metric, averaged over data sets, against the number of parameters, one line per ratio.

    Args:
        reports: one per model, each with `num_parameters`.
        task: such as "question_answering".
        metric: such as "f1".
        path: PNG file to write; folders are made.

    Returns:
        The path; ratios that a model lacks are left out of its lines.

    Raises:
        ValueError: no reports, or one without the task, the metric, any ratio or `num_parameters`.
    """
    _check(reports, task)
    if unknown := [report.model for report in reports if not report.num_parameters]:
        raise ValueError(f"num_parameters must be known for a plot by model size; it is not for {unknown}")
    figure, axes = line_figure(f"{_title(task)} by model size", _label(metric))
    ordered = sorted(reports, key=lambda report: report.num_parameters or 0)
    averages = [report.macro_average(task, metric) for report in ordered]
    ratios = ascending(ratio for report in ordered for ratio in report.ratios(task))
    lines = [(FULL_CONTEXT, "full context", "black", "--", "")]
    for index, ratio in enumerate(ratios):
        colour, marker = COLOURS[index % (len(COLOURS) - 1)], MARKERS[index % len(MARKERS)]
        lines.append((ratio_condition(ratio), _times(ratio), colour, "-", marker))
    lines.append((NO_CONTEXT, "no context", "black", ":", ""))
    for condition, label, colour, style, marker in lines:
        points = [
            (report.num_parameters, average[condition])
            for report, average in zip(ordered, averages, strict=True)
            if condition in average
        ]
        if points:
            # A bound without a marker would be invisible for a single model.
            marker = marker or ("_" if len(points) == 1 else "")
            axes.plot(*zip(*points, strict=True), color=colour, linestyle=style, marker=marker, label=label)
    _value_axis(axes, metric)
    _size_axis(axes, {report.num_parameters or 0 for report in ordered})
    return save_with_legend(figure, axes, path)


def plot_domain_gap(reports: Sequence[EvaluationReport], task: str, metric: str, path: str | os.PathLike[str]) -> Path:
    """Draw in-domain minus out-of-domain teacher-normalised score, one group of bars per ratio, one bar per model.

    Args:
        reports: one per model, each with data sets of both domains and both bounds.
        task: such as "question_answering".
        metric: such as "f1".
        path: PNG file to write; folders are made.

    Returns:
        The path.

    Raises:
        ValueError: no reports, or one that lacks the task, the metric, a domain or a bound.

    Source: mean-pooling paper, appendix B, Figure 3b.
    """
    _check(reports, task)
    label = _label(metric).partition(" (")[0]
    figure, axes = line_figure(
        f"{_title(task)}: gap between domains", f"in-domain minus out-of-domain\n(teacher-normalised {label})"
    )
    ratios = ascending(ratio for report in reports for ratio in report.ratios(task))
    width = 0.8 / len(reports)
    for index, report in enumerate(reports):
        gaps = report.domain_gap(task, metric)
        shift = (index - (len(reports) - 1) / 2) * width
        # An undefined gap is no bar of height zero, but no bar.
        shown = {ratio: gap for ratio, gap in gaps.items() if math.isfinite(gap)}
        axes.bar(
            [ratios.index(ratio) + shift for ratio in shown],
            list(shown.values()),
            width,
            color=COLOURS[index % len(COLOURS)],
            label=report.model,
        )
    axes.axhline(0.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(ratios)), list(map(_times, ratios)))
    axes.set_xlabel("compression ratio")
    return save_with_legend(figure, axes, path)


def plot_curves(curves: "Sequence[Curve]", metric: str, path: str | os.PathLike[str], loss: float) -> Path:
    """Draw a value of training logs by step, one line per run; its range over seeds is shaded.

    Args:
        curves: the runs.
        metric: what the value is, such as "reconstruction_loss".
        path: PNG file to write; folders are made.
        loss: drawn as a dashed line, with a mark where a run reaches it.

    Returns:
        The path.

    Raises:
        ValueError: no curves.

    Source: EPL, appendix E, Figures 4 and 5.
    """
    if not curves:
        raise ValueError("curves are empty: there is nothing to draw")
    figure, axes = line_figure(f"{_title(metric)} by training step", _label(metric))
    for index, curve in enumerate(curves):
        colour = COLOURS[index % len(COLOURS)]
        # A legend leaves out what starts with "_".
        label = f" {curve.name}" if curve.name.startswith("_") else curve.name
        axes.plot(curve.steps, curve.mean, color=colour, label=label)
        if len(curve.seeds) > 1:
            low, high = (list(map(pick, zip(*curve.seeds, strict=True))) for pick in (min, max))
            axes.fill_between(curve.steps, low, high, color=colour, alpha=0.2, linewidth=0)
        reached = curve.steps_to_reach(loss)
        if reached is not None:
            axes.plot([reached], [loss], color=colour, marker=MARKERS[index % len(MARKERS)], linestyle="")
    axes.axhline(loss, color="grey", linestyle="--", linewidth=0.8)
    low, high = axes.dataLim.intervaly
    if low > 0 and high > 10 * low:
        axes.set_yscale("log")
    axes.set_xlabel("step")
    return save_with_legend(figure, axes, path)


def plot_needles(grid: "NeedleGrid", path: str | os.PathLike[str]) -> Path:
    """Draw the share of needles that the outputs contain as heat maps, one for all needles and one for each kind.

    Args:
        grid: what was found, by length and condition.
        path: PNG file to write; folders are made.

    Returns:
        The path.
    """
    # Its module loads the whole evaluation.
    from .needles import KINDS

    lengths, conditions, kinds = grid.lengths(), grid.conditions(), ("all", *KINDS)
    width, height = 2.0 + 0.7 * len(conditions), 1.6 + 0.45 * len(lengths)
    figure = blank_figure(2 * width, 2 * height)
    for axes, kind in zip(figure.subplots(2, 2).flat, kinds, strict=True):
        shares = [[grid.cell(length, name, kind).accuracy for name in conditions] for length in lengths]
        axes.imshow(shares, aspect="auto", cmap="viridis", vmin=0, vmax=100)
        for row, values in enumerate(shares):
            for column, share in enumerate(values):
                colour = "black" if share > 60 else "white"
                axes.text(column, row, f"{share:.0f}", ha="center", va="center", color=colour, fontsize=9)
        names = [f"{ratio_of(name)}x" if ratio_of(name) else name.replace("_", "\n") for name in conditions]
        axes.set_xticks(range(len(conditions)), names, fontsize=8)
        axes.set_yticks(range(len(lengths)), [f"{length:,}" for length in lengths], fontsize=8)
        axes.set_ylabel("tokens of text")
        axes.set_title(f"{kind} ({grid.cell(lengths[0], conditions[0], kind).number} a cell)", fontsize=10)
    figure.suptitle(f"{grid.model}: needles found, %")
    return save_figure(figure, path)


def _check(reports: Sequence[EvaluationReport], task: str) -> None:
    if not reports:
        raise ValueError("reports are empty: there is nothing to draw")
    for report in reports:
        if not _places(report, task):
            raise ValueError(f"the report of {report.model!r} has no ratio for task {task!r}; tasks: {report.tasks()}")


def _places(report: EvaluationReport, task: str) -> dict[str, float]:
    """Where each ratio's condition stands on the axis of ratios; "auto" where its memories came out."""
    found = {ratio: report.reached_ratio(task) if ratio == "auto" else float(ratio) for ratio in report.ratios(task)}
    return {ratio_condition(ratio): place for ratio, place in found.items() if place is not None}


def _times(ratio: int | str) -> str:
    return "auto" if ratio == "auto" else f"{ratio}x"


def _value_axis(axes: Axes, metric: str) -> None:
    low, high = axes.dataLim.intervaly
    if metric == "perplexity" and high > 4 * low:
        # Without context it can be a hundred times that with; on a linear axis the ratios would all lie on one line.
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _ratio_axis(axes: Axes, ratios: set[float]) -> None:
    _log_axis(axes, sorted(ratios), lambda value: f"{value:g}x" if value == int(value) else f"{value:.1f}x")
    axes.set_xlabel("compression ratio (context tokens per slot)")


def _size_axis(axes: Axes, sizes: set[int]) -> None:
    _log_axis(axes, sorted(sizes), _size)
    axes.set_xlabel("parameters")


def _log_axis(axes: Axes, values: Sequence[float], text: Callable[[float], str]) -> None:
    axes.set_xscale("log", base=2)
    # The margin also keeps the axis of a single value from running from 0 to infinity.
    margin = 0.3 + 0.02 * math.log2(values[-1] / values[0])
    octaves = math.log2(values[-1] / values[0]) + 2 * margin
    shown: list[float] = []
    # Whole ratios have the first claim on a label.
    for value in sorted(values, key=lambda value: (value != int(value), value)):
        # Labels less than a twelfth of the axis apart would be printed over each other.
        if all(abs(math.log2(value / other)) > octaves / 12 for other in shown):
            shown.append(value)
    axes.xaxis.set_major_locator(FixedLocator(sorted(shown)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))
    axes.set_xlim(values[0] / 2**margin, values[-1] * 2**margin)


def _size(value: float) -> str:
    for unit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:.3g}{letter}"
    return f"{value:g}"


def _label(metric: str) -> str:
    return _LABELS.get(metric, metric.replace("_", " "))


def _title(task: str) -> str:
    return task.replace("_", " ").capitalize()


def _bounds(report: EvaluationReport) -> str:
    return {"teacher": "teacher", "own_decoder": "own decoder"}[report.bounds]
