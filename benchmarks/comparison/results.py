# SPDX-License-Identifier: Apache-2.0
"""The comparison's result file: scores, intervals, costs, paired differences and documents."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from pyarrow.parquet import read_table

from benchmarks.comparison.peers import KEEP_DROP
from benchmarks.comparison.plan import read_json, summary
from benchmarks.comparison.scores import (
    METRICS,
    SECONDS,
    Scores,
    averaged_sets,
    parsed_ratio,
    published_scores,
    questions_of,
    read_scores,
    seconds_of,
    values_of,
    whole,
)
from context_compressors.configuration.methods import config_class
from context_compressors.data.document_ids import TrainingDocuments, document_id
from context_compressors.evaluation.bootstrap import helps, percentile_interval, resampled_means
from context_compressors.evaluation.held_out import Sources, compare_sources
from context_compressors.evaluation.metrics import teacher_normalized
from context_compressors.evaluation.rows import FULL_CONTEXT, NO_CONTEXT
from context_compressors.reporting.environment import environment

_SETTINGS = ("base", "size", "ratios", "budget", "sets", "context_tokens", "timed_questions", "max_new_tokens")
_OF_BASE = re.compile(r"(^|\.)(language_model|encoder_model|lm_head)\.")
_FAMILY = "family"
HOLDS, FAILS, OPEN, NOT_RUN = "higher", "lower", "inconclusive", "not run"
# Of 2,000 the ends of an interval move by a tenth of a point from draw to draw, which turned a verdict.
NUM_RESAMPLES = 10_000


def gather(comparison: Any) -> dict[str, Any]:
    """Return the result file's content: the answers here, and published rows of other systems.

    Args:
        comparison: a `plan.Comparison`.
    """
    table, questions, published = comparison.table, questions_of(comparison), comparison.published
    family = [*table["family"], *table["rounded"]]
    scores, costs = read_scores(comparison, questions)
    kept = _kept(comparison, published, scores)
    for name, of_system in kept.items():
        scores[name] = published_scores(of_system, questions)
    rows = []
    for name in [*family, *table["peers"]]:
        if name in kept:
            rows += kept[name]
        elif name in scores:
            rows += _rows(name, scores, costs, questions, table, comparison.arguments.dtype)
    # Timed apart from the answers: also of what is published, and what was published stays until it is timed again.
    timed = {_key(row): row["costs"] for row in published.get("rows", []) if row["set"] == "mean"}
    for row in rows:
        if row["set"] == "mean":
            earlier = {kind: value for kind, value in timed.get(_key(row), {}).items() if kind in SECONDS}
            row["costs"] |= earlier | seconds_of(comparison, row["system"], row["ratio"])
    trained = {
        name: published["family"].get(name) if name in kept else _training(comparison, name)
        for name in table["family"]
    }
    carriers = {
        name: published["carriers"].get(name) if name in kept else _carrier(comparison, name) for name in family
    }
    given = scores, questions, table
    compared = [*table["family"], *(name for name in table["peers"] if name not in (NO_CONTEXT, FULL_CONTEXT, "cut"))]
    return {
        "format_version": 1,
        "benchmark": "comparison",
        "settings": {name: table[name] for name in _SETTINGS},
        "reader": comparison.reader_name,
        "budget": read_json(comparison.questions / "budget.json"),
        "device": comparison.device,
        "environment": environment(),
        "family": {name: found for name, found in trained.items() if found},
        "carriers": {name: carrier for name, carrier in carriers.items() if carrier},
        "rows": rows,
        "question_documents": {title: _numbers(questions[title].values()) for title in averaged_sets(table)},
        "documents_apart": documents_of(comparison, questions),
        "against_no_context": against_no_context(table["family"], scores, questions, table),
        # The pairs of the table, and every system against truncated text.
        "orderings": [
            ordering(pair, *given)
            for pair in dict.fromkeys(
                [
                    *map(tuple, table["orderings"]),
                    *(pair for name in compared if name in scores for pair in _against_cut(comparison, name)),
                ]
            )
        ],
    }


def _key(row: Mapping[str, Any]) -> tuple[str, int | str]:
    return row["system"], row["ratio"]


def _numbers(questions: Iterable[Mapping[str, Any]]) -> list[int]:
    """Return the number of each question's document, in order of appearance."""
    numbers: dict[str, int] = {}
    return [numbers.setdefault(question["document"], len(numbers)) for question in questions]


