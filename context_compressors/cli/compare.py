# SPDX-License-Identifier: Apache-2.0
"""`context-compressors compare [NAME=]ANSWERS ...`."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..evaluation.settings import NUM_RESAMPLES
from .command import OVERWRITE, argument, check_outputs, command, positive_int, seed

if TYPE_CHECKING:
    from ..evaluation.rows import SampleAnswers

_EXAMPLES = """
# Slots at 4x beside cut text, BM25's sentences and the full text, on the same questions:
context-compressors compare answers.jsonl --conditions ratio=4 cut=4 bm25=4 full_context

# Two checkpoints at every ratio that both have; three seeds of the first one, two of the second:
context-compressors compare ours=a0.jsonl ours=a1.jsonl ours=a2.jsonl theirs=b0.jsonl theirs=b1.jsonl
"""


def comparisons(
    systems: dict[str, list[list[SampleAnswers]]], conditions: Sequence[str]
) -> list[tuple[str, str, str, str]]:
    """Which conditions of which systems are compared: (first system, its condition, second system, its condition).

    Args:
        systems: name -> the answers of each of its seeds, of one data set and task.
        conditions: of one system, the first is compared with each other one; of several systems, the first system is
            compared with each other one under each of these. All that they have when empty.

    Raises:
        ValueError: nothing to compare, or a condition that no system has.
    """
    (first, runs), *others = systems.items()
    known = {name for of_system in systems.values() for name in of_system[0][0].scores}
    if unknown := [name for name in conditions if name not in known]:
        raise ValueError(f"no system has the conditions {unknown}; there are {sorted(known)}")
    own = [name for name in runs[0][0].scores if not conditions or name in conditions]
    own = sorted(own, key=conditions.index) if conditions else own
    if not others:
        start = own[0] if conditions else next((name for name in own if name.startswith("ratio=")), own[0])
        found = [(first, start, first, name) for name in own if name != start]
    else:
        found = [(first, name, other, name) for other, runs in others for name in own if name in runs[0][0].scores]
    if not found:
        raise ValueError(f"there is nothing to compare: of {list(systems)}, these conditions are there: {own}")
    return found


def _read(values: Sequence[str]) -> dict[tuple[str, str], dict[str, list[list[SampleAnswers]]]]:
    """(Data set, task) -> system -> the answers of each of its seeds."""
    from ..evaluation.answers_file import read_answers

    found: dict[tuple[str, str], dict[str, list[list[Any]]]] = {}
    files: dict[str, list[str]] = {}
    unnamed = set()
    for value in values:
        name, _, path = value.rpartition("=")
        if not name:
            name = Path(path).stem
            unnamed.add(name)
        files.setdefault(name, []).append(path)
        by_part: dict[tuple[str, str], list[Any]] = {}
        for sample in read_answers(path):
            by_part.setdefault((sample.dataset, sample.task), []).append(sample)
        for part, samples in by_part.items():
            found.setdefault(part, {}).setdefault(name, []).append(samples)
    for name in unnamed:
        if len(files[name]) > 1:
            raise ValueError(
                f"{' and '.join(files[name])} would all be {name!r}: give NAME=FILE, one NAME to seeds alone"
            )
    if not found:
        raise ValueError(f"{', '.join(values)} have no answers")
    in_all, partly = {}, []
    for part, systems in found.items():
        # Every seed of every system.
        if all(len(systems.get(name, ())) == len(paths) for name, paths in files.items()):
            in_all[part] = systems
        else:
            partly.append(f"{part[0]!r}, {part[1]}")
    if not in_all:
        raise ValueError(f"no data set is in all of {', '.join(values)}; some of them have {'; '.join(partly)}")
    if partly:
        print(f"left out, since not all files have it: {'; '.join(partly)}", file=sys.stderr)
    return in_all


def main_metric(systems: dict[str, list[list[SampleAnswers]]], task: str) -> str:
    """What a task is compared by: the benchmarks' own score where all samples have it."""
    from ..evaluation.benchmark_metrics import BENCHMARK_SCORE
    from ..evaluation.rows import MAIN_METRICS

    samples = [sample for runs in systems.values() for run in runs for sample in run]
    is_benchmark = all(BENCHMARK_SCORE in metrics for sample in samples for metrics in sample.scores.values())
    return BENCHMARK_SCORE if is_benchmark else MAIN_METRICS[task]


