# SPDX-License-Identifier: Apache-2.0
"""Documents that the command line reads: text files, standard input, and rows of JSONL or Parquet files."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..configuration.nearest_names import nearest


@dataclass(frozen=True)
class Document:
    """One document.

    Args:
        name: file name without its suffix, with the row's number where a file holds several documents.
        text: the whole text.
    """

    name: str
    text: str


def read_documents(paths: Sequence[str], column: str = "context") -> list[Document]:
    """Read documents in the order given.

    Args:
        paths: `.jsonl` and `.parquet` files give one document a row, `-` is standard input, every other file is one
            document in UTF-8.
        column: the column that holds the text in a `.jsonl` or `.parquet` file.

    Raises:
        ValueError: a file that does not exist, is no text or lacks the column, or an empty document.
    """
    documents = [document for path in paths for document in _read(path, column)]
    for document in documents:
        if not document.text.strip():
            raise ValueError(f"document {document.name!r} is empty")
    return documents


def _read(path: str, column: str) -> Iterator[Document]:
    if path == "-":
        yield Document("stdin", sys.stdin.read())
        return
    file = Path(path).expanduser()
    if not file.is_file():
        what = "a folder, not a file" if file.is_dir() else "not there"
        raise ValueError(f"{path} is {what}: give text files, .jsonl or .parquet files, or - for standard input")
    suffix = file.suffix.lower()
    if suffix in (".jsonl", ".parquet"):
        rows = _jsonl_rows(file, column) if suffix == ".jsonl" else _parquet_rows(file, column)
        for number, text in enumerate(rows, start=1):
            if not isinstance(text, str):
                raise ValueError(f"{path}, row {number}: {column!r} is {type(text).__name__}, not text")
            yield Document(f"{file.stem}-{number:06d}", text)
        return
    try:
        yield Document(file.stem, file.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text file in UTF-8: {error}") from error


def _jsonl_rows(file: Path, column: str) -> Iterator[object]:
    # The standard library's reader has no limit on the length of a line, and long documents are the point.
    with open(file, "rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{file}, line {number} is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{file}, line {number} is not a JSON object with columns")
            if column not in row:
                raise ValueError(f"{file}, line {number} has no column {column!r}{nearest(column, row)}")
            yield row[column]


def _parquet_rows(file: Path, column: str) -> Iterator[object]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{file} is not a Parquet file: {error}") from error
    names = table.schema_arrow.names
    if column not in names:
        raise ValueError(f"{file} has no column {column!r}{nearest(column, names)}")
    for batch in table.iter_batches(columns=[column]):
        yield from batch.column(0).to_pylist()
