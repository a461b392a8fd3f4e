# SPDX-License-Identifier: Apache-2.0
"""Retrieval collections of a recipe, three tables each: `corpus`, `queries` and `relevance`.

Columns are `id`, `text` and perhaps `title`; `id` and `query`; `query_id`, `doc_id` and perhaps a `score` above 0.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
from transformers import PreTrainedTokenizerBase

from ..configuration.nearest_names import check_choice, nearest
from ..modeling.parts.text_ids import context_end_ids, context_start_ids, encode
from .files import existing_paths, read_records
from .sources import DataSource

# Our column -> BEIR's, in each of its tables.
_BEIR_COLUMNS: Mapping[str, Mapping[str, str]] = {
    "corpus": {"id": "_id"},
    "queries": {"id": "_id", "query": "text"},
    "relevance": {"query_id": "query-id", "doc_id": "corpus-id"},
}


@dataclass(frozen=True)
class RetrievalSource:
    """One entry of a retrieval recipe's `sources`: its tables, and license, Hub id and title for the model card."""

    corpus: DataSource
    queries: DataSource
    relevance: DataSource
    license: str | None = None
    hub_id: str | None = None
    title: str | None = None

    @property
    def label(self) -> str:
        """Return the name to show, that of its corpus."""
        return self.corpus.label

    @classmethod
    def from_mapping(cls, mapping: Any) -> RetrievalSource:
        """Build a source from a recipe's entry; an unknown or missing key raises `ValueError`."""
        for name in _BEIR_COLUMNS:
            if name not in mapping:
                raise ValueError(f"a source of retrieval needs {', '.join(_BEIR_COLUMNS)}: there is no {name!r}")
        tables = {name: DataSource.from_mapping(mapping[name], needs_tasks=False) for name in _BEIR_COLUMNS}
        entry = {**mapping, **tables}
        for key in entry:
            check_choice("field of a source of retrieval:", key, cls.__dataclass_fields__)
        return cls(**entry)

    @classmethod
    def from_beir(cls, place: str | os.PathLike[str], split: str = "test") -> RetrievalSource:
        """Return the source that a folder of BEIR's form is, or a data set of the Hub such as mteb/scifact."""
        folder, columns = Path(place), _BEIR_COLUMNS
        if not folder.is_dir():
            name = os.fspath(place)
            corpus, queries = (DataSource(name, config=n, split=n, columns=columns[n]) for n in ("corpus", "queries"))
            return cls(corpus, queries, DataSource(name, split=split, columns=columns["relevance"]))
        check_choice(f"split of {place}:", split, sorted(path.stem for path in folder.glob("qrels/*.tsv")))
        files = {"corpus": "corpus.jsonl", "queries": "queries.jsonl", "relevance": f"qrels/{split}.tsv"}
        corpus, queries, relevance = (
            DataSource(path=str(folder / file), columns=columns[name]) for name, file in files.items()
        )
        return cls(corpus, queries, relevance)


class JudgedQueries:
    """The queries of a source with document id -> grade, `pairs` of both in order, and the corpus as a stream."""

    def __init__(self, source: RetrievalSource | Mapping[str, Any], data_dir: str | None = None):
        self._source = source if isinstance(source, RetrievalSource) else RetrievalSource.from_mapping(source)
        self._data_dir = data_dir
        texts = {key: text for key, text, _ in _texts("query", self._source.queries, data_dir)}
        relevance = self._source.relevance
        by_query: dict[str, dict[str, float]] = {}
        self.pairs: list[tuple[str, str]] = []
        for query_id, document_id, grade in _grades(relevance, data_dir):
            if query_id not in texts:
                raise ValueError(f"{relevance.label!r} names {query_id!r}, which the queries do not have")
            self.pairs.append((query_id, document_id))
            by_query.setdefault(query_id, {})[document_id] = grade
        if not by_query:
            raise ValueError(f"{relevance.label!r} has no relevant pair")
        self.query_ids = list(by_query)
        self.queries = [texts[query_id] for query_id in by_query]
        self.grades = list(by_query.values())

    def documents(self) -> Iterator[tuple[str, str]]:
        """Yield the id and text, title in front, of each document."""
        for key, text, title in _texts("text", self._source.corpus, self._data_dir):
            yield key, f"{title or ''} {text}".strip()


def _rows(table: DataSource, data_dir: str | None) -> Iterator[Mapping[str, Any]]:
    if table.name is not None:
        yield from datasets.load_dataset(table.name, table.config, split=table.split)
        return
    for path in existing_paths(table, data_dir):
        yield from read_records(path)


def _own_names(table: DataSource, *ours: str) -> list[str]:
    """Return a table's own names of columns."""
    return [(table.columns or {}).get(name, name) for name in ours]


def _texts(column: str, table: DataSource, data_dir: str | None) -> Iterator[tuple[str, str, str | None]]:
    """Yield id, text and title of each row of a table."""
    id_column, text_column, title_column = _own_names(table, "id", column, "title")
    for number, row in enumerate(_rows(table, data_dir)):
        key, text = row.get(id_column), row.get(text_column)
        place = f"{table.label!r}: row {number} (counted from 0)"
        if key is None or not isinstance(text, str):
            raise ValueError(f"{place} needs {id_column!r} and a text in {text_column!r}{nearest(text_column, row)}")
        yield str(key), text, row.get(title_column)


def _grades(table: DataSource, data_dir: str | None) -> Iterator[tuple[str, str, float]]:
    """Yield query id, document id and grade of the pairs with a grade above 0."""
    query, document, score = _own_names(table, "query_id", "doc_id", "score")
    for row in _rows(table, data_dir):
        if missing := [name for name in (query, document) if name not in row]:
            raise ValueError(f"{table.label!r} has no column {missing[0]!r}{nearest(missing[0], row)}")
        if (grade := float(row.get(score, 1))) > 0:
            yield str(row[query]), str(row[document]), int(grade) if grade.is_integer() else grade


class TextEncoder:
    """Texts as the token ids that a retrieval model reads: what `tokenizer(text)` gives, cut to a length."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_tokens: int):
        self._tokenizer = tokenizer
        self._start, self._end = context_start_ids(tokenizer), context_end_ids(tokenizer)
        self._room = max_tokens - len(self._start) - len(self._end)

    def __call__(self, text: str) -> tuple[list[int], int]:
        """Return the token ids of a text, and the number of those that were cut off."""
        ids = encode(self._tokenizer, text)
        return [*self._start, *ids[: self._room], *self._end], max(0, len(ids) - self._room)
