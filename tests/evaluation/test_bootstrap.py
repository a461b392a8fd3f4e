# SPDX-License-Identifier: Apache-2.0
"""Bootstrap intervals against a plain loop over drawn documents."""

import math

import numpy as np
import pytest

from context_compressors.evaluation.bootstrap import (
    Statistic,
    mean_statistic,
    percentile_interval,
    perplexity_statistic,
    resampled_scores,
    wilson_interval,
)
from context_compressors.evaluation.metrics import bleu_counts, bleu_of_counts, teacher_normalized


def naive_resamples(documents, num_resamples, seed):
    """Rows of each resample, found by a loop: every document as often as it was drawn, with all of its questions."""
    names = list(dict.fromkeys(documents))
    rng = np.random.default_rng(seed)
    for _ in range(num_resamples):
        drawn = rng.multinomial(len(names), np.full(len(names), 1 / len(names)))
        rows = []
        for name, times in zip(names, drawn, strict=True):
            rows += [row for row, document in enumerate(documents) if document == name] * int(times)
        yield rows


def test_perplexity_bleu_and_retention_of_a_resample_are_those_of_its_rows():
    documents = ["a", "b", "a", "c", "b", "d"]
    nll, counts = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0], [2, 7, 1, 8, 2, 8]
    full, none = [90.0, 80.0, 70.0, 60.0, 90.0, 50.0], [10.0, 20.0, 30.0, 10.0, 0.0, 5.0]
    score = [50.0, 40.0, 70.0, 20.0, 60.0, 30.0]
    said = ["one two three four five", "the cat sat on the mat", "x", "six seven eight nine", "a b c d e", "t u v w"]
    wanted = [
        ["one two three four six"],
        ["the cat sat on a mat", "a cat"],
        ["y"],
        ["six seven"],
        ["a b c d e"],
        ["t"],
    ]
    found = resampled_scores(
        {
            "perplexity": perplexity_statistic(nll, counts),
            "bleu": Statistic(
                np.array([bleu_counts(*pair) for pair in zip(said, wanted, strict=True)]), bleu_of_counts
            ),
            **{name: mean_statistic(v) for name, v in (("full", full), ("none", none), ("score", score))},
        },
        documents,
        300,
        7,
    )
    kept = 100 * teacher_normalized(found["score"], found["full"], found["none"])
    for place, rows in enumerate(naive_resamples(documents, 300, 7)):

        def mean(values, rows=rows):
            return sum(values[row] for row in rows) / len(rows)

        perplexity = math.exp(sum(nll[row] for row in rows) / sum(counts[row] for row in rows))
        assert found["perplexity"][place] == pytest.approx(perplexity)
        expected = bleu_of_counts(np.sum([bleu_counts(said[row], wanted[row]) for row in rows], axis=0))
        assert found["bleu"][place] == pytest.approx(expected)
        expected = 100 * (mean(score) - mean(none)) / (mean(full) - mean(none))
        assert kept[place] == pytest.approx(expected)


def test_an_interval_leaves_out_resamples_without_a_score():
    scores = np.array([*range(1, 101), *[math.nan] * 50], dtype=float)
    low, high = percentile_interval(scores)
    assert (low, high) == (3.0, 98.0)
    assert all(map(math.isnan, percentile_interval(np.array([math.nan]))))
    assert percentile_interval(np.array([1.0] * 90 + [math.inf] * 10)) == (1.0, math.inf)


def test_wilson_intervals_are_those_of_the_textbook():
    assert wilson_interval(81, 263) == pytest.approx((25.5289, 36.6206), abs=0.01)
    assert wilson_interval(0, 10) == pytest.approx((0, 27.7533), abs=0.01)
    assert wilson_interval(10, 10) == pytest.approx((72.2467, 100), abs=0.01)
