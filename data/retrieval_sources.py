# SPDX-License-Identifier: Apache-2.0
"""Retrieval collections of a recipe: a corpus, queries, and which documents answer which query.

A source is three tables, as retrieval benchmarks have them, each a Parquet or JSONL file or a data set on the Hub:

    corpus: {path: corpus.parquet}        # id, text, and title where there is one
    queries: {path: queries.parquet}      # id, query
    relevance: {path: qrels.parquet}      # query_id, doc_id, and score where there is one: above 0 is relevant

A folder as BEIR has it (corpus.jsonl, queries.jsonl, qrels/*.tsv) is one, too, see `RetrievalSource.from_folder`.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..configuration.nearest_names import check_choice, nearest
from ..modeling.parts.text_ids import context_end_ids, context_start_ids, encode
from .files import matching_paths, read_records

_NEEDED_COLUMNS = {"corpus": ("id", "text"), "queries": ("id", "query"), "relevance": ("query_id", "doc_id")}

# Our column -> BEIR's, in each of its tables.
BEIR_COLUMNS: Mapping[str, Mapping[str, str]] = {
    "corpus": {"id": "_id"},
    "queries": {"id": "_id", "query": "text"},
    "qrels": {"query_id": "query-id", "doc_id": "corpus-id"},
}


def _from_mapping(kind: type, what: str, mapping: Any) -> Any:
    if not isinstance(mapping, Mapping):
        raise ValueError(f"{what} must be a mapping, got {mapping!r}")
    for key in mapping:
        check_choice(f"field of {what}:", key, [field.name for field in fields(kind)])
    return kind(**mapping)


@dataclass(frozen=True)
class RetrievalTable:
    """One of the three tables of a source.

    Args:
        name: a data set on the Hub.
        path: Parquet or JSONL file, or of pairs a TSV file, relative to `data_dir`.
        config: the Hub data set's configuration.
        split: the Hub data set's split.
        columns: our column -> the table's own, where they differ.

    Raises:
        ValueError: not one of name and path.
    """

    name: str | None = None
    path: str | None = None
    config: str | None = None
    split: str = "train"
    columns: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        if (self.name is None) == (self.path is None):
            raise ValueError(f"a table has exactly one of name and path, got {self.name!r} and {self.path!r}")

    @property
    def label(self) -> str:
        """The name to show: Hub name or path."""
        return str(self.name or self.path)


@dataclass(frozen=True)
class RetrievalSource:
    """One entry of a retrieval recipe's `sources`.

    Args:
        corpus: a table of documents.
        queries: a table of queries.
        relevance: a table of (query, relevant document) pairs.
        licence: the data's licence, for the model card.
        hub_id: the data set's repository on the Hub, for the model card, where the paths are copies of it.
        title: what the model card calls the data set.
    """

    corpus: RetrievalTable
    queries: RetrievalTable
    relevance: RetrievalTable
    licence: str | None = None
    hub_id: str | None = None
    title: str | None = None

    @property
    def label(self) -> str:
        """The name to show: its corpus'."""
        return self.corpus.label

    @classmethod
    def from_mapping(cls, mapping: Any) -> RetrievalSource:
        """Build a source from a recipe's entry; an unknown or missing key raises `ValueError`."""
        if isinstance(mapping, Mapping):
            for name in _NEEDED_COLUMNS:
                if name not in mapping:
                    raise ValueError(f"a source of retrieval needs {', '.join(_NEEDED_COLUMNS)}: there is no {name!r}")
            tables = {name: _from_mapping(RetrievalTable, f"the {name}", mapping[name]) for name in _NEEDED_COLUMNS}
            mapping = {**mapping, **tables}
            mapping = {"licence" if key == "license" else key: value for key, value in mapping.items()}
        return _from_mapping(cls, "a source of retrieval", mapping)

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str], split: str = "test") -> RetrievalSource:
        """The source that a folder is."""
        place, kind, pairs = Path(folder), "jsonl", "tsv"
        names: Mapping[str, Mapping[str, str] | None] = BEIR_COLUMNS
        if (place / "corpus.parquet").is_file():
            kind = pairs = "parquet"
            names = dict.fromkeys(names)
        for name in (f"corpus.{kind}", f"queries.{kind}"):
            if not (place / name).is_file():
                raise ValueError(f"{place} is no folder of BEIR's form: there is no {name}")
        check_choice(f"split of {place}:", split, sorted(path.stem for path in place.glob(f"qrels/*.{pairs}")))
        return cls(
            corpus=RetrievalTable(path=str(place / f"corpus.{kind}"), columns=names["corpus"]),
            queries=RetrievalTable(path=str(place / f"queries.{kind}"), columns=names["queries"]),
            relevance=RetrievalTable(path=str(place / "qrels" / f"{split}.{pairs}"), columns=names["qrels"]),
        )


class RetrievalCollection:
    """A corpus, queries and `pairs` of row numbers (query, relevant document), in the order of the relevance table."""

    def __init__(self, source: RetrievalSource | Mapping[str, Any], data_dir: str | None = None):
        judged = JudgedQueries(source, data_dir)
        documents = dict(judged.documents())
        self.query_ids, self._queries = judged.query_ids, judged.queries
        self.document_ids, self._documents = list(documents), list(documents.values())
        rows = {key: row for row, key in enumerate(documents)}
        query_rows = {key: row for row, key in enumerate(self.query_ids)}
        self.pairs = []
        for query_id, document_id in judged.pairs:
            if document_id not in rows:
                raise ValueError(f"{judged.label!r} names {document_id!r}, which the corpus do not have")
            self.pairs.append((query_rows[query_id], rows[document_id]))

    def query(self, row: int) -> str:
        """Text of a query."""
        return self._queries[row]

    def document(self, row: int) -> str:
        """Title, where there is one, and text of a document."""
        return self._documents[row]


