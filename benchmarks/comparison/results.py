# SPDX-License-Identifier: Apache-2.0
"""From the answers of all systems to the comparison's one result file: scores, intervals, costs and orderings."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from benchmarks.comparison.peers import lines_of
from context_compressors.evaluation.answers_file import read_answers
from context_compressors.evaluation.bootstrap import percentile_interval
from context_compressors.evaluation.metrics import rouge_scores, squad_scores, substring_accuracy
from context_compressors.evaluation.paired import resampled_means
from context_compressors.evaluation.rows import FULL_CONTEXT, NO_CONTEXT, SampleAnswers
from context_compressors.reporting.environment import environment

METRICS = {
    "question_answering": ("f1", "exact_match", "substring_accuracy"),
    "summarisation": ("rougeL",),
    "reconstruction": ("token_accuracy",),
}
_SETTINGS = ("base", "size", "ratios", "budget", "sets", "context_tokens", "max_new_tokens")
_OF_BASE = re.compile(r"(^|\.)(language_model|encoder_model|lm_head)\.")
HOLDS, FAILS, OPEN, NOT_RUN = "holds", "does not", "cannot be told", "not run"
# System -> ratio -> set -> question's id -> metric -> its score with each seed; of the two bounds the ratio is 0 or 1.
Scores = dict[str, dict[int, dict[str, dict[str, dict[str, list[float]]]]]]


def gather(comparison: Any, states: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The result file's content, of all that has been answered so far.

    Args:
        comparison: a `run.Comparison`.
        states: of its jobs.
    """
    table, questions = comparison.table, _questions(comparison)
    scores: Scores = {}
    costs: dict[tuple[str, int], dict[str, float]] = {}
    for name in table["family"]:
        _add_family(comparison, name, questions, scores, costs)
    for name, entry in table["peers"].items():
        _add_peer(comparison, name, entry, questions, scores, costs)
    _add_restored(comparison, scores)
    return {
        "format_version": 1,
        "benchmark": "comparison",
        "settings": {name: table[name] for name in _SETTINGS},
        "reader": comparison.reader_name,
        "budget": _budget(comparison),
        "environment": environment(),
        "family": {name: found for name in table["family"] if (found := _training(comparison, name, states))},
        "rows": [row for name in scores for row in _rows(name, scores, costs, questions, table)],
        # And of every method whether it is better than cutting the text.
        "orderings": [
            _ordering(pair, scores, questions, table)
            for pair in [*table["orderings"], *([name, "cut"] for name in table["family"] if name in scores)]
        ],
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
    seeds = comparison.arguments.seeds
    for task in METRICS:
        files = [comparison.run_folder(name, seed) / f"{task}.jsonl" for seed in seeds]
        for file in files:
            for sample in read_answers(file) if file.is_file() else ():
                for condition, metrics in sample.scores.items():
                    _note(scores, name, int(condition.partition("=")[2]), sample.dataset, sample.id, metrics)
    if name not in scores:
        return
    timed = list(lines_of(comparison.run_folder(name, comparison.arguments.seeds[0]) / "times.jsonl"))
    for ratio in scores[name]:
        lines = [line for line in timed if line["ratio"] == ratio]
        kept = [-(-len(question["context_ids"]) // ratio) for question in _reported(questions, comparison.table)]
        costs[name, ratio] = {"kept_positions": fmean(kept)}
        if lines:
            of_position = sum(line["memory_bytes"] for line in lines) / sum(line["kept_positions"] for line in lines)
            costs[name, ratio] |= {"memory_bytes": of_position * fmean(kept), **_seconds(lines)}


def _note(scores: Scores, name: str, ratio: int, title: str, question: str, metrics: Mapping[str, float]) -> None:
    """Add what a question scored with one seed."""
    of_question = scores.setdefault(name, {}).setdefault(ratio, {}).setdefault(title, {}).setdefault(question, {})
    for metric, value in metrics.items():
        of_question.setdefault(metric, []).append(value)


def _reported(questions: Any, table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All questions of the sets that the mean is over."""
    return [question for title in averaged_sets(table) for question in questions[title].values()]


def averaged_sets(table: Mapping[str, Any]) -> list[str]:
    """The sets of questions that all systems answer, over which F1 is averaged."""
    return [
        title
        for title, entry in table["sets"].items()
        if entry["task"] == "question_answering" and entry.get("trained", True)
    ]


def _seconds(lines: Iterable[Mapping[str, float]]) -> dict[str, float]:
    lines = list(lines)
    return {name: median(line[name] for line in lines) for name in ("compress_seconds", "answer_seconds")}


def _add_peer(
    comparison: Any, name: str, entry: Mapping[str, Any], questions: Any, scores: Scores, costs: Any
) -> None:
    """Scores and costs of a system that is not trained; its answers are also written as `evaluate` keeps them."""
    lines = list(lines_of(comparison.peers / f"{name}.jsonl"))
    answers: dict[tuple[str, str], SampleAnswers] = {}
    for line in lines:
        question, condition = questions[line["set"]][line["id"]], _condition(name, line["ratio"])
        key = (line["set"], line["id"])
        sample = answers.setdefault(key, _no_answers(question))
        sample.answers[condition] = line["answer"]
        sample.scores[condition] = score(question["task"], line["answer"], question["references"])
        _note(scores, name, line["ratio"], *key, sample.scores[condition])
    if lines:
        kept = comparison.peers / "answers" / f"{name}.jsonl"
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text("".join(f"{sample.to_json()}\n" for sample in answers.values()), encoding="utf-8")
    timed = list(questions["squad"])[: comparison.table["timed_questions"]]
    for ratio in scores.get(name, {}):
        mine = [line for line in lines if line["ratio"] == ratio and line["set"] in averaged_sets(comparison.table)]
        if not mine:
            continue
        # What picks by the question needs the whole text again for the next one.
        stored = [
            len(questions[line["set"]][line["id"]]["context"].encode()) if entry.get("aware") else line["memory_bytes"]
            for line in mine
        ]
        clocked = [line for line in mine if line["set"] == "squad" and line["id"] in timed]
        costs[name, ratio] = {
            "kept_positions": fmean(line["kept_positions"] for line in mine),
            "memory_bytes": fmean(stored),
            **(_seconds(clocked) if clocked else {}),
        }


def _condition(name: str, ratio: int) -> str:
    return name if name in (NO_CONTEXT, FULL_CONTEXT) else f"{name}={ratio}"


def _no_answers(question: Mapping[str, Any]) -> SampleAnswers:
    fields = {name: question[name] for name in ("task", "id", "question", "references")}
    return SampleAnswers(dataset=question["set"], document=0, answers={}, scores={}, **fields)


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


def _budget(comparison: Any) -> dict[str, Any]:
    file = comparison.questions / "budget.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _training(comparison: Any, name: str, states: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What a system was trained with: its trials, the chosen rate, and the runs of all seeds."""
    found = {job: line for job, line in states.items() if job.startswith(f"{name}/") and line["state"] == "done"}
    trials = {job.rpartition("_")[2]: line["eval_loss"] for job, line in found.items() if "/trial_" in job}
    runs = [line for job, line in found.items() if job.endswith("/run")]
    if not runs:
        return {}
    folder = comparison.run_folder(name, comparison.arguments.seeds[0])
    kept = ("steps", "input_tokens", "context_tokens", "hours", "loss")
    return {
        "trials": trials,
        "learning_rate": float(min(trials, key=lambda rate: trials[rate])) if trials else None,
        "seeds": len(runs),
        "trainable_parameters": num_trained(folder / "run" / "model.safetensors"),
        **{name: runs[0].get(name) for name in kept},
    }


def num_trained(path: Path) -> int:
    """Parameters in a checkpoint's file that were trained: adapters and the method's parts."""
    with path.open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    header.pop("__metadata__", None)
    trained = [entry for name, entry in header.items() if "lora_" in name or not _OF_BASE.search(name)]
    return sum(math.prod(entry["shape"]) for entry in trained)


def _rows(name: str, scores: Scores, costs: Any, questions: Any, table: Mapping[str, Any]) -> list[dict[str, Any]]:
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
    return _plain(rows)


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


def _ordering(pair: Sequence[str], scores: Scores, questions: Any, table: Mapping[str, Any]) -> dict[str, Any]:
    """Whether the first system's F1 is above the second's, at each ratio: the mean over sets of paired differences."""
    first, second = pair
    found = []
    for ratio in table["ratios"]:
        mine, theirs = (scores.get(name, {}).get(ratio, {}) for name in pair)
        differences, resamples, num_questions = [], [], 0
        for number, title in enumerate(averaged_sets(table)):
            ids = _whole(questions[title], mine.get(title, {}), theirs.get(title, {}))
            if not ids:
                continue
            values = [_values(system[title], ids, "f1") for system in (mine, theirs)]
            documents = [questions[title][id_]["document"] for id_ in ids]
            better, worse = resampled_means(values, documents, seed=number)
            resamples.append(better - worse)
            differences.append(float(values[0].mean() - values[1].mean()))
            num_questions += len(ids)
        if len(differences) < len(averaged_sets(table)):
            found.append({"ratio": ratio, "verdict": NOT_RUN})
            continue
        low, high = percentile_interval(np.mean(resamples, axis=0))
        verdict = HOLDS if low > 0 else FAILS if high < 0 else OPEN
        found.append(
            {
                "ratio": ratio,
                "difference": fmean(differences),
                "interval": [low, high],
                "num_questions": num_questions,
                "verdict": verdict,
            }
        )
    return {"first": first, "second": second, "ratios": found}


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: these are `None`."""
    if isinstance(value, float):  # numpy's, too
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value
