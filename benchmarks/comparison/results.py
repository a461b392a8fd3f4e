# SPDX-License-Identifier: Apache-2.0
"""From the answers of all systems to the comparison's one result file: scores, intervals, costs and orderings."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from benchmarks.comparison.peers import lines_of
from benchmarks.comparison.plan import read_json, summary
from context_compressors.configuration.methods import config_class
from context_compressors.evaluation.answers_file import read_answers
from context_compressors.evaluation.bootstrap import percentile_interval
from context_compressors.evaluation.metrics import rouge_scores, squad_scores, substring_accuracy
from context_compressors.evaluation.paired import resampled_means
from context_compressors.evaluation.rows import FULL_CONTEXT, NO_CONTEXT
from context_compressors.reporting.environment import environment

METRICS = {
    "question_answering": ("f1", "exact_match", "substring_accuracy"),
    "summarisation": ("rougeL",),
    "reconstruction": ("token_accuracy",),
}
_SETTINGS = ("base", "size", "ratios", "budget", "sets", "context_tokens", "max_new_tokens")
# As `evaluate` calls them.
_KEPT = ("slots", "memory_bytes")
_OF_BASE = re.compile(r"(^|\.)(language_model|encoder_model|lm_head)\.")
HOLDS, FAILS, OPEN, NOT_RUN = "holds", "does not", "cannot be told", "not run"
# System -> ratio -> set -> question's id -> metric -> its score with each seed; of the two bounds the ratio is 0 or 1.
Scores = dict[str, dict[int, dict[str, dict[str, dict[str, list[float]]]]]]


def gather(comparison: Any) -> dict[str, Any]:
    """The result file's content: what has been answered here, and of other systems what is published.

    Args:
        comparison: a `plan.Comparison`.
    """
    table, questions, published = comparison.table, _questions(comparison), comparison.published
    scores: Scores = {}
    costs: dict[tuple[str, int], dict[str, float]] = {}
    family = [*table["family"], *table["rounded"]]
    for name in family:
        _add_family(comparison, name, questions, scores, costs)
    for name in table["peers"]:
        _add_peer(comparison, name, questions, scores, costs)
    _add_seconds(comparison, costs)
    _add_restored(comparison, scores)
    kept = _kept(published, scores)
    for name, of_system in kept.items():
        scores[name] = _by_question(of_system, questions)
    rows = []
    for name in [*family, *table["peers"]]:
        if name in kept:
            rows += kept[name]
        elif name in scores:
            rows += _rows(name, scores, costs, questions, table, comparison.arguments.dtype)
    trained = {
        name: published["family"].get(name) if name in kept else _training(comparison, name)
        for name in table["family"]
    }
    carriers = {
        name: published["carriers"].get(name) if name in kept else _carrier(comparison, name) for name in family
    }
    given = scores, questions, table, _differences(published, kept)
    return {
        "format_version": 1,
        "benchmark": "comparison",
        "settings": {name: table[name] for name in _SETTINGS},
        "reader": comparison.reader_name,
        "budget": read_json(comparison.questions / "budget.json"),
        "environment": environment(),
        "family": {name: found for name, found in trained.items() if found},
        "carriers": {name: carrier for name, carrier in carriers.items() if carrier},
        "rows": rows,
        "against_embeddings": _against_embeddings(rows, carriers, *given),
        # And of every method whether it is better than cutting the text.
        "orderings": [
            _ordering(pair, *given)
            for pair in [*table["orderings"], *([name, "cut"] for name in table["family"] if name in scores)]
        ],
    }


def _kept(published: Mapping[str, Any], scores: Scores) -> dict[str, list[dict[str, Any]]]:
    """The published rows of systems that have not answered all of it here."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in published.get("rows", []):
        found.setdefault(row["system"], []).append(row)
    return {
        name: rows
        for name, rows in found.items()
        if any(
            len(scores.get(name, {}).get(row["ratio"], {}).get(row["set"], {})) < row["num_questions"]
            for row in rows
            if row["set"] != "mean"
        )
    }


