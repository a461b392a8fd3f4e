# SPDX-License-Identifier: Apache-2.0
"""Rows of a collection: Parquet and JSONL files, text files, folders of these, Hub data sets.

Processes read parts of it. A row's name depends on its place alone, so that a run that is taken up again knows it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..configuration.nearest_names import nearest

_TABLES = (".parquet", ".jsonl")
_TEXTS = (".txt", ".md", ".rst")

Row = dict[str, Any]


@dataclass(frozen=True)
class CorpusColumns:
    """Names of a collection's columns: text, id (else file name and row number), and further ones to keep."""

    text: str = "text"
    id: str | None = None
    metadata: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """Return all of them."""
        return [name for name in (self.text, self.id, *self.metadata) if name is not None]


@dataclass(frozen=True)
class CorpusPart:
    """Rows that one process reads: a file (".jsonl", "text"), a row group (".parquet"), or a shard ("hub")."""

    kind: str
    name: str
    path: str
    index: int = 0
    first_row: int = 0


def corpus_parts(inputs: Sequence[str], columns: CorpusColumns) -> list[CorpusPart]:
    """The parts of a collection, in order."""
    parts: list[CorpusPart] = []
    names: list[str] = []
    for source in inputs:
        path = Path(source).expanduser()
        if path.is_dir():
            files = sorted(f for f in path.rglob("*") if f.suffix.lower() in _TABLES + _TEXTS and f.is_file())
            if not files:
                raise ValueError(f"{source} holds no {', '.join(_TABLES + _TEXTS)} file")
        elif path.suffix.lower() in (".csv", ".json", ".tsv"):
            raise ValueError(f"{source} is a table as this does not read it: give it as .jsonl or .parquet")
        elif path.is_file():
            files, path = [path], path.parent
        elif source.count("/") == 1 and path.suffix.lower() not in _TABLES + _TEXTS:
            name, _, split = source.partition(":")
            shards = range(_hub_data_set(name, split or "train").num_shards)
            parts += [CorpusPart("hub", name, split or "train", shard) for shard in shards]
            continue
        else:
            raise ValueError(f"{source} is not there: give files, folders, or data sets of the Hub as OWNER/NAME")
        for file in files:
            name, kind = _escaped(file.relative_to(path).as_posix()), file.suffix.lower()
            if columns.id is None or kind not in _TABLES:
                names.append(name)
            if kind == ".parquet":
                parts += _row_groups(name, file, columns)
            else:
                parts.append(CorpusPart(kind if kind in _TABLES else "text", name, str(file)))
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"two files have the name {twice[0]!r}, which ids are made of: rename one")
    return parts


def _row_groups(name: str, path: Path, columns: CorpusColumns) -> Iterator[CorpusPart]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} is not a Parquet file: {error}") from error
    for column in columns.names:
        if column not in file.schema_arrow.names:
            raise ValueError(f"{path} has no column {column!r}{nearest(column, file.schema_arrow.names)}")
    first = 0
    for group in range(file.num_row_groups):
        yield CorpusPart(".parquet", name, str(path), group, first)
        first += file.metadata.row_group(group).num_rows


def _hub_data_set(name: str, split: str) -> Any:
    import datasets

    try:
        return datasets.load_dataset(name, split=split, streaming=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"{name} is no file or folder, and no data set of the Hub: {error}") from error


def read_part(part: CorpusPart, columns: CorpusColumns) -> Iterator[Row]:
    """The rows of a part: `id`, `text`, `metadata` (JSON, or None), and `error`, why there is no text (or None)."""
    if part.kind == "text":
        row: Row = {"id": part.name, "text": None, "metadata": None, "error": None}
        try:
            row["text"] = Path(part.path).read_text(encoding="utf-8-sig")
        except (UnicodeDecodeError, OSError) as error:
            row["error"] = f"no text in UTF-8: {error}"
        yield row
        return
    reader = {".parquet": _parquet_rows, ".jsonl": _json_rows, "hub": _hub_rows}[part.kind]
    place = f"{part.name}:{part.path}:{part.index}" if part.kind == "hub" else part.name
    for number, record in enumerate(reader(part, columns), start=part.first_row):
        yield _row(record, f"{place}:{number}", columns)


def _row(record: Row | str, name: str, columns: CorpusColumns) -> Row:
    if isinstance(record, str):
        return {"id": name, "text": None, "metadata": None, "error": record}
    text, error = record.get(columns.text), None
    if columns.id is not None:
        own = record.get(columns.id)
        name, error = (name, f"no id in column {columns.id!r}") if own in (None, "") else (_escaped(str(own)), None)
    if not isinstance(text, str):
        error = error or f"no text in column {columns.text!r}, but {text!r:.50}"
    elif text != _escaped(text):
        error = error or "half of a character (a lone surrogate) in the text"
    # Dates and the like have no form of their own in JSON.
    described = {column: record.get(column) for column in columns.metadata}
    metadata = json.dumps(described, default=str) if described else None
    return {"id": name, "text": None if error else text, "metadata": metadata, "error": error}


def _escaped(text: str) -> str:
    """A text with its lone surrogates escaped, so that UTF-8 can hold it."""
    return text.encode(errors="backslashreplace").decode()


def _parquet_rows(part: CorpusPart, columns: CorpusColumns) -> Iterator[Row | str]:
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(part.path)
    try:
        for batch in file.iter_batches(batch_size=1024, row_groups=[part.index], columns=columns.names):
            yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        # The other row groups go on.
        yield f"the rest of row group {part.index} cannot be read: {error}"


def _json_rows(part: CorpusPart, columns: CorpusColumns) -> Iterator[Row | str]:
    with open(part.path, "rb") as stream:
        for line in filter(bytes.strip, stream):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                yield f"not JSON: {error}"
                continue
            yield row if isinstance(row, dict) else "no JSON object with columns"


def _hub_rows(part: CorpusPart, columns: CorpusColumns) -> Iterator[Row]:
    data = _hub_data_set(part.name, part.path)
    yield from data.shard(num_shards=data.num_shards, index=part.index)


def batches(rows: Iterable[Row], size: int) -> Iterator[dict[str, list[Any]]]:
    """Rows as columns, `size` rows at a time."""
    rows = iter(rows)
    while chosen := list(itertools.islice(rows, size)):
        yield {name: [row[name] for row in chosen] for name in chosen[0]}
