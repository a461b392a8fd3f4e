# SPDX-License-Identifier: Apache-2.0
"""Scores of each system by question, and costs of its memories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

import numpy as np

from benchmarks.comparison.peers import lines_of
from benchmarks.comparison.plan import read_json
from context_compressors.evaluation.metrics import rouge_scores, squad_scores, substring_accuracy
from context_compressors.evaluation.rows import FULL_CONTEXT, NO_CONTEXT, read_answers

METRICS = {
    "question_answering": ("f1", "exact_match", "substring_accuracy"),
    "summarization": ("rougeL",),
    "reconstruction": ("token_accuracy",),
}
# As `evaluate` calls them.
_KEPT = ("slots", "memory_bytes")
# Costs of an answer that are measured apart.
SECONDS = ("compress_seconds", "answer_seconds")
# Ratio -> set -> question's id -> metric -> its score with each seed; of the two bounds the ratio is 0 or 1.
SystemScores = dict[int | str, dict[str, dict[str, dict[str, list[float]]]]]
Scores = dict[str, SystemScores]


def read_scores(comparison: Any, questions: Any) -> tuple[Scores, dict[tuple[str, int | str], dict[str, float]]]:
    """Scores of all systems that have answered here, and costs at each of their ratios.

    Args:
        comparison: a `plan.Comparison`.
        questions: of `questions_of`.
    """
    scores: Scores = {}
    costs: dict[tuple[str, int | str], dict[str, float]] = {}
    for name in [*comparison.table["family"], *comparison.table["rounded"]]:
        _add_family(comparison, name, questions, scores, costs)
    for name in comparison.table["peers"]:
        _add_peer(comparison, name, questions, scores, costs)
    _add_restored(comparison, scores)
    return scores, costs


def questions_of(comparison: Any) -> dict[str, dict[str, dict[str, Any]]]:
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
                    ratio = parsed_ratio(condition.partition("=")[2])
                    _note(scores, name, ratio, sample.dataset, sample.id, metrics)
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


def _add_peer(comparison: Any, name: str, questions: Any, scores: Scores, costs: Any) -> None:
    """Scores of a system that is not trained, and what it costs: means over sets of means over documents, as above."""
    lines, sets = list(lines_of(comparison.answers(name))), averaged_sets(comparison.table)
    for line in lines:
        question = questions[line["set"]][line["id"]]
        found = score(question["task"], line["answer"], question["references"])
        _note(scores, name, line["ratio"], line["set"], line["id"], found)
    for ratio in scores.get(name, {}):
        # What picks by the question needs the whole text again for the next one.
        is_aware = comparison.entry(name).get("aware", False)
        of_sets: dict[str, dict[str, list[tuple[float, float, float]]]] = {}
        for line in (line for line in lines if line["ratio"] == ratio and line["set"] in sets):
            question = questions[line["set"]][line["id"]]
            stored = len(question["context"].encode()) if is_aware else line["memory_bytes"]
            of_documents = of_sets.setdefault(line["set"], {})
            cost = line["kept_positions"], stored, len(question["context_ids"])
            of_documents.setdefault(question["document"], []).append(cost)
        if len(of_sets) == len(sets):
            means = ([_column_means(of_one) for of_one in found.values()] for found in of_sets.values())
            costs[name, ratio] = _costs(*_column_means([_column_means(of_set) for of_set in means]))


def _column_means(rows: Sequence[Sequence[float]]) -> list[float]:
    return [fmean(column) for column in zip(*rows, strict=True)]


def _add_restored(comparison: Any, scores: Scores) -> None:
    file = comparison.peers / "restored.jsonl"
    for sample in read_answers(file) if file.is_file() else ():
        for name, ratio in ((NO_CONTEXT, 0), (FULL_CONTEXT, 1)):
            _note(scores, name, ratio, sample.dataset, sample.id, sample.scores[name])


def seconds_of(comparison: Any, name: str, ratio: int | str) -> dict[str, float]:
    """Medians of what was timed, the same number of tokens written by each system; empty where nothing was."""
    lines = [line for line in lines_of(comparison.times(name)) if line["ratio"] == ratio]
    return {kind: median(line[kind] for line in lines) for kind in (SECONDS if lines else ())}


def _note(
    scores: Scores, name: str, ratio: int | str, title: str, question: str, metrics: Mapping[str, float]
) -> None:
    """Add what a question scored with one seed."""
    of_question = scores.setdefault(name, {}).setdefault(ratio, {}).setdefault(title, {}).setdefault(question, {})
    for metric, value in metrics.items():
        of_question.setdefault(metric, []).append(value)


def _costs(kept_positions: float, memory_bytes: float, tokens: float) -> dict[str, float]:
    return {
        "kept_positions": kept_positions,
        "memory_bytes": memory_bytes,
        "bytes_per_context_token": memory_bytes / tokens,
    }


def score(task: str, answer: str, references: Sequence[str]) -> dict[str, float]:
    """A written answer's own scores, as `evaluate` has them."""
    if task == "summarization":
        return rouge_scores([answer], [references])
    return {**squad_scores([answer], [references]), "substring_accuracy": substring_accuracy([answer], [references])}


def parsed_ratio(text: str) -> int | str:
    """A ratio as rows have it: a number, or "auto"."""
    return int(text) if text.isdecimal() else text


def averaged_sets(table: Mapping[str, Any]) -> list[str]:
    """The sets of questions that all systems answer, over which F1 is averaged."""
    return [
        title
        for title, entry in table["sets"].items()
        if entry["task"] == "question_answering" and entry.get("trained", True)
    ]


def published_scores(rows: Sequence[Mapping[str, Any]], questions: Mapping[str, Any]) -> SystemScores:
    """The main scores of a system's published rows, which differences are made of."""
    found: SystemScores = {}
    for row in rows:
        of_seeds = row.get("by_question", [])
        for (id_, question), *values in zip(questions[row["set"]].items(), *of_seeds, strict=True) if of_seeds else ():
            if None not in values:
                of_set = found.setdefault(row["ratio"], {}).setdefault(row["set"], {})
                of_set[id_] = {METRICS[question["task"]][0]: values}
    return found


def whole(questions: Mapping[str, Any], *answered: Mapping[str, Mapping[str, list[float]]]) -> list[str]:
    """The questions that all systems have answered, with all of their seeds."""
    ids = [id_ for id_ in questions if all(id_ in of_system for of_system in answered)]
    seeds = [max((len(next(iter(of_system[id_].values()))) for id_ in ids), default=0) for of_system in answered]
    return [id_ for id_ in ids if [len(next(iter(of_system[id_].values()))) for of_system in answered] == seeds]


def values_of(answered: Mapping[str, Mapping[str, list[float]]], ids: Sequence[str], metric: str) -> np.ndarray:
    """Scores `(num_seeds, num_questions)`."""
    return np.array([answered[id_][metric] for id_ in ids]).T
