# SPDX-License-Identifier: Apache-2.0
import json

import pyarrow
import pyarrow.parquet
import pytest

from context_compressors.data.prompts import TASKS
from context_compressors.data.synthetic_documents import generate_document
from context_compressors.modeling.parts.text_ids import encode
from context_compressors.training.arguments import DataArguments
from context_compressors.training.fields import scheduled_length
from context_compressors.training.objectives.compression_dataset import CompressionDataset

GENERATED = {"generated": True, "tasks": ["question_answering", "reconstruction", "continuation"], "weight": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("data")
    rows = []
    for seed in range(6):
        document = generate_document(seed, num_tokens=60 + 20 * seed)
        for i, question in enumerate(document.questions[:3]):
            row = {"context": document.text, "question": question.question, "answers": [question.answer]}
            rows.append({"id": f"{seed}-{i}", "summary": "All of it.", **row})
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path / "qa.parquet")
    texts = [{"text": generate_document(seed, num_tokens=300).text} for seed in range(4)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([*texts, {"text": ""}]), path / "text.parquet")
    return str(path)


def make(tokenizer, folder, *sources, num_examples=40, seed=0, batch_size=1, context_tokenizer=None, **fields):
    data = DataArguments(sources=list(sources), data_dir=folder, **fields)
    how = {"seed": seed, "batch_size": batch_size, "context_tokenizer": context_tokenizer}
    return CompressionDataset(data, tokenizer, num_examples, **how)


TEXT = {"path": "text.parquet", "tasks": ["reconstruction", "continuation"], "weight": 1}
QUESTIONS = {"path": "qa.parquet", "tasks": ["question_answering", "summarization"], "weight": 1}


def test_an_example_depends_on_index_and_seed_only(tokenizer, folder):
    first, second = (make(tokenizer, folder, GENERATED, TEXT, QUESTIONS, max_context_tokens=120) for _ in range(2))
    backwards = [second[index] for index in reversed(range(40))]
    assert [first[index] for index in range(40)] == backwards[::-1]
    other = make(tokenizer, folder, GENERATED, TEXT, QUESTIONS, max_context_tokens=120, seed=1)
    assert [other[index] for index in range(40)] != backwards[::-1]
    assert {example["task"] for example in backwards} == set(TASKS)


def test_each_epoch_draws_its_own(tokenizer, folder):
    fields = {"max_context_tokens": 120, "group_batches": 2, "batch_size": 2}
    sources = [{**TEXT, "weight": None}, {**QUESTIONS, "weight": None}]
    first, second = (make(tokenizer, folder, *sources, num_examples=None, **fields) for _ in range(2))
    epochs = []
    for epoch in range(3):
        first.set_epoch(epoch)
        epochs.append([first[index] for index in range(len(first))])
        # Every row once, as ever, but for the empty text.
        asked = [example["id"] for example in epochs[-1] if example["id"].startswith("qa")]
        assert len(asked) == len(set(asked)) == 18
    assert epochs[0] == [second[index] for index in range(len(second))]
    drawn = [[(example["id"], example["task"], example["context_ids"]) for example in made] for made in epochs]
    assert drawn[0] != drawn[1] != drawn[2] != drawn[0]
    assert len({example["index"] for made in epochs for example in made}) == 3 * len(first)
    second.set_epoch(1)
    assert [second[index] for index in range(len(second))] == epochs[1]


def dealt(dataset):
    return list(zip(dataset.source_of.tolist(), dataset.turn_of.tolist(), strict=True))


def test_without_a_number_all_rows_come_once(tokenizer, folder):
    sources = [{"path": "qa.parquet", "tasks": ["question_answering"]}, {**TEXT, "weight": None}]
    dataset = CompressionDataset(DataArguments(sources=sources, data_dir=folder), tokenizer)
    rows = [(place, dataset._row(place, [18, 5][place], turn)) for place, turn in dealt(dataset)]
    assert sorted(rows) == [(0, row) for row in range(18)] + [(1, row) for row in range(5)]
    # The last row of the texts is empty, and gives its place to another one.
    ids = [dataset[index]["id"] for index in range(23)]
    assert len({*ids} - {f"text.parquet/{row}" for row in range(5)}) == 18
    assert {f"text.parquet/{row}" for row in range(4)} < {*ids}
    again, other = (
        CompressionDataset(DataArguments(sources=sources, data_dir=folder), tokenizer, seed=seed) for seed in (0, 1)
    )
    assert dealt(again) == dealt(dataset) != dealt(other)
    assert dataset.source_of.tolist() != sorted(dataset.source_of.tolist())