class JudgedQueries:
    """The queries of a source that have a relevant document, and its corpus, which is read as a stream."""

    def __init__(self, source: RetrievalSource | Mapping[str, Any], data_dir: str | None = None):
        self._source = source if isinstance(source, RetrievalSource) else RetrievalSource.from_mapping(source)
        self._data_dir = data_dir
        self.label = self._source.relevance.label
        texts = {key: text for key, text, _ in _texts("queries", self._source.queries, data_dir)}
        by_query: dict[str, dict[str, float]] = {}
        grades = _grades(self._source.relevance, data_dir)
        self.pairs = list(grades)
        for (query_id, document_id), grade in grades.items():
            if query_id not in texts:
                raise ValueError(f"{self.label!r} names {query_id!r}, which the queries do not have")
            by_query.setdefault(query_id, {})[document_id] = grade
        self.query_ids = list(by_query)
        self.queries = [texts[query_id] for query_id in by_query]
        self.grades = list(by_query.values())

    def documents(self) -> Iterator[tuple[str, str]]:
        """Id and text, title in front, of one document after the other; of a file, only ids stay in memory."""
        for key, text, title in _texts("corpus", self._source.corpus, self._data_dir):
            yield key, f"{title or ''} {text}".strip()


def _texts(name: str, table: RetrievalTable, data_dir: str | None) -> Iterator[tuple[str, str, str | None]]:
    """Id, text and title of one row of a table after the other; raises `ValueError` for an id that stands twice."""
    id_column, text_column, title_column = (
        (table.columns or {}).get(ours, ours) for ours in (*_NEEDED_COLUMNS[name], "title")
    )
    seen: set[str] = set()
    for number, row in enumerate(_stream(table, data_dir)):
        key, text = row.get(id_column), row.get(text_column)
        if key is None or not isinstance(text, str):
            raise ValueError(
                f"{table.label!r}: row {number} (counted from 0) needs {id_column!r} and a text in {text_column!r}, "
                f"got {key!r} and {text!r}{nearest(text_column, row)}"
            )
        key = str(key)
        if key in seen:
            raise ValueError(
                f"{table.label!r}: the id {key!r} of the {name} stands twice, again in row {number} (counted from 0)"
            )
        seen.add(key)
        yield key, text, row.get(title_column)


def _grades(table: RetrievalTable, data_dir: str | None) -> dict[tuple[str, str], float]:
    """(Query id, document id) -> grade, of those above 0, in the order of the relevance table."""
    names = [(table.columns or {}).get(ours, ours) for ours in _NEEDED_COLUMNS["relevance"]]
    grades: dict[tuple[str, str], float] = {}
    for number, row in enumerate(_stream(table, data_dir)):
        for name in names:
            if name not in row:
                raise ValueError(f"{table.label!r} has no column {name!r}, which relevance needs{nearest(name, row)}")
        score = row.get((table.columns or {}).get("score", "score"), 1)
        query, document = (str(row[name]) for name in names)
        grades[query, document] = as_grade(score, table.label, number)
    grades = {pair: grade for pair, grade in grades.items() if grade > 0}
    if not grades:
        raise ValueError(f"{table.label!r} has no relevant pair")
    return grades


def as_grade(score: Any, label: str, row: int) -> float:
    """The number that a relevance is, an int where it is whole; also of a text such as "1.0"."""
    with contextlib.suppress(TypeError, ValueError):
        number = float(score)
        if math.isfinite(number):
            return int(number) if number.is_integer() else number
    raise ValueError(f"{label!r}: the score in row {row} (counted from 0) must be a number, got {score!r}")


def _stream(table: RetrievalTable, data_dir: str | None) -> Iterator[Mapping[str, Any]]:
    """The rows of a table, one after the other."""
    if table.name is not None:
        from datasets import load_dataset

        yield from load_dataset(table.name, table.config, split=table.split)
        return
    paths = matching_paths(str(table.path), data_dir)
    if not paths:
        raise ValueError(f"{table.label!r}: there is no file {Path(data_dir or '.').expanduser() / str(table.path)}")
    for path in paths:
        yield from read_records(Path(path))


class TextEncoder:
    """Texts as the token ids that a retrieval model reads: what `tokenizer(text)` gives, cut to a length."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_tokens: int):
        self._tokenizer = tokenizer
        self._start, self._end = context_start_ids(tokenizer), context_end_ids(tokenizer)
        self._room = max_tokens - len(self._start) - len(self._end)
        if self._room < 1:
            raise ValueError(f"max_tokens must be above {max_tokens - self._room}, got {max_tokens}")

    def __call__(self, text: str) -> tuple[list[int], int]:
        """Token ids of a text, and how many of it were cut off."""
        ids = encode(self._tokenizer, text)
        return [*self._start, *ids[: self._room], *self._end], max(0, len(ids) - self._room)