def _by_question(
    rows: Sequence[Mapping[str, Any]], questions: Mapping[str, Any]
) -> dict[int, dict[str, dict[str, dict[str, list[float]]]]]:
    """The main scores of a system's published rows, which differences are made of."""
    found: dict[int, dict[str, dict[str, dict[str, list[float]]]]] = {}
    for row in rows:
        of_seeds = row.get("by_question", [])
        for (id_, question), *values in zip(questions[row["set"]].items(), *of_seeds, strict=True) if of_seeds else ():
            if None not in values:
                of_set = found.setdefault(row["ratio"], {}).setdefault(row["set"], {})
                of_set[id_] = {METRICS[question["task"]][0]: values}
    return found


def _differences(published: Mapping[str, Any], kept: Mapping[str, Any]) -> dict[Any, dict[str, Any]]:
    """Differences between two systems that are both published, also where their scores by question are not."""
    found = {}
    for entry in published.get("orderings", []):
        for at in entry["ratios"]:
            found[(entry["first"], at["ratio"]), (entry["second"], at["second_ratio"])] = at
    for entry in published.get("against_embeddings", []):
        for side in ("positions", "fewer", "more"):
            if at := entry.get(side):
                found[(entry["system"], entry["ratio"]), (at["system"], at["ratio"])] = at
    names = ("difference", "interval", "num_questions", "verdict")
    return {
        pair: {name: at[name] for name in names}
        for pair, at in found.items()
        if "difference" in at and all(system in kept for system, _ in pair)
    }


def _questions(comparison: Any) -> dict[str, dict[str, dict[str, Any]]]:
    """Set -> id -> the question, with its document: questions about one are drawn together."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name, entry in comparison.table["sets"].items():
        is_window = entry["task"] == "reconstruction"
        found[name] = {
            line["id"]: {**line, "document": line["id"].rpartition("#")[0] if is_window else line["context"]}
            for line in lines_of(comparison.questions / f"{name}.jsonl")
        }
    return found


def _add_family(comparison: Any, name: str, questions: Any, scores: Scores, costs: Any) -> None:
    """Scores of a trained system with all seeds that have answered, and what it costs."""
    sets, seeds = averaged_sets(comparison.table), comparison.arguments.seeds
    for task in METRICS:
        for report in (report for seed in seeds for report in comparison.reports(name, seed, task)):
            file = report.with_suffix(".jsonl")
            for sample in read_answers(file) if file.is_file() else ():
                for condition, metrics in sample.scores.items():
                    _note(scores, name, int(condition.partition("=")[2]), sample.dataset, sample.id, metrics)
    reports = comparison.reports(name, seeds[0], "question_answering")
    rows = [row for report in reports for row in read_json(report).get("rows", []) if row["dataset"] in sets]
    for ratio in scores.get(name, {}):
        # Of documents, and so are the tokens.
        found = [row["costs"] for row in rows if row["condition"] == f"ratio={ratio}"]
        if len(found) == len(sets):
            tokens = [
                fmean({entry["document"]: len(entry["context_ids"]) for entry in questions[title].values()}.values())
                for title in sets
            ]
            costs[name, ratio] = _costs(*(fmean(cost[kind] for cost in found) for kind in _KEPT), fmean(tokens))


def _costs(kept_positions: float, memory_bytes: float, tokens: float) -> dict[str, float]:
    return {
        "kept_positions": kept_positions,
        "memory_bytes": memory_bytes,
        "bytes_per_context_token": memory_bytes / tokens,
    }


def _note(scores: Scores, name: str, ratio: int, title: str, question: str, metrics: Mapping[str, float]) -> None:
    """Add what a question scored with one seed."""
    of_question = scores.setdefault(name, {}).setdefault(ratio, {}).setdefault(title, {}).setdefault(question, {})
    for metric, value in metrics.items():
        of_question.setdefault(metric, []).append(value)


def averaged_sets(table: Mapping[str, Any]) -> list[str]:
    """The sets of questions that all systems answer, over which F1 is averaged."""
    return [
        title
        for title, entry in table["sets"].items()
        if entry["task"] == "question_answering" and entry.get("trained", True)
    ]


def _add_peer(comparison: Any, name: str, questions: Any, scores: Scores, costs: Any) -> None:
    """Scores and costs of a system that is not trained."""
    lines = list(lines_of(comparison.answers(name)))
    for line in lines:
        question = questions[line["set"]][line["id"]]
        found = score(question["task"], line["answer"], question["references"])
        _note(scores, name, line["ratio"], line["set"], line["id"], found)
    for ratio in scores.get(name, {}):
        mine = [line for line in lines if line["ratio"] == ratio and line["set"] in averaged_sets(comparison.table)]
        if not mine:
            continue
        asked = [questions[line["set"]][line["id"]] for line in mine]
        # What picks by the question needs the whole text again for the next one.
        is_aware = comparison.entry(name).get("aware", False)
        stored = [
            len(question["context"].encode()) if is_aware else line["memory_bytes"]
            for question, line in zip(asked, mine, strict=True)
        ]
        positions = fmean(line["kept_positions"] for line in mine)
        costs[name, ratio] = _costs(positions, fmean(stored), fmean(len(entry["context_ids"]) for entry in asked))


def _add_seconds(comparison: Any, costs: Any) -> None:
    """Medians of what was timed."""
    for (name, ratio), found in costs.items():
        lines = [line for line in lines_of(comparison.times(name)) if line["ratio"] == ratio]
        for kind in ("compress_seconds", "answer_seconds") if lines else ():
            found[kind] = median(line[kind] for line in lines)


def score(task: str, answer: str, references: Sequence[str]) -> dict[str, float]:
    """A written answer's own scores, as `evaluate` has them."""
    if task == "summarisation":
        return rouge_scores([answer], [references])
    return {**squad_scores([answer], [references]), "substring_accuracy": substring_accuracy([answer], [references])}