def _against_cut(comparison: Any, name: str) -> list[tuple[str, str]]:
    """Return the pairs of a system and truncated text, at the table's ratios."""
    own, common = comparison.ratios(name), comparison.table["ratios"]
    if set(common) <= set(own):
        return [(name, "cut")]
    return [(f"{name}={ratio}", f"cut={ratio}") for ratio in own if ratio in common]


def _kept(comparison: Any, published: Mapping[str, Any], scores: Scores) -> dict[str, list[dict[str, Any]]]:
    """Return the published rows of systems that have not answered everything here.

    Not those of a checkpoint that is gone: memories are rounded anew where what makes them was trained anew.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for row in published.get("rows", []):
        found.setdefault(row["system"], []).append(row)
    kept = {
        name: rows
        for name, rows in found.items()
        if any(
            len(scores.get(name, {}).get(row["ratio"], {}).get(row["set"], {})) < row["num_questions"]
            for row in rows
            if row["set"] != "mean"
        )
    }
    for name, entry in comparison.table["rounded"].items():
        if entry["of"] in found and entry["of"] not in kept and comparison.trains(entry["of"]):
            kept.pop(name, None)
    return kept


def _training(comparison: Any, name: str) -> dict[str, Any]:
    """Return a system's trials, the chosen rate, and the runs of all seeds."""
    folders = {f"{rate:g}": folder for rate, folder in comparison.trials(name).items()}
    trials = {
        rate: trial["eval_loss"] for rate, folder in folders.items() if (trial := read_json(folder / "trial.json"))
    }
    seeds = comparison.arguments.seeds
    runs = [found for seed in seeds if (found := summary(comparison.checkpoint(name, seed)))]
    # Scorers that are fitted have no trials.
    if not (runs and trials):
        return {}
    chosen = min(trials, key=lambda rate: trials[rate])
    leader = comparison.entry(name).get("behind")
    trained, before = (
        num_trained(comparison.checkpoint(one, seeds[0]) / "model.safetensors") if one else 0 for one in (name, leader)
    )
    return {
        "trials": trials,
        "learning_rate": float(chosen),
        "seeds": len(runs),
        "trainable_parameters": trained - before,
        **runs[0],
    }


def _carrier(comparison: Any, name: str) -> str | None:
    """Return the form of a system's memories, embeddings or key_values, if it has a checkpoint."""
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
    name: str, ratio: int | str, title: str, scores: Scores, questions: Mapping[str, Any], seed: int
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Scores of a system on one set with their intervals, and the resampled scores behind these."""
    answered = scores[name][ratio][title]
    ids = whole(questions, answered)
    documents = [questions[id_]["document"] for id_ in ids]
    main, *others = METRICS[questions[ids[0]]["task"]]
    values = {metric: values_of(answered, ids, metric) for metric in (main, *others)}
    means = {metric: float(value.mean()) for metric, value in values.items()}
    resampled = dict(zip(values, resampled_means(list(values.values()), documents, seed=seed), strict=True))
    bounds = [
        scores.get(bound, {}).get(place, {}).get(title, {}) for bound, place in ((NO_CONTEXT, 0), (FULL_CONTEXT, 1))
    ]
    if name not in (NO_CONTEXT, FULL_CONTEXT) and all(id_ in bound for id_ in ids for bound in bounds):
        none, full = (values_of(bound, ids, main) for bound in bounds)
        if helps(main, full.mean(), none.mean()):
            means["retention"] = 100 * float(teacher_normalized(means[main], full.mean(), none.mean()))
            # The same seed draws the same documents.
            resampled["retention"] = 100 * teacher_normalized(
                *resampled_means([values[main], full, none], documents, seed=seed)
            )
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


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: these are `None`."""
    if isinstance(value, float):  # numpy's, too
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value


# --- paired differences ---


