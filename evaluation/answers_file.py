# SPDX-License-Identifier: Apache-2.0
"""Files with what every sample got, one line of JSON each, written while an evaluation runs."""

import json
import os
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path

from ..configuration.nearest_names import as_spelled_now
from .report import EvaluationReport
from .rows import SampleAnswers, number_of


class AnswersFile:
    """Writes the answers of a report as they come."""

    def __init__(self, path: str | os.PathLike[str], done: Collection[tuple[str, str]] = ()):
        self.path = Path(path)
        # An interrupted write leaves an unfinished last line.
        lines = self.path.read_text(encoding="utf-8").split("\n")[:-1] if done and self.path.is_file() else []
        self._lines = [line for line in lines if _key(line, self.path) in done]
        if missing := set(done) - {_key(line, self.path) for line in self._lines}:
            raise ValueError(f"{path} does not have the answers of {sorted(missing)}, which are not scored again")
        self._num_written = 0

    def write_new(self, report: EvaluationReport) -> None:
        """Append the answers of a report that came since the last call."""
        if not self._num_written:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text("".join(f"{line}\n" for line in self._lines), encoding="utf-8")
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(f"{answers.to_json()}\n" for answers in report.answers[self._num_written :])
        self._num_written = len(report.answers)


def write_answers(answers: Iterable[SampleAnswers], path: str | os.PathLike[str]) -> None:
    """Write a file of answers at once, folders included."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("".join(f"{of_sample.to_json()}\n" for of_sample in answers), encoding="utf-8")


def read_answers(path: str | os.PathLike[str]) -> list[SampleAnswers]:
    """Read what `AnswersFile` or `write_answers` wrote; raises `ValueError` for any other file."""
    try:
        # Not by `splitlines`: a text may hold other ends of lines.
        lines = Path(path).read_text(encoding="utf-8").split("\n")
        return [_sample(line) for line in lines if line]
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no file of answers: {error}") from error


def _sample(line: str) -> SampleAnswers:
    sample = SampleAnswers(**json.loads(line))
    scores = {
        condition: {metric: number_of(score) for metric, score in metrics.items()}
        for condition, metrics in sample.scores.items()
    }
    return replace(sample, task=as_spelled_now(sample.task), scores=scores)


def _key(line: str, path: Path) -> tuple[str, str]:
    try:
        content = json.loads(line)
        return content["dataset"], content["task"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no file of answers: {error}") from error
