# SPDX-License-Identifier: Apache-2.0
"""Scores against hand-made cases, the paper's own numbers, and the reference implementations."""

import numpy as np
import pytest
import sacrebleu
from hypothesis import given
from hypothesis import strategies as st
from rouge_score import rouge_scorer

from context_compressors.evaluation.metrics import (
    bleu_counts,
    bleu_of_counts,
    normalize_answer,
    prefix_exact_match,
    rouge_lsum,
    squad_scores,
    teacher_normalized,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The Cat, a dog & an owl!", "cat dog owl"),
        ("  U.S.A. ", "usa"),
        ("theatre", "theatre"),
        ("a-the", "athe"),
        ("An", ""),
        ("Zürich's “old” town", "zürichs “old” town"),
    ],
)
def test_normalisation_is_squads(text, expected):
    assert normalize_answer(text) == expected


def test_exact_match_and_f1_take_the_best_reference():
    predictions = ["the Eiffel Tower", "in 1889 it was", "nothing"]
    references = [["Eiffel tower"], ["1990", "1889"], ["something", "else"]]
    scores = squad_scores(predictions, references)
    assert scores["exact_match"] == pytest.approx(100 / 3)
    # Second question: one of four tokens right, all of the reference: 2 * 0.25 * 1 / 1.25 = 0.4.
    assert scores["f1"] == pytest.approx(100 * (1 + 0.4 + 0) / 3, abs=1e-4)


WORDS = st.lists(st.sampled_from(["red", "fox", "jumps", "Over", "the", "dog,", "7.5"]), max_size=9).map(" ".join)


TEXTS = st.lists(WORDS, max_size=3).map("\n".join)


@pytest.mark.slow
@given(st.lists(st.tuples(TEXTS, st.lists(TEXTS, min_size=1, max_size=3)), min_size=1, max_size=4))
def test_rouge_lsum_equals_googles_scorer_over_lines(samples):
    scorer = rouge_scorer.RougeScorer(["rougeLsum"], use_stemmer=False)
    best = [
        max(scorer.score(reference, prediction)["rougeLsum"].fmeasure for reference in texts)
        for prediction, texts in samples
    ]
    expected = pytest.approx(100 * sum(best) / len(best), abs=1e-3)
    assert rouge_lsum([sample[0] for sample in samples], [sample[1] for sample in samples]) == expected
    # A full stop ends a sentence as the end of a line does, also with spaces on both sides, as in CNN / DailyMail.
    for end in (". ", " . ", "!  "):
        predictions = [prediction.replace("\n", end) for prediction, _ in samples]
        references = [[text.replace("\n", end) for text in texts] for _, texts in samples]
        assert rouge_lsum(predictions, references) == expected


def test_bleu_equals_sacrebleu_on_a_corpus_with_several_references():
    predictions = ["The dog bit the man.", "It wasn't surprising, at 3.5 miles.", "The man had just bitten him."]
    references = [
        ["The dog bit the man.", "The dog had bit the man."],
        ["It was not unexpected.", "It wasn't a surprise, at 3.5 miles."],
        ["The man bit him first.", "The man had bitten the dog."],
    ]
    expected = sacrebleu.corpus_bleu(predictions, [list(stream) for stream in zip(*references, strict=True)]).score
    counts = [bleu_counts(*pair) for pair in zip(predictions, references, strict=True)]
    assert bleu_of_counts(np.sum(counts, axis=0)) == pytest.approx(expected, abs=1e-3)


def test_prefix_exact_match_is_the_share_before_the_first_mistake():
    """GMSA, footnote 2: 128 of 512 tokens, whatever follows the mistake."""
    reference = list(range(512))
    wrong = [*reference[:128], -1, *reference[129:]]
    assert prefix_exact_match([wrong], [reference]) == 25.0
    assert prefix_exact_match([reference], [reference]) == 100.0
    assert prefix_exact_match([[-1, *reference[1:]]], [reference]) == 0.0
    assert prefix_exact_match([reference[:384], [*reference, 7]], [reference, reference]) == 87.5
    assert prefix_exact_match([[]], [reference]) == 0.0


@pytest.mark.parametrize(("score", "expected"), [(71.66, 0.947923), (70.55, 0.926273), (45.92, 0.445875)])
def test_teacher_normalised_score_of_the_mean_pooling_paper(score, expected):
    """Table 1, Qwen3-8B: 4x single, 4x multi and 128x multi between 74.33 (full) and 23.06 (none)."""
    assert teacher_normalized(score, full=74.33, none=23.06) == pytest.approx(expected, abs=1e-6)