@pytest.mark.slow
def test_continuation_goes_on_where_the_context_ends(tokenizer, folder):
    texts = [encode(tokenizer, generate_document(seed, num_tokens=300).text) for seed in range(4)]
    source = {**TEXT, "tasks": ["continuation"]}
    dataset = make(tokenizer, folder, source, num_examples=600, max_context_tokens=100, max_target_tokens=50)
    ends = []
    for index in range(600):
        example = dataset[index]
        # Only where the text itself ends, EOS does.
        ends.append(example["target_ids"][-1] == tokenizer.eos_token_id)
        whole = example["context_ids"] + example["target_ids"][: 49 if ends[-1] else 50]
        places = [(text, i) for text in texts for i in range(len(text)) if whole == text[i : i + len(whole)]]
        assert places
        assert ends[-1] == any(i + len(whole) == len(text) for text, i in places)
        assert len(example["context_ids"]) <= 100
        assert len(example["target_ids"]) == 50
    assert 0 < sum(ends) < 60


@pytest.mark.parametrize("prefix", ["", "### Context:\n"])
def test_the_beginning_is_dropped_on_request_behind_the_prefix_and_counted(tokenizer, folder, prefix):
    ids = encode(tokenizer, prefix)
    whole = make(tokenizer, folder, QUESTIONS, max_context_tokens=1000)
    settings = {"context_prefix": prefix, "overlong_contexts": "truncate_left", "max_context_tokens": 50 + len(ids)}
    cut = make(tokenizer, folder, QUESTIONS, **settings)
    pairs = [(whole[index], cut[index]) for index in range(40)]
    assert {big["task"] for big, _ in pairs} == {"question_answering", "summarization"}
    for big, small in pairs:
        assert small["context_ids"] == [*ids, *big["context_ids"][-50:]]
        assert small["num_cut"] == max(0, len(big["context_ids"]) - 50)
        assert small["target_ids"] == big["target_ids"]
    assert sum(small["num_cut"] for _, small in pairs) > 0


def test_overlong_contexts_are_skipped_on_request(tokenizer, folder):
    source = {**QUESTIONS, "tasks": ["question_answering"]}
    lengths = sorted({len(make(tokenizer, folder, source)[index]["context_ids"]) for index in range(18)})
    limit = lengths[2]
    dataset = make(tokenizer, folder, source, max_context_tokens=limit, overlong_contexts="skip")
    assert {len(dataset[index]["context_ids"]) for index in range(40)} == set(lengths[:3])
    assert all(dataset[index]["num_cut"] == 0 for index in range(40))
    short = make(
        tokenizer, folder, source, max_context_tokens=lengths[0] - 1, min_context_tokens=1, overlong_contexts="skip"
    )
    with pytest.raises(ValueError, match="all rows are shorter than 2 or longer than"):
        short[0]


def test_the_length_limit_grows(tokenizer, folder):
    schedule = [[0.0, 40], [1.0, 200]]
    dataset = make(tokenizer, folder, TEXT, num_examples=200, length_schedule=schedule, max_context_tokens=200)
    lengths = [len(dataset[index]["context_ids"]) for index in range(200)]
    assert max(lengths[:20]) <= 56
    assert max(lengths[150:]) > 120
    points = [[0.2, 10], [0.4, 30]]
    assert [scheduled_length(points, x) for x in (0, 0.2, 0.3, 0.35, 0.4, 1)] == [10, 10, 20, 25, 30, 30]


