# SPDX-License-Identifier: Apache-2.0
"""Retrieval collections of a recipe: a corpus, queries, and which documents answer which query.

A source is three tables, as retrieval benchmarks have them, each a Parquet or JSONL file or a data set on the Hub:

    corpus: {path: corpus.parquet}        # id, text, and title where there is one
    queries: {path: queries.parquet}      # id, query
    relevance: {path: qrels.parquet}      # query_id, doc_id, and score where there is one: above 0 is relevant
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import pyarrow
from transformers import PreTrainedTokenizerBase

from ..configuration.nearest_names import check_choice, nearest
from ..modeling.parts.prompting import context_end_ids, context_start_ids, encode
from .rows import check_texts, read_table

_NEEDED_COLUMNS = {"corpus": ("id", "text"), "queries": ("id", "query"), "relevance": ("query_id", "doc_id")}


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
        path: Parquet or JSONL file, relative to `data_dir`.
        config: the Hub data set's configuration.
        split: the Hub data set's split.
        columns: our column -> the table's own, where they differ.
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
        return _from_mapping(cls, "a source of retrieval", mapping)


class RetrievalCollection:
    """A corpus, queries and the relevant pairs, read and checked.

    Attributes:
        document_ids, query_ids: list of str.
        pairs: list of (query, document) row numbers, in the order of the relevance table, each once.

    Args:
        source: a [`RetrievalSource`] or a recipe's entry.
        data_dir: folder that local paths are relative to.

    Raises:
        ValueError: no such file, a missing column, a row without its text, an id that stands twice or that no row has,
            or no relevant pair.
    """

    def __init__(self, source: RetrievalSource | Mapping[str, Any], data_dir: str | None = None):
        if not isinstance(source, RetrievalSource):
            source = RetrievalSource.from_mapping(source)
        tables = {name: _read(name, getattr(source, name), data_dir) for name in _NEEDED_COLUMNS}
        self._corpus, self._queries, relevance = tables["corpus"], tables["queries"], tables["relevance"]
        self.document_ids = [str(key) for key in self._corpus["id"].to_pylist()]
        self.query_ids = [str(key) for key in self._queries["id"].to_pylist()]
        query_rows = _rows("queries", source.queries.label, self.query_ids)
        document_rows = _rows("corpus", source.corpus.label, self.document_ids)
        scores = relevance["score"].to_pylist() if "score" in relevance.column_names else [1] * relevance.num_rows
        pairs: dict[tuple[int, int], None] = {}
        columns = (relevance["query_id"].to_pylist(), relevance["doc_id"].to_pylist(), scores)
        for query_id, document_id, score in zip(*columns, strict=True):
            if score > 0:
                for rows, key, table in ((query_rows, query_id, "queries"), (document_rows, document_id, "corpus")):
                    if str(key) not in rows:
                        raise ValueError(f"{source.relevance.label!r} names {key!r}, which the {table} do not have")
                pairs[query_rows[str(query_id)], document_rows[str(document_id)]] = None
        self.pairs = list(pairs)
        if not self.pairs:
            raise ValueError(f"{source.relevance.label!r} has no relevant pair")

    def query(self, row: int) -> str:
        """Text of a query."""
        return self._queries["query"][row].as_py()

    def document(self, row: int) -> str:
        """Title, where there is one, and text of a document."""
        title = self._corpus["title"][row].as_py() if "title" in self._corpus.column_names else None
        return f"{title or ''} {self._corpus['text'][row].as_py()}".strip()


def _read(name: str, table: RetrievalTable, data_dir: str | None) -> pyarrow.Table:
    content = read_table(table, data_dir)
    for column in _NEEDED_COLUMNS[name]:
        if column not in content.column_names:
            raise ValueError(
                f"{table.label!r} has no column {column!r}, which the {name} needs"
                f"{nearest(column, content.column_names)}"
            )
    if name != "relevance":
        check_texts(content, _NEEDED_COLUMNS[name][1], table)
    return content


def _rows(name: str, label: str, ids: Sequence[str]) -> dict[str, int]:
    rows = {key: row for row, key in enumerate(ids)}
    if len(rows) != len(ids):
        raise ValueError(f"{label!r}: {len(ids) - len(rows)} ids of the {name} stand twice")
    return rows


class TextEncoder:
    """Texts as the token ids that a retrieval model reads: what `tokenizer(text)` gives, cut to a length.

    Args:
        tokenizer: see `text_tokenizer`; its start and end ids are kept when a text is cut.
        max_tokens: longest text, start and end ids included.

    Raises:
        ValueError: no token of a text would be left.
    """

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
