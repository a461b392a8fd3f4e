# SPDX-License-Identifier: Apache-2.0
import copy
import itertools
import json
import math
import pickle
import random
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest

from context_compressors.data.prompts import TASKS
from context_compressors.data.sources import DataSource
from context_compressors.data.synthetic_documents import generate_document
from context_compressors.data.tokenized_rows import FileSource, TokenizedTexts
from context_compressors.modeling.parts.text_ids import encode
from context_compressors.training.arguments import DataArguments
from context_compressors.training.objectives.compression_dataset import CompressionDataset
from context_compressors.training.schedules import check_length_schedule, scheduled_length

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
QUESTIONS = {"path": "qa.parquet", "tasks": ["question_answering", "summarisation"], "weight": 1}


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


def test_every_row_comes_once_before_any_comes_again(tokenizer, folder):
    dataset = make(tokenizer, folder, {"path": "qa.parquet", "tasks": ["question_answering"]}, num_examples=36)
    ids = [dataset[index]["id"] for index in range(36)]
    assert len(set(ids[:18])) == 18
    assert sorted(ids[:18]) == sorted(ids[18:])
    assert ids[:18] != ids[18:]


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


def test_without_a_number_weights_and_schedules_draw_as_many_examples_as_there_are_rows(tokenizer, folder):
    weighted = [{**QUESTIONS, "weight": 1}, {**TEXT, "weight": 30}]
    dataset = CompressionDataset(DataArguments(sources=weighted, data_dir=folder), tokenizer)
    assert len(dataset) == 23
    assert (dataset.source_of == 1).sum() > 18
    sources = [{**QUESTIONS, "weight": None}, {**TEXT, "weight": None}]
    schedule = [[0.0, ["continuation"]], [0.5, list(TASKS)]]
    dataset = CompressionDataset(DataArguments(sources=sources, data_dir=folder, task_schedule=schedule), tokenizer)
    assert len(dataset) == 23
    assert set(dataset.source_of[:12]) == {1}


def test_sources_are_drawn_by_weight(tokenizer, folder):
    dataset = make(tokenizer, folder, {**TEXT, "weight": 3}, {**QUESTIONS, "weight": 1}, num_examples=2000)
    share = (dataset.source_of == 0).mean()
    assert 0.7 < share < 0.8


def test_reconstruction_repeats_the_context_exactly(tokenizer, folder):
    dataset = make(
        tokenizer, folder, {**TEXT, "tasks": ["reconstruction"]}, max_context_tokens=200, max_target_tokens=90
    )
    for index in range(40):
        example = dataset[index]
        assert example["target_ids"] == [*example["context_ids"], tokenizer.eos_token_id]
        assert 32 <= len(example["context_ids"]) <= 89
        assert example["num_cut"] == 0


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


