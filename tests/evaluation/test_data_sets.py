# SPDX-License-Identifier: Apache-2.0
"""The data sets of an evaluation: files, Hub data sets and generated documents, in the forms that training takes."""

from dataclasses import replace
from datetime import date
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from naive_twin import CONTINUATION, QA, RECONSTRUCTION, SUMMARIZATION

from context_compressors.data.document_ids import TrainingDocuments, document_id
from context_compressors.data.rows import read_rows
from context_compressors.data.sources import DataSource
from context_compressors.evaluation.data_sets import load_datasets, source_in_report
from context_compressors.evaluation.held_out import compare_sources
from context_compressors.evaluation.samples import EvaluationDataset, SampleBuilder
from context_compressors.evaluation.settings import EvaluationSettings

LIMITS = {QA: 6, SUMMARIZATION: 6}
SHORT = EvaluationSettings(max_new_tokens=LIMITS, context_tokens=8, continuation_tokens=4)
PUBLISHED = yaml.safe_load(Path(__file__).with_name("published_rows.yaml").read_text(encoding="utf-8"))


@pytest.fixture
def mrqa(tmp_path):
    """A folder with a Parquet file of 40 rows, of four subsets in turn."""
    names = ("SQuAD", "NewsQA", "TriviaQA", "HotpotQA")
    rows = [
        {"subset": names[n % 4], "length": n, "context": f"c{n}", "question": f"q{n}", "answers": ["a"]}
        for n in range(40)
    ]
    (tmp_path / "mrqa").mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "mrqa" / "train.parquet")
    return tmp_path


def test_data_sets_are_read_as_they_are_published_by_training_and_evaluation(tokenizer, tmp_path):
    for name, published in PUBLISHED.items():
        row, expected = published["row"], published["read"]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "rows.parquet")
        task = QA if isinstance(expected, list) else SUMMARIZATION
        (read,) = read_rows(DataSource(path="rows.parquet", tasks=(task,)), str(tmp_path)).to_pylist()
        found = {key: read[key] for key in ("context", "question", "answers", "summary") if key in read}
        texts = {"question": "q", "answers": expected} if task == QA else {"summary": expected}
        assert found == {"context": "T\nOne. Two." if name == "HotpotQA" else "c", **texts}, name
        (data,) = load_datasets(["rows.parquet"], tokenizer, data_dir=str(tmp_path))
        (sample,) = SampleBuilder(tokenizer, SHORT).build(data, task)
        assert sample.references == (expected if task == QA else [expected]), name
        assert sample.id == next((row[key] for key in ("id", "qid", "question_id", "_id") if key in row), "0"), name


def test_windows_count_as_the_documents_that_they_name(tokenizer, tmp_path):
    whole = "The harbour of Sandvik has a lighthouse, two cranes and eleven boats."
    other = {"context": "Another harbour.", "question": "Where?", "answers": ["There."], "summary": "None.", "id": "o"}
    windows = [
        {**other, "id": str(start), "context": whole[start : start + 20], "source_texts": [whole]} for start in (0, 20)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([*windows, other]), tmp_path / "windows.parquet")
    (data,) = load_datasets(["windows.parquet"], tokenizer, data_dir=str(tmp_path))
    builder = SampleBuilder(tokenizer, replace(SHORT, context_tokens=16))
    for task in (QA, SUMMARIZATION, RECONSTRUCTION, CONTINUATION):
        samples = builder.build(data, task)
        # A row's own text may have trained a model that does not know what it was cut from.
        ids = [(document_id(whole), document_id(row["context"])) for row in windows]
        ids.append((document_id(other["context"]),))
        assert [sample.source_ids for sample in samples] == ids, task
        # What makes a document hard, all of its windows share: a bootstrap draws them together.
        assert [sample.document for sample in samples] == [0, 0, 1], task
    seen = {"ours": TrainingDocuments(trained={document_id(whole)})}
    samples = {data.name: builder.build(data, SUMMARIZATION)}
    with pytest.raises(ValueError, match=r"1 of 4 documents of 'windows' trained ours \(samples 0\)"):
        compare_sources(samples, seen)
    seen = {"ours": TrainingDocuments(trained={document_id(windows[1]["context"])})}
    with pytest.raises(ValueError, match=r"1 of 4 documents of 'windows' trained ours \(samples 20\)"):
        compare_sources(samples, seen)
    with pytest.raises(ValueError, match="source_texts must be a list of whole texts, got 'The harbour of"):
        builder.build(EvaluationDataset("windows", [{**other, "source_texts": whole}]), QA)


