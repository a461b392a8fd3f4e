# SPDX-License-Identifier: Apache-2.0
"""Data sources of a recipe: Hub data sets, local Parquet or JSONL files, and generated documents.

A source is a mapping such as `{path: qa_squad_train.parquet, tasks: [question_answering], weight: 2}`. Rows have the
columns `context` with `question` and `answers`, `context` with `summary`, or `text`.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import numbers
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pyarrow
import pyarrow.compute
from transformers import PreTrainedTokenizerBase

from ..configuration.nearest_names import check_choice, nearest
from ..modeling.parts.prompting import context_start_ids as context_start_ids
from ..modeling.parts.prompting import encode as encode
from ..modeling.parts.prompting import restored_ids
from ..modeling.parts.prompting import start_token_id as start_token_id
from .files import read_files, with_our_columns
from .prompts import TASKS

_TEXT_TASKS = ("reconstruction", "continuation")
_NEEDED_COLUMNS = {
    "question_answering": ("context", "question", "answers"),
    "summarisation": ("context", "summary"),
}
_NO_ANSWER = '; keep only the rows with an answer, e.g. by `dataset.filter(lambda row: row["answers"])`'
_COLUMNS = ("id", "context", "question", "answers", "summary", "text")
_FIELD_TYPES = {
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
    def from_mapping(cls, mapping: Mapping[str, Any]) -> DataSource:
        """Build a source from a recipe's entry; an unknown key raises `ValueError` with the nearest right one."""
        if not isinstance(mapping, Mapping):
            raise ValueError(f"a source is a mapping such as {{path: FILE, tasks: [TASK]}}, got {mapping!r}")
        allowed = [field.name for field in fields(cls)]
        for key in mapping:
            check_choice("field of a source", key, allowed)
        return cls(**mapping)


def read_rows(source: DataSource, data_dir: str | None = None, seed: int = 0) -> pyarrow.Table:
    """Read the rows of a file or Hub source, and check that its tasks have their columns.

    Args:
        source: where to read; not a generated one.
        data_dir: folder that local paths are relative to.
        seed: draws the rows that `max_samples` keeps.

    Raises:
        ValueError: no such file, an unknown file type, a missing column, no row, or a row that lacks a value which the
            tasks need: no text, or a question without an answer.
    """
    table = read_table(source, data_dir)
    if source.rows is not None:
        table = table.slice(source.rows[0], source.rows[1] - source.rows[0])
    columns = table.column_names
    for task in source.tasks:
        for column in _NEEDED_COLUMNS.get(task, ()):
            if column not in columns:
                raise ValueError(
                    f"source {source.label!r} has no column {column!r}, which {task} needs{nearest(column, columns)}"
                )
        if task in _TEXT_TASKS and not {"text", "context"} & set(columns):
            raise ValueError(
                f"source {source.label!r} has no column 'text' or 'context', which {task} needs"
                f"{nearest('text', columns)}"
            )
    if table.num_rows == 0:
        there = "" if source.rows is None else f" among {list(source.rows)}"
        raise ValueError(f"source {source.label!r} has no rows{there}")
    if "question_answering" in source.tasks:
        table = _with_answer_lists(table, source)
    for column in _text_columns(source, columns):
        check_texts(table, column, source)
    if source.max_samples is not None and source.max_samples < table.num_rows:
        kept = sorted(random.Random(f"{seed}/{source.label}").sample(range(table.num_rows), source.max_samples))
        table = _rows_at(table, kept)
    return table


def _is_range(rows: Sequence[Any]) -> bool:
    whole = all(isinstance(row, int) and not isinstance(row, bool) for row in rows)
    return whole and len(rows) == 2 and 0 <= rows[0] < rows[1]


def _rows_at(table: pyarrow.Table, rows: Sequence[int]) -> pyarrow.Table:
    """`table.take` of ascending rows, batch by batch: at once, it joins the batches and fails past 2 GiB of text."""
    taken, start, rows = [], 0, np.asarray(rows)
    for batch in table.to_batches():
        first, last = np.searchsorted(rows, (start, start + batch.num_rows))
        if first < last:
            taken.append(batch.take(pyarrow.array(rows[first:last] - start)))
        start += batch.num_rows
    return pyarrow.Table.from_batches(taken, schema=table.schema)


