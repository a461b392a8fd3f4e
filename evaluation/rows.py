# SPDX-License-Identifier: Apache-2.0
"""Rows of an evaluation, the answers of its samples, and the files of these."""

import json
import math
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

DOMAINS = ("in", "out")
NO_CONTEXT = "no_context"
FULL_CONTEXT = "full_context"
RETENTION = "retention"
# How a benchmark's authors score its questions; it comes before the task's main metric.
BENCHMARK_SCORE = "benchmark_score"
# The metric that stands for a task in averages and plots.
MAIN_METRICS = {
    "question_answering": "f1",
    "summarization": "rougeL",
    "reconstruction": "token_accuracy",
    "continuation": "perplexity",
    "retrieval": "ndcg_at_10",
}


def ratio_condition(ratio: int) -> str:
    """Name of the condition "compressed `ratio` times", such as `ratio=4`."""
    return f"ratio={ratio}"


def ratio_of(condition: str) -> int | None:
    """The number in a ratio's name, or `None` for what is not compressed, "cut=4" among them."""
    name, _, number = condition.partition("=")
    return int(number) if name == "ratio" else None


def alternative_condition(selection: str, ratio: int) -> str:
    """Name of the condition "as many tokens of the text as slots at a ratio", such as `cut=4` or `bm25=4`."""
    return f"{selection}={ratio}"


def ordered_conditions(names: Iterable[str]) -> list[str]:
    """Different conditions: those without a ratio first, as they came; each kind by ascending ratio."""
    names = list(dict.fromkeys(names))
    kinds = list(dict.fromkeys(name.partition("=")[0] for name in names))

    def place(name: str) -> tuple[int, float]:
        kind, has_ratio, ratio = name.partition("=")
        return (kinds.index(kind), int(ratio)) if has_ratio else (-1, 0)

    return sorted(names, key=place)


@dataclass(frozen=True)
class EvaluationRow:
    """Scores of one task on one data set under one condition.

    Args:
        dataset, task, condition: such as "squad", "question_answering" and "ratio=4".
        domain: "in" when the compressor was trained on the data set's training part, "out" otherwise.
        metrics: name -> score, as `metrics.py` defines them.
        num_samples, num_truncated: samples, and those whose context was cut to fit the model.
        num_documents: number of different documents; `None` where it is not known.
        intervals: metric, or "retention", -> ends of its 95 % bootstrap interval over documents; NaN of one document.
        retention: `metrics.teacher_normalized` of the main metric, in percent; `None` of the bounds, where they were
            not scored, and where the full context does not help.
        costs: means of `slots` and `memory_bytes` of a context's memory or text, of `decoder_positions` that are read
            before the answer, and of their `cache_bytes`.
        seconds: means to `compress` a context at all ratios at once, and to `answer` a question.
        differences: alternative at the same number of positions, such as "cut=4" -> how much this row's `metric` is
            above its on the same questions: `difference`, and its 95 % `interval`.
    """

    dataset: str
    domain: str
    task: str
    condition: str
    metrics: dict[str, float]
    num_samples: int
    num_truncated: int = 0
    num_documents: int | None = None
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    retention: float | None = None
    costs: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    differences: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def main_metric(self) -> str:
        """The metric that differences and retention are of."""
        return BENCHMARK_SCORE if BENCHMARK_SCORE in self.metrics else MAIN_METRICS.get(self.task, "")


@dataclass(frozen=True)
class SampleAnswers:
    """Answers and scores of one sample under all conditions."""

    dataset: str
    task: str
    id: str
    document: int
    question: str
    references: list[str]
    answers: dict[str, str]
    scores: dict[str, dict[str, float]]

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(plain_json(asdict(self)), ensure_ascii=False, allow_nan=False)


def row_from(content: dict[str, Any]) -> EvaluationRow:
    """Read a row from its JSON values; files of earlier versions lack some fields, and have others."""
    known = {of_row.name for of_row in fields(EvaluationRow)}
    read = {name: value for name, value in content.items() if name in known}
    read["metrics"] = {name: number_of(value) for name, value in content["metrics"].items()}
    read["intervals"] = {name: tuple(map(number_of, ends)) for name, ends in content.get("intervals", {}).items()}
    if content.get("retention") is not None:
        read["retention"] = number_of(content["retention"])
    read["differences"] = {}
    for other, entry in content.get("differences", {}).items():
        numbers = {"difference": number_of(entry["difference"]), "interval": tuple(map(number_of, entry["interval"]))}
        read["differences"][other] = entry | numbers
    return EvaluationRow(**read)


def number_of(value: float | str | None) -> float:
    """A number as JSON holds it: `None` is NaN, "inf" infinite."""
    return math.nan if value is None else float(value)


def plain_json(value: Any) -> Any:
    """A value as JSON holds it: NaN is `None`, an infinite number a text."""
    if isinstance(value, dict):
        return {name: plain_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


# --- files of answers, one line of JSON for each sample ---


def write_answers(answers: Iterable[SampleAnswers], path: str | os.PathLike[str]) -> None:
    """Write a file of answers, folders included."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("".join(f"{sample.to_json()}\n" for sample in answers), encoding="utf-8")


def read_answers(path: str | os.PathLike[str], was_interrupted: bool = False) -> list[SampleAnswers]:
    """Read a file of answers, without its last line if a write was interrupted; `ValueError` for any other file."""
    # Not by `splitlines`: a text may hold other ends of lines.
    lines = Path(path).read_text(encoding="utf-8").split("\n")
    try:
        return [_sample(line) for line in (lines[:-1] if was_interrupted else lines) if line]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no file of answers: {error}") from error


def _sample(line: str) -> SampleAnswers:
    content = json.loads(line)
    content["scores"] = {
        condition: {metric: number_of(score) for metric, score in metrics.items()}
        for condition, metrics in content["scores"].items()
    }
    return SampleAnswers(**content)


class AnswersFile:
    """Writes the answers of an evaluation while it runs, behind those of the data sets and tasks that are `done`."""

    def __init__(self, path: str | os.PathLike[str], done: Collection[tuple[str, str]] = ()):
        self.path = Path(path)
        known = read_answers(path, was_interrupted=True) if done and self.path.is_file() else []
        self._earlier = [sample for sample in known if (sample.dataset, sample.task) in done]
        if missing := set(done) - {(sample.dataset, sample.task) for sample in self._earlier}:
            raise ValueError(f"{path} does not have the answers of {sorted(missing)}, which are not scored again")
        self._num_written = 0

    def write_new(self, answers: Sequence[SampleAnswers]) -> None:
        """Append the answers that came since the last call."""
        if not self._num_written:
            write_answers(self._earlier, self.path)
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(f"{sample.to_json()}\n" for sample in answers[self._num_written :])
        self._num_written = len(answers)
