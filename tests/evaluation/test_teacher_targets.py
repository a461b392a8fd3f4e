# SPDX-License-Identifier: Apache-2.0
"""Targets that a language model writes from whole contexts: what it writes, stops, refusals, and training on them."""

import json
from dataclasses import replace

import pytest
import torch
from naive_twin import ROWS, encode

from context_compressors.data.sources import DataSource
from context_compressors.evaluation.settings import EvaluationSettings
from context_compressors.evaluation.teacher_targets import write_targets
from context_compressors.training.fields import DataArguments
from context_compressors.training.objectives.compression_dataset import CompressionDataset

NEW = 6
# A question that is asked twice, and none of them with an answer.
QUESTIONS = [{"id": f"q{n}", "context": row["context"], "question": row["question"]} for n, row in enumerate(ROWS)]
QUESTIONS.append({**QUESTIONS[0], "id": "q3"})


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in QUESTIONS))
    return DataSource(path=str(path), license="cc-by-4.0", title="questions")


@pytest.fixture
def settings():
    limits = {"question_answering": NEW, "summarization": NEW}
    return EvaluationSettings(batch_size=2, max_new_tokens=limits)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def naive_target(teacher, tokenizer, context, prompt):
    """Greedy tokens without a cache, a batch or padding."""
    ids = [tokenizer.bos_token_id, *encode(tokenizer, context), *encode(tokenizer, prompt)]
    written = []
    while len(written) < NEW and tokenizer.eos_token_id not in written:
        with torch.no_grad():
            written.append(int(teacher(torch.tensor([ids + written]), use_cache=False).logits[0, -1].argmax()))
    return tokenizer.decode(written, skip_special_tokens=True).strip(), tokenizer.eos_token_id in written


def test_each_row_gets_what_the_teacher_writes_alone_in_the_order_of_the_source(
    teacher, tokenizer, questions, settings, tmp_path
):
    path = tmp_path / "out" / "targets.jsonl"
    # One that ends at once, so that empty and unfinished targets are both there.
    bias = torch.zeros(len(tokenizer))
    found = []
    for favour in (0.0, 100.0):
        bias[tokenizer.eos_token_id] = favour
        teacher.lm_head.bias = torch.nn.Parameter(bias.clone())
        target = path.with_name(f"{favour}.jsonl")
        record = write_targets(teacher, tokenizer, [questions], target, settings=settings, progress=False)
        rows = read(target)
        assert [(row["id"], row["context"]) for row in rows] == [(row["id"], row["context"]) for row in QUESTIONS]
        for row in rows:
            text, ended = naive_target(teacher, tokenizer, row["context"], f"\nQuestion: {row['question']}\nAnswer:")
            assert (row["answers"], row["finished"], row["truncated"]) == ([text] if text else [], ended, False)
        found.append((record["rows"], record["unfinished"], record["empty"], record["truncated"]))
        teacher.lm_head.bias = None
    assert found == [(4, 4, 0, 0), (4, 0, 4, 0)]


@pytest.mark.slow
def test_the_record_has_teacher_license_and_settings_and_training_reads_the_file(
    folders, teacher, tokenizer, questions, settings, tmp_path
):
    output = tmp_path / "targets.jsonl"
    sources = ["generated", f"{{path: {questions.path}, license: cc-by-4.0}}"]
    record = write_targets(teacher, tokenizer, sources, output, settings=settings, progress=False)
    assert json.loads((tmp_path / "targets.jsonl.json").read_text()) == record
    assert (record["teacher"], record["max_new_tokens"], record["prompt_format"]) == ("teacher", NEW, "plain")
    assert record["prompt"] == "\nQuestion: {question}\nAnswer:"
    assert not any(folder in json.dumps(record) for folder in (str(tmp_path), str(folders)))
    source = {"path": output.name, "tasks": ["question_answering"]}
    rows = read(output)
    assert record["rows"] == len(rows) > len(QUESTIONS)
    # Only the questions of the file, which all came to the limit: no end is learned behind them.
    kept = {**source, "where": {"source": "questions", "finished": False}, "max_samples": 1}
    data = DataArguments(sources=[kept], data_dir=str(tmp_path), canonical_prompts=True)
    example = CompressionDataset(data, tokenizer)[0]
    (row,) = [row for row in rows if example["id"].endswith(row["id"]) and row["source"] == "questions"]
    assert tokenizer.decode(example["context_ids"]) == row["context"]
    assert tokenizer.decode(example["target_ids"]).strip() == row["answers"][0]
    finished = "".join(json.dumps({**row, "finished": True}) + "\n" for row in rows)
    output.write_text(finished)
    example = CompressionDataset(replace(data, sources=[{**kept, "where": {"source": "questions"}}]), tokenizer)[0]
    assert example["target_ids"][-1] == tokenizer.eos_token_id


def test_summaries_are_written_for_texts_alone_and_long_contexts_are_cut_where_they_may_be(
    teacher, tokenizer, settings, tmp_path
):
    path = tmp_path / "texts.jsonl"
    texts = [ROWS[0]["context"], ROWS[2]["context"], ROWS[0]["context"]]
    path.write_text("".join(f"{json.dumps({'context': text})}\n" for text in texts))
    short = {**vars(settings), "max_context_tokens": 40}
    output, task = tmp_path / "summaries.jsonl", "summarization"
    with pytest.raises(ValueError, match=r"does not fit.*truncate_context"):
        write_targets(
            teacher, tokenizer, [DataSource(path=str(path))], output, task=task, settings=EvaluationSettings(**short)
        )
    assert not output.exists()
    settings = EvaluationSettings(**{**short, "truncate_context": True})
    record = write_targets(
        teacher, tokenizer, [DataSource(path=str(path))], output, task=task, settings=settings, progress=False
    )
    rows = read(output)
    assert [row["context"] for row in rows] == texts
    assert [row["truncated"] for row in rows] == [False, True, False]
    assert rows[0]["summary"] == rows[2]["summary"] != rows[1]["summary"]
    assert record["truncated"] == 1
