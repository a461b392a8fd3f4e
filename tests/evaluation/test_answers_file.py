# SPDX-License-Identifier: Apache-2.0
"""Files of answers, and comparisons on the very same samples."""

import random

import numpy as np
import pytest

from context_compressors.evaluation.answers_file import AnswersFile, paired_difference, read_answers
from context_compressors.evaluation.report import EvaluationReport, SampleAnswers

QA = "question_answering"


def answers_of(scores, dataset="squad", condition="ratio=4"):
    """Two questions about each document."""
    return [
        SampleAnswers(
            dataset, QA, str(row), row // 2, f"{row}?", ["ja", "über\u2028"], {condition: "x"}, {condition: {"f1": f1}}
        )
        for row, f1 in enumerate(scores)
    ]


def test_answers_are_appended_and_read_back(tmp_path):
    path, report = tmp_path / "new" / "answers.jsonl", EvaluationReport("tiny")
    file = AnswersFile(path)
    report.answers += answers_of([1.0, 2.0])
    file.write_new(report)
    report.answers += answers_of([3.0], "nq")
    file.write_new(report)
    assert read_answers(path) == report.answers
    # An evaluation that stopped in the middle of "nq" scores it again.
    path.write_text(path.read_text() + '{"dataset": "nq", "ta')
    again = AnswersFile(path, {("squad", QA)})
    assert [answers.dataset for answers in read_answers(path)] == ["squad", "squad"]
    report.answers = report.answers[2:]
    again.write_new(report)
    assert [answers.dataset for answers in read_answers(path)] == ["squad", "squad", "nq"]
    with pytest.raises(ValueError, match=r"does not have the answers of \[\('qed', 'question_answering'\)\]"):
        AnswersFile(path, {("qed", QA)})
    path.write_text("[1]\n")
    for read in (lambda: AnswersFile(path, {("squad", QA)}), lambda: read_answers(path)):
        with pytest.raises(ValueError, match="is no file of answers"):
            read()


def test_a_paired_difference_is_that_of_the_same_samples_and_resamples_documents():
    rng = random.Random(1)
    first, second = ([rng.uniform(0, 100) for _ in range(12)] for _ in range(2))
    shuffled = answers_of(second)
    rng.shuffle(shuffled)
    difference, interval = paired_difference(answers_of(first), shuffled, "f1", "ratio=4", seed=5)
    by_row = np.subtract(first, second)
    assert difference == pytest.approx(by_row.mean())
    generator, means = np.random.default_rng(5), []
    for _ in range(2000):
        drawn = generator.multinomial(6, [1 / 6] * 6)
        means.append(np.average(by_row, weights=np.repeat(drawn, 2)))
    assert interval == pytest.approx(tuple(np.quantile(means, [0.025, 0.975], method="nearest")))
    shifted = answers_of([score + 10 for score in first])
    assert paired_difference(shifted, answers_of(first), "f1", "ratio=4") == (
        pytest.approx(10.0),
        pytest.approx((10.0, 10.0)),
    )
    cut = answers_of(second, condition="cut=4")
    assert paired_difference(answers_of(first), cut, "f1", "ratio=4", "cut=4", seed=5) == (difference, interval)


def test_other_samples_are_not_compared():
    one = answers_of([1.0, 2.0])
    for other in (answers_of([1.0]), answers_of([1.0, 2.0], "nq"), [*one, *one]):
        with pytest.raises(ValueError, match="must have the same samples of one data set and task"):
            paired_difference(one, other, "f1", "ratio=4")
    two = [*one, *answers_of([1.0], "nq")]
    with pytest.raises(ValueError, match="must have the same samples of one data set and task"):
        paired_difference(two, two, "f1", "ratio=4")
