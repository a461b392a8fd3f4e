# SPDX-License-Identifier: Apache-2.0
"""The data sets of an evaluation: files, Hub data sets and generated documents, in the forms that training takes."""

import json
import re
from datetime import date

import pyarrow
import pyarrow.parquet
import pytest
from naive_twin import CONTINUATION, QA, RECONSTRUCTION, ROWS, SUMMARISATION, encode

from context_compressors.data.document_ids import TrainingDocuments, document_id
from context_compressors.data.rows import read_rows
from context_compressors.data.sources import DataSource, parse_sources
from context_compressors.evaluation.data_sets import load_datasets, source_in_report
from context_compressors.evaluation.held_out import check_held_out
from context_compressors.evaluation.samples import EvaluationDataset, SampleBuilder

LIMITS = {QA: 6, SUMMARISATION: 6}
# Name -> a row as the data set is published, and what is read of it.
PUBLISHED = {
    "SQuAD": ({"context": "c", "question": "q", "answers": {"text": ["a", "b"], "answer_start": [0, 2]}}, ["a", "b"]),
    "MRQA": ({"subset": "HotpotQA", "qid": "7", "context": "c", "question": "q", "answers": ["a"]}, ["a"]),
    "PwC": ({"input": "c", "prompt": "q", "answer": "a"}, ["a"]),
    "ParaphraseRC": (
        {"plot_id": "p", "plot": "c", "question_id": "7", "question": "q", "answers": ["a"], "no_answer": False},
        ["a"],
    ),
    "BoolQ": ({"passage": "c", "question": "q", "answer": True}, ["yes"]),
    "DROP": (
        {"passage": "c", "question": "q", "answers_spans": {"spans": ["a"], "types": ["span"]}, "query_id": "7"},
        ["a"],
    ),
    "NarrativeQA": (
        {
            "document": {"id": "d", "summary": {"text": "c", "title": "t"}, "text": "the whole story"},
            "question": {"text": "q", "tokens": ["q"]},
            "answers": [{"text": "a", "tokens": ["a"]}, {"text": "b", "tokens": ["b"]}],
        },
        ["a", "b"],
    ),
    "LongBench": (
        {
            "input": "q",
            "context": "c",
            "answers": ["a"],
            "length": 7,
            "dataset": "qasper",
            "all_classes": None,
            "_id": "7",
        },
        ["a"],
    ),
    "HotpotQA": (
        {
            "id": "7",
            "question": "q",
            "answer": "a",
            "supporting_facts": {"title": ["T"], "sent_id": [0]},
            "context": {"title": ["T"], "sentences": [["One.", " Two. "]]},
        },
        ["a"],
    ),
    "RACE": (
        {"article": "c", "question": "q", "options": ["a", "b"], "answer": "B", "example_id": "high1.txt"},
        ["b"],
    ),
    "QuAIL": ({"id": "7", "context": "c", "question": "q", "answers": ["a", "b"], "correct_answer_id": 1}, ["b"]),
    "LooGLE": (
        {"context": "c", "question": "q", "answer_prefix": "Answer: ", "answer": "a", "task": "longdep_qa"},
        ["a"],
    ),
    "RULER": ({"context": "c", "question": "q", "answer_prefix": "Answer:", "answer": ["a"], "task": "qa_1"}, ["a"]),
    "CNN/DailyMail": ({"article": "c", "highlights": "s", "id": "7"}, "s"),
    "arXiv": ({"article": "c", "abstract": "s"}, "s"),
    "XSum": ({"document": "c", "summary": "s", "id": "7"}, "s"),
    "SAMSum": ({"id": "7", "dialogue": "c", "summary": "s"}, "s"),
}


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
    for name, (row, expected) in PUBLISHED.items():
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "rows.parquet")
        task = QA if isinstance(expected, list) else SUMMARISATION
        (read,) = read_rows(DataSource(path="rows.parquet", tasks=(task,)), str(tmp_path)).to_pylist()
        found = {key: read[key] for key in ("context", "question", "answers", "summary") if key in read}
        texts = {"question": "q", "answers": expected} if task == QA else {"summary": expected}
        assert found == {"context": "T\nOne. Two." if name == "HotpotQA" else "c", **texts}, name
        (data,) = load_datasets(["rows.parquet"], tokenizer, data_dir=str(tmp_path))
        (sample,) = SampleBuilder(tokenizer, None, LIMITS, 8, 4).build(data, task)
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
    builder = SampleBuilder(tokenizer, None, LIMITS, 16, 4)
    for task in (QA, SUMMARISATION, RECONSTRUCTION, CONTINUATION):
        samples = builder.build(data, task)
        # A row's own text may have trained a model that does not know what it was cut from.
        ids = [(document_id(whole), document_id(row["context"])) for row in windows]
        ids.append((document_id(other["context"]),))
        assert [sample.source_ids for sample in samples] == ids, task
        # What makes a document hard, all of its windows share: a bootstrap draws them together.
        assert [sample.document for sample in samples] == [0, 0, 1], task
    seen = {"ours": TrainingDocuments(trained={document_id(whole)})}
    work = [(data, SUMMARISATION, builder.build(data, SUMMARISATION))]
    with pytest.raises(ValueError, match=r"1 of 4 documents of 'windows' trained ours \(samples 0\)"):
        check_held_out(work, seen)
    seen = {"ours": TrainingDocuments(trained={document_id(windows[1]["context"])})}
    with pytest.raises(ValueError, match=r"1 of 4 documents of 'windows' trained ours \(samples 20\)"):
        check_held_out(work, seen)
    with pytest.raises(ValueError, match="source_texts must be a list of whole texts, got 'The harbour of"):
        builder.build(EvaluationDataset("windows", [{**other, "source_texts": whole}]), QA)
    with pytest.raises(ValueError, match=r"source_texts must be a list of whole texts, got \[3\]"):
        builder.build(EvaluationDataset("windows", [{**other, "source_texts": [3]}]), QA)
    # Nothing would be known of what a context of running text is put together from.
    with pytest.raises(ValueError, match="niah_single_2 takes whole texts, and rows name source_texts"):
        load_datasets(["{path: windows.parquet, kind: niah_single_2}"], tokenizer, data_dir=str(tmp_path))


