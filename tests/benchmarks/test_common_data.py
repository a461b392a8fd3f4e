# SPDX-License-Identifier: Apache-2.0
"""The texts and questions that benchmarks train and test with."""

from pathlib import Path

import pyarrow.parquet
from transformers import PreTrainedTokenizerFast


def test_windows_end_between_sentences_and_keep_the_limit(script, tokenizer: PreTrainedTokenizerFast):
    windows = script("common.data").windows
    text = "One two. Three four? " + "Too long for any window, this one is. " + "Five! Six seven."
    # One token a byte, and a space in front of every sentence.
    assert windows(text, tokenizer, 24) == ["One two. Three four?", "Five! Six seven."]
    assert windows("", tokenizer, 24) == []


def test_a_question_gets_the_one_window_that_holds_its_answer(script, tokenizer: PreTrainedTokenizerFast):
    answerable = script("common.data").answerable
    context = "Ada keeps bees. The cat is grey. Ada has a dog. It is two."

    def ask(answer: str) -> list[dict]:
        return answerable([{"context": context, "question": "?", "answers": [answer]}], tokenizer, 36)

    assert ask("the BEES") == [
        {"context": "Ada keeps bees. The cat is grey.", "question": "?", "answers": ["the BEES"]}
    ]
    assert ask("Ada") == []  # both windows hold it: which one was meant?
    assert ask("horse") == []
    assert ask("do") == []  # a part of a word is no answer


def test_training_and_test_contexts_never_meet(script, tokenizer: PreTrainedTokenizerFast, data: Path, tmp_path: Path):
    sources, tests = script("common.data").prepare(str(data), tokenizer, 192, tmp_path)
    trained = set()
    for source in sources[1:]:
        table = pyarrow.parquet.read_table(tmp_path / source["path"])
        trained |= set(table["context" if "context" in table.column_names else "text"].to_pylist())
    tested = {example.get("context") or example["text"] for test in tests for example in test.examples}
    assert len(trained) > 20
    assert len(tested) > 10
    assert not trained & tested
