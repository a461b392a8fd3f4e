# SPDX-License-Identifier: Apache-2.0
"""Parquet, JSON, TSV and text files as records, and as one table with our names for its columns."""

from __future__ import annotations

import glob
import gzip
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from ..configuration.nearest_names import check_choice, nearest
from .columns import with_columns, with_our_columns
from .sources import COLUMNS, FILE_TYPES, RETRIEVAL_COLUMNS, TEXT_FILES

_ID_COLUMNS = ("id", "query_id", "doc_id")
# What training, evaluation and retrieval read of a table.
_READ_COLUMNS = (*COLUMNS, *RETRIEVAL_COLUMNS, "source_texts")
_ROWS_AT_ONCE = 10_000
UNREADABLE = (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, pyarrow.ArrowNotImplementedError)


def read_files(source: Any, data_dir: str | None = None) -> pyarrow.Table:
    """Read the file of a source, or all files of its pattern, with our names for the columns that it maps."""
    tables = []
    for path in existing_paths(source, data_dir):
        check_choice(f"file type of {path}:", path.suffix, FILE_TYPES)
        try:
            tables += [with_our_columns(table, source) for table in _tables(path)]
        except (*UNREADABLE, UnicodeError) as error:
            raise ValueError(f"source {source.path!r}: {path} cannot be read: {error}") from error
    if not tables:
        raise ValueError(f"source {source.path!r} has no rows")
    return _merged(tables, source)


def existing_paths(source: Any, data_dir: str | None = None) -> list[Path]:
    """Return the files of a source; `ValueError` names the nearest one where there is none."""
    paths = matching_paths(source.path, data_dir)
    if not paths:
        pattern = Path(data_dir or ".").expanduser() / source.path
        names = [entry.name for entry in pattern.parent.glob("*")]
        raise ValueError(f"source {source.path!r}: there is no file {pattern}{nearest(pattern.name, names)}")
    return list(map(Path, paths))


def matching_paths(pattern: str, data_dir: str | None = None) -> list[str]:
    """Return the file of this name, or those of this pattern in order of their names."""
    folder = Path(data_dir or ".").expanduser()
    if (folder / pattern).is_file():
        return [str(folder / pattern)]
    return sorted(glob.glob(str(Path(glob.escape(str(folder))) / pattern)))


def _tables(path: Path) -> Iterator[pyarrow.Table]:
    if path.suffix in TEXT_FILES:
        yield pyarrow.table({"text": [path.read_text(encoding="utf-8-sig")]})
    elif path.suffix == ".parquet":
        table = pyarrow.parquet.read_table(path)
        # Categories, which few functions of Arrow take, become their values.
        categories = {kind.name: kind.type for kind in table.schema if pyarrow.types.is_dictionary(kind.type)}
        yield with_columns(table, {name: table[name].cast(kind.value_type) for name, kind in categories.items()})
    else:
        yield from record_tables(read_records(path), _ROWS_AT_ONCE, path)


def record_tables(records: Iterable[Mapping[str, Any]], num_rows: int, place: object) -> Iterator[pyarrow.Table]:
    """Make tables of records, `num_rows` rows each; numbers become texts in a column that has both."""
    records = iter(records)
    while batch := list(itertools.islice(records, num_rows)):
        columns = {}
        for name in dict.fromkeys(name for record in batch for name in record):
            values = [record.get(name) for record in batch]
            if {type(value) for value in values if value is not None} == {str, int}:
                values = [value if value is None else str(value) for value in values]
            try:
                columns[name] = pyarrow.array(values)
            except (*UNREADABLE, UnicodeError) as error:
                raise ValueError(f"{place}: column {name!r} cannot be read: {error}") from error
        yield pyarrow.table(columns)


def read_records(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the records of a Parquet, JSON (a list, its `data`, or a mapping from names), TSV or JSON Lines file."""
    number = 0
    try:
        for record in _records(path):
            if not isinstance(record, Mapping):
                raise ValueError(f"{record!r:.80} is not a mapping from columns to values")
            yield record
            number += 1
    except (*UNREADABLE, ValueError, OSError, EOFError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read, after record {number}: {error}") from error


def _records(path: Path) -> Iterator[Any]:
    # The suffix of a file, that of gzip apart.
    kind = Path(path.name.removesuffix(".gz")).suffix
    if kind == ".parquet":
        with pyarrow.parquet.ParquetFile(path) as table:
            for batch in table.iter_batches(batch_size=1000):
                yield from batch.to_pylist()
        return
    opener: Any = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8-sig") as file:
        if kind == ".json":
            yield from _members(file.read())
        elif kind == ".tsv":
            names = next(file, "").rstrip("\n").split("\t")
            yield from (dict(zip(names, line.rstrip("\n").split("\t"), strict=False)) for line in file if line.strip())
        else:
            yield from (json.loads(line) for line in file if line.strip())


def _members(text: str) -> Sequence[Any]:
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            raise
        # Some .json files hold a mapping a line.
        content = [json.loads(line) for line in text.splitlines() if line.strip()]
    if not isinstance(content, dict):
        return content if isinstance(content, list) else [content]
    if isinstance(content.get("data"), list):
        return content["data"]
    if all(isinstance(value, dict) for value in content.values()):
        return list(content.values())
    return [content]


def _merged(tables: Sequence[pyarrow.Table], source: Any) -> pyarrow.Table:
    """Join tables, with the columns that all have; a file without `source_texts` has whole documents."""
    if any("source_texts" in table.column_names for table in tables):
        nothing = (pyarrow.nulls(table.num_rows, pyarrow.list_(pyarrow.string())) for table in tables)
        tables = [
            table if "source_texts" in table.column_names else table.append_column("source_texts", nulls)
            for table, nulls in zip(tables, nothing, strict=True)
        ]
    merged = {}
    for name in (name for name in tables[0].column_names if all(name in table.column_names for table in tables)):
        parts = [table.select([name]) for table in tables]
        if name in _ID_COLUMNS and len({part[name].type for part in parts}) > 1:
            parts = [part.cast(pyarrow.schema([(name, pyarrow.string())])) for part in parts]
        try:
            merged[name] = pyarrow.concat_tables(parts, promote_options="permissive")[name]
        except UNREADABLE as error:
            if name in _READ_COLUMNS:
                what = f"source {source.label!r}: column {name!r} must be of one type in all files"
                raise ValueError(f"{what}: {error}") from error
    return pyarrow.table(merged)
