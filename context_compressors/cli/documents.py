# SPDX-License-Identifier: Apache-2.0
"""Documents that the command line reads: text files, standard input, and rows of JSONL or Parquet files."""

from __future__ import annotations

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
    """Read documents in the order given."""
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
    if file.suffix.lower() in (".jsonl", ".parquet"):
        from ..data.files import read_records

        for number, row in enumerate(read_records(file), start=1):
            if column not in row:
                raise ValueError(f"{path}, row {number} has no column {column!r}{nearest(column, row)}")
            if not isinstance(row[column], str):
                raise ValueError(f"{path}, row {number}: {column!r} is {type(row[column]).__name__}, not text")
            yield Document(f"{file.stem}-{number:06d}", row[column])
        return
    try:
        yield Document(file.stem, file.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text file in UTF-8: {error}") from error