def test_rows_are_kept_by_value_and_each_value_gets_a_data_set(tokenizer, mrqa):
    read = {"tokenizer": tokenizer, "data_dir": str(mrqa)}
    source = {"path": "mrqa/train.parquet", "title": "MRQA"}
    found = load_datasets([{**source, "by": "subset", "max_samples": 3}], **read)
    assert [data.name for data in found] == ["MRQA/SQuAD", "MRQA/NewsQA", "MRQA/TriviaQA", "MRQA/HotpotQA"]
    assert [len(data.examples) for data in found] == [10, 10, 10, 10]
    assert [len(SampleBuilder(tokenizer, SHORT).build(data, QA)) for data in found] == [3, 3, 3, 3]
    # The range is counted among the rows that are kept.
    kept = {**source, "where": {"subset": ["NewsQA", "HotpotQA"], "length": {"from": 4, "below": 30}}, "rows": [1, 4]}
    (data,) = load_datasets([kept], **read)
    assert [row["context"] for row in data.examples] == ["c7", "c9", "c11"]
    trained = read_rows(DataSource.from_mapping({**kept, "tasks": [QA]}), str(mrqa))
    assert trained["context"].to_pylist() == ["c7", "c9", "c11"]
    for where, message in (
        ({"subset": "NewsQ"}, r"has no rows where {'subset': 'NewsQ'}"),
        ({"sbset": "NewsQA"}, "no column 'sbset'; did you mean 'subset'"),
        ({"length": "seven"}, "where asks length, of int64, for 'seven'"),
    ):
        with pytest.raises(ValueError, match=message):
            load_datasets([{**source, "where": where}], **read)


def test_data_sets_say_what_they_were_read_from_and_no_folder(tokenizer, mrqa):
    fields = {
        "columns": {"question": "question"},
        "rows": [0, 9],
        "where": {"length": {"below": 20}},
        "max_samples": 3,
    }
    read = {"path": "mrqa/*.parquet", "by": "subset", "title": "MRQA", "weight": 2, "tasks": [QA], **fields}
    found = load_datasets([read], tokenizer, data_dir=str(mrqa))
    said = {"path": "*.parquet", "by": "subset", **fields}
    assert {data.name: data.source for data in found} == {
        f"MRQA/{name}": said for name in ("SQuAD", "NewsQA", "TriviaQA", "HotpotQA")
    }
    (data,) = load_datasets([str(mrqa / "mrqa" / "train.parquet")], tokenizer)
    assert data.source == {"path": "train.parquet"}
    (data,) = load_datasets(["generated:two_hop#4"], tokenizer)
    assert data.source == {"generated": True, "config": "two_hop", "split": "test", "max_samples": 4}
    (data,) = load_datasets([{"name": str(mrqa / "mrqa"), "split": "train", "where": {"length": 3}}], tokenizer)
    assert (data.name, data.source) == ("mrqa", {"name": "mrqa", "split": "train", "where": {"length": 3}})
    hub = DataSource(name="rajpurkar/squad", config="plain", split="train", where={"day": [date(2020, 1, 2)]})
    assert source_in_report(hub) == {
        **{"name": "rajpurkar/squad", "config": "plain", "split": "train"},
        "where": {"day": ["2020-01-02"]},
    }
