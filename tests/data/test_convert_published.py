# SPDX-License-Identifier: Apache-2.0
"""Published data sets as Parquet in our columns: a few rows of each form that authors publish."""

import dataclasses
import json
from pathlib import Path

import pyarrow.parquet
import pytest
from record_files import lines, write_files

from context_compressors import cli
from context_compressors.data.convert_published import convert
from context_compressors.data.files import read_records
from context_compressors.data.published_sets import PUBLISHED_SETS
from context_compressors.data.rows import read_rows
from context_compressors.data.sources import DataSource

SECTION = {"title": "T", "section_title": "S", "background": "B"}
PARAGRAPH = {
    "id": "d",
    "context": "c CANNOTANSWER",
    "qas": [
        {"id": "d#0", "question": "q", "answers": [{"text": "a"}, {"text": "a"}, {"text": "b"}], "followup": "y"},
        {"id": "d#1", "question": "r", "answers": [{"text": "CANNOTANSWER"}], "followup": "n"},
    ],
}
QUAC_ROWS = [
    {"id": "d#0", "context": "c CANNOTANSWER", "question": "q", "answers": ["a", "b"]},
    {"id": "d#1", "context": "c CANNOTANSWER", "question": "r", "answers": ["CANNOTANSWER"]},
]
HOPS = {
    "_id": "7",
    "type": "bridge",
    "question": "q",
    "answer": "a",
    "supporting_facts": [["Rome", 0], ["Rome", 1]],
    "context": [["Rome", ["R.", " r."]], ["Oslo", ["O."]]],
}
HOPS_ROW = {"id": "7", "context": "Rome\nR. r.\n\nOslo\nO.", "question": "q", "answers": ["a"]}
DOCUMENT = {"id": "1", "title": "T", "text": "o", "score": "1.5", "hasanswer": False, "isgold": False}
DPR = {"title": "N", "text": "n", "score": 0, "title_score": 0, "passage_id": "9"}
QASPER_ANSWER = {
    "unanswerable": False, "extractive_spans": ["x", "y"], "yes_no": None, "free_form_answer": "", "evidence": [],
    "highlighted_evidence": [],
}  # fmt: skip
QASPER = {
    "title": "T",
    "abstract": "A",
    "full_text": [{"section_name": "One", "paragraphs": ["p", "r"]}, {"section_name": None, "paragraphs": ["s"]}],
    "qas": [
        {
            "question": "q",
            "question_id": "7",
            "answers": [
                {"answer": QASPER_ANSWER, "annotation_id": "1"},
                {"answer": {**QASPER_ANSWER, "extractive_spans": [], "free_form_answer": "f"}},
                {"answer": {**QASPER_ANSWER, "extractive_spans": [], "yes_no": False}},
                {"answer": {**QASPER_ANSWER, "unanswerable": True, "extractive_spans": []}},
            ],
        }
    ],
}
QASPER_ROW = {
    "id": "7", "context": "T\n\nA\n\nOne\np\nr\n\ns", "question": "q", "answers": ["x, y", "f", "no", "unanswerable"],
}  # fmt: skip
PAPER = "Below is a paper. Memorize the paper and answer my question after the paper.\n The paper begins. \n "
BOOK = "Below is some paragraphs in the book, T. Memorize the content and answer my question after the book.\n"
NO_ID = {"id": None, "question": "q"}

