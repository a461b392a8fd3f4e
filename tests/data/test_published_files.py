# SPDX-License-Identifier: Apache-2.0
"""The files that published data sets are read from: records of unlike columns, marks, numbered parts."""

import pyarrow.parquet
import pytest
from record_files import lines, write_files

from context_compressors.data.converters import convert
from context_compressors.data.published_files import read_records

SUMMARY = {"dialogue": "d", "summary": "s"}


@pytest.mark.parametrize(
    ("rows", "where", "written", "skipped"),
    [
        ([{"id": 1}, {"id": 2}, {"id": "x", "kind": "a"}], {"kind": "a"}, ["x"], {}),
        ([{"id": 1, "kind": None}] * 2 + [{"id": "x", "kind": "a"}], {"kind": "a"}, ["x"], {}),
        ([{"id": 1, "kind": "a"}, {"id": 2, "kind": "a"}, {"id": "x"}], {"kind": "a"}, ["1", "2"], {}),
        ([{"id": 1, "summary": ...}, {"id": 2, "summary": ...}, {"id": 3}], None, ["3"], {"summary": 2}),
        ([{"id": 1}, {"id": "a"}, {"id": None}], None, ["1", "a", None], {}),
    ],
)
def test_records_need_not_have_the_same_columns(tmp_path, monkeypatch, rows, where, written, skipped):
    monkeypatch.setattr("context_compressors.data.converters._BATCH_ROWS", 2)
    whole = [{key: value for key, value in {**SUMMARY, **row}.items() if value is not ...} for row in rows]
    write_files(tmp_path, {"train.jsonl": lines(*whole)})
    done = convert("samsum", tmp_path / "a.parquet", source=str(tmp_path / "train.jsonl"), where=where)
    assert pyarrow.parquet.read_table(tmp_path / "a.parquet")["id"].to_pylist() == written
    assert {name: count for name, count in done.skipped.items() if count} == skipped
    with pytest.raises(ValueError, match="where asks for 'kinds', which no record has"):
        convert("samsum", tmp_path / "b.parquet", source=str(tmp_path / "train.jsonl"), where={"kinds": "a"})


@pytest.mark.parametrize("name", ["train.csv", "train.json", "train.jsonl", "train.json.gz"])
def test_a_mark_of_the_byte_order_and_a_record_alone_are_read(tmp_path, name):
    record = {"id": "7", **SUMMARY}
    text = "id,dialogue,summary\n7,d,s\n" if name.endswith(".csv") else lines(record)
    for mark in ("", "\ufeff"):
        write_files(tmp_path, {name: mark + text})
        convert("samsum", tmp_path / "a.parquet", source=str(tmp_path / name), overwrite=True)
        assert pyarrow.parquet.read_table(tmp_path / "a.parquet")["id"].to_pylist() == ["7"]


def test_a_carriage_return_in_a_tsv_starts_no_row(tmp_path):
    (tmp_path / "collection.tsv").write_bytes(b'0\tone \rtwo "\r\n\n1\tthree\tfour\n2\n')
    assert list(read_records(tmp_path / "collection.tsv", ("_id", "text"))) == [
        {"_id": "0", "text": 'one \rtwo "'}, {"_id": "1", "text": "three"}, {"_id": "2", "text": None},
    ]  # fmt: skip


def test_files_whose_rows_are_numbered_alike_are_both_read_and_a_column_may_be_in_one_of_them(tmp_path):
    rows = [{"id": 0, **SUMMARY}, {"id": 1, **SUMMARY}], [{"id": 0, **SUMMARY, "dialogue": "e", "kind": "a"}]
    write_files(tmp_path, {f"sum/train-{number}.jsonl": lines(*part) for number, part in enumerate(rows)})
    for where, expected in ((None, ["0", "1", "0"]), ({"kind": "a"}, ["0"])):
        place = tmp_path / "a.parquet"
        convert("samsum", place, source=str(tmp_path / "sum"), where=where, overwrite=True)
        assert pyarrow.parquet.read_table(place)["id"].to_pylist() == expected
