# SPDX-License-Identifier: Apache-2.0
"""Figures on a canvas of their own: neither pyplot nor any of matplotlib's global settings is touched."""

import os
import textwrap
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKERS = "osD^vPX"
# Letters beside each other under the axes.
_LEGEND_WIDTH = 90


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