# Data set, the files that are published (texts, or records of a Parquet file), further arguments, what is written.
FORMS = [
    ("quac", {"val_v0.2.json": json.dumps({"data": [{**SECTION, "paragraphs": [PARAGRAPH]}]})},
     {"split": "validation"}, QUAC_ROWS),
    ("2wikimqa", {"dev.json": json.dumps([{**HOPS, "evidences": [["a", "b", "c"]]}])}, {"split": "validation"},
     [HOPS_ROW]),
    ("2wikimqa", {"train.parquet": [
        {**HOPS, "context": json.dumps(HOPS["context"]), "supporting_facts": json.dumps(HOPS["supporting_facts"])}
    ]}, {}, [HOPS_ROW]),
    (
        "nq",
        {"nq-open-20_total_documents_gold_at_9.jsonl.gz": lines({
            "question": "q", "answers": ["a", "b"],
            "ctxs": [DOCUMENT, {**DOCUMENT, "title": "G", "text": "g", "isgold": True}],
            "nq_annotated_gold": {"title": "G", "long_answer": "g"},
        })},
        {"split": "test"},
        [{**NO_ID, "context": "T\no\n\nG\ng", "answers": ["a", "b"]}],
    ),
    ("qasper", {"qasper-train-v0.3.json": json.dumps({"1909.1": QASPER})}, {}, [QASPER_ROW]),
    ("quality_choices", {"QuALITY.v1.0.1.htmlstripped.train": lines({"article_id": "1", "article": "c", "questions": [
        {"question": "q", "question_unique_id": "1_A", "options": ["a", "b"], "gold_label": 2, "difficult": 0},
        {"question": "r", "question_unique_id": "1_B", "options": ["a", "b"]},
    ]})}, {}, [{"id": "1_A", "context": "c", "question": "q\n\nChoices:\nA. a\nB. b", "answers": ["B. b"]}]),
    ("longalpaca", {"LongAlpaca-12k.json": json.dumps([
        {"instruction": f"{PAPER}c \n d \n Now the paper ends. \nq", "output": "a", "input": "", "file": "f"},
        {"instruction": "Name three fruits.", "output": "x"},
        {"instruction": f"{BOOK} e \n Now the material ends. r", "output": "b"},
    ])}, {}, [
        {**NO_ID, "context": "c \n d", "answers": ["a"]},
        {"id": None, "question": "r", "context": "e", "answers": ["b"]},
    ]),
    ("qmsum", {"jsonl/val.jsonl": lines({
        "topic_list": [], "general_query_list": [{"query": "q", "answer": "a"}],
        "specific_query_list": [{"query": "r", "answer": "b", "relevant_text_span": [["0", "1"]]}],
        "meeting_transcripts": [{"speaker": "A", "content": "x"}, {"speaker": "B", "content": "y"}],
    })}, {"split": "validation"}, [
        {**NO_ID, "context": "A: x\nB: y", "answers": ["a"]},
        {"id": None, "question": "r", "context": "A: x\nB: y", "answers": ["b"]},
    ]),
    (
        "mediasum",
        {
            "news_dialogue.json": json.dumps([
                {"id": f"NPR-{n}", "program": "P", "date": "2006-01-02", "url": "u", "title": "t", "summary": f"s{n}",
                 "utt": ["Hello.", "Hi."], "speaker": ["A, host", "B"]} for n in (1, 2)
            ]),
            "train_val_test_split.json": json.dumps({"train": ["NPR-1"], "val": ["NPR-2"], "test": []}),
        },
        {"split": "validation"},
        [{"id": "NPR-2", "context": "A, host: Hello.\nB: Hi.", "summary": "s2"}],
    ),
    ("samsum", {"train.json": json.dumps([
        {"id": "1", "summary": "s", "dialogue": "A: x\r\nB: y"}, {"id": "2", "summary": "s", "dialogue": None},
        {"id": "3", "summary": " ", "dialogue": "A: x"},
    ])}, {}, [{"id": "1", "context": "A: x\r\nB: y", "summary": "s"}]),
    ("booksum", {"train.parquet": [{"bid": 1, "chapter": "c", "summary": '{"summary": "s"}', "summary_text": "s"}]},
     {}, [{"id": None, "context": "c", "summary": "s"}]),
    ("2wikimqa", {"train.json": json.dumps([HOPS])}, {"supporting_passages": True},
     [{**HOPS_ROW, "context": "Rome\nR. r."}]),
    ("2wikimqa", {"train.json": json.dumps([HOPS])}, {"separate_passages": True},
     [{**HOPS_ROW, "context": ["Rome\nR. r.", "Oslo\nO."]}]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "files", "options", "expected"), FORMS)
def test_every_published_form_becomes_our_columns(tmp_path, name, files, options, expected):
    output = tmp_path / "out" / "rows.parquet"
    write_files(tmp_path, files)
    done = convert(name, output, source=str(tmp_path / next(iter(files))), **options)
    table = pyarrow.parquet.read_table(output)
    assert table.to_pylist() == expected
    assert done.rows == len(expected)
    entry, metadata = PUBLISHED_SETS[name], table.schema.metadata
    assert metadata[b"license"].decode() == entry.license
    # What was written is a source as it stands.
    task = "question_answering" if "question" in table.column_names else "summarization"
    assert read_rows(DataSource(path=str(output), tasks=(task,))).num_rows == len(expected)
    lacks = {"samsum": {"context": 1, "summary": 1}, "longalpaca": {"context": 1}, "quality_choices": {"answers": 1}}
    lacks = lacks.get(name, {})
    assert json.loads(pyarrow.parquet.read_metadata(output).metadata[b"skipped"]) == lacks


def test_every_form_of_its_own_is_tried():
    assert {name for name, *_ in FORMS} >= {name for name, entry in PUBLISHED_SETS.items() if entry.rows}