def read_table(source: Any, data_dir: str | None = None) -> pyarrow.Table:
    """Read a Hub data set or files, with our names for the columns that the source maps.

    Args:
        source: a [`DataSource`], or anything with its `name`, `config`, `split`, `path`, `columns` and `label`.
        data_dir: folder that local paths are relative to.

    Raises:
        ValueError: no such file, an unknown file type, a file that cannot be read, files that cannot be merged or a
            missing column.
    """
    if source.name is not None:
        return with_our_columns(_read_hub(source), source)
    return read_files(source, data_dir)


def _read_hub(source: DataSource) -> pyarrow.Table:
    from datasets import load_dataset

    return load_dataset(source.name, source.config, split=source.split).with_format("arrow")[:]


def context_column(task: str, columns: Sequence[str]) -> str:
    """The column that a task's contexts are in, among those of a source.

    Args:
        task: a task.
        columns: our names of the source's columns.

    Returns:
        "context" for questions and summaries; for plain text "text", or "context" where there is none.
    """
    return "text" if task in _TEXT_TASKS and "text" in columns else "context"


def _text_columns(source: DataSource, columns: Sequence[str]) -> list[str]:
    """The columns whose texts the tasks of a source read."""
    needed = [column for task in source.tasks for column in _NEEDED_COLUMNS.get(task, ()) if column != "answers"]
    return list(dict.fromkeys([*needed, *(context_column(task, columns) for task in source.tasks)]))


def check_texts(table: pyarrow.Table, column: str, source: Any) -> None:
    """Raise `ValueError` naming source, column and row unless every value of a column is a text.

    Args:
        table: rows with our names for the columns.
        column: our name of the column.
        source: a [`DataSource`], or anything with its `columns` and `label`.
    """
    values = table[column]
    _refuse_rows(values.is_null(), "is null", source, column)
    if len(values) and not _is_text(values.type):
        raise ValueError(f"{_place(source, column)} must hold texts, not {values.type} (row 0: {values[0].as_py()!r})")


def _refuse_rows(wrong: pyarrow.ChunkedArray, fault: str, source: Any, column: str, advice: str = "") -> None:
    """`ValueError` with the first of the rows that are wrong, if there is one."""
    row = pyarrow.compute.index(wrong, True).as_py()
    if row >= 0:
        raise ValueError(f"{_place(source, column)} {fault} in row {row} (counted from 0){advice}")


def _place(source: Any, column: str) -> str:
    """Source and column, by the name that the source has for it."""
    return f"source {source.label!r}: column {(source.columns or {}).get(column, column)!r}"


def _is_text(kind: pyarrow.DataType) -> bool:
    kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    return pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind) or pyarrow.types.is_string_view(kind)


def answer_text(answer: Any) -> str:
    """A single answer as it is learned and scored.

    Args:
        answer: a text, a number, a date or time, or a truth value, which is said as "yes" or "no".

    Raises:
        TypeError: anything else.
    """
    if isinstance(answer, bool):
        return "yes" if answer else "no"
    if not isinstance(answer, (str, numbers.Number, datetime.date, datetime.time)):
        raise TypeError(f"answers must be texts, numbers, dates or truth values, got {answer!r}")
    return str(answer)


def _with_answer_lists(table: pyarrow.Table, source: DataSource) -> pyarrow.Table:
    """Bring answers, see `answer_text`, into lists of strings, none of them empty."""
    answers = table["answers"]
    kind = answers.type
    _refuse_rows(answers.is_null(), "is null", source, "answers", _NO_ANSWER)
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        _check_answer_lists(answers, source)
        return table
    if pyarrow.types.is_nested(kind):
        raise ValueError(
            f"source {source.label!r}: answers must be strings or lists of strings, not {kind}; name their place with "
            "columns, e.g. {answers: answers.text}"
        )
    try:
        lists = [[answer_text(answer)] for answer in answers.to_pylist()]
    except TypeError as error:
        raise ValueError(f"{_place(source, 'answers')}: {error}") from error
    return table.drop_columns(["answers"]).append_column("answers", pyarrow.array(lists))


