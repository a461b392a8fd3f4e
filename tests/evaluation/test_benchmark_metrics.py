# SPDX-License-Identifier: Apache-2.0
"""Scores of LongBench and RULER by hand, and questions in kvpress's schema, asked and scored."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from naive_twin import QA, make_tokenizer, run

from context_compressors.evaluation.metrics import BenchmarkMetric, benchmark_max_new_tokens, benchmark_metric
from context_compressors.evaluation.rows import BENCHMARK_SCORE
from context_compressors.evaluation.samples import EvaluationDataset, SampleBuilder
from context_compressors.evaluation.settings import EvaluationSettings

LABELS = ("Date", "Other", "Other number")
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}<assistant>"
SCORES = yaml.safe_load(Path(__file__).with_name("benchmark_scores.yaml").read_text(encoding="utf-8"))


@pytest.mark.slow
def test_scores_are_those_of_the_published_definitions():
    for task, output, answers, expected in SCORES:
        metric = BenchmarkMetric(task, LABELS if task == "trec" else ())
        assert metric.score(output, answers) == pytest.approx(expected, abs=1e-2), (task, output)


def test_metric_and_length_of_an_answer_are_those_of_the_row():
    kvpress = {"task": "trec-e", "answer_prefix": "Type:", "max_new_tokens": 84, "all_classes": list(LABELS)}
    assert benchmark_metric(kvpress) == BenchmarkMetric("trec", LABELS)
    assert benchmark_max_new_tokens(kvpress) == 84
    # LongBench's own rows leave the length to the task.
    published = {"task": "gov_report_e", "all_classes": None}
    assert (benchmark_metric(published), benchmark_max_new_tokens(published)) == (BenchmarkMetric("gov_report"), 512)
    for other in ({"task": "hotpotqa", "question": "?"}, {"task": "longdep_qa", "answer_prefix": "Answer: "}):
        assert benchmark_metric(other) is None
        assert benchmark_max_new_tokens(other) is None


def test_questions_of_kvpress_are_put_in_their_own_words(tokenizer):
    row = {"context": "A text.\n", "question": "Who?", "answer_prefix": "Answer:", "answers": ["Ada"], "task": "qa_1"}
    data = EvaluationDataset("tiny", [{**row, "max_new_tokens": 9}, {**row, "max_new_tokens": 3}])
    settings = EvaluationSettings(max_new_tokens={QA: 6, "summarization": 6})
    plain = SampleBuilder(tokenizer, settings, 64).build(data, QA)
    assert [sample.max_new_tokens for sample in plain] == [9, 3]
    assert {tokenizer.decode(sample.prompt_ids) for sample in plain} == {"Who?\nAnswer:"}
    assert tokenizer.decode(plain[0].target_ids[:-1]) == " Ada"
    # The rows' own lengths leave other room: of 30, 1 for BOS, 12 for the prompt, and 9 or 5 for an answer.
    cut = SampleBuilder(tokenizer, replace(settings, truncate_context=True), 28).build(data, QA)
    assert [len(sample.context_ids) for sample in cut] == [6, 8]
    chat = make_tokenizer()
    chat.chat_template = CHAT
    (asked, _) = SampleBuilder(chat, replace(settings, prompt_format="chat")).build(data, QA)
    assert chat.decode(asked.prompt_ids).endswith("Who?</user><assistant>Answer:")


def test_benchmark_scores_stand_first_and_answers_keep_their_own_length(model, tokenizer):
    prefix = {"answer_prefix": "A:", "task": "niah_single_1", "answers": ["e"]}
    rows = [
        {"context": "Ada has a cat." * (n + 1), "question": "Who?", **prefix, "max_new_tokens": 2 + n}
        for n in range(4)
    ]
    report = run(model, tokenizer, rows, tasks=(QA,))
    assert report.main_metric(QA) == BENCHMARK_SCORE
    for row in report.rows:
        assert next(iter(row.metrics)) == BENCHMARK_SCORE
    for number, sample in enumerate(report.answers):
        for condition, answer in sample.answers.items():
            # A token is a byte, and one that is no letter is read as one sign.
            assert len(answer) <= 2 + number
            assert sample.scores[condition][BENCHMARK_SCORE] == 100.0 * ("e" in answer.lower())
