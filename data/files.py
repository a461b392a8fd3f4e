# SPDX-License-Identifier: Apache-2.0
"""Parquet, JSONL and text files as one table, with our names for its columns."""

from __future__ import annotations

import codecs
import glob
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.json
import pyarrow.parquet

from ..configuration.nearest_names import check_choice, nearest
from .columns import is_list, with_our_columns
from .sources import COLUMNS, FILE_TYPES, TEXT_FILES

_ID_COLUMNS = ("id", "query_id", "doc_id")
# What training, evaluation and retrieval read of a table.
_READ_COLUMNS = (*_ID_COLUMNS, *COLUMNS, "query", "title", "score", "source_texts")
_LARGEST_BLOCK = 2**31 - 1
_UNREADABLE = (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, pyarrow.ArrowNotImplementedError)


def read_files(source: Any, data_dir: str | None = None) -> pyarrow.Table:
    """Read the file of a source, or all files of its pattern, with our names for the columns that it maps.

    Args:
        source: anything with a `path`, `columns` and `label`.
        data_dir: folder that the path is relative to.

    Returns:
        The rows of all files, in order of the files' names, with the columns that all of them have, and with
        `source_texts`, null in the rows of a file that has none, where any has it. Ids are brought to texts where
        files differ; a column that nothing reads and that cannot be merged is left out.

    Raises:
        ValueError: no such file, an unknown file type, a file that cannot be read, a missing column, or a column of
            types that cannot be merged.
    """
    paths = matching_paths(source.path, data_dir)
    if not paths:
        pattern = Path(data_dir or ".").expanduser() / source.path
        folder = pattern.parent
        present = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
        reason = nearest(pattern.name, present) if present else "; give the folder with the data files as data_dir"
        raise ValueError(f"source {source.path!r}: there is no file {pattern}{reason}")
    tables = []
    for path in paths:
        suffix = Path(path).suffix
        check_choice(f"file type of {path}:", suffix, FILE_TYPES)
        try:
            table = _read_file(path)
        except (*_UNREADABLE, UnicodeDecodeError) as error:
            raise ValueError(f"source {source.path!r}: {path} cannot be read: {error}") from error
        tables.append(with_our_columns(table, source))
    return _merged(tables, paths, source)


def matching_paths(pattern: str, data_dir: str | None = None) -> list[str]:
    """The file of this name, or those of this pattern in order of their names.

    Args:
        pattern: in which brackets, stars and question marks stand for letters, if no file has it as its name.
        data_dir: folder that it is relative to.
    """
    folder = Path(data_dir or ".").expanduser()
    if (folder / pattern).is_file():
        return [str(folder / pattern)]
    return sorted(glob.glob(str(Path(glob.escape(str(folder))) / pattern)))


def _read_file(path: str) -> pyarrow.Table:
    """A file as it is; a text file is a row with the column `text`."""
    suffix = Path(path).suffix
    if suffix in TEXT_FILES:
        return pyarrow.table({"text": [Path(path).read_text(encoding="utf-8-sig")]})
    return _without_views(pyarrow.parquet.read_table(path)) if suffix == ".parquet" else _read_json(path)


def _read_json(path: str) -> pyarrow.Table:
    """A file of JSON lines, or an array of rows, in which a text that looks like a date stays the text that it is."""
    lines = _lines_of_array(path)
    try:
        return _without_times(path, lines, pyarrow.json.ReadOptions())
    except _UNREADABLE:
        size = Path(path).stat().st_size if lines is None else len(lines)
        if not 0 < size <= _LARGEST_BLOCK:
            raise
        # A row may be longer than a block, or a column hold nulls alone in the first one and lists behind it.
        return _without_times(path, lines, pyarrow.json.ReadOptions(block_size=size))