def test_questions_of_dpr_stand_among_twenty_documents(tmp_path):
    rows = [
        {
            "dataset": "nq_train_psgs_w100",
            "question": f"q{n}",
            "answers": ["a"],
            "positive_ctxs": [{**DPR, "title": "G", "text": "g"}, DPR][: 2 if n else 0],
            "negative_ctxs": [DPR] * 30,
            # One is of the same article.
            "hard_negative_ctxs": [{**DPR, "title": "G", "text": "h"}, *[{**DPR, "title": "H", "text": "h"}] * 3],
        }
        for n in range(12)
    ]
    write_files(tmp_path, {"biencoder-nq-train.json": json.dumps(rows)})
    done = convert("nq", tmp_path / "a.parquet", source=str(tmp_path / "biencoder-nq-train.json"))
    assert done.skipped["context"] == 1
    documents = [
        text.split("\n\n") for text in pyarrow.parquet.read_table(tmp_path / "a.parquet")["context"].to_pylist()
    ]
    assert [sorted(texts) for texts in documents] == [sorted(["G\ng", "G\nh", *["H\nh"] * 3, *["N\nn"] * 15])] * 11
    assert len({texts.index("G\ng") for texts in documents}) > 3
    convert("nq", tmp_path / "b.parquet", source=str(tmp_path / "biencoder-nq-train.json"))
    assert pyarrow.parquet.read_table(tmp_path / "b.parquet") == pyarrow.parquet.read_table(tmp_path / "a.parquet")
    convert("nq", tmp_path / "c.parquet", source=str(tmp_path / "biencoder-nq-train.json"), supporting_passages=True)
    assert pyarrow.parquet.read_table(tmp_path / "c.parquet")["context"].to_pylist() == ["G\ng"] * 11


def test_the_command_reads_the_hub_and_says_what_it_wrote(tmp_path, monkeypatch, capsys):
    rows = [
        {"subset": name, "qid": str(n), "context": "c", "question": "q", "answers": ["a"] if n else []}
        for n, name in enumerate(["SQuAD", "NewsQA", "SQuAD"])
    ]
    write_files(tmp_path, {"mrqa/train.parquet": rows})
    hub = dataclasses.replace(PUBLISHED_SETS["mrqa"], hub=str(tmp_path / "mrqa"))
    monkeypatch.setitem(PUBLISHED_SETS, "mrqa", hub)
    output = tmp_path / "mrqa.parquet"
    words = ["data", "mrqa", str(output)]
    assert cli.main(words) == 0
    assert capsys.readouterr().out == (
        f"wrote 2 rows to {output}; left out 1 without answers\nlicense: not stated, each subset has its own\n"
    )
    assert [row["subset"] for row in pyarrow.parquet.read_table(output).to_pylist()] == ["NewsQA", "SQuAD"]
    whole = output.read_bytes()
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    assert [name for name in PUBLISHED_SETS if f"`{name}`" not in page] == []
    assert cli.main(["data"]) == 0
    table = capsys.readouterr().out
    assert all(entry.title in table and entry.license in table for entry in PUBLISHED_SETS.values())
    write_files(tmp_path, {"cut.json": '[{"_id": "1", "question"', "other.json": '[{"question": "q"}]'})
    cut, other = ["--overwrite", "--source", str(tmp_path / "cut.json")], str(tmp_path / "other.json")
    for wrong, message in (
        (words, "the output must be a new .parquet file"),
        (["data", "mrqa"], "name the file to write"),
        (["data", "squad", "x.parquet", "--split", "validaton"], "did you mean 'validation'"),
        (["data", "quac", "x.parquet"], "QuAC is not on the Hub: get it from https://quac.ai"),
        ([*words, "--overwrite", "--separate-passages"], "has no passages that could stay apart"),
        ([*words, *cut], "cut.json cannot be read, after"),
        (["data", "2wikimqa", *words[2:], "--overwrite", "--source", other], "not in the form that 2WikiMulti"),
        (["data", "pwc", *words[2:], "--overwrite", "--source", other], "there is no context and no answers"),
    ):
        assert cli.main(wrong) == 1
        assert message in capsys.readouterr().err
    # What was there stays, and nothing half written lies beside it.
    assert output.read_bytes() == whole
    assert list(tmp_path.glob("*.part")) == []


def test_files_may_have_a_mark_of_the_byte_order_and_tabs(tmp_path):
    write_files(tmp_path, {"train.jsonl": "\ufeff" + lines({"id": "7", "dialogue": "d", "summary": "s"})})
    convert("samsum", tmp_path / "a.parquet", source=str(tmp_path / "train.jsonl"))
    assert pyarrow.parquet.read_table(tmp_path / "a.parquet")["id"].to_pylist() == ["7"]
    (tmp_path / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq\t1\t2\n\n")
    assert list(read_records(tmp_path / "test.tsv")) == [{"query-id": "q", "corpus-id": "1", "score": "2"}]
