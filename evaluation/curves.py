# SPDX-License-Identifier: Apache-2.0
"""Training curves of several runs: losses by step, and how soon each reaches a loss."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..configuration.nearest_names import nearest

_STATE, _SUMMARY = "trainer_state.json", "training_summary.json"


@dataclass(frozen=True)
class Curve:
    """A value by training step, once for each seed.

    Args:
        name: how tables and pictures call it.
        steps: optimizer steps, ascending.
        seeds: for each seed, the values at those steps.

    Raises:
        ValueError: no steps or seeds, steps that do not ascend, or another number of values.
    """

    name: str
    steps: tuple[int, ...]
    seeds: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        if not self.steps or not self.seeds:
            raise ValueError(f"curve {self.name!r} has no values")
        if list(self.steps) != sorted(set(self.steps)):
            raise ValueError(f"steps of curve {self.name!r} must ascend, got {self.steps}")
        if lengths := {len(values) for values in self.seeds} - {len(self.steps)}:
            raise ValueError(f"curve {self.name!r} has {len(self.steps)} steps, but {min(lengths)} values")

    @property
    def mean(self) -> tuple[float, ...]:
        """The values, averaged over the seeds."""
        return tuple(math.fsum(values) / len(values) for values in zip(*self.seeds, strict=True))

    def steps_to_reach(self, loss: float) -> float | None:
        """The first step at which the mean is at a loss or below, linear between the steps that there are.

        Returns:
            The step, or `None` when the mean stays above.
        """
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
    """How many times fewer steps than the first curve each one needs to reach a loss.

    Returns:
        Name -> steps of the first curve / its own steps; `None` where one of the two stays above.

    Source: EPL, section 5.1 (there 9.7 for 500xCompressor on Llama-3.1-8B, at a loss of 0.01).
    """
    steps = {curve.name: curve.steps_to_reach(loss) for curve in curves}
    first = steps[curves[0].name]
    return {name: None if first is None or own is None else first / own for name, own in steps.items()}


def read_curves(sources: Sequence[str], metric: str = "loss") -> list[Curve]:
    """Read the curves of runs.

    Args:
        sources: `trainer_state.json`, `training_summary.json`, or a run's folder (the state that reaches furthest is
            taken), whose name the run has; `NAME=` in front gives it another name, and runs that are given one name
            are the seeds of one curve.
        metric: a value of the logs' entries.

    Returns:
        One curve for each name, in the order of the sources.

    Raises:
        ValueError: no such file, one that holds no log, a log without the metric or with one that is not finite, two
            runs of one name that was not given to them, or seeds that were logged at different steps.
    """
    logs: dict[str, list[dict[int, float]]] = {}
    for source in sources:
        given, place = _split(source)
        path = _log_file(place)
        name = given or (place if place.is_dir() else path.parent).resolve().name
        if name in logs and not given:
            raise ValueError(
                f"two runs have the name {name!r}: give names as NAME=SOURCE, one name to seeds of one run"
            )
        logs.setdefault(name, []).append(_values(path, metric))
    curves = []
    for name, seeds in logs.items():
        steps = {tuple(values) for values in seeds}
        if len(steps) > 1:
            raise ValueError(f"the seeds of {name!r} were logged at different steps")
        curves.append(Curve(name, steps.pop(), tuple(tuple(values.values()) for values in seeds)))
    return curves


def _split(source: str) -> tuple[str, Path]:
    """Name, which may be empty, and place of `[NAME=]PLACE`; either may hold "=", and the place is what is there."""
    words = source.split("=")
    splits = [("=".join(words[:i]), Path("=".join(words[i:])).expanduser()) for i in range(len(words))]
    return next(((name, place) for name, place in splits if place.exists()), splits[-1])


def _log_file(path: Path) -> Path:
    """The file itself, or of a run's folder the log that reaches furthest."""
    if path.is_file():
        return path
    numbered = [file for file in path.glob(f"checkpoint-*/{_STATE}") if file.parent.name.split("-")[1].isdecimal()]
    checkpoints = sorted(numbered, key=lambda file: int(file.parent.name.split("-")[1]))
    for file in (path / _STATE, *checkpoints[::-1], path / _SUMMARY):
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
    for step, value in values.items():
        if not math.isfinite(value):
            raise ValueError(f"{path} has {metric!r} {value} at step {step}, which has no place in a curve")
    return values


def table(curves: Sequence[Curve], loss: float) -> str:
    """Markdown: each curve's first, last and lowest value, its steps to a loss, and how it compares with the first."""
    from ..reporting.tables import markdown_table

    faster = speed_ups(curves, loss)
    rows = []
    for curve in curves:
        steps = curve.steps_to_reach(loss)
        times = faster[curve.name]
        rows.append(
            [
                curve.name,
                len(curve.seeds),
                f"{curve.mean[0]:.4g}",
                f"{curve.mean[-1]:.4g}",
                f"{min(curve.mean):.4g}",
                "never" if steps is None else f"{steps:.0f}",
                "-" if times is None else f"{times:.2f}",
            ]
        )
    header = ["run", "seeds", "first", "last", "lowest", f"steps to {loss:.4g}", f"times faster than {curves[0].name}"]
    return markdown_table(header, rows)
