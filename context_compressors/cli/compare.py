# SPDX-License-Identifier: Apache-2.0
"""`context-compressors compare [NAME=]ANSWERS ...`."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .command import OVERWRITE, argument, check_outputs, command

if TYPE_CHECKING:
    from ..evaluation.rows import SampleAnswers

# Name of a system -> the answers of each of its seeds, of one data set and task.
Systems = dict[str, list[list["SampleAnswers"]]]

_EXAMPLES = """
context-compressors compare answers.jsonl --conditions ratio=4 cut=4 bm25=4 full_context

# Two checkpoints at every ratio that both have; three seeds of the first one, two of the second:
context-compressors compare ours=a0.jsonl ours=a1.jsonl ours=a2.jsonl theirs=b0.jsonl theirs=b1.jsonl
"""


def comparisons(systems: Systems, conditions: Sequence[str], metric: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield what is compared, as (first system, its condition, second system, its condition).

    The first condition of one system is compared with its others; the first of several systems is compared with each
    other one, condition by condition.
    """
    (first, runs), *others = systems.items()
    scores = runs[0][0].scores
    names = [name for name in conditions or scores if metric in scores.get(name, ())]
    if others:
        for other, other_runs in others:
            yield from ((first, name, other, name) for name in names if name in other_runs[0][0].scores)
    elif names:
        start = names[0] if conditions else next((name for name in names if name.startswith("ratio=")), names[0])
        yield from ((first, start, first, name) for name in names if name != start)


def _read(values: Sequence[str]) -> dict[tuple[str, str], Systems]:
    """(Data set, task) -> systems, of those that are in all files."""
    from ..evaluation.rows import read_answers

    parts: dict[tuple[str, str], Systems] = {}
    files: dict[str, int] = {}
    for value in values:
        name, _, path = value.rpartition("=")
        if not name and (name := Path(path).stem) in files:
            raise ValueError(f"two files would be {name!r}: give NAME=FILE, one NAME to seeds alone")
        files[name] = files.get(name, 0) + 1
        by_part: dict[tuple[str, str], list[SampleAnswers]] = {}
        for sample in read_answers(path):
            by_part.setdefault((sample.dataset, sample.task), []).append(sample)
        for part, samples in by_part.items():
            parts.setdefault(part, {}).setdefault(name, []).append(samples)
    in_all = {part: s for part, s in parts.items() if {name: len(runs) for name, runs in s.items()} == files}
    if partly := [f"{dataset!r}, {task}" for dataset, task in parts if (dataset, task) not in in_all]:
        print(f"left out, since not all files have it: {'; '.join(partly)}", file=sys.stderr)
    return in_all


def main_metric(systems: Systems, task: str) -> str:
    """Return the metric that a task is compared by: the benchmarks' own score where all samples have it."""
    from ..evaluation.rows import BENCHMARK_SCORE, MAIN_METRICS

    samples = [sample for runs in systems.values() for run in runs for sample in run]
    is_benchmark = all(BENCHMARK_SCORE in metrics for sample in samples for metrics in sample.scores.values())
    return BENCHMARK_SCORE if is_benchmark else MAIN_METRICS[task]


def _with_interval(value: float, interval: tuple[float, float]) -> str:
    low, high = interval
    # Of one document there is none.
    return f"{value:.2f}" if math.isnan(low) else f"{value:.2f} [{low:.2f}, {high:.2f}]"


@command(
    "compare",
    "Compare conditions of an evaluation, or systems, on the very same samples: scores and their difference, with "
    "95 % bootstrap intervals over documents and seeds, and whether the first is better, worse, or inconclusive.",
    argument("answers", nargs="+", metavar="[NAME=]FILE", help="of `evaluate --keep-answers`; one NAME is one system"),
    argument("--conditions", nargs="+", default=[], metavar="NAME", help="such as ratio=4 bm25=4 (default: all)"),
    argument("--output", metavar="FILE", help="write the differences as JSON"),
    OVERWRITE,
    examples=_EXAMPLES,
)
def compare(arguments: argparse.Namespace) -> None:
    """Run `context-compressors compare`."""
    from dataclasses import asdict

    from ..evaluation.bootstrap import is_lower_better, paired_difference
    from ..evaluation.rows import plain_json
    from ..reporting.result_files import write_results
    from ..reporting.tables import markdown_table

    check_outputs((arguments.output,), arguments.overwrite)
    rows, results, known = [], [], set()
    for (dataset, task), systems in _read(arguments.answers).items():
        known |= {condition for runs in systems.values() for condition in runs[0][0].scores}
        metric = main_metric(systems, task)
        for first, condition, second, other in comparisons(systems, arguments.conditions, metric):
            pair = paired_difference(systems[first], systems[second], metric, condition, other)
            names = (first, second) if first != second else ("", "")
            sides = [f"{name} {kind}".strip() for name, kind in zip(names, (condition, other), strict=True)]
            seeds = " and ".join(map(str, pair.num_seeds)) if max(pair.num_seeds) > 1 else "1"
            scores = [
                _with_interval(pair.first, pair.first_interval),
                _with_interval(pair.second, pair.second_interval),
                _with_interval(pair.difference, pair.interval),
            ]
            title = f"{metric}, nats a token" if is_lower_better(metric) else metric
            rows.append([dataset, title, *sides, pair.num_samples, pair.num_documents, seeds, *scores, pair.verdict])
            parts = {"dataset": dataset, "task": task, "systems": [first, second], "conditions": [condition, other]}
            results.append({**parts, **asdict(pair), "verdict": pair.verdict})
    if not rows or set(arguments.conditions) - known:
        raise ValueError(f"nothing to compare, or not all; the files have the conditions {sorted(known)}")
    header = ["data set", "metric", "first", "second", "samples", "documents", "seeds", "first scores"]
    print(markdown_table([*header, "second scores", "difference", "first is"], rows))
    if arguments.output:
        print(f"wrote {write_results(plain_json({'differences': results}), arguments.output)}")