def _add_restored(comparison: Any, scores: Scores) -> None:
    file = comparison.peers / "restored.jsonl"
    for sample in read_answers(file) if file.is_file() else ():
        for name, ratio in ((NO_CONTEXT, 0), (FULL_CONTEXT, 1)):
            _note(scores, name, ratio, sample.dataset, sample.id, sample.scores[name])


def _training(comparison: Any, name: str) -> dict[str, Any]:
    """What a system was trained with: its trials, the chosen rate, and the runs of all seeds."""
    folders = {f"{rate:g}": folder for rate, folder in comparison.trials(name).items()}
    trials = {
        rate: trial["eval_loss"] for rate, folder in folders.items() if (trial := read_json(folder / "trial.json"))
    }
    seeds = comparison.arguments.seeds
    runs = [found for seed in seeds if (found := summary(comparison.checkpoint(name, seed)))]
    # Scorers that are fitted have no trials.
    if not (runs and trials):
        return {}
    return {
        "trials": trials,
        "learning_rate": float(min(trials, key=lambda rate: trials[rate])),
        "seeds": len(runs),
        "trainable_parameters": num_trained(comparison.checkpoint(name, seeds[0]) / "model.safetensors"),
        **runs[0],
    }


def _carrier(comparison: Any, name: str) -> str | None:
    """What a system's memories consist of, embeddings or key_values, if it has a checkpoint."""
    method = read_json(comparison.checkpoint(name, comparison.arguments.seeds[0]) / "config.json").get("model_type")
    return config_class(method.removesuffix("_compressor")).carrier if method else None


def num_trained(path: Path) -> int:
    """Parameters in a checkpoint's file that were trained: adapters and the method's parts."""
    with path.open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    header.pop("__metadata__", None)
    trained = [entry for name, entry in header.items() if "lora_" in name or not _OF_BASE.search(name)]
    return sum(math.prod(entry["shape"]) for entry in trained)