def test_a_short_text_gives_up_context_before_its_target(tokenizer, folder):
    lengths = sorted({len(encode(tokenizer, generate_document(seed, num_tokens=300).text)) for seed in range(4)})
    source = {**TEXT, "tasks": ["continuation"]}
    for target in (lengths[0] - 100, lengths[-1] + 1):
        limits = {"min_context_tokens": 200, "max_context_tokens": 200, "max_target_tokens": target}
        examples = list(map(make(tokenizer, folder, source, **limits).__getitem__, range(12)))
        # Half a text at the least, and all of the target where that leaves more.
        allowed = {min(200, max(length // 2, length - target + 1)) for length in lengths}
        assert {len(example["context_ids"]) for example in examples} == allowed
        assert all(len(example["target_ids"]) > target // 3 for example in examples)


def test_an_answer_that_is_cut_does_not_end(tokenizer, folder):
    source = {**QUESTIONS, "tasks": ["question_answering"]}
    whole, cut = (make(tokenizer, folder, source, max_target_tokens=limit) for limit in (50, 4))
    lengths = set()
    for index in range(30):
        target = whole[index]["target_ids"]
        assert target.index(tokenizer.eos_token_id) == len(target) - 1
        assert cut[index]["target_ids"] == target[:4]
        lengths.add(len(target) > 4)
    assert lengths == {True, False}


def test_questions_stand_in_the_canonical_prompt(tokenizer, folder):
    source = {**QUESTIONS, "tasks": ["question_answering"]}
    example = make(tokenizer, folder, source, canonical_prompts=True)[0]
    prompt = tokenizer.decode(example["prompt_ids"])
    assert prompt.startswith("\nQuestion: ")
    assert prompt.endswith("?\nAnswer:")
    answer = tokenizer.decode(example["target_ids"][:-1])
    assert answer.startswith(" ")
    assert answer.strip() in tokenizer.decode(example["context_ids"])


def test_prompts_vary_unless_canonical(tokenizer, folder):
    source = {**TEXT, "tasks": ["reconstruction"]}
    varied = {tuple(make(tokenizer, folder, source)[index]["prompt_ids"]) for index in range(40)}
    fixed = {
        tuple(make(tokenizer, folder, source, canonical_prompts=True)[index]["prompt_ids"]) for index in range(40)
    }
    assert len(varied) > 4
    assert len(fixed) == 1


def test_an_answer_is_drawn_unless_the_first_is_asked_for(tokenizer, tmp_path):
    answers = ["seven", "eleven", "twelve"]
    row = {"context": "Nora keeps bees.", "question": "How many?", "answers": answers}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "qa.parquet")

    def targets(**fields) -> set[str]:
        dataset = make(tokenizer, str(tmp_path), {"path": "qa.parquet", "tasks": ["question_answering"]}, **fields)
        return {tokenizer.decode(dataset[i]["target_ids"], skip_special_tokens=True).strip() for i in range(40)}

    assert targets() == set(answers)
    assert targets(first_answer=True) == {"seven"}


def test_several_questions_about_one_context(tokenizer, folder):
    for source in ({**QUESTIONS, "tasks": ["question_answering"]}, {**GENERATED, "tasks": ["question_answering"]}):
        example = make(tokenizer, folder, source, questions_per_example=3)[1]
        prompts = [tuple(example["prompt_ids"]), *(tuple(prompt) for prompt, _ in example["more_turns"])]
        assert len(set(prompts)) == 3


def test_what_is_cut_is_counted(tokenizer, folder):
    source = {**QUESTIONS, "tasks": ["question_answering"]}
    whole, cut = (make(tokenizer, folder, source, max_context_tokens=n) for n in (1000, 50))
    pairs = [(whole[index], cut[index]) for index in range(18)]
    assert sum(small["num_cut"] for _, small in pairs) > 0
    for big, small in pairs:
        assert small["context_ids"] == big["context_ids"][:50]
        assert small["num_cut"] == max(0, len(big["context_ids"]) - 50)


@pytest.mark.parametrize("prefix", ["", "### Context:\n"])
def test_the_beginning_is_dropped_on_request_behind_the_prefix_and_counted(tokenizer, folder, prefix):
    ids = encode(tokenizer, prefix)
    whole = make(tokenizer, folder, QUESTIONS, max_context_tokens=1000)
    settings = {"context_prefix": prefix, "overlong_contexts": "truncate_left", "max_context_tokens": 50 + len(ids)}
    cut = make(tokenizer, folder, QUESTIONS, **settings)
    pairs = [(whole[index], cut[index]) for index in range(40)]
    assert {big["task"] for big, _ in pairs} == {"question_answering", "summarisation"}
    for big, small in pairs:
        assert small["context_ids"] == [*ids, *big["context_ids"][-50:]]
        assert small["num_cut"] == max(0, len(big["context_ids"]) - 50)
        assert small["target_ids"] == big["target_ids"]
    assert sum(small["num_cut"] for _, small in pairs) > 0


@pytest.mark.parametrize("task", ["reconstruction", "continuation"])
def test_windows_of_a_text_are_the_same_whichever_end_is_dropped(tokenizer, folder, task):
    source = {**TEXT, "tasks": [task]}
    right, left = (
        make(tokenizer, folder, source, max_context_tokens=60, overlong_contexts=kind)
        for kind in ("truncate", "truncate_left")
    )
    assert [left[index] for index in range(40)] == [right[index] for index in range(40)]


@pytest.mark.parametrize("source", [{**QUESTIONS}, {**GENERATED, "tasks": ["question_answering"]}])
def test_a_context_prefix_is_part_of_the_context(tokenizer, folder, source):
    prefix = encode(tokenizer, "### Context:\n")
    limit = 60
    plain = make(tokenizer, folder, source, max_context_tokens=limit - len(prefix))
    dataset = make(tokenizer, folder, source, max_context_tokens=limit, context_prefix="### Context:\n")
    examples = [dataset[index] for index in range(40)]
    assert [example["context_ids"] for example in examples] == [
        [*prefix, *plain[index]["context_ids"]] for index in range(40)
    ]
    assert limit - 10 < max(len(example["context_ids"]) for example in examples) <= limit
    assert [example["num_cut"] for example in examples] == [plain[index]["num_cut"] for index in range(40)]


def test_windows_of_a_text_have_no_prefix(tokenizer, folder):
    plain, prefixed = (make(tokenizer, folder, TEXT, context_prefix=prefix) for prefix in ("", "### Context:\n"))
    assert [prefixed[index] for index in range(40)] == [plain[index] for index in range(40)]


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


@pytest.mark.parametrize("waits", [False, True])
def test_few_rows_that_fit_are_found_among_many_that_do_not(tokenizer, tmp_path, waits):
    """In place of each of the others stands one of the few, however seldom it is drawn."""
    contexts = ["Row." + " It is blue." * (0 if n == 170 else 9) for n in range(300)]
    rows = [{"context": context, "question": "?", "answers": ["!"]} for context in contexts]
    (tmp_path / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {**QUESTIONS, "path": "few.jsonl", "tasks": ["question_answering"]}
    shortest = len(encode(tokenizer, "Row."))
    how = {"length_schedule": [[0.0, shortest], [1.0, shortest]], "schedule_contexts": True} if waits else {}
    if not waits:
        how = {"max_context_tokens": shortest, "min_context_tokens": 1, "overlong_contexts": "skip"}
    dataset = make(tokenizer, str(tmp_path), source, num_examples=300, **how)
    assert {len(dataset[index]["context_ids"]) for index in range(0, 300, 20)} == {shortest}


def test_in_a_chat_what_texts_say_ends_no_turn(tokenizer, tmp_path):
    own = copy.deepcopy(tokenizer)
    own.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>{% endfor %}assistant: "
    assert own.eos_token == "<|end|>"
    row = dict.fromkeys(("context", "question"), f"a {own.eos_token} b") | {"answers": [f"a {own.eos_token} b"]}
    (tmp_path / "one.jsonl").write_text(json.dumps(row) + "\n")
    source = {"path": "one.jsonl", "tasks": ["question_answering"]}
    fields = {"prompts": "chat", "prompt_format": "chat"}
    example = make(own, str(tmp_path), source, num_examples=1, **fields)[0]
    assert own.eos_token_id not in example["context_ids"]
    row = {name: "a b" if name != "answers" else ["a b"] for name in row}
    (tmp_path / "one.jsonl").write_text(json.dumps(row) + "\n")
    plain = make(own, str(tmp_path), source, num_examples=1, **fields)[0]
    for name in ("prompt_ids", "target_ids"):
        assert example[name].count(own.eos_token_id) == plain[name].count(own.eos_token_id)


def test_passages_in_lists_of_any_kind_are_read(tokenizer, tmp_path):
    rows = [{"context": ["Bees.", "Ada."], "question": "?", "answers": ["!"]}] * 2
    table = pyarrow.Table.from_pylist(rows)
    large = pyarrow.large_list(pyarrow.large_string())
    examples = []
    for name, contexts in (("plain", table["context"]), ("large", table["context"].cast(large))):
        pyarrow.parquet.write_table(table.set_column(0, "context", contexts), tmp_path / f"{name}.parquet")
        source = {"path": f"{name}.parquet", "tasks": ["question_answering"]}
        examples.append(make(tokenizer, str(tmp_path), source, num_examples=1)[0] | {"id": ""})
    assert examples[0] == examples[1]
    assert len(examples[0]["passages"]) == 2


def test_the_length_limit_grows(tokenizer, folder):
    schedule = [[0.0, 40], [1.0, 200]]
    dataset = make(tokenizer, folder, TEXT, num_examples=200, length_schedule=schedule, max_context_tokens=200)
    lengths = [len(dataset[index]["context_ids"]) for index in range(200)]
    assert max(lengths[:20]) <= 56
    assert max(lengths[150:]) > 120
    points = check_length_schedule([[0.2, 10], [0.4, 30]], 1)
    assert [scheduled_length(points, x) for x in (0, 0.2, 0.3, 0.35, 0.4, 1)] == [10, 10, 20, 25, 30, 30]


def test_whole_contexts_wait_for_the_limit_on_request(tokenizer, tmp_path):
    for name, sizes in (("some", (2, 20, 40)), ("long", (40,))):
        rows = [{"context": f"Row {n}." + " It is blue." * n, "question": "?", "answers": ["!"]} for n in sizes]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = [{**QUESTIONS, "path": f"{name}.jsonl", "tasks": ["question_answering"]} for name in ("some", "long")]
    longest = max(len(make(tokenizer, tmp_path, *sources)[index]["context_ids"]) for index in range(18))
    settings = {"max_context_tokens": longest, "num_examples": 60, "overlong_contexts": "skip"}
    settings["length_schedule"] = [[0.0, longest // 4], [0.5, longest // 4], [0.5, longest]]
    with pytest.raises(ValueError, match="the sources have no other task: leave it out, or give schedule_contexts"):
        make(tokenizer, tmp_path, *sources, **settings)
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
    schedule = [[0.0, ["reconstruction"]], [0.25, ["summarisation", "reconstruction"]], [0.5, list(TASKS)]]
    dataset = make(tokenizer, folder, *sources, num_examples=122, task_schedule=schedule, max_context_tokens=120)
    tasks = [dataset[index]["task"] for index in range(122)]
    # A fraction of 122 that is no whole number: the first index behind it, 31.
    assert set(tasks[:31]) == {"reconstruction"}
    assert set(tasks[31:61]) == {"summarisation", "reconstruction"}
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


def test_a_schedule_of_all_tasks_changes_nothing(tokenizer, folder):
    sources = [TEXT, QUESTIONS, GENERATED]
    plain, scheduled = (
        make(tokenizer, folder, *sources, max_context_tokens=120, task_schedule=schedule)
        for schedule in (None, [[0.0, list(TASKS)]])
    )
    assert [plain[index] for index in range(40)] == [scheduled[index] for index in range(40)]


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


def test_the_hub_kind_of_dataset_holds_the_same_examples(tokenizer, folder):
    dataset = make(tokenizer, folder, GENERATED, TEXT, num_examples=6)
    wrapped = dataset.as_dataset()
    assert len(wrapped) == 6
    assert [wrapped[index] for index in range(6)] == [dataset[index] for index in range(6)]


def test_rows_without_questions_are_the_same_as_with_them(tokenizer, folder, tmp_path):
    """A text that is read when it is drawn makes the examples of one that was read at the start."""
    texts = pyarrow.parquet.read_table(f"{folder}/text.parquet")["text"].to_pylist()
    table = pyarrow.table({"text": [*texts, *texts[:2]]})
    pyarrow.parquet.write_table(table, tmp_path / "text.parquet", row_group_size=3)
    (tmp_path / "asked").mkdir()
    questions = pyarrow.array(["Who?"] * table.num_rows)
    pyarrow.parquet.write_table(table.append_column("question", questions), tmp_path / "asked" / "text.parquet")
    limits = {"max_context_tokens": 60, "num_examples": 30}
    by_row, at_once = (make(tokenizer, str(path), TEXT, **limits) for path in (tmp_path, tmp_path / "asked"))
    assert len(by_row.sources[0].texts("continuation").texts) > len(at_once.sources[0].texts("continuation").texts)
    assert [by_row[index] for index in range(30)] == [at_once[index] for index in range(30)]


@pytest.fixture
def more_than_2_gib(monkeypatch):
    """Rows that are one chunk in memory, and 2.1 GiB together."""
    chunk = pyarrow.array([f"{number} bells. " + "x" * 2**20 for number in range(2)])

    def use(**columns):
        table = pyarrow.table({name: pyarrow.chunked_array([values] * 1076) for name, values in columns.items()})
        monkeypatch.setattr("context_compressors.data.rows.read_table", lambda source, data_dir: table)
        return table

    return chunk, use


class Characters:
    """Stands in for a tokenizer that would take a while over a megabyte."""

    def __call__(self, text, **kwargs):
        return SimpleNamespace(input_ids=[ord(letter) for letter in text[:8]])


def test_more_text_than_a_string_column_may_join_is_read_by_row(more_than_2_gib):
    chunk, use = more_than_2_gib
    table = use(text=chunk)
    with pytest.raises(pyarrow.ArrowInvalid, match="offset overflow"):
        table["text"].combine_chunks()
    source = DataSource(name="texts", tasks=("continuation",))
    rows = FileSource(source, None, 0, Characters())
    assert rows.num_rows == 2152
    assert bytes(rows.texts("continuation")[2151].tolist()) == b"1 bells."
    assert rows.identifier(2151) == "texts/2151"
    few = FileSource(DataSource(name="texts", tasks=("continuation",), max_samples=3), None, 0, Characters())
    expected = sorted(random.Random("0/texts").sample(range(2152), 3))
    assert [int(chr(few.texts("continuation")[row][0])) for row in range(3)] == [row % 2 for row in expected]


def test_more_text_than_a_string_column_may_join_has_questions(more_than_2_gib):
    chunk, use = more_than_2_gib
    use(context=chunk, question=pyarrow.array(["How many?", "Who?"]), answers=pyarrow.array([["0"], ["1"]]))
    rows = FileSource(DataSource(name="texts", tasks=("question_answering",)), None, 0, Characters())
    assert len(rows.texts("question_answering").texts) == 2
    assert rows.rows_of_text[1] == list(range(1, 2152, 2))
    assert (rows.value("question", 2151), rows.value("answers", 2150)) == ("Who?", ["0"])


def test_rows_are_not_in_the_hash_of_the_hub_kind_of_dataset(tokenizer, folder):
    source = make(tokenizer, folder, TEXT).sources[0]
    assert len(pickle.dumps(source)) < len(pickle.dumps(tokenizer)) + 1000
    assert copy.deepcopy(source) is source
    again, texts = pickle.loads(pickle.dumps(source)).texts("continuation"), source.texts("continuation")
    assert [again[row].tolist() for row in range(5)] == [texts[row].tolist() for row in range(5)]


def test_no_more_tokens_are_kept_than_allowed():
    rows = TokenizedTexts(pyarrow.chunked_array([["abc", None], ["defgh", "ij"]]), Characters(), max_kept_tokens=5)
    assert [len(rows[row]) for row in (0, 1, 2, 3)] == [3, 0, 5, 2]
    assert rows[0] is rows[0]
    assert rows[3] is rows[3]
    assert rows[2] is not rows[2]


def test_iteration_ends(tokenizer, folder):
    dataset = make(tokenizer, folder, TEXT, num_examples=3)
    assert len(list(itertools.islice(iter(dataset), 10))) == 3


@pytest.mark.parametrize(
    ("sources", "fields", "message"),
    [
        ([], {}, "there are no sources: give at least one"),
        ([GENERATED], {"num_examples": None}, "give a number of examples"),
        ([TEXT, {**QUESTIONS, "weight": None}], {}, r"give a weight to every source or to none; \['qa.parquet'\]"),
        ([{**GENERATED, "weight": None}], {}, "give a weight to every source"),
        ([TEXT], {"num_examples": 0}, "num_examples must be at least 1"),
        ([TEXT], {"max_context_tokens": 16}, "min_context_tokens must be 1 to max_context_tokens"),
        ([TEXT], {"max_target_tokens": 1}, "max_target_tokens must be at least 2"),
        (
            [TEXT],
            {"context_prefix": "no" * 40, "max_context_tokens": 32},
            "context_prefix has .* leaves none of the 32",
        ),
        ([TEXT], {"prompts": "memory_token"}, "did you mean 'memory_tokens'"),
        ([TEXT], {"overlong_contexts": "truncat"}, "did you mean 'truncate'"),
        ([TEXT], {"length_schedule": [[0.5, 10], [0.1, 20]]}, "length_schedule must be"),
        ([TEXT], {"length_schedule": 7}, "length_schedule must be"),
        ([TEXT], {"length_schedule": [[0, 10], [5000, 20]]}, "length_schedule must be .* fractions from 0 to 1"),
        ([TEXT], {"length_schedule": [[math.nan, 10]]}, "length_schedule must be .* fractions from 0 to 1"),
        ([TEXT], {"task_schedule": [[0.0, "reconstruction"]]}, "task_schedule must be"),
        ([TEXT], {"task_schedule": [[0.1, ["reconstruction"]]]}, "the first fraction 0"),
        ([TEXT], {"task_schedule": [[0.0, ["reconstruction"]], [float("nan"), ["continuation"]]]}, "all below 1"),
        ([TEXT], {"task_schedule": [[0.0, ["repetition"]]]}, "tasks of question_answering, .*'repetition'"),
        ([TEXT], {"task_schedule": [[0.0, []]]}, "task_schedule must be"),
        (
            [TEXT],
            {"task_schedule": [[0.0, ["summarisation"]]]},
            r"has the tasks \['summarisation'\]; those of the sou",
        ),
        ([TEXT], {"task_schedule": [[0.0, ["continuation"] * 2]]}, "names a task twice"),
        ([TEXT, QUESTIONS], {"task_schedule": [[0.0, ["continuation"]]]}, r"a task of the sources \['qa.parquet'\]"),
        ([TEXT], {"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ([TEXT, QUESTIONS], {"task_per_batch": True}, "task_per_batch draws a task for .* the same tasks"),
        ([TEXT], {"task_per_batch": True, "group_batches": 2}, "task_per_batch goes with group_batches 1, got 2"),
    ],
)
def test_wrong_arguments_are_refused(tokenizer, folder, sources, fields, message):
    with pytest.raises(ValueError, match=message):
        make(tokenizer, folder, *sources, **fields)[0]
