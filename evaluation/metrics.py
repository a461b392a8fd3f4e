# SPDX-License-Identifier: Apache-2.0
"""Scores of answers, summaries, reconstructions and continuations; shares run from 0 to 100."""

import difflib
import itertools
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from sacrebleu.metrics import BLEU
from torchmetrics.functional.text import bert_score, rouge_score, squad
from transformers import AutoModel, AutoTokenizer

from ..data.sources import is_of_benchmark

_PUNCTUATION = frozenset(string.punctuation)
_BLEU = BLEU(effective_order=True)
# Without rougeLsum, for which torchmetrics would download data that splits sentences: see `rouge_lsum`.
ROUGE_KEYS = ("rouge1", "rouge2", "rougeL")
# Tokens of a text that BERTScore reads.
_MOST_SCORED_TOKENS = 512

Number = TypeVar("Number", float, np.ndarray)


def normalize_answer(text: str) -> str:
    """Lower-case a text and drop punctuation, articles and extra spaces, as SQuAD's evaluation script does."""
    kept = "".join(character for character in text.lower() if character not in _PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def holds_answer(answer: str, accepted: Sequence[str]) -> bool:
    """Return whether an answer holds an accepted one as whole words, both in SQuAD's normal form."""
    padded_answer = f" {normalize_answer(answer)} "
    return any(f" {normalize_answer(text)} " in padded_answer for text in accepted)


def squad_scores(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Exact match and token F1 with SQuAD's normalisation, each the best over a question's references."""
    scores = squad(
        [{"prediction_text": prediction, "id": str(index)} for index, prediction in enumerate(predictions)],
        [
            {"answers": {"answer_start": [0] * len(answers), "text": list(answers)}, "id": str(index)}
            for index, answers in enumerate(references)
        ],
    )
    return {"exact_match": float(scores["exact_match"]), "f1": float(scores["f1"])}


def substring_accuracy(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Share of outputs that contain one of their answers, both in SQuAD's normal form, 0 to 100."""
    num_right = 0
    for prediction, answers in zip(predictions, references, strict=True):
        output = normalize_answer(prediction)
        normalized = [normalize_answer(answer) for answer in answers]
        num_right += any(answer in output if answer else not output for answer in normalized)
    return 100.0 * num_right / len(predictions)


def rouge_scores(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """Return ROUGE-1, ROUGE-2 and ROUGE-L (of the whole text) F-measures, each the best over the references."""
    scores = rouge_score(
        list(predictions), [list(texts) for texts in references], accumulate="best", rouge_keys=ROUGE_KEYS
    )
    return {key: 100.0 * float(scores[f"{key}_fmeasure"]) for key in ROUGE_KEYS}


def rouge_lsum(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Return summary-level ROUGE-L, the best over the references, as T5 reports it (Lin, 2004, section 3.2)."""
    # NLTK comes with it, a third of a second at the start of every command.
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeLsum"])
    total = 0.0
    for prediction, texts in zip(predictions, references, strict=True):
        best = scorer.score_multi([_sentence_lines(text) for text in texts], _sentence_lines(prediction))
        total += float(best["rougeLsum"].fmeasure)
    return 100.0 * total / len(predictions)


def _sentence_lines(text: str) -> str:
    return re.sub(r"(?<=[.!?])\s+", "\n", text)


def bleu_counts(prediction: str, references: Sequence[str]) -> list[int]:
    """Count matching n-grams, n-grams, tokens and the nearest reference's tokens, which sum up to corpus BLEU-4."""
    score = _BLEU.sentence_score(prediction, list(references))
    return [*score.counts, *score.totals, score.sys_len, score.ref_len]


def bleu_of_counts(counts: np.ndarray) -> np.ndarray:
    """Corpus BLEU-4 without smoothing, 0 to 100, from sums of `bleu_counts`, `(..., 10)`."""
    matches, totals, length, wanted = counts[..., :4], counts[..., 4:8], counts[..., 8], counts[..., 9]
    with np.errstate(divide="ignore", invalid="ignore"):
        precision = np.exp(np.log(matches / totals).mean(axis=-1))
        brevity = np.exp(np.minimum(0.0, 1 - wanted / length))
    return 100.0 * np.where((matches > 0).all(axis=-1), precision * brevity, 0.0)


def prefix_exact_match(predicted_ids: Sequence[Sequence[int]], reference_ids: Sequence[Sequence[int]]) -> float:
    """Return the share of each reference that the output repeats from its start without a mistake (GMSA, note 2)."""
    total = 0.0
    for predicted, reference in zip(predicted_ids, reference_ids, strict=True):
        is_same = (left == right for left, right in zip(predicted, reference, strict=False))
        total += sum(itertools.takewhile(bool, is_same)) / len(reference)
    return 100.0 * total / len(predicted_ids)


def teacher_normalized(score: Number, full: Number, none: Number) -> Number:
    """Return the kept share of the context's worth, `(score - none) / (full - none)` (mean-pooling paper, 5.1)."""
    worth = np.asarray(full, dtype=np.float64) - none
    with np.errstate(invalid="ignore"):
        share: Any = (score - none) / np.where(worth == 0, np.nan, worth)
    return share


class BertScorer:
    """BERTScore F1 (GMSA, section 4.1) by the last layer of a folder's encoder, of texts cut to 512 tokens."""

    def __init__(self, folder: str, device: str | torch.device = "cpu"):
        self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.model = AutoModel.from_pretrained(folder, local_files_only=True, dtype=torch.float32).eval().to(device)
        self.max_tokens = min(_MOST_SCORED_TOKENS, self.model.config.max_position_embeddings)

    def score(self, predictions: Sequence[str], references: Sequence[Sequence[str]]) -> float:
        """Mean BERTScore F1, each the best over the references, times 100."""
        pairs = zip(predictions, references, strict=True)
        best = [max(self._score_pair(prediction, text) for text in of_sample) for prediction, of_sample in pairs]
        return 100.0 * sum(best) / len(best)

    def _score_pair(self, prediction: str, reference: str) -> float:
        # One pair a call: with several, torchmetrics 1.9 puts predictions and references that it sorted by length back
        # in an order that mixes up the pairs.
        scores = bert_score(
            [prediction],
            [reference],
            model=self.model,
            user_tokenizer=self.tokenizer,
            max_length=self.max_tokens,
            truncation=True,
            device=self.model.device,
        )
        return float(scores["f1"])


# --- LongBench, LongBench-E (their English tasks) and RULER, as their authors publish them ---


@dataclass(frozen=True)
class BenchmarkMetric:
    """A benchmark's metric for the answers to one of its tasks.

    Source: LongBench (Bai et al., 2024), Table 1 and `metrics.py`; RULER (Hsieh et al., 2024),
    `synthetic/constants.py`.
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


def _qa_f1(prediction: str, answer: str) -> float:
    """Return the F1 of two bags of words."""
    predicted, wanted = normalize_answer(prediction).split(), normalize_answer(answer).split()
    common = sum((Counter(predicted) & Counter(wanted)).values())
    return 2 * common / (len(predicted) + len(wanted)) if common else 0.0


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
    """Return the share of the numbers in an output that are the right one."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(number) / len(numbers) if numbers else 0.0


def _paragraph(prediction: str, answer: str) -> float:
    """The number of "Paragraph 7"."""
    number = re.search(r"Paragraph (\d+)", answer)
    return 0.0 if number is None else _share_of_numbers(prediction, number[1])


def _code_similarity(prediction: str, answer: str) -> float:
    """Return the likeness of the first line that is no comment, in whole percent, as `fuzz.ratio` has it."""
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


def _occurrences(prediction: str, answers: Sequence[str]) -> list[bool]:
    text = re.sub(r"[\x00-\x1f]", "\n", prediction).lower()
    return [answer.lower() in text for answer in answers]


def _all_strings(prediction: str, answers: Sequence[str], classes: Sequence[str]) -> float:
    occurrences = _occurrences(prediction, answers)
    return sum(occurrences) / len(occurrences)


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
    # A question has one right answer, which may be written in several ways.
    **dict.fromkeys(("qa_1", "qa_2"), (lambda *given: float(any(_occurrences(*given[:2]))), 32)),
}