def ordering(pair: Sequence[str], scores: Scores, questions: Any, table: Mapping[str, Any]) -> dict[str, Any]:
    """Compare the F1 of two systems, at each ratio or at the ratios that end the names ("=4")."""
    (first, _, ratio), (second, _, other) = (side.partition("=") for side in pair)
    ratios = [(parsed_ratio(ratio), parsed_ratio(other))] if ratio else [(ratio, ratio) for ratio in table["ratios"]]
    found = [
        {
            "ratio": one,
            "second_ratio": two,
            **_paired((first, one), (second, two), scores, questions, table),
        }
        for one, two in ratios
    ]
    return {"first": first, "second": second, "ratios": found}


def _paired(
    first: tuple[str, int | str],
    second: tuple[str, int | str],
    scores: Scores,
    questions: Any,
    table: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the mean over sets of the paired differences of F1."""
    mine, theirs = (scores.get(name, {}).get(ratio, {}) for name, ratio in (first, second))
    differences, resamples, num_questions = [], [], 0
    for number, title in enumerate(averaged_sets(table)):
        ids = whole(questions[title], mine.get(title, {}), theirs.get(title, {}))
        if not ids:
            return {"verdict": NOT_RUN}
        values = [values_of(system[title], ids, "f1") for system in (mine, theirs)]
        documents = [questions[title][id_]["document"] for id_ in ids]
        better, worse = resampled_means(values, documents, num_resamples=NUM_RESAMPLES, seed=number)
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


def against_no_context(
    names: Sequence[str], scores: Scores, questions: Any, table: Mapping[str, Any]
) -> dict[str, list[dict[str, Any]]]:
    """Return the difference to no context at each ratio, of the systems with scores by question."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name in names:
        for ratio in sorted(scores.get(name, {})):
            at = _paired((name, ratio), (NO_CONTEXT, 0), scores, questions, table)
            if "difference" in at:
                kept = {"ratio": ratio, "difference": at["difference"], "interval": at["interval"]}
                found.setdefault(name, []).append(kept)
    return found


# --- documents ---


def documents_of(comparison: Any, questions: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the IDs of each set and of the training and validation documents; missing ones stay as published.

    All methods learn from the same examples, so that their documents are one list for each part. What the reader has
    seen before stands in the record beside its weights, and not in these.

    Args:
        comparison: a `plan.Comparison`.
        questions: of `scores.questions_of`.

    Raises:
        ValueError: a document of a set has trained or chosen.
    """
    published = comparison.published.get("documents_apart", {"documents": {}, "held_out": {}})
    earlier, held_out = published["documents"], published["held_out"]
    seen = TrainingDocuments(
        *(set(earlier.get(part, "").split()) for part in ("trained", "chose")),
        is_whole=held_out.get(_FAMILY, {}).get("record") != "in part",
    )
    reader, names = TrainingDocuments.of(comparison.peers / "reader"), comparison.table["family"]
    runs = [comparison.checkpoint(name, seed) for name in names for seed in comparison.arguments.seeds]
    for record in filter(None, [reader, *map(TrainingDocuments.of, runs)]):
        seen.add(record)
    before = reader or TrainingDocuments()
    parts = {"trained": seen.trained - before.trained, "chose": seen.chose - before.chose}
    of_sets = {
        title: _reported(comparison, title, of_set.values()) or set(earlier.get(title, "").split())
        for title, of_set in questions.items()
    }
    records = {comparison.reader_name: reader, **({_FAMILY: seen} if any(parts.values()) else {})}
    records[KEEP_DROP.name] = TrainingDocuments.of(KEEP_DROP)
    found = compare_sources({title: [Sources(title, tuple(ids))] for title, ids in of_sets.items()}, records)
    if reader is None:
        found |= {name: said for name, said in held_out.items() if name == comparison.reader_name}
    documents = {part: " ".join(sorted(ids)) for part, ids in (of_sets | parts).items() if ids}
    return {"model": comparison.reader_name, "held_out": found, "documents": documents}


def _reported(comparison: Any, title: str, questions: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the IDs of a set: its contexts, or the texts of its windows where the data are available."""
    entry = comparison.table["sets"][title]
    if entry["task"] != "reconstruction":
        return {document_id(question["context"]) for question in questions}
    file = comparison.data / entry["path"]
    texts = {row["id"]: row["text"] for row in read_table(file).to_pylist()} if file.is_file() else {}
    return {document_id(texts[question["document"]]) for question in questions if question["document"] in texts}
