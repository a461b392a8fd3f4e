# SPDX-License-Identifier: Apache-2.0
"""Data sources of training and evaluation: Hub data sets, local files, and generated documents.

Rows have the columns `context` with `question` and `answers`, `context` with `summary`, or `text`.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..configuration.nearest_names import check_choice
from .prompts import TASKS
from .synthetic_documents import KINDS, SPLITS
from .yaml_text import parse_yaml, read_yaml

# Columns of a benchmark's questions, in the names of kvpress.
BENCHMARK_COLUMNS = ("task", "answer_prefix", "max_new_tokens", "all_classes", "length")
COLUMNS = ("id", "context", "question", "answers", "summary", "text", *BENCHMARK_COLUMNS)
RETRIEVAL_COLUMNS = ("title", "query", "query_id", "doc_id", "score")
# One text each, in UTF-8.
TEXT_FILES = (".txt", ".md")
FILE_TYPES = (".parquet", ".jsonl", ".json", *TEXT_FILES)


@dataclass(frozen=True)
class DataSource:
    """One source of a recipe or an evaluation.

    Args:
        name: a data set on the Hub, or a folder that `datasets` reads as one.
        path: file, or pattern such as `text_*_train.parquet`, relative to `data_dir`.
        generated: documents of `synthetic_documents` instead of a file.
        config: the Hub data set's configuration; of generated documents in an evaluation, "one_hop" or "two_hop".
        split: the Hub data set's split, or of generated documents: "train" or "test".
        tasks: among `TASKS`; in an evaluation, those that the columns allow when none are named.
        weight: how often it is drawn, relative to the other sources; its number of rows when no source has a weight.
        max_samples: keep a fixed random choice of so many rows; of a stream without `rows` the first ones.
        where: keep rows with one of these values, `{subset: [HotpotQA]}`, or `{length: {from: 4000, below: 8000}}`.
        rows: `[first, end]`, counted from 0 among the rows that `where` keeps, the end not included.
        streaming: read a Hub data set from its start as far as `rows` or `max_samples` say, and download no more.
        skip_incomplete: leave out rows that lack what the tasks need, and log their number; else they are refused.
        supporting_passages: of HotpotQA and 2WikiMultihopQA, only the passages that the answer follows from.
        separate_passages: passages, or the contexts that are joined, are compressed one by one, as lists of texts are.
        by: in an evaluation, a data set of its own for each value of this column.
        kind: only this kind of generated document; in an evaluation also "needles".
        document_tokens: in an evaluation, length of generated documents and of needles' contexts.
        contexts_per_document: of questions: join up to so many neighbouring contexts, as far as they fit.
        columns: our column -> the source's, with dots into structs, where it is not of a published set.
        license, hub_id, title: of the data set, for reports and the model card.
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
    contexts_per_document: int = 1
    columns: Mapping[str, str] | None = None
    where: Mapping[str, Any] | None = None
    streaming: bool = False
    skip_incomplete: bool = False
    supporting_passages: bool = False
    separate_passages: bool = False
    by: str | None = None
    document_tokens: int | None = None
    license: str | None = None
    hub_id: str | None = None
    title: str | None = None

    def __post_init__(self) -> None:
        if sum((self.name is not None, self.path is not None, bool(self.generated))) != 1:
            raise ValueError(f"a source has exactly one of name, path and generated: true, got {self.label!r}")
        object.__setattr__(self, "tasks", tuple(self.tasks))
        for task in self.tasks:
            check_choice(f"task of source {self.label!r}:", task, TASKS)
        if self.generated:
            check_choice("split of generated documents:", self.split, SPLITS)
        if self.weight is not None and not 0 < self.weight < math.inf:
            raise ValueError(f"weight of source {self.label!r} must be above 0 and finite, got {self.weight!r}")
        if self.streaming and (self.name is None or (self.rows is None and self.max_samples is None)):
            raise ValueError(f"streaming of source {self.label!r} needs a data set's name, and rows or max_samples")
        for column in self.columns or {}:
            check_choice(f"column of source {self.label!r}:", column, (*COLUMNS, *RETRIEVAL_COLUMNS))

    @property
    def label(self) -> str:
        """Return the name to show: Hub name, path or "generated"."""
        return self.name or self.path or "generated"

    @classmethod
    def from_mapping(cls, mapping: DataSource | Mapping[str, Any], needs_tasks: bool = True) -> DataSource:
        """Build a source from a recipe's entry."""
        if not isinstance(mapping, cls):
            if not isinstance(mapping, Mapping):
                raise ValueError(f"a source is a mapping such as {{path: FILE, tasks: [TASK]}}, got {mapping!r}")
            for key in mapping:
                check_choice("field of a source", key, cls.__dataclass_fields__)
            mapping = cls(**mapping)
        if needs_tasks and not mapping.tasks:
            raise ValueError(f"source {mapping.label!r} needs tasks, among {TASKS}")
        if needs_tasks and mapping.kind is not None:
            check_choice("kind of generated documents:", mapping.kind, KINDS)
        return mapping


def is_of_benchmark(columns: Container[str]) -> bool:
    """Return True for the columns of a benchmark: kvpress's copies have `answer_prefix`, LongBench `all_classes`."""
    return "answer_prefix" in columns or "all_classes" in columns


def parse_sources(entries: Sequence[str | DataSource | Mapping[str, Any]], split: str = "test") -> list[DataSource]:
    """Read sources in any of their forms.

    Args:
        entries: mappings as in a recipe, also as text; YAML files with a list of entries or a recipe's `sources`; or
            `[TITLE=]PLACE[#MAX_SAMPLES]`: a file, `HUB_NAME[:CONFIG][@SPLIT]`, or `generated[:KIND]`.
        split: of sources that name none.
    """
    sources = []
    for entry in entries:
        if isinstance(entry, str) and Path(entry).suffix in (".yaml", ".yml"):
            content = read_yaml(Path(entry))
            sources += parse_sources(content["sources"] if isinstance(content, Mapping) else content, split)
            continue
        if isinstance(entry, str):
            entry = source_fields(entry)
        if isinstance(entry, Mapping):
            entry = {"split": split, **entry}
        sources.append(DataSource.from_mapping(entry, needs_tasks=False))
    return sources


def source_fields(text: str) -> dict[str, Any]:
    """Return the mapping of a source that is written as YAML, or as `[TITLE=]PLACE[#MAX_SAMPLES]`."""
    if text.lstrip().startswith("{"):
        return parse_yaml(text, f"the source {text!r}")
    title, _, place = text.rpartition("=")
    counted, _, number = place.rpartition("#")
    fields: dict[str, Any] = {"title": title} if title else {}
    if counted and number.isdecimal():
        fields["max_samples"], place = int(number), counted
    if Path(place).suffix in FILE_TYPES:
        return {**fields, "path": place}
    hub, _, split = place.partition("@")
    name, _, config = hub.partition(":")
    if name == "generated":
        fields["generated"] = True
        return fields | ({"config" if config.endswith("_hop") else "kind": config} if config else {})
    return {**fields, "name": name, **({"config": config} if config else {}), **({"split": split} if split else {})}
