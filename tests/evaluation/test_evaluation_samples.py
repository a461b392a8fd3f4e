# SPDX-License-Identifier: Apache-2.0
"""The samples of an evaluation: sources, prompts, windows, and what is cut from long contexts."""

import math
import string

import pytest
from naive_twin import CONTINUATION, QA, RECONSTRUCTION, ROWS, SUMMARIZATION, run

from context_compressors.evaluation.evaluate import evaluate_model
from context_compressors.evaluation.samples import EvaluationDataset, SampleBuilder
from context_compressors.evaluation.settings import EvaluationSettings


def builder(tokenizer, max_positions=512, **options):
    options = {"max_new_tokens": {QA: 6, SUMMARIZATION: 6}, "context_tokens": 8, "continuation_tokens": 4, **options}
    return SampleBuilder(tokenizer, EvaluationSettings(**options), max_positions)


def test_restoration_at_several_lengths_takes_whole_windows(model, tokenizer):
    rows = [{"text": "abcdefghijklmnop"}, {"text": "a short one"}, {"text": "0123456789" * 4}]
    report = run(model, tokenizer, rows, tasks=(RECONSTRUCTION, CONTINUATION), restoration_lengths=(8, 16))
    assert report.datasets(RECONSTRUCTION) == ["tiny, 8 tokens", "tiny, 16 tokens"]
    assert report.datasets(CONTINUATION) == ["tiny"]
    samples = {row.dataset: row.num_samples for row in report.rows if row.task == RECONSTRUCTION}
    assert samples == {"tiny, 8 tokens": 3, "tiny, 16 tokens": 2}
    data = EvaluationDataset("tiny", rows)
    work = builder(tokenizer).build_by_length(data, RECONSTRUCTION, (8, 16))
    assert [{len(sample.context_ids) for sample in built} for _, _, built in work] == [{8}, {16}]
    with pytest.raises(
        ValueError,
        match="data set 'tiny, 64 tokens' has nothing to score for reconstruction: all rows are texts of less",
    ):
        run(model, tokenizer, rows, tasks=(RECONSTRUCTION,), restoration_lengths=(64,))


def test_several_summaries_of_a_context_are_references_of_one_sample(tokenizer, model):
    rows = [
        {"context": "a b c", "summary": "a"},
        {"context": "d e f", "summary": "d"},
        {"context": "a b c", "summary": "b"},
    ]
    report = run(model, tokenizer, rows, tasks=(SUMMARIZATION,))
    assert {row.num_samples for row in report.rows} == {2}
    samples = builder(tokenizer).build(EvaluationDataset("tiny", rows), SUMMARIZATION)
    assert [sample.references for sample in samples] == [["a", "b"], ["d"]]


def test_only_a_text_that_ends_is_continued_to_its_end(tokenizer):
    eos = tokenizer.eos_token_id
    text = string.ascii_letters[:40]
    data = EvaluationDataset("tiny", [{"text": text}])
    ends = set()
    for seed in range(60):
        made = builder(tokenizer, seed=seed)
        (continued,), (repeated,) = (made.build(data, task) for task in (CONTINUATION, RECONSTRUCTION))
        assert eos not in continued.target_ids[:-1]
        window = tokenizer.decode([*continued.context_ids, *continued.target_ids], skip_special_tokens=True)
        assert (continued.target_ids[-1] == eos) == (window == text[-12:])
        assert len(continued.target_ids) == 4 + (continued.target_ids[-1] == eos)
        ends.add(continued.target_ids[-1] == eos)
        # Of a repetition the window alone is scored, wherever it was cut.
        assert repeated.target_ids == repeated.context_ids
    assert ends == {True, False}


