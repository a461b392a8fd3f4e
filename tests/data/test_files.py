# SPDX-License-Identifier: Apache-2.0
"""Files as tables: texts that look like dates, columns that change their look, and files that differ."""

import json

import pytest

from context_compressors.data.rows import read_rows
from context_compressors.data.sources import DataSource

QUESTION = {"context": "c d e", "question": "When?", "answers": ["noon"]}
# Longer than the part of a file that is read at a time.
FILLER = "x" * 700_000


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def rows_of(folder, pattern, **fields):
    fields = {"tasks": ("question_answering",), **fields}
    return read_rows(DataSource(path=pattern, **fields), str(folder))


@pytest.mark.parametrize(
    "values",
    [
        ["1990-05-02", "1990-05-02", "at noon"],
        ["at noon", "1990-05-02", "1990-05-02"],
        [None, None, ["1990-05-02"]],
        [None, None, {"text": ["1990-05-02"]}],
        [[], None, ["1990-05-02"]],
        [["1990-05-02"], None, ["at noon"]],
    ],
)
def test_a_column_may_look_otherwise_further_on(tmp_path, values):
    write(tmp_path / "rows.jsonl", [{"note": value, "text": FILLER} for value in values])
    table = rows_of(tmp_path, "rows.jsonl", tasks=("reconstruction",))
    assert table["note"].to_pylist() == values


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\n{"text": ["b"]}\n', "rows.jsonl: column 'text' cannot be read: .*list"),
        ('{"text": "a"\n', "rows.jsonl cannot be read, after record 0: Expecting"),
        ("", "source 'rows.jsonl' has no rows"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, content, message):
    (tmp_path / "rows.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message):
        rows_of(tmp_path, "rows.jsonl", tasks=("reconstruction",))


def test_files_whose_columns_differ_are_named(tmp_path):
    write(tmp_path / "a.jsonl", [{**QUESTION, "labels": []}])
    write(tmp_path / "b.jsonl", [{**QUESTION, "labels": ["noon"]}])
    labelled = {"columns": {"answers": "labels"}}
    assert rows_of(tmp_path, "*.jsonl", tasks=("reconstruction",), **labelled).num_rows == 2
    write(tmp_path / "c.jsonl", [{**QUESTION, "labels": "noon"}])
    message = r"column 'answers' must be of one type in all files, got .* in .*b\.jsonl and string in .*c\.jsonl"
    with pytest.raises(ValueError, match=message):
        rows_of(tmp_path, "*.jsonl", **labelled)


def test_a_file_is_found_by_its_name_before_it_is_a_pattern(tmp_path):
    folder = tmp_path / "run[1]"
    (folder / "part[2]").mkdir(parents=True)
    write(folder / "part[2]" / "a.jsonl", [{"text": "a"}])
    write(folder / "b1.jsonl", [{"text": "b"}])
    asked = {"tasks": ("reconstruction",)}
    assert rows_of(folder, "part[2]/a.jsonl", **asked)["text"].to_pylist() == ["a"]
    assert rows_of(folder, "b[12].jsonl", **asked)["text"].to_pylist() == ["b"]
    assert rows_of(folder, "*.jsonl", **asked)["text"].to_pylist() == ["b"]
    with pytest.raises(ValueError, match=r"there is no file .*run\[1\]/c\.jsonl"):
        rows_of(folder, "c.jsonl", **asked)


@pytest.mark.parametrize("last", ["a.jsonl", "c.jsonl"])
def test_windows_keep_their_documents_beside_files_without(tmp_path, last):
    write(tmp_path / "b.jsonl", [{"text": "b", "source_texts": ["a b"]}, {"text": "d", "source_texts": ["c d", "e"]}])
    write(tmp_path / last, [{"text": "whole", "note": "x"}])
    table = rows_of(tmp_path, "*.jsonl", tasks=("continuation",))
    assert set(table.column_names) == {"text", "source_texts"}
    found = dict(zip(*table.to_pydict().values(), strict=True))
    assert found == {"b": ["a b"], "d": ["c d", "e"], "whole": None}
    (tmp_path / last).unlink()
    (tmp_path / last.replace("jsonl", "txt")).write_text("whole")
    assert found == dict(zip(*rows_of(tmp_path, "*.*", tasks=("continuation",)).to_pydict().values(), strict=True))
