# SPDX-License-Identifier: Apache-2.0
"""The result file of the small-scale benchmark: reading it, its summary over seeds, and the tables.

python -m benchmarks.small_scale.results                       # what all models reach at ratio 4
python -m benchmarks.small_scale.results --ratio 5 --data-sets squad
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.runs import cell, mean_and_std
from benchmarks.common.tools import positive_int
from benchmarks.small_scale.arguments import RESULTS
from context_compressors.evaluation.rows import ratio_condition
from context_compressors.reporting.tables import markdown_table

# What the bounds of the packaged prompts stand under in a result file.
DEFAULT_PROMPTS = "default"
COLUMNS = (
    ("reconstruction", "tokens_per_slot", "tokens per slot"),
    ("reconstruction", "bleu", "BLEU"),
    ("reconstruction", "loss", "loss"),
    ("reconstruction", "token_accuracy", "token accuracy"),
    ("continuation", "perplexity", "perplexity"),
    ("continuation", "saved_by_context", "saved by context (nats)"),
    ("question_answering", "exact_match", "EM"),
    ("question_answering", "f1", "F1"),
)


def run_name(method: str, config: Mapping[str, Any]) -> str:
    """Name of a run's row: the method and the settings it was given, such as "icae, position_layout=uniform"."""
    values = {name: value if isinstance(value, str) else json.dumps(value) for name, value in sorted(config.items())}
    return ", ".join([method, *(f"{name}={value}" for name, value in values.items())])


def run_key(run: Mapping[str, Any]) -> tuple[str, tuple[int, ...], int]:
    """What a run is known by: its name, which tells method and settings, ratios and seed."""
    return run["name"], tuple(run["ratios"]), run["seed"]


def summarize(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row for each method with its settings, ratios, condition and data set: mean and deviation over the seeds.

    In front of them stand the bounds, for each kind of prompts: no training changes them, and they have no seeds.
    """
    groups: dict[tuple[Any, ...], tuple[list[int], dict[str, list[float | None]]]] = {}

    def collect(key: tuple[Any, ...], scores: Mapping[str, Any], seed: int | None = None) -> None:
        for dataset, tasks in scores.items():
            for task, conditions in tasks.items():
                for condition, metrics in conditions.items():
                    seeds, values = groups.setdefault((*key, dataset, condition), ([], {}))
                    if seed is not None and seed not in seeds:
                        seeds.append(seed)
                    for metric, value in metrics.items():
                        values.setdefault(f"{task}/{metric}", []).append(value)
                    if "perplexity" in metrics:
                        perplexity = metrics["perplexity"]
                        loss = None if perplexity is None else math.log(perplexity)
                        values.setdefault(f"{task}/loss", []).append(loss)

    for prompts, scores in results["bounds"].items():
        collect((None, None if prompts == DEFAULT_PROMPTS else prompts, ()), scores)
    for run in results["runs"]:
        collect((run["name"], run["prompts"], tuple(run["ratios"])), run["scores"], run["seed"])
    summary = []
    for (name, prompts, ratios, dataset, condition), (seeds, values) in groups.items():
        known = {metric: [value for value in found if value is not None] for metric, found in values.items()}
        row = {"name": name, "prompts": prompts, "ratios": list(ratios), "dataset": dataset, "condition": condition}
        scores = {metric: mean_and_std(found) for metric, found in known.items() if found}
        summary.append({**row, "seeds": sorted(seeds), "scores": scores})
    return summary


def table(results: Mapping[str, Any]) -> str:
    """The summary as Markdown, the bounds of a data set first."""
    summary = summarize(results)
    columns = _columns(summary)
    rows = []
    for row in summary:
        cells = [row["dataset"], *_names(row), row["condition"], len(row["seeds"]) or "-"]
        rows.append([*cells, *_cells(row["scores"], columns)])
    order = list(dict.fromkeys(row["dataset"] for row in summary))
    rows.sort(key=lambda cells: order.index(cells[0]))
    header = ["data set", "model", "trained at", "context", "seeds", *(title for *_, title in columns)]
    return markdown_table(header, rows)


def ratio_table(summary: Sequence[Mapping[str, Any]], dataset: str, ratio: int) -> str:
    """What every model that has a ratio reaches there on one data set, the best restoration first, under the bounds.

    Args:
        summary: of a result file.
        dataset: its name.
        ratio: the compression ratio.

    Raises:
        ValueError: no model has scores there.
    """
    rows = [row for row in summary if row["dataset"] == dataset and "reconstruction/loss" in row["scores"]]
    bounds = sorted((row for row in rows if row["name"] is None), key=lambda row: row["prompts"] or "")
    compressed = [row for row in rows if row["condition"] == ratio_condition(ratio)]
    if not compressed:
        raise ValueError(f"no run has scores on {dataset!r} at ratio {ratio}")
    compressed.sort(key=lambda row: row["scores"]["reconstruction/loss"]["mean"])
    columns = _columns(summary)
    body = [
        [*_names(row), len(row["seeds"]) or "-", *_cells(row["scores"], columns)] for row in [*bounds, *compressed]
    ]
    return markdown_table(["model", "trained at", "seeds", *(title for *_, title in columns)], body)


def _names(row: Mapping[str, Any]) -> tuple[str, str]:
    """What a row's model is called, and the ratios that it was trained at."""
    if row["name"] is not None:
        return row["name"], " ".join(map(str, row["ratios"]))
    # Prompts decide what the bounds are asked.
    name = row["condition"].replace("_", " ")
    return name if row["prompts"] is None else f"{name}, {row['prompts']} prompts", "-"


def _columns(summary: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """All columns but what no run of a file was scored on: earlier files have nothing saved by context."""
    saved = ("continuation", "saved_by_context")
    has_saved = any("/".join(saved) in row["scores"] for row in summary)
    return [column for column in COLUMNS if has_saved or column[:2] != saved]


def _cells(scores: Mapping[str, Mapping[str, float | None]], columns: Sequence[tuple[str, str, str]]) -> list[str]:
    # Of a nat, and so of what a context saves, a hundredth is much.
    return [
        cell(scores.get(f"{task}/{metric}"), 3 if metric == "saved_by_context" else 2, "-")
        for task, metric, _ in columns
    ]


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--results", default=str(RESULTS), metavar="FILE", help="the result file")
    add("--ratio", type=positive_int, default=4, metavar="R", help="default: 4")
    add("--data-sets", nargs="+", metavar="NAME", help="default: all of the file")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables; returns the exit status."""
    arguments = build_parser().parse_args(argv)
    summary = summarize(json.loads(Path(arguments.results).read_text(encoding="utf-8")))
    for dataset in arguments.data_sets or dict.fromkeys(row["dataset"] for row in summary):
        print(f"{dataset}, ratio {arguments.ratio}\n\n{ratio_table(summary, dataset, arguments.ratio)}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
