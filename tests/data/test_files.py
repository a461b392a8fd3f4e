# SPDX-License-Identifier: Apache-2.0
"""Files as tables: those that cannot be read, and those that differ."""

import json

import pytest

from context_compressors.data.rows import read_rows
from context_compressors.data.sources import DataSource

QUESTION = {"context": "c d e", "question": "When?", "answers": ["noon"]}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def rows_of(folder, pattern, **fields):
    fields = {"tasks": ("question_answering",), **fields}
    return read_rows(DataSource(path=pattern, **fields), str(folder))


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
    with pytest.raises(ValueError, match="column 'answers' must be of one type in all files: "):
        rows_of(tmp_path, "*.jsonl", **labelled)


def test_a_file_is_found_by_its_name_before_it_is_a_pattern(tmp_path):
    folder = tmp_path / "run[1]"
    folder.mkdir()
    for name in ("a[2]", "b1"):
        write(folder / f"{name}.jsonl", [{"text": name}])
    for pattern, expected in (("a[2].jsonl", "a[2]"), ("b[12].jsonl", "b1")):
        assert rows_of(folder, pattern, tasks=("reconstruction",))["text"].to_pylist() == [expected]


@pytest.mark.parametrize("last", ["a.jsonl", "c.jsonl"])
def test_windows_keep_their_documents_beside_files_without(tmp_path, last):
    write(tmp_path / "b.jsonl", [{"text": "b", "source_texts": ["a b"]}, {"text": "d", "source_texts": ["c d", "e"]}])
    write(tmp_path / last, [{"text": "whole", "note": "x"}])
    table = rows_of(tmp_path, "*.jsonl", tasks=("continuation",))
    assert set(table.column_names) == {"text", "source_texts"}
    found = dict(zip(*table.to_pydict().values(), strict=True))
    assert found == {"b": ["a b"], "d": ["c d", "e"], "whole": None}
