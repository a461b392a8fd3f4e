# SPDX-License-Identifier: Apache-2.0
import datetime
import json

import pyarrow
import pyarrow.parquet
import pytest

from context_compressors.data.rows import distinct_texts, read_rows
from context_compressors.data.sources import DataSource
from context_compressors.training.arguments import DataArguments
from context_compressors.training.objectives.compression_dataset import CompressionDataset


def source(**fields):
    return DataSource.from_mapping({"tasks": ["question_answering"], **fields})


@pytest.fixture
def folder(tmp_path):
    rows = [{"context": f"text {i // 2}", "question": f"q{i}", "answers": [f"a{i}"]} for i in range(6)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "qa_one.parquet")
    (tmp_path / "qa_two.jsonl").write_text("\n".join(json.dumps(row) for row in rows[:2]))
    answers = {"text": ["x", "y"]}
    nested = [{"passage": "p", "question": "q", "answers": answers, "reply": {"words": ["x"]}, "label": True}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(nested), tmp_path / "nested.parquet")
    return tmp_path


def test_parquet_jsonl_and_patterns_are_read(folder):
    assert read_rows(source(path="qa_one.parquet"), str(folder)).num_rows == 6
    assert read_rows(source(path="qa_two.jsonl"), str(folder)).to_pylist()[1]["answers"] == ["a1"]
    assert read_rows(source(path="qa_*"), str(folder)).num_rows == 8
    kept = [read_rows(source(path="qa_one.parquet", max_samples=3), str(folder), seed=1) for _ in range(2)]
    assert kept[0].num_rows == 3
    assert kept[0] == kept[1]
    assert distinct_texts(read_rows(source(path="qa_one.parquet"), str(folder))) == ["text 0", "text 1", "text 2"]


def test_columns_are_renamed_and_answers_become_lists(folder):
    columns = {"context": "passage", "answers": "answers.text"}
    row = read_rows(source(path="nested.parquet", columns=columns), str(folder)).to_pylist()[0]
    assert (row["context"], row["answers"]) == ("p", ["x", "y"])
    columns = {"context": "passage", "answers": "label"}
    assert read_rows(source(path="nested.parquet", columns=columns), str(folder))["answers"].to_pylist() == [["yes"]]


def test_known_columns_take_no_place_of_mapped_ones(tmp_path):
    document = {"text": "the story", "summary": {"text": "its summary"}}
    row = {"document": document, "question": {"text": "who?"}, "answers": [{"text": "Nora"}], "reply": {"text": ["N"]}}
    (tmp_path / "stories.jsonl").write_text(json.dumps(row))
    for columns, expected in (
        (None, ("its summary", "who?", ["Nora"])),
        ({"context": "document.text"}, ("the story", "who?", ["Nora"])),
        ({"answers": "reply"}, ("its summary", "who?", ["N"])),
    ):
        found = read_rows(source(path="stories.jsonl", columns=columns), str(tmp_path)).to_pylist()[0]
        assert (found["context"], found["question"], found["answers"]) == expected
    options = {"article": "theirs", "passage": "ours", "question": "q", "options": ["x", "y"], "answer": "B"}
    (tmp_path / "options.jsonl").write_text(json.dumps(options))
    [found] = read_rows(source(path="options.jsonl", columns={"context": "passage"}), str(tmp_path)).to_pylist()
    assert (found["context"], found["answers"]) == ("ours", ["y"])


QUAIL = {"context": "c", "question": "q", "answers": ["x", "y", "z"], "correct_answer_id": 1, "gold": "theirs"}
RACE = {"article": "c", "question": "q", "options": ["x", "y", "z"], "answer": "C", "level": "high"}


@pytest.mark.parametrize(
    ("row", "fields", "expected"),
    [
        (QUAIL, {}, [["y"]]),
        (QUAIL, {"columns": {"answers": "gold"}}, [["theirs"]]),
        (RACE, {}, [["z"]]),
        ({**RACE, "answer": None}, {"skip_incomplete": True}, [["z"]]),
    ],
)
def test_the_right_option_is_the_answer(tmp_path, row, fields, expected):
    whole = RACE if "options" in row else QUAIL
    (tmp_path / "qa.jsonl").write_text("\n".join(json.dumps(row) for row in (whole, row)))
    answers = read_rows(source(path="qa.jsonl", **fields), str(tmp_path))["answers"].to_pylist()
    assert answers == (expected * 2 if row == whole else expected)


