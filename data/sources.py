# SPDX-License-Identifier: Apache-2.0
"""Data sources of a recipe: Hub data sets, local Parquet or JSONL files, and generated documents.

A source is a mapping such as `{path: qa_squad_train.parquet, tasks: [question_answering], weight: 2}`. Rows have the
columns `context` with `question` and `answers`, `context` with `summary`, or `text`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ..configuration.nearest_names import check_choice
from .prompts import TASKS

_COLUMNS = ("id", "context", "question", "answers", "summary", "text")
_FIELD_TYPES: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(("name", "path", "config", "split", "kind", "licence", "hub_id", "title"), (str, "a text")),
    **dict.fromkeys(("max_samples", "facts_per_record", "contexts_per_document"), (int, "a whole number")),
    "generated": (bool, "true or false"),
    "weight": ((int, float), "a number, such as 0.5 or 1.0e-1"),
    "tasks": ((list, tuple, str), "a list of tasks"),
    "rows": ((list, tuple), "two whole numbers, [first, end]"),
    "columns": (Mapping, "a mapping from our column to the source's"),
}


@dataclass(frozen=True)
class DataSource:
    """One entry of a recipe's `sources`.

    Args:
        name: a data set on the Hub.
        path: Parquet or JSONL file, or a pattern such as `text_*_train.parquet`, relative to `data_dir`.
        generated: documents of `generated.py` instead of a file.
        config: the Hub data set's configuration.
        split: the Hub data set's split, or of generated documents: "train" or "test".
        tasks: what is trained on it, among `TASKS`.
        weight: how often it is drawn, relative to the other sources; its number of rows when no source has a weight
            (1 in language modelling).
        max_samples: keep a fixed random choice of so many rows.
        rows: `[first, end]`, only these rows of the file or data set, counted from 0, the end not included.
        kind: only this kind of generated document.
        facts_per_record: of generated documents: say only so many things about each record, see `generate_document`.
        contexts_per_document: of questions: up to so many neighbouring contexts of the source, a number drawn for each
            example, are joined to one document with blank lines between them, as far as they fit.
        columns: where the source has other names: our column -> its column, with dots into structs, e.g.
            `{context: article, summary: highlights}` or `{answers: answers.text}`.
        licence: the data's licence, for the model card.
        hub_id: the data set's repository on the Hub, for the model card, where `path` is a copy of it.
        title: what the model card calls the data set.
    """

    name: str | None = None
    path: str | None = None
    generated: bool = False
    config: str | None = None
    split: str = "train"
    tasks: tuple[str, ...] = ()
    weight: float | None = None
    max_samples: int | None = None
    rows: Sequence[int] | None = None
    kind: str | None = None
    facts_per_record: int | None = None
    contexts_per_document: int = 1
    columns: Mapping[str, str] | None = None
    licence: str | None = None
    hub_id: str | None = None
    title: str | None = None

    def __post_init__(self) -> None:
        if sum((self.name is not None, self.path is not None, bool(self.generated))) != 1:
            raise ValueError(f"a source has exactly one of name, path and generated: true, got {self.label!r}")
        self._check_types()
        tasks = (self.tasks,) if isinstance(self.tasks, str) else tuple(self.tasks)
        object.__setattr__(self, "tasks", tasks)
        if not tasks:
            raise ValueError(f"source {self.label!r} needs tasks, among {TASKS}")
        for task in tasks:
            check_choice(f"task of source {self.label!r}:", task, TASKS)
        if self.generated and "summarisation" in tasks:
            raise ValueError("generated documents have no summaries: take summarisation out of their tasks")
        if self.weight is not None and not 0 < self.weight < math.inf:
            raise ValueError(f"weight of source {self.label!r} must be above 0 and finite, got {self.weight!r}")
        if self.rows is not None and not _is_range(self.rows):
            raise ValueError(
                f"rows of source {self.label!r} must be [first, end] with 0 <= first < end, got {self.rows}"
            )
        if self.contexts_per_document < 1 or (self.contexts_per_document > 1 and "question_answering" not in tasks):
            raise ValueError(
                f"contexts_per_document of source {self.label!r} must be at least 1, and goes with the task "
                f"question_answering, got {self.contexts_per_document!r}"
            )
        if self.max_samples is not None and self.max_samples < 1:
            raise ValueError(f"max_samples of source {self.label!r} must be at least 1, got {self.max_samples!r}")

    def _check_types(self) -> None:
        """Refuse values that a field cannot have, such as what YAML does not read as it looks."""
        if isinstance(self.weight, str):
            # YAML 1.1 reads 1e-1, which has no point, as a text.
            with contextlib.suppress(ValueError):
                object.__setattr__(self, "weight", float(self.weight))
        for name, (kind, words) in _FIELD_TYPES.items():
            value = getattr(self, name)
            if value is None and getattr(type(self), name) is None:
                continue
            is_other = not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)
            if is_other or (isinstance(value, str) and not value.strip()):
                raise ValueError(f"{name} of source {self.label!r} must be {words}, got {value!r}")
        for column, theirs in (self.columns or {}).items():
            check_choice(f"column of source {self.label!r}:", column, _COLUMNS)
            if not isinstance(theirs, str):
                raise ValueError(f"columns of source {self.label!r}: {column} must name a column, got {theirs!r}")

    @property
    def label(self) -> str:
        """The name to show: Hub name, path or "generated"."""
        return self.name or self.path or "generated"

    @classmethod
    def from_mapping(cls, mapping: DataSource | Mapping[str, Any]) -> DataSource:
        """Build a source from a recipe's entry; an unknown key raises `ValueError` with the nearest right one."""
        if isinstance(mapping, cls):
            return mapping
        if not isinstance(mapping, Mapping):
            raise ValueError(f"a source is a mapping such as {{path: FILE, tasks: [TASK]}}, got {mapping!r}")
        allowed = [field.name for field in fields(cls)]
        for key in mapping:
            check_choice("field of a source", key, allowed)
        return cls(**mapping)


def _is_range(rows: Sequence[Any]) -> bool:
    whole = all(isinstance(row, int) and not isinstance(row, bool) for row in rows)
    return whole and len(rows) == 2 and 0 <= rows[0] < rows[1]
