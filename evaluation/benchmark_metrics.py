# SPDX-License-Identifier: Apache-2.0
"""Scores of LongBench, LongBench-E (their English tasks) and RULER as their authors publish them."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..data.sources import is_of_benchmark
from .metrics import normalize_answer


@dataclass(frozen=True)
class BenchmarkMetric:
    """How a benchmark scores an answer of one of its tasks.

    Source: LongBench (Bai et al., 2024), Table 1, and its `metrics.py`; RULER (Hsieh et al., 2024), section 4, and its
    `eval/synthetic/constants.py`.
    """

    task: str
    classes: tuple[str, ...] = ()

    def score(self, prediction: str, answers: Sequence[str]) -> float:
        """The score of one output, 0 to 100."""
        return 100.0 * _TASKS[self.task][0](prediction, answers, self.classes)


def benchmark_metric(row: Mapping[str, Any]) -> BenchmarkMetric | None:
    """The metric of a row that a benchmark published; `None` of rows that none did."""
    if not is_of_benchmark(row):
        return None
    # LongBench-E.
    task = str(row.get("task", "")).removesuffix("-e").removesuffix("_e")
    classes = tuple(row.get("all_classes") or ())
    return BenchmarkMetric(task, classes) if task in _TASKS else None


def benchmark_max_new_tokens(row: Mapping[str, Any]) -> int | None:
    """Most tokens of an answer: the row's own, or what LongBench gives its task; `None` where neither says."""
    if row.get("max_new_tokens") is not None:
        return int(row["max_new_tokens"])
    metric = benchmark_metric(row)
    return None if metric is None else _TASKS[metric.task][1]


def _overlap_f1(prediction: Sequence[str], answer: Sequence[str]) -> float:
    """F1 of two bags of words."""
    common = sum((Counter(prediction) & Counter(answer)).values())
    return 2 * common / (len(prediction) + len(answer)) if common else 0.0


def _qa_f1(prediction: str, answer: str) -> float:
    return _overlap_f1(normalize_answer(prediction).split(), normalize_answer(answer).split())


def _rouge_l(prediction: str, answer: str) -> float:
    """ROUGE-L of the library `rouge`, which counts each word of a sentence once."""
    try:
        from rouge import Rouge
    except ImportError as error:
        raise ImportError("LongBench scores with rouge: pip install -e '.[benchmarks]' in the clone") from error
    try:
        return float(Rouge(["rouge-l"]).get_scores(prediction, answer)[0]["rouge-l"]["f"])
    except (ValueError, RecursionError):
        # A text without words, or a sentence too long for the library: no points, as in LongBench's script.
        return 0.0


def _share_of_numbers(prediction: str, number: str) -> float:
    """How many of the numbers in an output are the right one."""
    found = re.findall(r"\d+", prediction)
    return found.count(number) / len(found) if found else 0.0


def _paragraph(prediction: str, answer: str) -> float:
    """The number of "Paragraph 7"."""
    number = re.search(r"Paragraph (\d+)", answer)
    return 0.0 if number is None else _share_of_numbers(prediction, number[1])


def _code_similarity(prediction: str, answer: str) -> float:
    """Likeness of the first line that is no comment, in whole percent.

    LongBench calls `fuzz.ratio` of fuzzywuzzy, which is `difflib`'s ratio unless python-Levenshtein, which LongBench
    does not ask for, is installed beside it: then scores are higher.
    """
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(100 * difflib.SequenceMatcher(None, line, answer).ratio()) / 100


def _classification(prediction: str, answer: str, classes: Sequence[str]) -> float:
    named = [name for name in classes if name in prediction]
    # As published: the list grows shorter while it is gone through, so that the label behind a removed one stays.
    for name in named:
        if name in answer and name != answer:
            named.remove(name)
    return 1 / len(named) if answer in named else 0.0


def _best(score: Callable[[str, str], float]) -> Callable[[str, Sequence[str], Sequence[str]], float]:
    return lambda prediction, answers, classes: max(score(prediction, answer) for answer in answers)


def _first_line(score: Callable[..., float]) -> Callable[[str, Sequence[str], Sequence[str]], float]:
    """Tasks with solved examples: a model goes on with more of them."""
    return lambda prediction, answers, classes: score(prediction.lstrip("\n").split("\n")[0], answers, classes)


def _label(prediction: str, answers: Sequence[str], classes: Sequence[str]) -> float:
    return max(_classification(prediction, answer, classes) for answer in answers)


def _found(prediction: str, answers: Sequence[str]) -> list[bool]:
    text = re.sub(r"[\x00-\x1f]", "\n", prediction).lower()
    return [answer.lower() in text for answer in answers]


def _all_strings(prediction: str, answers: Sequence[str], classes: Sequence[str]) -> float:
    found = _found(prediction, answers)
    return sum(found) / len(found)


def _any_string(prediction: str, answers: Sequence[str], classes: Sequence[str]) -> float:
    return float(any(_found(prediction, answers)))


# Task -> score and most new tokens.
_TASKS: dict[str, tuple[Callable[[str, Sequence[str], Sequence[str]], float], int]] = {
    "narrativeqa": (_best(_qa_f1), 128),
    "qasper": (_best(_qa_f1), 128),
    "multifieldqa_en": (_best(_qa_f1), 64),
    "hotpotqa": (_best(_qa_f1), 32),
    "2wikimqa": (_best(_qa_f1), 32),
    "musique": (_best(_qa_f1), 32),
    "gov_report": (_best(_rouge_l), 512),
    "qmsum": (_best(_rouge_l), 512),
    "multi_news": (_best(_rouge_l), 512),
    "triviaqa": (_first_line(_best(_qa_f1)), 32),
    "samsum": (_first_line(_best(_rouge_l)), 128),
    "trec": (_first_line(_label), 64),
    "passage_count": (_best(_share_of_numbers), 32),
    "passage_retrieval_en": (_best(_paragraph), 32),
    "lcc": (_best(_code_similarity), 64),
    "repobench-p": (_best(_code_similarity), 64),
    # RULER.
    **dict.fromkeys(("niah_single_1", "niah_single_2", "niah_single_3", "niah_single_words"), (_all_strings, 128)),
    **dict.fromkeys(("niah_multikey_1", "niah_multikey_2", "niah_multikey_3"), (_all_strings, 128)),
    **dict.fromkeys(("niah_multivalue", "niah_multiquery"), (_all_strings, 128)),
    "vt": (_all_strings, 30),
    "cwe": (_all_strings, 120),
    "fwe": (_all_strings, 50),
    **dict.fromkeys(("qa_1", "qa_2"), (_any_string, 32)),
}