@pytest.mark.slow
def test_samples_are_drawn_from_all_rows_and_stay_the_same_whatever_else_is_evaluated(model, tokenizer):
    rows = [{**ROWS[row % 3], "id": f"q{row}", "question": f"{row}?"} for row in range(60)]
    drawn = [
        int(sample.id[1:])
        for seed in range(40)
        for sample in builder(tokenizer, seed=seed).build(EvaluationDataset("tiny", rows), QA, 6)
    ]
    # Each sixth of the rows has about a sixth of the 240 draws.
    assert all(20 <= sum(10 * part <= row < 10 * part + 10 for row in drawn) <= 60 for part in range(6))
    alone = run(model, tokenizer, rows, tasks=(QA,), max_samples=5)
    options = {"batch_size": 2, "max_new_tokens": {QA: 6, SUMMARIZATION: 6}, "max_samples": 5}
    others = [EvaluationDataset("other", ROWS), EvaluationDataset("tiny", rows)]
    settings = EvaluationSettings(tasks=(RECONSTRUCTION, QA), **options)
    beside = evaluate_model(model, tokenizer, others, settings, progress=False)
    asked = [sample.id for sample in beside.answers if (sample.dataset, sample.task) == ("tiny", QA)]
    assert asked == [sample.id for sample in alone.answers]
    assert len(set(asked)) == 5


@pytest.mark.parametrize("task", [QA, RECONSTRUCTION, CONTINUATION])
def test_truncated_samples_fill_the_positions_exactly(tokenizer, task):
    text = "0123456789" * 30
    data = EvaluationDataset("tiny", [{"context": text, "question": "?", "answers": ["1"]}])
    cut = builder(tokenizer, 100, context_tokens=200, truncate_context=True).build(data, task)[0]
    tail = max(len(cut.target_ids), 6 if task == QA else 0)
    used = 1 + len(cut.context_ids) + len(cut.prompt_ids) + tail
    # A reconstruction grows by two tokens for one of context.
    assert used in ((99, 100) if task == RECONSTRUCTION else (100,))
    assert cut.truncated
    if task == RECONSTRUCTION:
        assert cut.target_ids == cut.context_ids
        assert cut.references == [tokenizer.decode(cut.context_ids)]


@pytest.mark.parametrize("prefix", ["", "# Text\n"])
def test_contexts_lose_their_beginning_on_request_behind_the_prefix(tokenizer, prefix):
    rows = [{**ROWS[0], "summary": "Ada's cat."}]
    data = EvaluationDataset("tiny", rows)
    options = {"max_context_tokens": 10 + len(prefix), "context_prefix": prefix, "truncate_context": True}
    for side, kept in (("right", rows[0]["context"][:10]), ("left", rows[0]["context"][-10:])):
        for task in (QA, SUMMARIZATION):
            cut = builder(tokenizer, 512, truncation_side=side, **options).build(data, task)[0]
            assert (tokenizer.decode(cut.context_ids), cut.truncated) == (prefix + kept, True)
    # Of a text, the end is continued and the beginning repeated, whichever side is cut.
    options = {"max_context_tokens": 4, "truncate_context": True}
    for side in ("right", "left"):
        cut = builder(tokenizer, 512, truncation_side=side, **options).build(data, RECONSTRUCTION)[0]
        window = builder(tokenizer).build(data, RECONSTRUCTION)[0]
        assert cut.context_ids == cut.target_ids == window.context_ids[:4]
        cut = builder(tokenizer, 512, truncation_side=side, **options).build(data, CONTINUATION)[0]
        assert cut.context_ids == builder(tokenizer).build(data, CONTINUATION)[0].context_ids[-4:]


@pytest.mark.parametrize(
    ("task", "column", "value"),
    [
        (QA, "context", None),
        (QA, "answers", []),
        (QA, "answers", ["a", None]),
        (QA, "answers", math.nan),
        (QA, "question", " "),
        (SUMMARIZATION, "summary", ""),
        (RECONSTRUCTION, "context", 5),
    ],
)
def test_a_row_that_lacks_a_value_is_named(tokenizer, task, column, value):
    whole = {"context": "a b", "question": "?", "answers": ["a"], "summary": "a"}
    data = EvaluationDataset("tiny", [whole, {**whole, column: value}])
    with pytest.raises(ValueError, match=r"data set 'tiny'.* in row 1 \(counted from 0\)"):
        builder(tokenizer).build(data, task)