def _comparable(arguments: argparse.Namespace) -> dict[tuple[str, str], tuple[str, Any, list[tuple[str, ...]]]]:
    """(Data set, task) -> metric, systems and what is compared, of those that have the conditions and the metric."""
    found: dict[tuple[str, str], tuple[str, Any, list[Any]]] = {}
    reasons = {}
    for (dataset, task), systems in _read(arguments.answers).items():
        metric = arguments.metric or main_metric(systems, task)
        try:
            pairs = comparisons(systems, arguments.conditions)
            known = {name for runs in systems.values() for scores in runs[0][0].scores.values() for name in scores}
            if metric not in known:
                raise ValueError(f"there is no {metric!r}; allowed: {', '.join(sorted(known))}")
        except ValueError as error:
            reasons[f"{dataset!r}, {task}"] = str(error)
        else:
            found[dataset, task] = metric, systems, pairs
    if not found:
        raise ValueError("; ".join(f"{part}: {reason}" for part, reason in reasons.items()))
    for part, reason in reasons.items():
        print(f"left out: {part}: {reason}", file=sys.stderr)
    return found


def _with_interval(value: float, interval: tuple[float, float]) -> str:
    low, high = interval
    # Of one document there is none.
    return f"{value:.2f}" if math.isnan(low) else f"{value:.2f} [{low:.2f}, {high:.2f}]"


@command(
    "compare",
    "Compare conditions of an evaluation, or systems, on the very same samples: scores and their difference, with "
    "95 % bootstrap intervals over documents and seeds, and whether the first is better, worse, or it cannot be told.",
    argument(
        "answers",
        nargs="+",
        metavar="[NAME=]FILE",
        help="what `evaluate --keep-answers` wrote; files of one NAME are seeds of one system",
    ),
    argument(
        "--conditions",
        nargs="+",
        default=[],
        metavar="NAME",
        help="such as ratio=4 bm25=4: of one system the first beside the others, of several each (default: all)",
    ),
    argument("--metric", metavar="NAME", help="such as f1 (default: each task's main one)"),
    argument("--output", metavar="FILE", help="write the differences as JSON"),
    OVERWRITE,
    argument("--seed", type=seed, default=0, help="draws resamples (default: 0)"),
    argument(
        "--num-resamples",
        type=positive_int,
        default=NUM_RESAMPLES,
        metavar="N",
        help="of the bootstrap (default: %(default)s)",
    ),
    examples=_EXAMPLES,
)
def main(arguments: argparse.Namespace) -> None:
    """Run `context-compressors compare`.

    Raises:
        ValueError, OSError: see `read_answers` and `paired_difference`; no part has the conditions and the metric.
    """
    from dataclasses import asdict

    from ..evaluation.bootstrap import is_lower_better
    from ..evaluation.paired import paired_difference
    from ..evaluation.rows import plain_json
    from ..reporting.result_files import write_results
    from ..reporting.tables import markdown_table

    check_outputs((arguments.output,), arguments.overwrite)
    rows, results = [], []
    for (dataset, task), (metric, systems, pairs) in _comparable(arguments).items():
        for first, condition, second, other in pairs:
            found = paired_difference(
                systems[first], systems[second], metric, condition, other, arguments.num_resamples, arguments.seed
            )
            names = (first, second) if first != second else ("", "")
            sides = [f"{name} {kind}".strip() for name, kind in zip(names, (condition, other), strict=True)]
            seeds = [" and ".join(map(str, found.num_seeds))]
            counts = [found.num_samples, found.num_documents, *(seeds if max(found.num_seeds) > 1 else ["1"])]
            scores = [
                _with_interval(found.first, found.first_interval),
                _with_interval(found.second, found.second_interval),
                _with_interval(found.difference, found.interval),
            ]
            title = f"{metric}, nats a token" if is_lower_better(metric) else metric
            rows.append([dataset, title, *sides, *counts, *scores, found.verdict])
            parts = {"dataset": dataset, "task": task, "systems": [first, second], "conditions": [condition, other]}
            results.append({**parts, **asdict(found), "verdict": found.verdict})
    header = ["data set", "metric", "first", "second", "samples", "documents", "seeds", "first scores"]
    print(markdown_table([*header, "second scores", "difference", "first is"], rows))
    if arguments.output:
        print(f"wrote {write_results(plain_json({'differences': results}), arguments.output)}")
