# SPDX-License-Identifier: Apache-2.0
"""The result file of the small-scale benchmark: reading it, its summary over seeds, and the table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from context_compressors.evaluation.report import markdown_table, ratio_condition

COLUMNS = (
    ("reconstruction", "tokens_per_slot", "tokens per slot"),
    ("reconstruction", "bleu", "BLEU"),
    ("reconstruction", "loss", "loss"),
    ("reconstruction", "token_accuracy", "token accuracy"),
    ("continuation", "perplexity", "perplexity"),
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


def read_results(path: Path, budget: Mapping[str, Any]) -> dict[str, Any]:
    """The result file, or an empty one.

    Raises:
        ValueError: it is no result file of this benchmark, or its runs had another budget.
    """
    if not path.is_file():
        return {"format_version": 1, "benchmark": "small_scale", "budget": dict(budget), "runs": [], "summary": []}
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        known = results["budget"]
        finished = [run_key(run) for run in results["runs"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a result file of this benchmark: {error!r}") from error
    changed = {name: (known.get(name), value) for name, value in budget.items() if known.get(name) != value}
    if finished and changed:
        raise ValueError(
            f"{path} has runs of another budget, (there, now): {changed}; name another file with --output"
        )
    return {**results, "budget": dict(budget)}


def summarize(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for each method with its settings, ratios, condition and data set: mean and deviation over the seeds."""
    groups: dict[tuple[Any, ...], dict[str, dict[int, float]]] = {}
    for run in runs:
        for row in run["rows"]:
            key = (run["name"], run["prompts"], tuple(run["ratios"]), row["dataset"], row["condition"])
            for metric, value in row["metrics"].items():
                groups.setdefault(key, {}).setdefault(f"{row['task']}/{metric}", {})[run["seed"]] = value
    summary = []
    for (name, prompts, ratios, dataset, condition), metrics in groups.items():
        scores = {}
        for metric, by_seed in metrics.items():
            values = [value for value in by_seed.values() if value is not None]
            if values:
                scores[metric] = {"mean": fmean(values), "std": stdev(values) if len(values) > 1 else None}
        seeds = sorted({seed for by_seed in metrics.values() for seed in by_seed})
        summary.append(
            {
                "name": name,
                "prompts": prompts,
                "ratios": list(ratios),
                "dataset": dataset,
                "condition": condition,
                "seeds": seeds,
                "scores": scores,
            }
        )
    return summary


def table(summary: Sequence[Mapping[str, Any]]) -> str:
    """The summary as Markdown; the bounds, which no training changes, stand once for each kind of prompts."""
    rows: dict[tuple[str, ...], list[Any]] = {}
    for row in summary:
        ratios = " ".join(map(str, row["ratios"]))
        compressed = row["condition"] in [ratio_condition(ratio) for ratio in row["ratios"]]
        bound = "base" if row["prompts"] is None else f"base, {row['prompts']} prompts"
        name = f"{row['name']}, trained at {ratios}" if compressed else bound
        cells = []
        for task, metric, _ in COLUMNS:
            score = row["scores"].get(f"{task}/{metric}")
            spread = "" if score is None or score["std"] is None or not compressed else f" ± {score['std']:.2f}"
            cells.append("-" if score is None else f"{score['mean']:.2f}{spread}")
        rows.setdefault(
            (row["dataset"], name, row["condition"]),
            [row["dataset"], name, row["condition"], len(row["seeds"]), *cells],
        )
    order = list(dict.fromkeys(row["dataset"] for row in summary))
    header = ["data set", "model", "context", "seeds", *(title for *_, title in COLUMNS)]
    return markdown_table(
        header, sorted(rows.values(), key=lambda cells: (order.index(cells[0]), not cells[1].startswith("base")))
    )
