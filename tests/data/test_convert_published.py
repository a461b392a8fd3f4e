# SPDX-License-Identifier: Apache-2.0
"""Published data sets as Parquet in our columns: a few rows of each form that authors publish."""

import dataclasses
import json
from pathlib import Path

import pyarrow.parquet
import pytest
import yaml
from record_files import lines, write_files

from context_compressors import cli
from context_compressors.data.convert_published import convert
from context_compressors.data.files import read_records
from context_compressors.data.published_sets import PUBLISHED_SETS
from context_compressors.data.rows import read_rows
from context_compressors.data.sources import DataSource

FORMS = yaml.safe_load(Path(__file__).with_name("published_forms.yaml").read_text(encoding="utf-8"))
DPR = {"title": "N", "text": "n", "score": 0, "title_score": 0, "passage_id": "9"}
# How a file of each kind is written.
KINDS = {"json": json.dumps, "lines": lambda rows: lines(*rows), "rows": list}


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form["set"])
def test_every_published_form_becomes_our_columns(tmp_path, form):
    output, name, expected = tmp_path / "out" / "rows.parquet", form["set"], form["expected"]
    files = {file: KINDS[kind](value) for file, content in form["files"].items() for kind, value in content.items()}
    write_files(tmp_path, files)
    done = convert(name, output, source=str(tmp_path / next(iter(files))), **form["options"])
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
    assert {form["set"] for form in FORMS} >= {name for name, entry in PUBLISHED_SETS.items() if entry.rows}


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
