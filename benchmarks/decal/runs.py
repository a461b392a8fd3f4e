# SPDX-License-Identifier: Apache-2.0
"""What the trainings share: a result file that grows run by run, means over seeds, and the command's frame."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from context_compressors.reporting.environment import environment
from context_compressors.reporting.result_files import rounded


def read_runs(path: Path, benchmark: str, budget: Mapping[str, Any]) -> dict[str, Any]:
    """The result file, or an empty one.

    Args:
        path: the file.
        benchmark: its name.
        budget: what all runs have in common.

    Raises:
        ValueError: it is no result file of this benchmark, or its runs had another budget.
    """
    budget = rounded(budget)  # as it stands in the file
    empty = {"format_version": 2, "benchmark": benchmark, "budget": budget, "environment": environment()}
    if not path.is_file():
        return {**empty, "runs": []}
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        known, finished = results["budget"], [(run["model"], run["seed"]) for run in results["runs"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a result file of this benchmark: {error!r}") from error
    names = dict.fromkeys([*known, *budget])
    changed = {name: (known.get(name), budget.get(name)) for name in names if known.get(name) != budget.get(name)}
    if finished and changed:
        raise ValueError(
            f"{path} has runs of another budget, (there, now): {changed}; name another file with --output"
        )
    return {**empty, **results, "budget": budget}


def add_run(results: dict[str, Any], run: dict[str, Any]) -> None:
    """Add a run; one that was made elsewhere than the file's first run says where."""
    here = environment()
    results["runs"].append(run if results["environment"] == here else {**run, "environment": here})


def check_kept(finished: Iterable[tuple[str, int, Path]], output: Path) -> None:
    """Refuse to leave out the training of a model that is asked for and was not kept.

    Args:
        finished: name, seed, and the folder that the model would be in, of the runs that are not done again.
        output: the result file that has them.

    Raises:
        ValueError: one of the folders is not there.
    """
    for name, seed, folder in finished:
        if not folder.is_dir():
            raise ValueError(
                f"{name}, seed {seed}, is finished in {output}, and {folder} is not there: its model was not kept; "
                "name another file with --output"
            )


def mean_and_std(values: Sequence[float]) -> dict[str, float | None]:
    """Mean over seeds, and standard deviation where there are several."""
    return {"mean": fmean(values), "std": stdev(values) if len(values) > 1 else None}


def cell(score: Mapping[str, float | None] | None, digits: int = 2, missing: str = "") -> str:
    """A score for a table, such as "1.25 ± 0.50"."""
    if score is None:
        return missing
    return f"{score['mean']:.{digits}f}" + ("" if score["std"] is None else f" ± {score['std']:.{digits}f}")


def do_runs(
    arguments: argparse.Namespace,
    run_all: Callable[[argparse.Namespace], dict[str, Any]],
    table: Callable[[dict[str, Any]], str],
) -> int:
    """Do the runs that a result file lacks and print its table; returns the exit status.

    Args:
        arguments: the command line, with `output`.
        run_all: does the runs and returns the file's content; raises `ValueError` or `OSError` where the user has to
            change something.
        table: the content as text.
    """
    try:
        results = run_all(arguments)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"\n{table(results)}\n\nruns are in {arguments.output}")
    return 0
