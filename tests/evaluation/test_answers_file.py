# SPDX-License-Identifier: Apache-2.0
"""Files of answers."""

import pytest
from naive_twin import QA, answers_of

from context_compressors.evaluation.report import EvaluationReport
from context_compressors.evaluation.rows import AnswersFile, read_answers


def test_answers_are_appended_and_read_back(tmp_path):
    path, report = tmp_path / "new" / "answers.jsonl", EvaluationReport("tiny")
    file = AnswersFile(path)
    report.answers += answers_of([1.0, 2.0])
    file.write_new(report.answers)
    report.answers += answers_of([3.0], "nq")
    file.write_new(report.answers)
    assert read_answers(path) == report.answers
    # An evaluation that stopped in the middle of "nq" scores it again.
    path.write_text(path.read_text() + '{"dataset": "nq", "ta')
    before = path.read_text()
    again = AnswersFile(path, {("squad", QA)})
    # Nothing is lost where an evaluation is refused.
    assert path.read_text() == before
    report.answers = report.answers[2:]
    again.write_new(report.answers)
    assert [answers.dataset for answers in read_answers(path)] == ["squad", "squad", "nq"]
    with pytest.raises(ValueError, match=r"does not have the answers of \[\('qed', 'question_answering'\)\]"):
        AnswersFile(path, {("qed", QA)})
    path.write_text("[1]\n")
    for read in (lambda: AnswersFile(path, {("squad", QA)}), lambda: read_answers(path)):
        with pytest.raises(ValueError, match="is no file of answers"):
            read()
