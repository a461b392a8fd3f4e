# SPDX-License-Identifier: Apache-2.0
"""The demo's picture: three scores by ratio, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from .evaluation.report import FULL_CONTEXT, NO_CONTEXT, EvaluationReport, ratio_condition

_PANELS = (
    ("reconstruction", "token_accuracy", "Reconstruction: token accuracy, %"),
    ("continuation", "perplexity", "Continuation: perplexity (lower is better)"),
    ("question_answering", "exact_match", "Questions: answers right, %"),
)
_COLOURS = ("#0072b2", "#d55e00")


def plot_demo(report: EvaluationReport, datasets: Sequence[str], path: Path) -> Path:
    """Draw each data set as a line over the ratios, with full context dashed and no context dotted.

    Args:
        report: scores of the three tasks.
        datasets: names of at most two data sets.
        path: PNG file to write; its folder is made.
    """
    figure = Figure(figsize=(13.0, 4.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (task, metric, title) in zip(figure.subplots(1, len(_PANELS)), _PANELS, strict=True):
        ratios = report.ratios(task)
        for dataset, colour in zip(datasets, _COLOURS, strict=False):
            scores = [report.score(dataset, task, ratio_condition(ratio), metric) for ratio in ratios]
            axes.plot(ratios, scores, color=colour, marker="o", label=f"{dataset}: compressed")
            for condition, style in ((FULL_CONTEXT, "--"), (NO_CONTEXT, ":")):
                label = f"{dataset}: {condition.replace('_', ' ')}"
                value = report.score(dataset, task, condition, metric)
                axes.axhline(value, color=colour, linestyle=style, linewidth=1.2, label=label)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("compression ratio (context tokens per slot)")
        axes.set_xscale("log", base=2)
        axes.set_xticks(ratios, [f"{ratio}x" for ratio in ratios])
        axes.xaxis.set_minor_locator(NullLocator())
        if metric == "perplexity":
            axes.set_yscale("log", base=2)
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        else:
            axes.set_ylim(-3, 103)
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
    return path