def test_rows_are_kept_by_value_and_each_value_gets_a_data_set(tokenizer, mrqa):
    read = {"tokenizer": tokenizer, "data_dir": str(mrqa)}
    source = {"path": "mrqa/train.parquet", "title": "MRQA"}
    found = load_datasets([{**source, "by": "subset", "max_samples": 3}], **read)
    assert [data.name for data in found] == ["MRQA/SQuAD", "MRQA/NewsQA", "MRQA/TriviaQA", "MRQA/HotpotQA"]
    assert [len(data.examples) for data in found] == [10, 10, 10, 10]
    assert [len(SampleBuilder(tokenizer, None, LIMITS, 8, 4).build(data, QA)) for data in found] == [3, 3, 3, 3]
    # The range is counted among the rows that are kept.
    kept = {**source, "where": {"subset": ["NewsQA", "HotpotQA"], "length": {"from": 4, "below": 30}}, "rows": [1, 4]}
    (data,) = load_datasets([kept], **read)
    assert [row["context"] for row in data.examples] == ["c7", "c9", "c11"]
    trained = read_rows(DataSource.from_mapping({**kept, "tasks": [QA]}), str(mrqa))
    assert trained["context"].to_pylist() == ["c7", "c9", "c11"]
    for where, message in (
        ({"subset": "NewsQ"}, r"has no rows where {'subset': 'NewsQ'}"),
        ({"sbset": "NewsQA"}, "no column 'sbset'; did you mean 'subset'"),
        ({"length": "seven"}, "where asks length for 'seven', and it has int64"),
    ):
        with pytest.raises(ValueError, match=message):
            load_datasets([{**source, "where": where}], **read)


