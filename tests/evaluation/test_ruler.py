# SPDX-License-Identifier: Apache-2.0
"""RULER's tasks: what is hidden where, what is asked, and that the answers follow from the context alone."""

import json
import re
from collections import Counter

import pytest
from naive_twin import QA, encode

from context_compressors.data.document_ids import document_id
from context_compressors.evaluation.benchmark_metrics import benchmark_max_new_tokens, benchmark_metric
from context_compressors.evaluation.data_sets import load_datasets, sources_of_task
from context_compressors.evaluation.ruler import TASKS, ruler_examples
from context_compressors.evaluation.samples import SampleBuilder
from context_compressors.evaluation.settings import EvaluationSettings

TEXTS = [" ".join(f"This is sentence {number} of text {text}." for number in range(200)) for text in range(4)]
QUESTIONS = [
    {"context": f"The town of X{n} has {n + 100} houses." * 4, "question": f"X{n}?", "answers": [f"{n + 100}"]}
    for n in range(60)
]
# Bytes, which are the tokens here; most below that length are examples and instructions.
LENGTH = 4000


def made(task, tokenizer, length=LENGTH, number=2, seed=0):
    return ruler_examples(task, tokenizer, length, number, seed, TEXTS, QUESTIONS)


@pytest.mark.slow
def test_every_task_has_its_length_its_answers_and_its_seed(tokenizer):
    for task in TASKS:
        rows = made(task, tokenizer)
        for row in rows:
            # Within a line, a document, or all words that come and go with the number of coded ones.
            assert LENGTH - 400 <= len(encode(tokenizer, row["context"])) <= LENGTH, task
            assert all(answer in row["context"] for answer in row["answers"]), task
            asked = row["question"] + row["answer_prefix"]
            # Words to count may be any words.
            assert task == "cwe" or not any(answer in asked for answer in row["answers"]), task
            metric = benchmark_metric(row)
            assert metric.score(", ".join(row["answers"]), row["answers"]) == 100, task
            assert metric.score("", row["answers"]) == 0, task
            assert benchmark_max_new_tokens(row) >= 30, task
        assert rows[:1] == made(task, tokenizer, number=1), task
        assert rows[:1] != made(task, tokenizer, number=1, seed=1), task


@pytest.mark.slow
def test_needles_are_as_many_as_the_task_says_and_no_other_has_their_key(tokenizer):
    for task, num_needles, num_answers in (
        ("niah_single_1", 1, 1),
        ("niah_single_2", 1, 1),
        ("niah_multikey_1", 4, 1),
        ("niah_multikey_2", None, 1),
        ("niah_multivalue", 4, 4),
        ("niah_multiquery", 4, 4),
    ):
        for row in made(task, tokenizer):
            found = re.findall(r"One of the special magic numbers for (\S+) is: (\d{7})\.", row["context"])
            assert num_needles in (None, len(found)), task
            asked = [(key, value) for key, value in found if re.search(rf"(?<![\w-]){key}(?![\w-])", row["question"])]
            assert sorted(value for _, value in asked) == sorted(row["answers"]), task
            assert len(row["answers"]) == num_answers, task
    plain, several = (made(task, tokenizer, number=1)[0] for task in ("niah_single_3", "niah_multiquery"))
    assert re.fullmatch(r"What is the special magic uuid for \S+ mentioned in the provided text\?", plain["question"])
    assert re.fullmatch(r"[\da-f]{8}-[\da-f]{4}-4[\da-f]{3}-[\da-f]{4}-[\da-f]{12}", plain["answers"][0])
    assert several["answer_prefix"].startswith("The special magic numbers for ")
    assert several["answer_prefix"].endswith(" mentioned in the provided text are")


def test_variables_and_counts_lead_to_the_answers(tokenizer):
    for row in made("vt", tokenizer):
        solved, _, asked = row["context"].partition("\n\nMemorize")
        value = re.search(r"assigned the value (\d{5})", row["question"])[1]
        holders: dict[str, str] = {}
        for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", asked):
            # Read in order, each variable's source has its value already.
            holders[name] = source if source.isdigit() else holders[source]
        assert [name for name, held in holders.items() if held == value] == row["answers"]
        assert f"{len(row['answers'])} variables are assigned the value" in solved
    for row in made("cwe", tokenizer):
        words = re.findall(r"\d+\. ([^\d]+?)(?= \d+\.|\n)", row["context"].rpartition("appear most often.\n")[2])
        counts = Counter(words)
        assert {word for word, _ in counts.most_common(10)} == set(row["answers"])
        assert {counts[word] for word in row["answers"]} == {6}
        assert set(counts.values()) == {6, 1}
    for row in made("fwe", tokenizer):
        counts = Counter(row["context"].rpartition("coded words. ")[2].split())
        ranked = [word for word, _ in counts.most_common(4)]
        assert ranked[0] == "..."
        assert ranked[1:] == row["answers"]
        assert counts[ranked[3]] > sorted(counts.values(), reverse=True)[4]


