# SPDX-License-Identifier: Apache-2.0
"""Data sources of training and evaluation: Hub data sets, local Parquet, JSONL or text files, and generated documents.

A source is a mapping such as `{path: qa_squad_train.parquet, tasks: [question_answering], weight: 2}`, or a text, see
`parse_sources`. Rows have the columns `context` with `question` and `answers`, `context` with `summary`, or `text`.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..configuration.nearest_names import as_spelled_now, check_choice
from .prompts import TASKS
from .synthetic_documents import KINDS, SPLITS
from .yaml_text import parse_yaml, read_yaml

# What a benchmark says of a question beside it, in the names of kvpress.
BENCHMARK_COLUMNS = ("task", "answer_prefix", "max_new_tokens", "all_classes", "length")
COLUMNS = ("id", "context", "question", "answers", "summary", "text", *BENCHMARK_COLUMNS)
# One text each, in UTF-8.
TEXT_FILES = (".txt", ".md")
FILE_TYPES = (".parquet", ".jsonl", ".json", *TEXT_FILES)


@dataclass(frozen=True)
class DataSource:
    """One source of a recipe or an evaluation.

    Args:
        name: a data set on the Hub, or a folder that `datasets` reads as one.
        path: Parquet, JSONL or text file, or, where none has this name, a pattern such as `text_*_train.parquet`,
            relative to `data_dir`.
        generated: documents of `generated.py` instead of a file.
        config: the Hub data set's configuration; of generated documents that are evaluated, "one_hop" or "two_hop":
            only questions that join so many facts.
        split: the Hub data set's split, or of generated documents: "train" or "test".
        tasks: what is trained on it, among `TASKS`. In an evaluation it serves those that its columns allow when none
            are named.
        weight: how often it is drawn, relative to the other sources; its number of rows when no source has a weight.
        max_samples: keep a fixed random choice of so many rows, of those that `skip_incomplete` leaves; of a stream
            the first ones, unless it has `rows`.
        where: only rows that have one of these values, e.g. `{subset: [HotpotQA, NewsQA]}`, or a number in a range,
            e.g. `{length: {from: 4000, below: 8000}}`, with dots into structs.
        rows: `[first, end]`, only these rows, counted from 0 among those that `where` keeps, the end not included.
        streaming: read a Hub data set from its start as far as `rows` or `max_samples` say, and download no more.
        skip_incomplete: leave out rows that lack what the tasks need, such as questions without an answer, or have a
            blank text in its place, and say in the log how many; without it they are refused, but for blank texts and
            contexts, which are passed over.
        supporting_passages: of HotpotQA and 2WikiMultihopQA, the passages that the answer follows from, and no others.
        separate_passages: contexts of several texts, the passages of HotpotQA and 2WikiMultihopQA or those that
            `contexts_per_document` joins, stay apart: each is compressed by itself, and they are read together. A
            column `context` of lists of texts always does.
        by: in an evaluation, a data set of its own for each value of this column.
        kind: only this kind of generated document; in an evaluation also "needles".
        document_tokens: in an evaluation, length of generated documents and of needles' contexts.
        contexts_per_document: of questions: up to so many neighbouring contexts of the source, a number drawn for each
            example, are joined to one document with blank lines between them, as far as they fit.
        columns: where the source has other names: our column -> its column, with dots into structs, e.g.
            `{context: passage, answers: reply.text}`. Those of well-known data sets are found, see
            `data.published_sets`.
        license: the data's license, for the model card.
        hub_id: the data set's repository on the Hub, for the model card, where `path` is a copy of it.
        title: what reports and the model card call the data set.
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
        if isinstance(self.weight, str):
            # YAML 1.1 reads 1e-1, which has no point, as a text.
            object.__setattr__(self, "weight", float(self.weight))
        tasks = (self.tasks,) if isinstance(self.tasks, str) else tuple(self.tasks)
        tasks = tuple(map(as_spelled_now, tasks))
        object.__setattr__(self, "tasks", tasks)
        for task in tasks:
            check_choice(f"task of source {self.label!r}:", task, TASKS)
        if self.generated:
            check_choice("split of generated documents:", self.split, SPLITS)
        if self.weight is not None and not 0 < self.weight < math.inf:
            raise ValueError(f"weight of source {self.label!r} must be above 0 and finite, got {self.weight!r}")
        if self.rows is not None and not (len(self.rows) == 2 and 0 <= self.rows[0] < self.rows[1]):
            raise ValueError(f"rows of source {self.label!r} must be [first, end], got {self.rows}")
        for name in ("contexts_per_document", "max_samples"):
            if (value := vars(self)[name]) is not None and value < 1:
                raise ValueError(f"{name} of source {self.label!r} must be at least 1, got {value!r}")
        if self.streaming and (self.name is None or (self.rows is None and self.max_samples is None)):
            raise ValueError(
                f"streaming of source {self.label!r} needs the name of a data set, and rows or max_samples"
            )
        for column in self.columns or {}:
            check_choice(f"column of source {self.label!r}:", column, COLUMNS)
        for column, wanted in (self.where or {}).items():
            if isinstance(wanted, Mapping) and not wanted.keys() <= {"from", "below"}:
                raise ValueError(f"where of source {self.label!r}: {column} has no range {{from, below}}: {wanted!r}")

    @property
    def label(self) -> str:
        """The name to show: Hub name, path or "generated"."""
        return self.name or self.path or "generated"

    @classmethod
    def from_mapping(cls, mapping: DataSource | Mapping[str, Any], needs_tasks: bool = True) -> DataSource:
        """Build a source from a recipe's entry."""
        if not isinstance(mapping, cls):
            if not isinstance(mapping, Mapping):
                raise ValueError(f"a source is a mapping such as {{path: FILE, tasks: [TASK]}}, got {mapping!r}")
            mapping = {as_spelled_now(key): value for key, value in mapping.items()}
            allowed = [field.name for field in fields(cls)]
            for key in mapping:
                check_choice("field of a source", key, allowed)
            mapping = cls(**mapping)
        if needs_tasks and not mapping.tasks:
            raise ValueError(f"source {mapping.label!r} needs tasks, among {TASKS}")
        if needs_tasks and mapping.kind is not None and not mapping.generated:
            raise ValueError(f"kind of source {mapping.label!r} goes with generated: true, got {mapping.kind!r}")
        if needs_tasks and mapping.kind is not None:
            check_choice("kind of generated documents:", mapping.kind, KINDS)
        return mapping