def _check_answer_lists(answers: pyarrow.ChunkedArray, source: DataSource) -> None:
    """Every list has an answer, and holds texts only."""
    lengths = pyarrow.compute.list_value_length(answers)
    _refuse_rows(pyarrow.compute.equal(lengths, 0), "is an empty list", source, "answers", _NO_ANSWER)
    parts = pyarrow.compute.list_flatten(answers)
    first = pyarrow.compute.index(parts.is_null(), True).as_py()
    if first >= 0:
        row = pyarrow.compute.list_parent_indices(answers)[first].as_py()
        raise ValueError(f"{_place(source, 'answers')} has a null in its list in row {row} (counted from 0)")
    if not _is_text(parts.type):
        raise ValueError(
            f"{_place(source, 'answers')} must hold lists of texts, not {answers.type} (row 0: {answers[0].as_py()!r})"
        )


def distinct_texts(table: pyarrow.Table) -> list[str]:
    """The distinct `text` values of a table (`context`, where a row or all of them have no `text`), in order."""
    has_texts = "text" in table.column_names and table["text"].null_count == 0
    return list(dict.fromkeys(table["text" if has_texts else "context"].to_pylist()))


def task_start_ids(config: Any) -> dict[str, int]:
    """The token that the text of each task starts with, where a compressor has task tokens; else nothing.

    Args:
        config: a compressor's configuration.

    Returns:
        Task -> id: [AE] for reconstruction, [LM] for everything else. A task that is missing starts with BOS.
    """
    starts = dict.fromkeys(TASKS, config.continuation_token_id)
    starts["reconstruction"] = config.reconstruction_token_id
    return {task: token_id for task, token_id in starts.items() if token_id is not None}


def text_starts(config: Any, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What a compressor's texts start with, as arguments of a collator.

    Args:
        config: a compressor's configuration.
        tokenizer: the tokenizer saved with it.

    Returns:
        `task_start_ids`, `restored_ids` and `bos_before_text`, see `CompressionCollator`.
    """
    return {
        "task_start_ids": task_start_ids(config),
        "restored_ids": restored_ids(config, tokenizer),
        "bos_before_text": config.bos_before_text,
    }


class TokenizedRows:
    """A column of texts as integer arrays, each read and tokenized when it is asked for.

    The column stays where it is, which for a data set of the Hub is a memory-mapped file. The arrays that were made
    first are kept, up to `max_kept_tokens` tokens in all.

    Args:
        column: the texts; a missing one is empty.
        tokenizer: makes the token ids.
        max_kept_tokens: with 4 bytes each.
    """

    def __init__(self, column: pyarrow.ChunkedArray, tokenizer: PreTrainedTokenizerBase, max_kept_tokens: int = 2**26):
        self._column, self._tokenizer = column, tokenizer
        self._ids: dict[int, np.ndarray] = {}
        self._num_free = max_kept_tokens

    def __getitem__(self, row: int) -> np.ndarray:
        ids = self._ids.get(row)
        if ids is None:
            ids = np.asarray(encode(self._tokenizer, self._column[row].as_py() or ""), dtype=np.int32)
            if len(ids) <= self._num_free:
                self._ids[row] = ids
                self._num_free -= len(ids)
        return ids


class TokenizedTexts(Sequence):
    """Texts as integer arrays, each tokenized when it is first asked for and then kept.

    Args:
        texts: the texts.
        tokenizer: makes the token ids.
    """

    def __init__(self, texts: Sequence[str], tokenizer: PreTrainedTokenizerBase):
        self._texts = list(texts)
        self._tokenizer = tokenizer
        self._ids: list[np.ndarray | None] = [None] * len(self._texts)

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> np.ndarray:
        ids = self._ids[index]
        if ids is None:
            ids = self._ids[index] = np.asarray(encode(self._tokenizer, self._texts[index]), dtype=np.int32)
            self._texts[index] = ""
        return ids

    def window(self, length: int, rng: random.Random) -> list[int]:
        """A window of `length` tokens from a random offset of a random text (the whole text when it is shorter)."""
        ids = self[rng.randrange(len(self))]
        start = rng.randrange(max(1, len(ids) - length + 1))
        return ids[start : start + length].tolist()