def _lines_of_array(path: str) -> bytes | None:
    """The rows of a file that is one array as JSON lines; `None` of every other file."""
    with open(path, "rb") as file:
        start = file.read(64).removeprefix(codecs.BOM_UTF8).lstrip()
    if not start.startswith(b"["):
        return None
    try:
        rows = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (json.JSONDecodeError, RecursionError) as error:
        raise pyarrow.ArrowInvalid(f"it begins as an array, and is not JSON: {error}") from error
    if wrong := [row for row in rows if not isinstance(row, dict)]:
        raise pyarrow.ArrowInvalid(f"it is an array of other things than rows, such as {wrong[0]!r}")
    return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows).encode()


def _without_times(path: str, lines: bytes | None, options: pyarrow.json.ReadOptions) -> pyarrow.Table:
    def place() -> Any:
        return path if lines is None else pyarrow.BufferReader(lines)

    table = pyarrow.json.read_json(place(), read_options=options)
    kinds = {field.name: _with_texts(field.type, pyarrow.types.is_temporal) for field in table.schema}
    changed = [(field.name, kinds[field.name]) for field in table.schema if kinds[field.name] != field.type]
    if not changed:
        return table
    parsing = pyarrow.json.ParseOptions(explicit_schema=pyarrow.schema(changed), unexpected_field_behavior="infer")
    return pyarrow.json.read_json(place(), read_options=options, parse_options=parsing).select(table.column_names)


def _without_views(table: pyarrow.Table) -> pyarrow.Table:
    """A table whose views of texts, which cannot be filtered, are texts."""
    kinds = [_with_texts(kind, pyarrow.types.is_string_view) for kind in table.schema.types]
    schema = pyarrow.schema(list(zip(table.column_names, kinds, strict=True)))
    return table if kinds == table.schema.types else table.cast(schema)


def _with_texts(kind: pyarrow.DataType, is_other: Callable[[pyarrow.DataType], bool]) -> pyarrow.DataType:
    """A type with texts in place of those in it that are something else."""
    if is_other(kind):
        return pyarrow.large_string() if pyarrow.types.is_string_view(kind) else pyarrow.string()
    if is_list(kind):
        item = _with_texts(kind.value_type, is_other)
        make = pyarrow.list_ if pyarrow.types.is_list(kind) else pyarrow.large_list
        return kind if item == kind.value_type else make(item)
    if pyarrow.types.is_struct(kind):
        parts = [(field.name, _with_texts(field.type, is_other)) for field in kind]
        return kind if [part for _, part in parts] == [field.type for field in kind] else pyarrow.struct(parts)
    return kind


def _merged(tables: Sequence[pyarrow.Table], paths: Sequence[str], source: Any) -> pyarrow.Table:
    merged = {}
    if any("source_texts" in table.column_names for table in tables):
        # A file without them has whole documents, and its neighbours' rows stay windows of theirs.
        tables = [_with_source_texts(table) for table in tables]
    for name in tables[0].column_names:
        if not all(name in table.column_names for table in tables):
            continue
        parts = [table.select([name]) for table in tables]
        try:
            if name in _ID_COLUMNS and len({part[name].type for part in parts}) > 1:
                parts = [part.cast(pyarrow.schema([(name, pyarrow.string())])) for part in parts]
            merged[name] = pyarrow.concat_tables(parts, promote_options="permissive")[name]
        except _UNREADABLE as error:
            if name in _READ_COLUMNS:
                kinds = {str(part[name].type): path for part, path in reversed(list(zip(parts, paths, strict=True)))}
                found = " and ".join(f"{kind} in {path}" for kind, path in reversed(kinds.items()))
                needed = "a list of whole texts" if name == "source_texts" else "of one type in all files"
                raise ValueError(
                    f"source {source.label!r}: column {(source.columns or {}).get(name, name)!r} must be {needed}, "
                    f"got {found}"
                ) from error
    return pyarrow.table(merged)


def _with_source_texts(table: pyarrow.Table) -> pyarrow.Table:
    if "source_texts" in table.column_names:
        return table
    return table.append_column("source_texts", pyarrow.nulls(table.num_rows))