def test_whole_contexts_wait_for_the_limit_on_request(tokenizer, tmp_path):
    for name, sizes in (("some", (2, 20, 40)), ("long", (40,))):
        rows = [{"context": f"Row {n}." + " It is blue." * n, "question": "?", "answers": ["!"]} for n in sizes]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = [{**QUESTIONS, "path": f"{name}.jsonl", "tasks": ["question_answering"]} for name in ("some", "long")]
    longest = max(len(make(tokenizer, tmp_path, *sources)[index]["context_ids"]) for index in range(18))
    settings = {"max_context_tokens": longest, "num_examples": 60, "overlong_contexts": "skip"}
    settings["length_schedule"] = [[0.0, longest // 4], [0.5, longest // 4], [0.5, longest]]
    dataset = make(tokenizer, tmp_path, *sources, schedule_contexts=True, **settings)
    lengths = [len(example["context_ids"]) for example in dataset]
    assert max(lengths[:30]) <= longest // 4
    assert max(lengths[30:]) == longest
    # The source of long rows alone stops nothing, and comes later.
    assert {example["id"].partition("/")[0] for example in list(dataset)[30:]} == {"some.jsonl", "long.jsonl"}
    settings["length_schedule"] = [[0.0, 2]]
    dataset = make(tokenizer, tmp_path, *sources, schedule_contexts=True, **settings)
    with pytest.raises(ValueError, match="all rows are longer than the 2 tokens that length_schedule has"):
        dataset[0]


def test_tasks_come_when_the_schedule_says(tokenizer, folder):
    sources = [{**TEXT, "tasks": ["reconstruction", "continuation"]}, QUESTIONS, GENERATED]
    schedule = [[0.0, ["reconstruction"]], [0.25, ["summarization", "reconstruction"]], [0.5, list(TASKS)]]
    dataset = make(tokenizer, folder, *sources, num_examples=122, task_schedule=schedule, max_context_tokens=120)
    tasks = [dataset[index]["task"] for index in range(122)]
    # A fraction of 122 that is no whole number: the first index behind it, 31.
    assert set(tasks[:31]) == {"reconstruction"}
    assert set(tasks[31:61]) == {"summarization", "reconstruction"}
    assert set(tasks[61:]) == set(TASKS)
    assert set(dataset.source_of[:31]) == {0, 2}
    again = make(tokenizer, folder, *sources, num_examples=122, task_schedule=schedule, max_context_tokens=120)
    assert [again[index] for index in (121, 3, 40)] == [dataset[index] for index in (121, 3, 40)]


def test_a_coin_gives_all_rows_of_a_batch_one_task(tokenizer, folder):
    sources = [TEXT, {**GENERATED, "tasks": TEXT["tasks"]}]
    fields = {"batch_size": 4, "num_examples": 162, "max_context_tokens": 60, "task_per_batch": True}
    tasks = [example["task"] for example in make(tokenizer, folder, *sources, **fields)]
    batches = [set(tasks[start : start + 4]) for start in range(0, 162, 4)]
    assert all(len(batch) == 1 for batch in batches)
    heads = sum(batch == {"reconstruction"} for batch in batches)
    assert 10 < heads < 31, "41 tosses of a fair coin"
    assert [example["task"] for example in make(tokenizer, folder, *sources, seed=1, **fields)] != tasks


def test_groups_hold_the_same_examples_in_batches_of_like_length(tokenizer, folder):
    def width(batch):
        return max(len(example["context_ids"]) + len(example["target_ids"]) for example in batch)

    plain = make(tokenizer, folder, TEXT, num_examples=44)
    grouped = make(tokenizer, folder, TEXT, num_examples=44, group_batches=5, batch_size=4)
    for start, end in ((0, 20), (20, 40), (40, 44)):
        first, second = ([data[index] for index in range(start, end)] for data in (plain, grouped))
        assert sorted(map(str, first)) == sorted(map(str, second))
    batches = [[[data[index] for index in range(i, i + 4)] for i in range(0, 40, 4)] for data in (plain, grouped)]
    assert sum(map(width, batches[1])) < 0.85 * sum(map(width, batches[0]))
    widths = [width(batch) for batch in batches[1][:5]]
    assert widths != sorted(widths) or [width(batch) for batch in batches[1][5:]] != sorted(map(width, batches[1][5:]))
    again = make(tokenizer, folder, TEXT, num_examples=44, group_batches=5, batch_size=4)
    assert [again[index] for index in reversed(range(44))] == [grouped[index] for index in range(44)][::-1]
