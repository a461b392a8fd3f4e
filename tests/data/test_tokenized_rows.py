# SPDX-License-Identifier: Apache-2.0
"""Sources with contexts and texts side by side: which of the two a task reads."""

import json

import pytest

from context_compressors.data.prompts import TASKS
from context_compressors.data.rows import FileSource
from context_compressors.data.sources import DataSource
from context_compressors.evaluation.samples import EvaluationDataset, SampleBuilder
from context_compressors.evaluation.settings import EvaluationSettings
from context_compressors.modeling.parts.text_ids import encode
from context_compressors.training.arguments import DataArguments
from context_compressors.training.objectives.compression_dataset import CompressionDataset

ROWS = [
    {
        "context": f"Berth {row // 2} belongs to Nora.",
        "question": f"Who has berth {row}?",
        "answers": ["Nora"],
        "summary": "Nora has it.",
        "text": f"A note, number {row}, that was brought by Bob.",
    }
    for row in range(6)
]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    return str(tmp_path)


@pytest.mark.parametrize("tasks", [[task] for task in TASKS] + [list(TASKS)])
def test_a_task_is_trained_and_evaluated_on_the_same_contexts(tokenizer, folder, tasks):
    limits = {"min_context_tokens": 100, "max_context_tokens": 100, "max_target_tokens": 101}
    source = {"path": "rows.jsonl", "tasks": tasks}
    dataset = CompressionDataset(DataArguments(sources=[source], data_dir=folder, **limits), tokenizer, 80)
    builder = SampleBuilder(tokenizer, EvaluationSettings(context_tokens=100, continuation_tokens=1))
    found = {task: set() for task in tasks}
    for example in map(dataset.__getitem__, range(80)):
        words = example["context_ids"] + (example["target_ids"][:-1] if example["task"] == "continuation" else [])
        found[example["task"]].add(tokenizer.decode(words))
    for task in tasks:
        samples = builder.build(EvaluationDataset("rows", ROWS), task)
        column = "text" if task in ("reconstruction", "continuation") else "context"
        whole = {row[column] for row in ROWS}
        if task == "continuation":
            # Windows of the text, with what follows them.
            assert all(any(part in text for text in whole) for part in found[task])
            assert all(any(tokenizer.decode(sample.context_ids) in text for text in whole) for sample in samples)
        else:
            assert found[task] == whole == {tokenizer.decode(sample.context_ids) for sample in samples}


def test_only_the_rows_that_a_source_names_are_read(tokenizer, folder):
    source = {"path": "rows.jsonl", "tasks": ["question_answering"], "rows": [2, 4]}
    dataset = CompressionDataset(
        DataArguments(sources=[source], data_dir=folder, canonical_prompts=True), tokenizer, 12
    )
    asked = {tokenizer.decode(dataset[index]["prompt_ids"]) for index in range(12)}
    assert asked == {f"\nQuestion: Who has berth {row}?\nAnswer:" for row in (2, 3)}
    with pytest.raises(ValueError, match=r"has no rows among \[6, 9\]"):
        CompressionDataset(DataArguments(sources=[{**source, "rows": [6, 9]}], data_dir=folder), tokenizer)


def test_neighbouring_contexts_are_joined_to_one_document(tokenizer, folder):
    contexts = list(dict.fromkeys(row["context"] for row in ROWS))
    source = {"path": "rows.jsonl", "tasks": ["question_answering"], "contexts_per_document": 3}
    limit = 2 * len(encode(tokenizer, "\n\n".join(contexts)))
    options = {"data_dir": folder, "questions_per_example": 6, "max_context_tokens": limit}
    dataset = CompressionDataset(DataArguments(sources=[source], **options), tokenizer, 60)
    found = set()
    for example in map(dataset.__getitem__, range(60)):
        document = tokenizer.decode(example["context_ids"])
        found.add(document)
        prompts = [example["prompt_ids"], *(prompt for prompt, _ in example["more_turns"])]
        for prompt in map(tokenizer.decode, prompts):
            # Whatever is asked is asked about a context of the document.
            row = next(row for row in ROWS if row["question"] in prompt)
            assert row["context"] in document
        assert len(prompts) == 2 * len(document.split("\n\n"))
    assert found == {"\n\n".join(contexts[first:end]) for first in range(3) for end in range(first + 1, 4)}


def test_passages_with_marks_in_them_stay_whole(tokenizer, tmp_path):
    contexts = [["one\x1etwo", "three\x1f"], ["one", "two", "three"], ["one\x1etwo", "three\x1f"]]
    rows = [{**row, "context": context} for row, context in zip(ROWS, contexts, strict=False)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = FileSource(DataSource(path="rows.jsonl", tasks=("question_answering",)), str(tmp_path), 0, tokenizer)
    texts = source.texts("question_answering")
    passages = [texts.passages(source.text_of("question_answering", row)) for row in range(3)]
    assert [list(map(tokenizer.decode, of_row)) for of_row in passages] == contexts
    assert source.rows_of_text == {0: [0, 2], 1: [1]}
