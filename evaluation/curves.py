# SPDX-License-Identifier: Apache-2.0
"""Training curves of several runs: losses by step, and how soon each reaches a loss."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..configuration.nearest_names import nearest
from ..reporting.tables import markdown_table

_STATE, _SUMMARY = "trainer_state.json", "training_summary.json"


@dataclass(frozen=True)
class Curve:
    """A value by training step, once for each seed."""

    name: str
    steps: tuple[int, ...]
    seeds: tuple[tuple[float, ...], ...]

    @property
    def mean(self) -> tuple[float, ...]:
        """The values, averaged over the seeds."""
        return tuple(math.fsum(values) / len(values) for values in zip(*self.seeds, strict=True))

    def steps_to_reach(self, loss: float) -> float | None:
        """The first step at which the mean is at a loss or below, linear between the steps that there are."""
        values = self.mean
        for index, value in enumerate(values):
            if value <= loss:
                if index == 0:
                    return float(self.steps[0])
                before, after = self.steps[index - 1], self.steps[index]
                return before + (after - before) * (values[index - 1] - loss) / (values[index - 1] - value)
        return None


def common_loss(curves: Sequence[Curve]) -> float:
    """The lowest loss that all curves reach."""
    return max(min(curve.mean) for curve in curves)


def speed_ups(curves: Sequence[Curve], loss: float) -> dict[str, float | None]:
    """Name -> steps of the first curve to a loss / its own; `None` where one of the two stays above.

    Source: EPL, section 5.1 (there 9.7 for 500xCompressor on Llama-3.1-8B, at a loss of 0.01).
    """
    steps = {curve.name: curve.steps_to_reach(loss) for curve in curves}
    first = steps[curves[0].name]
    return {name: None if first is None or own is None else first / own for name, own in steps.items()}


def read_curves(
    runs: Mapping[str, str | os.PathLike[str] | Sequence[str | os.PathLike[str]]], metric: str = "loss"
) -> list[Curve]:
    """Read the curves of runs.

    Args:
        runs: name -> a run's folder, of which the state that reaches furthest is taken, its `trainer_state.json` or
            its `training_summary.json`; or several of them, the seeds of one curve.
        metric: a value of the logs' entries.

    Raises:
        ValueError: no such file, one that holds no log, a log without the metric, or seeds that were logged at
            different steps.
    """
    curves = []
    for name, places in runs.items():
        paths = [places] if isinstance(places, (str, os.PathLike)) else places
        seeds = [_values(_log_file(Path(path)), metric) for path in paths]
        if any(values.keys() != seeds[0].keys() for values in seeds):
            raise ValueError(f"the seeds of {name!r} were logged at different steps")
        curves.append(Curve(name, tuple(seeds[0]), tuple(tuple(values.values()) for values in seeds)))
    return curves


def _log_file(path: Path) -> Path:
    """The file itself, or of a run's folder the log that reaches furthest."""
    if path.is_file():
        return path
    states = path.glob(f"checkpoint-*/{_STATE}")
    checkpoints = sorted(states, key=lambda file: int(file.parent.name.rpartition("-")[2]), reverse=True)
    for file in (path / _STATE, *checkpoints, path / _SUMMARY):
        if file.is_file():
            return file
    raise ValueError(f"{path} is no file, and no folder with {_STATE} or {_SUMMARY}")


def _values(path: Path, metric: str) -> dict[int, float]:
    """Step -> value of a log."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        # A summary's log is its last entries only.
        log = content["log_history"] if "log_history" in content else content["log"]
        values = {entry["step"]: float(entry[metric]) for entry in log if metric in entry}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} has no training log: {error!r}") from error
    if not values:
        known = sorted({key for entry in log for key in entry} - {"step", "epoch"})
        raise ValueError(f"{path} has no {metric!r} in its log{nearest(metric, known)}")
    return values


def curves_table(curves: Sequence[Curve], loss: float) -> str:
    """Markdown: each curve's first, last and lowest value, its steps to a loss, and how it compares with the first."""
    faster = speed_ups(curves, loss)
    rows = []
    for curve in curves:
        steps, times = curve.steps_to_reach(loss), faster[curve.name]
        values = [f"{value:.4g}" for value in (curve.mean[0], curve.mean[-1], min(curve.mean))]
        reached = ["never" if steps is None else f"{steps:.0f}", "-" if times is None else f"{times:.2f}"]
        rows.append([curve.name, len(curve.seeds), *values, *reached])
    header = ["run", "seeds", "first", "last", "lowest", f"steps to {loss:.4g}", f"times faster than {curves[0].name}"]
    return markdown_table(header, rows)