def _rows(
    name: str, scores: Scores, costs: Any, questions: Any, table: Mapping[str, Any], dtype: str
) -> list[dict[str, Any]]:
    """A row for each ratio and set, and one for the mean over the sets of questions."""
    rows = []
    for ratio in sorted(scores[name]):
        sets, resamples = scores[name][ratio], {}
        for number, title in enumerate(table["sets"]):
            if not sets.get(title):
                continue
            row, resamples[title] = _row(name, ratio, title, scores, questions[title], number)
            rows.append(row)
        parts = [title for title in averaged_sets(table) if title in resamples]
        if len(parts) == len(averaged_sets(table)):
            of_parts = [row for row in rows if row["ratio"] == ratio and row["set"] in parts]
            names = [metric for metric in of_parts[0]["scores"] if all(metric in row["scores"] for row in of_parts)]
            means = {metric: np.mean([resamples[title][metric] for title in parts], axis=0) for metric in names}
            rows.append(
                {
                    "system": name,
                    "ratio": ratio,
                    "set": "mean",
                    "scores": {metric: fmean(row["scores"][metric] for row in of_parts) for metric in names},
                    "intervals": {metric: percentile_interval(mean) for metric, mean in means.items()},
                    "costs": costs.get((name, ratio), {}),
                    "num_questions": sum(row["num_questions"] for row in of_parts),
                    "num_documents": sum(row["num_documents"] for row in of_parts),
                }
            )
    return _plain([{**row, "dtype": dtype} for row in rows])