def test_supporting_passages_are_those_that_the_facts_name(tokenizer, tmp_path):
    context = {"title": ["Rome", "Oslo", "Bern"], "sentences": [["R.", " r."], ["O."], ["B."]]}
    facts = {"title": ["Bern", "Rome", "Rome"], "sent_id": [0, 0, 1]}
    row = {"question": "q", "answer": "a", "context": context, "supporting_facts": facts}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "rows.parquet")
    source = {"path": "rows.parquet", "title": "all"}
    sources = [source, {**source, "title": "gold", "supporting_passages": True}]
    found = load_datasets(sources, tokenizer, data_dir=str(tmp_path))
    assert [data.examples[0]["context"] for data in found] == [
        "Rome\nR. r.\n\nOslo\nO.\n\nBern\nB.",
        "Rome\nR. r.\n\nBern\nB.",
    ]
    abstract = {
        "context": {"contexts": ["Aim.", "Result."], "labels": ["A", "R"]},
        "question": "q",
        "final_decision": "no",
    }
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([abstract]), tmp_path / "rows.parquet")
    (data,) = load_datasets([{**source, "columns": {"answers": "final_decision"}}], tokenizer, data_dir=str(tmp_path))
    assert list(data.examples) == [{"context": "Aim.\nResult.", "question": "q", "answers": "no"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"context": "c", "question": "q", "answers": ["a"]}))
    with pytest.raises(ValueError, match=r"source 'rows\.jsonl' has no passages"):
        load_datasets(
            [{**source, "path": "rows.jsonl", "supporting_passages": True}], tokenizer, data_dir=str(tmp_path)
        )


def test_a_stream_is_read_as_far_as_its_rows_reach(tokenizer, mrqa, monkeypatch):
    monkeypatch.setattr("context_compressors.data.rows._STREAMED_ROWS", 7)
    source = {"name": str(mrqa / "mrqa"), "split": "train", "streaming": True, "where": {"subset": "NewsQA"}}
    (data,) = load_datasets([{**source, "rows": [2, 5], "title": "news"}], tokenizer)
    assert (data.name, [row["context"] for row in data.examples]) == ("news", ["c9", "c13", "c17"])
    first = DataSource.from_mapping({**source, "max_samples": 4, "tasks": [QA]})
    assert read_rows(first)["context"].to_pylist() == ["c1", "c5", "c9", "c13"]


def test_incomplete_rows_are_left_out_and_counted_where_the_source_says_so(tokenizer, tmp_path, caplog):
    whole = {"context": "c", "question": "q", "answers": ["a"]}
    rows = [whole, {**whole, "answers": []}, {**whole, "question": None}, {**whole, "context": " "}, whole]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    source = {"path": "rows.parquet", "skip_incomplete": True}
    (data,) = load_datasets([source], tokenizer, data_dir=str(tmp_path))
    assert list(data.examples) == [whole, whole]
    assert "source 'rows.parquet': 3 of 5 rows left out: incomplete" in caplog.text
    trained = read_rows(DataSource.from_mapping({**source, "tasks": [QA]}), str(tmp_path))
    assert trained.to_pylist() == [whole, whole]
    restored = read_rows(DataSource.from_mapping({**source, "tasks": [RECONSTRUCTION]}), str(tmp_path))
    assert restored.num_rows == 4


def test_one_file_of_sources_serves_training_and_evaluation(tokenizer, mrqa):
    (mrqa / "sources.yaml").write_text(
        "sources:\n"
        "  - {path: mrqa/train.parquet, title: News, where: {subset: NewsQA}, tasks: question_answering, weight: 2}\n"
        "  - generated:one_hop#3\n"
    )
    news, generated = parse_sources([str(mrqa / "sources.yaml")], split="train")
    assert read_rows(news, str(mrqa)).num_rows == 10
    assert (generated.split, generated.config, generated.max_samples) == ("train", "one_hop", 3)
    data = load_datasets([str(mrqa / "sources.yaml")], tokenizer, data_dir=str(mrqa), document_tokens=200)
    assert [found.name for found in data] == ["News", "generated:one_hop"]
    # Those that the source names, of the three that its columns allow.
    assert data[0].tasks() == (QA,)
    short = "Old=mrqa-workshop/mrqa:plain@validation#20"
    expected = {"name": "mrqa-workshop/mrqa", "config": "plain", "split": "validation", "max_samples": 20}
    mapping = f"{{title: Old, {', '.join(f'{key}: {value}' for key, value in expected.items())}}}"
    assert parse_sources([short]) == parse_sources([mapping]) == parse_sources([{"title": "Old", **expected}])
    (mrqa / "empty.yaml").write_text("base: x\n")
    with pytest.raises(ValueError, match=r"empty\.yaml must hold a list of sources"):
        parse_sources([str(mrqa / "empty.yaml")])


