# SPDX-License-Identifier: Apache-2.0
"""The result file of the small-scale benchmark: reading it, its summary over seeds, and the tables.

python benchmarks/small_scale_results.py                       # what all models reach at ratio 4
python benchmarks/small_scale_results.py --ratio 5 --data-sets squad
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmark_tools import RESULTS, positive_int

from context_compressors.evaluation.report import FULL_CONTEXT, markdown_table, ratio_condition

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
    names = dict.fromkeys([*known, *budget])
    changed = {name: (known.get(name), budget.get(name)) for name in names if known.get(name) != budget.get(name)}
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
    columns = _columns(summary)
    for row in summary:
        ratios = " ".join(map(str, row["ratios"]))
        compressed = row["condition"] in [ratio_condition(ratio) for ratio in row["ratios"]]
        bound = "base" if row["prompts"] is None else f"base, {row['prompts']} prompts"
        name = f"{row['name']}, trained at {ratios}" if compressed else bound
        cells = _cells(row["scores"], not compressed, columns)
        rows.setdefault(
            (row["dataset"], name, row["condition"]),
            [row["dataset"], name, row["condition"], len(row["seeds"]), *cells],
        )
    order = list(dict.fromkeys(row["dataset"] for row in summary))
    header = ["data set", "model", "context", "seeds", *(title for *_, title in columns)]
    return markdown_table(
        header, sorted(rows.values(), key=lambda cells: (order.index(cells[0]), not cells[1].startswith("base")))
    )


def ratio_table(summary: Sequence[Mapping[str, Any]], dataset: str, ratio: int) -> str:
    """What every model that has a ratio reaches there on one data set, the best restoration first, under the bounds.

    Args:
        summary: as in a result file.
        dataset: its name.
        ratio: the compression ratio.

    Raises:
        ValueError: no model has scores there.
    """
    rows = [row for row in summary if row["dataset"] == dataset]
    rows = [row for row in rows if "reconstruction/loss" in row["scores"]]
    compressed = [row for row in rows if row["condition"] == ratio_condition(ratio)]
    if not compressed:
        raise ValueError(f"no run has scores on {dataset!r} at ratio {ratio}")
    # Prompts decide what the bounds are asked: they stand once for each kind.
    found = sorted((row for row in rows if row["condition"].endswith("_context")), key=lambda row: len(row["seeds"]))
    bounds = {(row["condition"], row["prompts"]): row for row in found}
    compressed.sort(key=lambda row: row["scores"]["reconstruction/loss"]["mean"])
    body, columns = [], _columns(summary)
    order = sorted(bounds, key=lambda bound: (bound[1] or "", bound[0] == FULL_CONTEXT))
    for row in [*(bounds[bound] for bound in order), *compressed]:
        is_bound = row["condition"].endswith("_context")
        name = row["condition"].replace("_", " ") if is_bound else row["name"]
        if is_bound and row["prompts"] is not None:
            name = f"{name}, {row['prompts']} prompts"
        trained = "-" if is_bound else " ".join(map(str, row["ratios"]))
        body.append([name, trained, len(row["seeds"]), *_cells(row["scores"], is_bound, columns)])
    return markdown_table(["model", "trained at", "seeds", *(title for *_, title in columns)], body)


def _columns(summary: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """All columns but what no run of a file was scored on: earlier files have nothing saved by context."""
    saved = ("continuation", "saved_by_context")
    has_saved = any("/".join(saved) in row["scores"] for row in summary)
    return [column for column in COLUMNS if has_saved or column[:2] != saved]


def _cells(
    scores: Mapping[str, Mapping[str, float | None]], is_bound: bool, columns: Sequence[tuple[str, str, str]]
) -> list[str]:
    cells = []
    for task, metric, _ in columns:
        score = scores.get(f"{task}/{metric}")
        # Of a nat, and so of what a context saves, a hundredth is much.
        digits = 3 if metric == "saved_by_context" else 2
        spread = "" if score is None or score["std"] is None or is_bound else f" ± {score['std']:.{digits}f}"
        cells.append("-" if score is None else f"{score['mean']:.{digits}f}{spread}")
    return cells


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--results", default=str(RESULTS / "small_scale.json"), metavar="FILE", help="the result file")
    add("--ratio", type=positive_int, default=4, metavar="R", help="default: 4")
    add("--data-sets", nargs="+", metavar="NAME", help="default: all of the file")
    arguments = parser.parse_args(argv)
    summary = json.loads(Path(arguments.results).read_text(encoding="utf-8"))["summary"]
    for dataset in arguments.data_sets or dict.fromkeys(row["dataset"] for row in summary):
        print(f"{dataset}, ratio {arguments.ratio}\n\n{ratio_table(summary, dataset, arguments.ratio)}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
