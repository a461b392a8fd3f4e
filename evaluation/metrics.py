# SPDX-License-Identifier: Apache-2.0
"""Scores of answers, summaries, reconstructions and continuations.

Every function is pure: lists of strings, tensors or numbers in, floats out. Scores that are shares (exact match, F1,
ROUGE, BLEU, accuracies) run from 0 to 100; a teacher-normalised score is a plain number that is 1 at the full-context
score and 0 at the no-context score.
"""

import itertools
import re
import string
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from sacrebleu.metrics import BLEU
from torchmetrics.functional.text import rouge_score, squad

_PUNCTUATION = frozenset(string.punctuation)
_BLEU = BLEU(effective_order=True)
# Without rougeLsum, for which torchmetrics would download data that splits sentences: see `rouge_lsum`.
ROUGE_KEYS = ("rouge1", "rouge2", "rougeL")

Number = TypeVar("Number", float, np.ndarray)


def normalize_answer(text: str) -> str:
    """Lower-case a text and drop punctuation, articles and extra spaces, as SQuAD's evaluation script does."""
    kept = "".join(character for character in text.lower() if character not in _PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def holds_answer(answer: str, accepted: Sequence[str]) -> bool:
    """Return whether an answer holds an accepted one as whole words, both in SQuAD's normal form."""
    given = f" {normalize_answer(answer)} "
    return any(f" {normalize_answer(text)} " in given for text in accepted)


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
    found = 0
    for prediction, answers in zip(predictions, references, strict=True):
        output = normalize_answer(prediction)
        normalized = [normalize_answer(answer) for answer in answers]
        found += any(answer in output if answer else not output for answer in normalized)
    return 100.0 * found / len(predictions)


def rouge_scores(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """ROUGE-1, ROUGE-2 and ROUGE-L F-measures without stemming, each the best over the references.

    ROUGE-L is one subsequence of the whole text: the order of its sentences counts.
    """
    scores = rouge_score(
        list(predictions), [list(texts) for texts in references], accumulate="best", rouge_keys=ROUGE_KEYS
    )
    return {key: 100.0 * float(scores[f"{key}_fmeasure"]) for key in ROUGE_KEYS}


def rouge_lsum(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Summary-level ROUGE-L F-measure without stemming, the best over the references, averaged, 0 to 100.

    Source: ROUGE (Lin, 2004), section 3.2; T5's evaluation reports it as ROUGE-L.
    """
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
    """What one sample adds to corpus BLEU-4: matching n-grams, n-grams, tokens, and the nearest reference's tokens."""
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
    """Share of each reference that the output repeats from its start without a mistake, averaged, 0 to 100.

    Source: GMSA, footnote 2.
    """
    total = 0.0
    for predicted, reference in zip(predicted_ids, reference_ids, strict=True):
        is_same = (left == right for left, right in zip(predicted, reference, strict=False))
        total += sum(itertools.takewhile(bool, is_same)) / len(reference)
    return 100.0 * total / len(predicted_ids)


def summed_nll(logits: torch.Tensor, labels: torch.Tensor, ignore_index: int = -100) -> tuple[float, int]:
    """Negative log-likelihood (natural logarithm) summed over the label tokens, and their number.

    Args:
        logits: scores for each label, already shifted, `(batch_size, num_tokens, vocab_size)`.
        labels: token ids, `(batch_size, num_tokens)`; `ignore_index` where nothing is counted.
    """
    total = 0.0
    # One row at a time: a float32 copy of all logits would be the largest tensor of an evaluation.
    for row_logits, row_labels in zip(logits.flatten(0, -3), labels.flatten(0, -2), strict=True):
        counted = row_labels != ignore_index
        total += float(
            torch.nn.functional.cross_entropy(row_logits[counted].float(), row_labels[counted], reduction="sum")
        )
    return total, int((labels != ignore_index).sum())


def teacher_normalized(score: Number, full: Number, none: Number) -> Number:
    """Share of the context's worth that is kept: `(score - none) / (full - none)`.

    Works for scores where lower is better, too, since the sign cancels. It only means something where the full context
    helps: a teacher that does worse with the context than without turns the scale round.

    Source: mean-pooling paper, section 5.1, Metrics.
    """
    worth = np.asarray(full, dtype=np.float64) - none
    with np.errstate(invalid="ignore"):
        share: Any = (score - none) / np.where(worth == 0, np.nan, worth)
    return share
