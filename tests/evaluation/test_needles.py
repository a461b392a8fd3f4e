# SPDX-License-Identifier: Apache-2.0
"""One fact in running text: what is hidden where, and how it is asked for."""

import json
import random

import pytest
from naive_twin import QA, encode

from context_compressors import cli
from context_compressors.data.document_ids import document_id
from context_compressors.data.synthetic_documents import generate_document, split_of
from context_compressors.evaluation import data_sets
from context_compressors.evaluation.data_sets import NEEDLE_KINDS, draw_needle, needle_examples
from context_compressors.evaluation.report import EvaluationReport

# Running text whose sentences tell where they stand.
TEXTS = [" ".join(f"This is sentence {number} of text {text}." for number in range(60)) for text in range(4)]


def test_needles_are_about_names_that_training_documents_never_say():
    words = [name for kind in ("towns", "last_names") for name in data_sets._WORDS[kind].split()]
    names = set(words)
    assert len(names) == len(words)
    assert {split_of(name) for name in names} == {"test"}
    assert {split_of(draw_needle("numbers", random.Random(n)).answers[0]) for n in range(50)} == {"test"}
    seen = " ".join(generate_document(seed, num_tokens=400).text for seed in range(50))
    assert not [name for name in names if name in seen]


@pytest.mark.parametrize("num_tokens", [120, 300, 1200])
def test_contexts_have_their_length_and_one_needle_between_sentences(tokenizer, num_tokens):
    examples = needle_examples(TEXTS, tokenizer, num_tokens, 30)
    assert [example["id"] for example in examples] == [f"{NEEDLE_KINDS[n % 3]}/{n}" for n in range(30)]
    for number, example in enumerate(examples):
        needle = draw_needle(NEEDLE_KINDS[number % 3], random.Random(f"0/needle/{number}"))
        assert (example["question"], example["answers"]) == (needle.question, list(needle.answers))
        context = example["context"]
        assert num_tokens - 8 <= len(encode(tokenizer, context)) <= num_tokens
        assert context.count(needle.sentence) == context.count(needle.town) == 1
        before, after = context.split(needle.sentence)
        assert before == "" or before.endswith(". ")
        assert " This".startswith(after[:5])


def test_needles_are_the_same_at_every_length_and_change_with_the_seed(tokenizer):
    asked = [
        [(example["question"], example["answers"]) for example in needle_examples(TEXTS, tokenizer, length, 9, seed)]
        for length, seed in ((150, 0), (600, 0), (150, 1))
    ]
    assert asked[0] == asked[1] != asked[2]
    again = needle_examples(TEXTS, tokenizer, 150, 9, 0)
    assert again == needle_examples(TEXTS, tokenizer, 150, 9, 0)


def test_contexts_go_on_in_the_next_text_and_behind_the_last_one_in_the_first(tokenizer):
    num_tokens = sum(len(text) for text in TEXTS)
    for example in needle_examples(TEXTS, tokenizer, num_tokens, 9):
        assert all(f"sentence 30 of text {number}." in example["context"] for number in range(4))
    for example in needle_examples(TEXTS[:1], tokenizer, len(TEXTS[0]), 9):
        assert sum(f"sentence {number} of" in example["context"] for number in range(60)) >= 57
    with pytest.raises(ValueError, match=r"the texts have \d+ tokens, and a context of running text takes \d+"):
        needle_examples(TEXTS, tokenizer, 20_000, 1)
    with pytest.raises(ValueError, match="a context of 20 tokens has no room for"):
        needle_examples(TEXTS, tokenizer, 20, 1)


@pytest.mark.slow
def test_the_command_asks_for_needles_at_each_length(folders, tokenizer, tmp_path, capsys):
    (tmp_path / "books.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    output = tmp_path / "needles.json"
    argv = ["evaluate", str(folders / "tiny-compressor"), "--tasks", "needles"]
    argv += ["--data", str(tmp_path / "books.jsonl") + "#6"]
    argv += ["--max-new-tokens", "2", "--ratios", "2", "--device", "cpu", "--output", str(output)]
    assert cli.main([*argv, "--lengths", "100", "160", "--plots", str(tmp_path / "plots")]) == 0
    report = EvaluationReport.load(output)
    assert report.datasets(QA) == ["needles, 100 tokens", "needles, 160 tokens"]
    assert report.conditions(QA) == ["no_context", "full_context", "ratio=2"]
    # Needles whose contexts begin in one text are drawn together.
    assert all(row.num_samples == 6 > row.num_documents for row in report.rows)
    source = {"path": "books.jsonl", "kind": "needles", "document_tokens": 160, "max_samples": 6}
    assert report.settings["sources"]["needles, 160 tokens"] == source
    contexts = {document_id(row["context"]) for row in needle_examples(TEXTS, tokenizer, 100, 6)}
    assert contexts <= set(report.documents["needles, 100 tokens"].split())
    assert (tmp_path / "plots" / "needles.png").is_file()
    printed = capsys.readouterr().out
    assert "| needles, 160 tokens" in printed
    # Text that a model was trained on hides no needle, nor does text that it was chosen by.
    chosen = ["--chosen-by", str(output), "--output", str(tmp_path / "more.json"), "--lengths", "100"]
    assert cli.main([*argv, *chosen]) == 1
    assert "documents of 'needles, 100 tokens' chose tiny-compressor, by needles.json" in capsys.readouterr().err
    (tmp_path / "books.jsonl").write_text(json.dumps({"text": "Too short."}))
    assert cli.main([*argv, "--lengths", "100", "--overwrite"]) == 1
    assert "a context of running text takes" in capsys.readouterr().err
    assert cli.main([*argv, "--tasks", "needles", QA]) == 1
    assert "needles, ruler and retrieval are each evaluated alone" in capsys.readouterr().err