def test_a_data_set_may_have_a_number_of_samples_and_columns_of_its_own(tokenizer, tmp_path):
    rows = [{"story": f"text {n}", "question": f"{n}?", "reply": {"text": ["a"]}} for n in range(9)]
    (tmp_path / "qa.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = "{title: mine, path: qa.jsonl, max_samples: 4, columns: {context: story, answers: reply.text}}"
    (data,) = load_datasets([source], tokenizer, data_dir=str(tmp_path))
    assert (data.name, data.max_samples, len(data.examples)) == ("mine", 4, 9)
    assert len(SampleBuilder(tokenizer, None, LIMITS, 8, 4).build(data, QA, 2)) == 4
    (data,) = load_datasets(["generated#7"], tokenizer, num_documents=1, document_tokens=150)
    assert data.max_samples == 7
    with pytest.raises(ValueError, match="max_samples of data set 'tiny' must be at least 1, got 0"):
        EvaluationDataset("tiny", ROWS, max_samples=0)


def test_sources_are_files_and_generated_documents(tokenizer, qa_file, tmp_path):
    (data,) = load_datasets(["qa_rows.parquet"], tokenizer, data_dir=str(tmp_path), domain="out")
    assert (data.name, data.domain, list(data.examples)) == ("qa_rows", "out", ROWS)
    assert data.tasks() == (QA, CONTINUATION, RECONSTRUCTION)
    (tmp_path / "plain.jsonl").write_text(json.dumps({"text": "one"}) + "\n" + json.dumps({"text": "two"}) + "\n")
    (named,) = load_datasets(["books=plain.jsonl"], tokenizer, data_dir=str(tmp_path))
    assert (named.name, named.tasks()) == ("books", (CONTINUATION, RECONSTRUCTION))


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
    (data,) = load_datasets(["generated:two_hop#4"], tokenizer, num_documents=2)
    assert data.source == {"generated": True, "config": "two_hop", "split": "test", "max_samples": 4}
    (data,) = load_datasets([{"name": str(mrqa / "mrqa"), "split": "train", "where": {"length": 3}}], tokenizer)
    assert (data.name, data.source) == ("mrqa", {"name": "mrqa", "split": "train", "where": {"length": 3}})
    hub = DataSource(name="rajpurkar/squad", config="plain", split="train", where={"day": [date(2020, 1, 2)]})
    assert source_in_report(hub) == {
        **{"name": "rajpurkar/squad", "config": "plain", "split": "train"},
        "where": {"day": ["2020-01-02"]},
    }


def test_generated_documents_come_from_the_test_split_by_hops(tokenizer):
    options = {"num_documents": 3, "document_tokens": 300}
    both, one, two = load_datasets(["generated", "generated:one_hop", "generated:two_hop"], tokenizer, **options)
    assert len(both.examples) == len(one.examples) + len(two.examples)
    assert two.name == "generated:two_hop"
    assert len({example["context"] for example in both.examples}) == 3
    for example in both.examples:
        assert example["answers"][0] in example["context"]
        assert len(encode(tokenizer, example["context"])) <= 300
    (again,) = load_datasets(["generated"], tokenizer, seed=1, **options)
    assert again.examples != both.examples


def test_generated_documents_pass_over_seeds_that_do_not_fit(tokenizer):
    # At one token per byte, many first sentences are longer than 50 tokens.
    (data,) = load_datasets(["generated"], tokenizer, num_documents=20, document_tokens=50)
    assert len({example["context"] for example in data.examples}) <= 20
    assert max(len(encode(tokenizer, example["context"])) for example in data.examples) <= 50
    with pytest.raises(ValueError, match="num_tokens must be"):
        load_datasets(["generated"], tokenizer, document_tokens=5)


def test_fields_that_say_nothing_of_a_source_are_refused(tokenizer, mrqa):
    rows, texts, task = {"path": "mrqa/train.parquet"}, {"generated": True}, {"generated": True, "kind": "vt"}
    asked = {**rows, "kind": "qa_1"}
    for source, field, value, needed in (
        (texts, "rows", [0, 2], "a file or a data set of the Hub in"),
        (texts, "where", {"x": 1}, "a file or a data set of the Hub in"),
        (task, "columns", {"context": "nope"}, "a file or a data set of the Hub in"),
        (texts, "skip_incomplete", True, "a file or a data set of the Hub in"),
        (texts, "separate_passages", True, "a file or a data set of the Hub in"),
        (task, "supporting_passages", True, "a file or a data set of the Hub in"),
        (texts, "by", "kind", "a file or a data set of the Hub that is no task of RULER"),
        (asked, "by", "subset", "a file or a data set of the Hub that is no task of RULER"),
        (rows, "config", "plain", "a data set of the Hub, or generated documents that are no task"),
        (asked, "config", "plain", "a data set of the Hub, or generated documents that are no task"),
        (task, "config", "one_hop", "a data set of the Hub, or generated documents that are no task"),
        (rows, "document_tokens", 200, "generated documents or a task of RULER"),
    ):
        with pytest.raises(ValueError, match=f"{field} of source '.*' needs {needed}.* got {re.escape(repr(value))}"):
            load_datasets([{**source, field: value}], tokenizer, data_dir=str(mrqa))
    said = {**texts, "document_tokens": 200, "config": "one_hop"}
    (data,) = load_datasets([said], tokenizer, num_documents=1)
    assert data.source == {**said, "split": "test"}


def test_a_stream_serves_a_task_of_ruler_as_far_as_its_samples_reach(tokenizer, mrqa):
    stream = {"name": str(mrqa / "mrqa"), "split": "train", "streaming": True, "kind": "qa_1", "max_samples": 3}
    for source, reached in ((stream, range(3)), ({**stream, "rows": [2, 8]}, range(2, 8))):
        (data,) = load_datasets([source], tokenizer, document_tokens=200)
        assert len(data.examples) == 3
        found = {text for row in data.examples for text in row["source_texts"]}
        assert len(found) >= 3
        assert found <= {f"c{n}" for n in reached}


def test_a_data_set_for_each_value_needs_a_column_of_plain_values(tokenizer, tmp_path):
    rows = [{"text": f"t{n}", "tags": ["a"], "meta": {"kind": "a"}} for n in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for column, kind in (("tags", "list<"), ("meta", "struct<")):
        with pytest.raises(ValueError, match=rf"needs a column of texts or numbers, and '{column}' has {kind}"):
            load_datasets([{"path": "rows.jsonl", "by": column}], tokenizer, data_dir=str(tmp_path))
    (data,) = load_datasets([{"path": "rows.jsonl", "by": "meta.kind"}], tokenizer, data_dir=str(tmp_path))
    assert data.name == "rows/a"


def test_sources_that_are_not_there_are_refused(tokenizer, tmp_path):
    with pytest.raises(ValueError, match="there is no file"):
        load_datasets(["none.parquet"], tokenizer, data_dir=str(tmp_path))
    with pytest.raises(ValueError, match="is a folder: name its files"):
        load_datasets([tmp_path.name], tokenizer, data_dir=str(tmp_path.parent))
    with pytest.raises(ValueError, match="did you mean 'one_hop'"):
        load_datasets(["generated:onehop"], tokenizer)