def test_tasks_are_sources_of_an_evaluation_and_refuse_what_they_lack(tokenizer, tmp_path):
    (tmp_path / "text.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in TEXTS))
    sources = ["generated:vt#2", "{path: text.jsonl, kind: niah_multivalue, document_tokens: 900}"]
    read = {"data_dir": str(tmp_path), "num_documents": 3, "document_tokens": 2000}
    tracked, needles = load_datasets(sources, tokenizer, **read)
    assert (tracked.name, len(tracked.examples)) == ("vt, 2000 tokens", 2)
    assert (needles.name, len(needles.examples), needles.tasks()) == ("niah_multivalue, 900 tokens", 3, (QA,))
    # What a context is put together from may have trained a model.
    assert all(set(row["source_texts"]) <= set(TEXTS) and row["source_texts"] for row in needles.examples)
    assert not any("source_texts" in row for row in tracked.examples)
    rows = [{"context": f"Place {n} has {n} mills.", "question": f"{n}?", "answers": [f"{n} mills"]} for n in range(9)]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (asked,) = load_datasets(["{path: asked.jsonl, kind: qa_1}"], tokenizer, **{**read, "document_tokens": 400})
    for row in asked.examples:
        own, *others = row["source_texts"]
        # Questions are drawn by their own document in a bootstrap, not by one that nearly all contexts have.
        assert f"{row['answers'][0]}." in own
        taken = [one["context"] for one in rows if one["context"] in row["context"]]
        assert [own, *others] == sorted(taken, key=lambda text: text != own)
    builder = SampleBuilder(tokenizer, EvaluationSettings(max_new_tokens={QA: 4}))
    for sample, row in zip(builder.build(asked, QA), asked.examples, strict=True):
        assert sample.source_ids == tuple(map(document_id, [*row["source_texts"], row["context"]]))
    # A single answer is as good as a list of one, and keeps the same documents out.
    (tmp_path / "single.jsonl").write_text("".join(json.dumps({**r, "answers": r["answers"][0]}) + "\n" for r in rows))
    (single,) = load_datasets(["{path: single.jsonl, kind: qa_1}"], tokenizer, **{**read, "document_tokens": 400})
    assert single.examples == asked.examples
    with pytest.raises(ValueError, match="tokens is too long: this task has 9 words or documents"):
        load_datasets(["{path: asked.jsonl, kind: qa_1}"], tokenizer, **{**read, "document_tokens": 900})
    with pytest.raises(ValueError, match=r"contexts_per_document of source .* joins contexts when training"):
        load_datasets([{"path": "asked.jsonl", "tasks": [QA], "contexts_per_document": 2}], tokenizer, **read)
    for source, message in (
        ("generated:niah_single_2", "niah_single_2 hides needles in running text: give it a source"),
        ("{path: text.jsonl, kind: qa_1}", "qa_1 asks questions about documents"),
        ("generated:cwe", "a context of 300 tokens is too short: the least that this task takes is"),
        ("generated:niah_sngle_1", "did you mean 'niah_single_1'"),
        ("{path: text.jsonl, kind: niah_multvalue}", "did you mean 'niah_multivalue'"),
    ):
        with pytest.raises(ValueError, match=message):
            load_datasets([source], tokenizer, **{**read, "document_tokens": 300})


def test_each_source_serves_the_tasks_that_it_can():
    sources = sources_of_task(["generated", "books.jsonl", "{path: squad.jsonl, kind: qa_1}"], "ruler", [64, 128])
    kinds = {(source.label, source.kind) for source in sources}
    generated, essays = ({name for label, name in kinds if label == place} for place in ("generated", "books.jsonl"))
    assert essays >= {"niah_single_2", "niah_multivalue"}
    assert generated >= {"niah_single_1", "vt", "cwe"}
    assert not generated & essays
    assert generated | essays | {"qa_1", "qa_2"} == set(TASKS)
    assert ("squad.jsonl", "qa_1") in kinds
    assert len(sources) == 2 * len(kinds)
    (needles,) = sources_of_task(["books.jsonl#9"], "needles", [64])
    assert (needles.kind, needles.document_tokens, needles.max_samples) == ("needles", 64, 9)
