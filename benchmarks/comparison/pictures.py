# SPDX-License-Identifier: Apache-2.0
"""The comparison's pictures: F1 against what a context costs, a panel for each kind of what is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from context_compressors.evaluation.figures import COLOURS, MARKERS, blank_figure, save_figure
from context_compressors.evaluation.rows import FULL_CONTEXT, NO_CONTEXT

# What is kept of a context -> its panel's title.
PANELS = {
    "embeddings": "Vectors",
    "key_values": "Keys and values, this package",
    "pruned": "Keys and values, kvpress",
    "text": "Text",
}
_REFERENCE = "cut"


def draw(
    rows: Sequence[Mapping[str, Any]],
    kinds: Mapping[str, str],
    titles: Mapping[str, str],
    aware: set[str],
    cost: str,
    label: str,
    path: Path,
) -> None:
    """F1 against a cost, between no context and the full text; text cut to as many positions is grey in each panel.

    Args:
        rows: means over sets, see `results.gather`.
        kinds: system -> one of `PANELS`.
        titles: system -> what it is called.
        aware: those that see the question, which are dotted.
        cost: one of the rows' costs.
        label: what it is called.
        path: the PNG file.
    """
    points: dict[str, list[tuple[float, Mapping[str, Any]]]] = {}
    for row in rows:
        if cost in row["costs"]:
            points.setdefault(row["system"], []).append((row["costs"][cost], row))
    panels = [kind for kind in PANELS if any(kinds[system] == kind for system in points if system not in _BOUNDS)]
    if not panels:
        return
    figure = blank_figure(11.0, 4.6 * -(-len(panels) // 2))
    grid = figure.subplots(-(-len(panels) // 2), 2, sharey=True, sharex=True, squeeze=False).flatten()
    for axes in grid[len(panels) :]:
        axes.remove()
    for axes, kind in zip(grid, panels, strict=False):
        axes.set_title(PANELS[kind], fontsize=11)
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xscale("log")
        axes.tick_params(labelbottom=True)
        axes.set_xlabel(f"{label}, mean")
        axes.set_ylabel("F1, mean over sets")
        _bounds(axes, points, titles)
        if _REFERENCE in points and kind != "text" and cost == "kept_positions":
            _line(axes, points[_REFERENCE], titles[_REFERENCE], color="0.6", linestyle="--", linewidth=1)
        mine = [system for system in points if kinds[system] == kind and system not in _BOUNDS]
        # The best first, as the lines stand.
        mine.sort(key=lambda system: -max(row["scores"]["f1"] for _, row in points[system]))
        for index, system in enumerate(mine):
            style: dict[str, Any] = {"linestyle": ":"} if system in aware else {}
            style |= {"color": COLOURS[index % len(COLOURS)], "linewidth": 1.2, "markersize": 5}
            style["marker"] = MARKERS[(index + index // len(COLOURS)) % len(MARKERS)]
            # Ratios that texts select are a star, and no point of a line.
            kinds_of = {"": style, ", auto": {**style, "marker": "*", "markersize": 9, "linestyle": ""}}
            for name, of_kind in kinds_of.items():
                if own := [point for point in points[system] if (point[1]["ratio"] == "auto") == bool(name)]:
                    _line(axes, own, titles[system] + name, with_errors=True, **of_kind)
        axes.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    save_figure(figure, path)


_BOUNDS = (NO_CONTEXT, FULL_CONTEXT)


def _bounds(axes: Axes, points: Mapping[str, Any], titles: Mapping[str, str]) -> None:
    for system, style in zip(_BOUNDS, (":", "-"), strict=True):
        if system in points:
            f1 = points[system][0][1]["scores"]["f1"]
            axes.axhline(f1, color="0.6", linestyle=style, linewidth=1, label=titles[system])


def _line(
    axes: Axes,
    points: Sequence[tuple[float, Mapping[str, Any]]],
    title: str,
    with_errors: bool = False,
    **style: Any,
) -> None:
    """A system's F1 from the smallest cost on, with its intervals as thin bars."""
    points = sorted(points, key=lambda point: point[0])
    f1 = [row["scores"]["f1"] for _, row in points]
    # A picture on a scale of powers has no place for nothing.
    costs = [max(1.0, value) for value, _ in points]
    axes.plot(costs, f1, label=title, **style)
    if with_errors:
        ends = [row["intervals"]["f1"] for _, row in points]
        axes.vlines(costs, [low for low, _ in ends], [high for _, high in ends], color=style["color"], linewidth=0.6)