def _row(
    name: str, ratio: int, title: str, scores: Scores, questions: Mapping[str, Any], seed: int
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Scores of a system on one set with their intervals, and the resampled scores behind these."""
    answered = scores[name][ratio][title]
    ids = _whole(questions, answered)
    documents = [questions[id_]["document"] for id_ in ids]
    main, *others = METRICS[questions[ids[0]]["task"]]
    values = {metric: _values(answered, ids, metric) for metric in (main, *others)}
    means = {metric: float(value.mean()) for metric, value in values.items()}
    resampled = dict(zip(values, resampled_means(list(values.values()), documents, seed=seed), strict=True))
    bounds = [
        scores.get(bound, {}).get(place, {}).get(title, {}) for bound, place in ((NO_CONTEXT, 0), (FULL_CONTEXT, 1))
    ]
    if name not in (NO_CONTEXT, FULL_CONTEXT) and all(id_ in bound for id_ in ids for bound in bounds):
        of_bounds = [_values(bound, ids, main) for bound in bounds]
        means["retention"] = _retention(means[main], *(float(value.mean()) for value in of_bounds))
        # The same seed draws the same documents.
        triple = resampled_means([values[main], *of_bounds], documents, seed=seed)
        resampled["retention"] = np.array(_retention(*triple))
    row = {
        "system": name,
        "ratio": ratio,
        "set": title,
        "scores": means,
        "intervals": {metric: percentile_interval(resampled[metric]) for metric in means},
        "num_questions": len(ids),
        "num_documents": len(set(documents)),
        # Of each seed, in the order of the set's questions, which are the same wherever they are drawn.
        "by_question": [
            [answered[id_][main][seed] if id_ in set(ids) else None for id_ in questions]
            for seed in range(len(values[main]))
        ],
    }
    return row, resampled


def _whole(questions: Mapping[str, Any], *answered: Mapping[str, Mapping[str, list[float]]]) -> list[str]:
    """The questions that all systems have answered, with all of their seeds."""
    ids = [id_ for id_ in questions if all(id_ in of_system for of_system in answered)]
    seeds = [max((len(next(iter(of_system[id_].values()))) for id_ in ids), default=0) for of_system in answered]
    return [id_ for id_ in ids if [len(next(iter(of_system[id_].values()))) for of_system in answered] == seeds]


def _values(answered: Mapping[str, Mapping[str, list[float]]], ids: Sequence[str], metric: str) -> np.ndarray:
    """Scores `(num_seeds, num_questions)`."""
    return np.array([answered[id_][metric] for id_ in ids]).T


def _retention(score: Any, none: Any, full: Any) -> Any:
    """(score - none) / (full - none), in percent."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return 100 * np.subtract(score, none) / np.subtract(full, none)


def _ordering(
    pair: Sequence[str], scores: Scores, questions: Any, table: Mapping[str, Any], published: Mapping[Any, Any]
) -> dict[str, Any]:
    """Whether the first system's F1 is above the second's, at each ratio, or at those that the names end in ("=4")."""
    (first, _, ratio), (second, _, other) = (side.partition("=") for side in pair)
    ratios = [(int(ratio), int(other))] if ratio else [(ratio, ratio) for ratio in table["ratios"]]
    found = [
        {
            "ratio": one,
            "second_ratio": two,
            **_paired((first, one), (second, two), scores, questions, table, published),
        }
        for one, two in ratios
    ]
    return {"first": first, "second": second, "ratios": found}


def _paired(
    first: tuple[str, int],
    second: tuple[str, int],
    scores: Scores,
    questions: Any,
    table: Mapping[str, Any],
    published: Mapping[Any, dict[str, Any]],
) -> dict[str, Any]:
    """How much a system's F1 at a ratio is above another's: the mean over sets of paired differences."""
    mine, theirs = (scores.get(name, {}).get(ratio, {}) for name, ratio in (first, second))
    differences, resamples, num_questions = [], [], 0
    for number, title in enumerate(averaged_sets(table)):
        ids = _whole(questions[title], mine.get(title, {}), theirs.get(title, {}))
        if not ids:
            return published.get((first, second), {"verdict": NOT_RUN})
        values = [_values(system[title], ids, "f1") for system in (mine, theirs)]
        documents = [questions[title][id_]["document"] for id_ in ids]
        better, worse = resampled_means(values, documents, seed=number)
        resamples.append(better - worse)
        differences.append(float(values[0].mean() - values[1].mean()))
        num_questions += len(ids)
    low, high = percentile_interval(np.mean(resamples, axis=0))
    return {
        "difference": fmean(differences),
        "interval": [low, high],
        "num_questions": num_questions,
        "verdict": HOLDS if low > 0 else FAILS if high < 0 else OPEN,
    }


def _against_embeddings(
    rows: Sequence[Mapping[str, Any]],
    carriers: Mapping[str, str | None],
    *given: Any,
) -> list[dict[str, Any]]:
    """Of each system of keys and values how much its F1 is above that of embeddings of as many positions and bytes.

    `positions` are the best at the same ratio. Of bytes there are both sides: `fewer`, the best of those that store no
    more, and `more`, the nearest of those that store no less, of several the best. Above the second it is better at
    equal bytes, below the first it is worse.
    """
    stored, f1 = {}, {}
    for row in rows:
        if row["set"] == "mean" and "bytes_per_context_token" in row["costs"]:
            key = row["system"], row["ratio"]
            stored[key], f1[key] = round(row["costs"]["bytes_per_context_token"]), row["scores"]["f1"]
    embeddings = [key for key in stored if carriers.get(key[0]) == "embeddings"]
    found = []
    for key, num_bytes in stored.items():
        if carriers.get(key[0]) != "key_values":
            continue
        rivals = {
            "positions": max((other for other in embeddings if other[1] == key[1]), key=f1.get, default=None),
            "fewer": max((other for other in embeddings if stored[other] <= num_bytes), key=f1.get, default=None),
            "more": min(
                (other for other in embeddings if stored[other] >= num_bytes),
                key=lambda other: (stored[other], -f1[other]),
                default=None,
            ),
        }
        against = {
            side: {"system": rival[0], "ratio": rival[1], **_paired(key, rival, *given)}
            for side, rival in rivals.items()
            if rival is not None
        }
        found.append({"system": key[0], "ratio": key[1], **against})
    return found


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: these are `None`."""
    if isinstance(value, float):  # numpy's, too
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value
