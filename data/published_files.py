# SPDX-License-Identifier: Apache-2.0
"""Files as data sets are published in: JSON of one piece or of lines, CSV, TSV, Parquet, gzip around them."""

from __future__ import annotations

import csv
import gzip
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from .published_rows import KEY

# QuALITY's lines of JSON have the split as their suffix.
FILE_TYPES = (".json", ".jsonl", ".txt", ".csv", ".tsv", ".parquet", ".train", ".dev", ".test")
_READ_AT_ONCE = 2**22
# How files and folders call the splits.
_SPLIT_WORDS = {"validation": ("validation", "valid", "val", "dev"), "dev": ("dev", "validation", "valid", "val")}
_ALL_SPLIT_WORDS = ("train", "test", *_SPLIT_WORDS["validation"])


def published_paths(source: str, split: str, name: str | None = None, unnamed: str | None = None) -> list[Path]:
    """The files of a split.

    Args:
        source: a file, a pattern of files, or a folder, of which those files are taken whose name or folder has the
            split's name as a word ("val" and "dev" for "validation", too).
        split: the split.
        name: the one file of a folder that has all splits.
        unnamed: the split of a folder's files that name none.

    Returns:
        Paths in order of their names.

    Raises:
        ValueError: there is none, with the files that are.
    """
    place = Path(source).expanduser()
    if not place.is_dir():
        pattern = place.name if not place.exists() else ""
        found = sorted(place.parent.glob(pattern)) if pattern and place.parent.is_dir() else [place]
        if not found or not found[0].is_file():
            raise ValueError(f"there is no file {place}")
        return found
    files = sorted(path for path in place.rglob("*") if file_type(path) in FILE_TYPES)
    if name is not None:
        found = [path for path in files if path.name.removesuffix(".gz") == name]
    else:
        inside = [path.relative_to(place) for path in files]
        found = [place / path for path in inside if _has_word(path, _SPLIT_WORDS.get(split, (split,)))]
        if not found and split == unnamed:
            found = [place / path for path in inside if not _has_word(path, _ALL_SPLIT_WORDS)]
    if not found:
        wanted = name or f"the split {split!r} in its name"
        there = ", ".join(str(path.relative_to(place)) for path in files[:8]) or "none that can be read"
        raise ValueError(f"{place} has no file with {wanted}; files there: {there}")
    return found


def _has_word(path: Path, words: tuple[str, ...]) -> bool:
    text = "".join(letter if letter.isalnum() else " " for letter in path.as_posix().lower())
    return not set(words).isdisjoint(text.split())


def file_type(path: Path) -> str:
    """The suffix of a file, that of gzip apart."""
    return Path(path.name.removesuffix(".gz")).suffix


def read_records(path: Path, names: Sequence[str] | None = None) -> Iterator[Mapping[str, Any]]:
    """The records of a JSON, JSON lines, CSV or TSV file, one after the other.

    Of a JSON file these are the members of its list, or of the list `data` in it, or of the mapping that it is, with
    their names as `KEY`, or that mapping itself, where nothing in it is one; it is never in memory whole. A mark of
    the byte order is left out.

    Args:
        path: the file.
        names: of a CSV or TSV file without a line of names.

    Raises:
        ValueError: a file that is not what its name says, or a record that is no mapping.
    """
    kind, number = file_type(path), 0
    with _opened(path) as file:
        try:
            if kind == ".csv":
                csv.field_size_limit(2**31 - 1)
                yield from csv.DictReader(file, names)
                return
            if kind == ".tsv":
                yield from _tab_separated(file, names)
                return
            is_lines = kind != ".json" or _is_lines(file)
            for record in _lines(file) if is_lines else _members(file):
                if not isinstance(record, Mapping):
                    raise ValueError(f"{record!r:.80} is no mapping from columns to values")
                yield record
                number += 1
        except (ValueError, OSError, EOFError, csv.Error) as error:
            raise ValueError(f"{path}, behind record {number}: {error}") from error


def _opened(path: Path) -> IO[str]:
    opener: Any = gzip.open if path.name.endswith(".gz") else open
    return opener(path, "rt", encoding="utf-8-sig", newline={".csv": "", ".tsv": "\n"}.get(file_type(path)))


def _tab_separated(file: IO[str], names: Sequence[str] | None) -> Iterator[Mapping[str, Any]]:
    """The rows of a TSV, in which quotation marks and carriage returns are letters, but for one at a line's end."""
    rows = (line.removesuffix("\n").removesuffix("\r") for line in file)
    for row in filter(None, rows):
        values = row.split("\t")
        if names is None:
            names = values
        else:
            yield dict(itertools.zip_longest(names, values[: len(names)]))


def _is_lines(file: IO[str]) -> bool:
    """Whether a .json file holds a mapping a line, as some do."""
    first, second = file.readline().strip(), file.read(64).strip()
    file.seek(0)
    return first.startswith("{") and first.endswith("}") and second.startswith("{")


def _lines(file: IO[str]) -> Iterator[Any]:
    for line in file:
        if line.strip():
            yield json.loads(line)


def _members(file: IO[str]) -> Iterator[Any]:
    text = _JSONText(file)
    if text.next_mark() == "[":
        text.skip("[")
        while text.next_mark() != "]":
            yield text.value()
            text.skip(",")
        return
    text.skip("{")
    alone: dict[str, Any] | None = {}
    while text.next_mark() != "}":
        name = text.value()
        text.skip(":")
        value = text.value()
        text.skip(",")
        if isinstance(value, Mapping):
            alone = None
            yield {KEY: name, **value}
        elif name == "data" and isinstance(value, list):
            alone = None
            yield from value
        elif alone is not None:
            alone[name] = value
    if alone:
        yield alone


class _JSONText:
    """A JSON text, value after value."""

    def __init__(self, file: IO[str]):
        self._file, self._text, self._place = file, "", 0
        self._decode = json.JSONDecoder().raw_decode

    def next_mark(self) -> str:
        """The next letter that is no space, which stays."""
        while True:
            rest = self._text[self._place : self._place + 1]
            if not rest and not self._read_on():
                raise ValueError("the text ends too early")
            if rest.strip():
                return rest
            self._place += len(rest)

    def skip(self, mark: str) -> None:
        """Go behind a mark, if it is the next one."""
        if self.next_mark() == mark:
            self._place += 1

    def value(self) -> Any:
        """The next value."""
        self.next_mark()
        while True:
            try:
                value, end = self._decode(self._text, self._place)
            except json.JSONDecodeError as error:
                if not self._read_on():
                    raise ValueError(f"not JSON: {error.msg}") from error
                continue
            # A number may go on.
            if end < len(self._text) or not self._read_on():
                self._place = end
                return value

    def _read_on(self) -> bool:
        rest = self._text[self._place :]
        # As much again: a long value is not begun too often.
        more = self._file.read(max(_READ_AT_ONCE, len(rest)))
        self._text, self._place = rest + more, 0
        return bool(more)