def test_a_context_that_lacks_a_part_is_null_and_no_fact_names_no_passage(tmp_path):
    context = {"title": ["A", "B"], "sentences": [["a."], ["b."]]}
    row = {"question": "q", "answer": "x", "context": context, "supporting_facts": {"title": ["B"]}}
    cut = {**context, "sentences": [["a."], None]}
    rows = [
        row,
        {**row, "supporting_facts": None},
        {**row, "context": cut},
        {**row, "context": {**context, "title": None}},
    ]
    (tmp_path / "qa.jsonl").write_text("\n".join(map(json.dumps, rows)))
    asked = source(path="qa.jsonl", skip_incomplete=True, supporting_passages=True)
    assert read_rows(asked, str(tmp_path))["context"].to_pylist() == ["B\nb."]
    whole = read_rows(source(path="qa.jsonl", skip_incomplete=True), str(tmp_path))
    assert whole["context"].to_pylist() == ["A\na.\n\nB\nb."] * 2
    with pytest.raises(ValueError, match="column 'context' has no value in row 2"):
        read_rows(source(path="qa.jsonl"), str(tmp_path))


def test_single_answers_become_texts(tmp_path):
    for answers, expected in (
        ([0, 1, 2, 3], ["0", "1", "2", "3"]),
        ([0.0, 1.0, 2.5], ["0", "1", "2.5"]),
        ([True, False], ["yes", "no"]),
        ([datetime.date(1990, 5, 2), datetime.date(1, 1, 1)], ["1990-05-02", "0001-01-01"]),
    ):
        rows = [{"context": "c", "question": "q", "answers": answer} for answer in answers]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "qa.parquet")
        table = read_rows(source(path="qa.parquet"), str(tmp_path))
        assert table["answers"].to_pylist() == [[text] for text in expected]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"path": "qa_onne.parquet"}, r"no file .*qa_onne.parquet; did you mean 'qa_one.parquet'"),
        ({"path": "nested.parquet"}, "no column 'context', which question_answering needs"),
        ({"path": "qa_one.parquet", "tasks": ["summarization"]}, "no column 'summary'"),
        (
            {"path": "nested.parquet", "columns": {"context": "passage", "answers": "reply"}},
            "name their place with columns",
        ),
        ({"path": "nested.parquet", "columns": {"context": "pasage"}}, "no column 'pasage'; did you mean 'passage'"),
        ({"path": "nested.parquet", "columns": {"answers": "answers.txt"}}, "has no part 'answers.txt'"),
    ],
)
def test_wrong_files_and_columns_are_named(folder, fields, message):
    with pytest.raises(ValueError, match=message):
        read_rows(source(**fields), str(folder))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pth": "x"}, "unknown field of a source 'pth'; did you mean 'path'"),
        ({"path": "x", "tasks": ["reconstuction"]}, "did you mean 'reconstruction'"),
        ({}, "exactly one of name, path and generated"),
        ({"path": "x", "weight": 0}, "weight of source 'x' must be above 0"),
        ({"name": "x", "streaming": True}, "streaming of source 'x' needs a data set's name"),
        ({"generated": True, "kind": "biografy"}, "kind of generated documents: 'biografy'; did you mean 'biography'"),
        ({"generated": True, "split": "validation"}, "split of generated documents: 'validation'; allowed: test"),
    ],
)
def test_wrong_sources_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        source(**fields)


QUESTION = {"context": "c", "question": "q", "answers": ["a"]}


@pytest.mark.parametrize(
    ("task", "row", "message"),
    [
        ("question_answering", {"answers": None}, "column 'answers' has no value in row 2 .*skip_incomplete: true"),
        ("question_answering", {"answers": [None, " "]}, "column 'answers' has no value in row 2"),
        ("continuation", {"context": None}, "column 'context' has no value in row 2"),
        ("question_answering", {"question": " \n"}, "column 'question' has no value in row 2"),
    ],
)
def test_a_row_that_lacks_a_value_is_named(tmp_path, task, row, message):
    rows = [QUESTION, {**QUESTION, "answers": ["a", "b"]}, {**QUESTION, **row}]
    (tmp_path / "qa.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    with pytest.raises(ValueError, match=f"source 'qa.jsonl': .*{message}"):
        read_rows(source(path="qa.jsonl", tasks=[task]), str(tmp_path))


def test_a_blank_context_is_passed_over_where_examples_are_drawn(tmp_path, tokenizer):
    rows = [{**QUESTION, "context": context} for context in ("", "a long context", "")]
    (tmp_path / "qa.jsonl").write_text("\n".join(map(json.dumps, rows)))
    recipe = DataArguments(sources=[{"path": "qa.jsonl", "tasks": ["question_answering"]}], data_dir=str(tmp_path))
    dataset = CompressionDataset(recipe, tokenizer)
    assert {tokenizer.decode(dataset[index]["context_ids"]) for index in range(3)} == {"a long context"}


def test_a_stream_is_read_until_enough_rows_are_complete(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("context_compressors.data.rows._STREAMED_ROWS", 2)
    rows = [{**QUESTION, "question": str(n), "answers": ["a"] if n % 3 == 2 else []} for n in range(12)]
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    asked = source(name=str(tmp_path / "hub"), streaming=True, max_samples=2, skip_incomplete=True)
    assert read_rows(asked)["question"].to_pylist() == ["2", "5"]
    assert "4 of 6 rows left out: incomplete" in caplog.text