def is_of_benchmark(columns: Container[str]) -> bool:
    """Whether a benchmark published rows with these columns: kvpress's copies have `answer_prefix`, LongBench's own
    `all_classes`."""
    return "answer_prefix" in columns or "all_classes" in columns


def parse_sources(entries: Sequence[str | DataSource | Mapping[str, Any]], split: str = "test") -> list[DataSource]:
    """Read sources in any of their forms.

    Args:
        entries: mappings as in a recipe; such a mapping as a text, `{name: mrqa-workshop/mrqa, by: subset}`; a YAML
            file with a list of entries, or a recipe's `sources`; or the short form `[TITLE=]PLACE[#MAX_SAMPLES]`,
            where the place is a file, `HUB_NAME[:CONFIG][@SPLIT]`, or `generated[:KIND]`.
        split: of what names none.

    Raises:
        ValueError: what `DataSource` refuses, or a text that is no YAML.
    """
    found = []
    for entry in entries:
        if isinstance(entry, str) and entry.lstrip().startswith("{"):
            entry = parse_yaml(entry, f"the source {entry!r}")
        elif isinstance(entry, str) and Path(entry).suffix in (".yaml", ".yml"):
            content = read_yaml(Path(entry))
            listed = content.get("sources") if isinstance(content, Mapping) else content
            if not isinstance(listed, list):
                raise ValueError(f"{entry} must hold a list of sources, or sources: and such a list")
            found += parse_sources(listed, split)
            continue
        elif isinstance(entry, str):
            entry = short_form(entry)
        if isinstance(entry, Mapping):
            entry = {"split": split, **entry}
        found.append(DataSource.from_mapping(entry, needs_tasks=False))
    return found


def short_form(text: str) -> dict[str, Any]:
    """The mapping that `[TITLE=]PLACE[#MAX_SAMPLES]` stands for, see `parse_sources`."""
    title, _, place = text.rpartition("=")
    counted, _, number = place.rpartition("#")
    found: dict[str, Any] = {"title": title} if title else {}
    if counted and number.isdecimal():
        found["max_samples"], place = int(number), counted
    if Path(place).suffix in FILE_TYPES:
        return {**found, "path": place}
    hub, _, split = place.partition("@")
    name, _, config = hub.partition(":")
    if name == "generated":
        return {
            **found,
            "generated": True,
            **({"config" if config.endswith("_hop") else "kind": config} if config else {}),
        }
    return {**found, "name": name, **({"config": config} if config else {}), **({"split": split} if split else {})}
