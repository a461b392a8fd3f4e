# SPDX-License-Identifier: Apache-2.0
"""The rows of a data source, read and checked, and their texts as token ids."""

from __future__ import annotations

import logging
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.compute
from transformers import PreTrainedTokenizerBase

from ..configuration.nearest_names import nearest
from ..modeling.parts.text_ids import DOCUMENT_END, encode, encode_all
from .columns import (
    column_of,
    complete_rows,
    has_value,
    is_list,
    is_text,
    kept_rows,
    with_columns,
    with_joined_passages,
    with_known_columns,
    with_our_columns,
    without_blanks,
)
from .document_ids import document_id, ends_as_source, source_ids
from .files import read_files
from .sources import DataSource, is_of_benchmark
from .synthetic_documents import MAX_TOKENS, MIN_TOKENS, GeneratedDocument, generate_document

logger = logging.getLogger(__name__)

_TEXT_TASKS = ("reconstruction", "continuation")
_NEEDED_COLUMNS = {"question_answering": ("context", "question", "answers"), "summarization": ("context", "summary")}
_ALL_TEXTS = ("context", "question", "summary", "text")
_STREAMED_ROWS = 1000
# Rows that are drawn in place of one that will not do.
MAX_ATTEMPTS = 100
# Tokens of a column that are kept.
_MAX_KEPT_TOKENS = 2**26


class PassageText(str):
    """A context of passages as one text, with blank lines between them."""

    passages: tuple[str, ...]

    def __new__(cls, passages: Sequence[str]) -> PassageText:
        text = super().__new__(cls, DOCUMENT_END.join(passages))
        text.passages = tuple(passages)
        return text


def as_text(context: str | Sequence[str]) -> str:
    """Return a context as one text, a list of passages as [`PassageText`]."""
    return context if isinstance(context, str) else PassageText(context)


def read_rows(source: DataSource, data_dir: str | None = None, seed: int = 0) -> pyarrow.Table:
    """Read the rows of a file or Hub source in our columns; `ValueError` where its tasks lack theirs."""
    if source.streaming:
        table = _streamed(source)
    else:
        if source.name is None:
            table = read_files(source, data_dir)
        else:
            table = datasets.load_dataset(source.name, source.config, split=source.split).with_format("arrow")[:]
            table = with_our_columns(table, source)
        table = in_known_columns(table, source)
        if source.rows is not None:
            table = table.slice(source.rows[0], source.rows[1] - source.rows[0])
    columns = table.column_names
    if source.by is not None:
        column_of(table, source.by, source)
    for task in source.tasks or _TEXT_TASKS[:1]:
        needed = _NEEDED_COLUMNS.get(task) or (context_column(task, columns),)
        for column in needed:
            if column not in columns:
                what = f"source {source.label!r} has no column {column!r}"
                raise ValueError(f"{what}, which {task} needs{nearest(column, columns)}")
    if source.skip_incomplete:
        kept = _complete_rows(table, source)
        _say_left_out(source, table.num_rows - kept.num_rows, table.num_rows)
        table = kept
    if table.num_rows == 0:
        there = "" if source.rows is None else f" among {list(source.rows)}"
        there += "" if source.where is None else f" where {dict(source.where)}"
        raise ValueError(f"source {source.label!r} has no rows{there}")
    if "question_answering" in source.tasks:
        table = with_answer_lists(table, source)
    for column in _text_columns(source, columns):
        table = with_values(table, column, source)
    if source.max_samples is not None and source.max_samples < table.num_rows:
        kept = random.Random(f"{seed}/{source.label}").sample(range(table.num_rows), source.max_samples)
        # `take` would join all chunks, and fail past 2 GiB of text.
        table = table.filter(pyarrow.array(np.isin(np.arange(table.num_rows), kept)))
    return table


def in_known_columns(table: pyarrow.Table, source: Any) -> pyarrow.Table:
    """Give the columns of published data sets our names, keep the rows that a source keeps, and join passages."""
    return with_joined_passages(kept_rows(with_known_columns(table, source), source), source)


def _streamed(source: DataSource) -> pyarrow.Table:
    """The rows of a Hub data set that the source keeps, read from its start as far as they reach."""
    first, end = source.rows or (0, source.max_samples or 0)
    stream = datasets.load_dataset(source.name, source.config, split=source.split, streaming=True).with_format("arrow")
    batches, count, num_left_out = [], 0, 0
    for batch in stream.iter(batch_size=_STREAMED_ROWS):
        batch = in_known_columns(with_our_columns(batch, source), source)
        if source.skip_incomplete and source.rows is None:
            kept = _complete_rows(batch, source)
            num_left_out += batch.num_rows - kept.num_rows
            batch = kept
        batches.append(batch.slice(max(0, first - count), max(0, end - max(first, count))))
        count += batch.num_rows
        if count >= end:
            break
    _say_left_out(source, num_left_out, num_left_out + count)
    return pyarrow.concat_tables(batches, promote_options="permissive") if batches else pyarrow.table({})


def _complete_rows(table: pyarrow.Table, source: DataSource) -> pyarrow.Table:
    """The rows that have what the source's tasks need, or any task could."""
    needed = _text_columns(source, table.column_names) if source.tasks else _ALL_TEXTS
    answers = ["answers"] if not source.tasks or "question_answering" in source.tasks else []
    return complete_rows(table, [name for name in (*needed, *answers) if name in table.column_names])


def _say_left_out(source: DataSource, num_left_out: int, num_rows: int) -> None:
    if num_left_out:
        logger.warning("source %r: %d of %d rows left out: incomplete", source.label, num_left_out, num_rows)


def context_column(task: str, columns: Sequence[str]) -> str:
    """The column that a task's contexts are in, among those of a source."""
    return "text" if task in _TEXT_TASKS and "text" in columns else "context"


def _text_columns(source: DataSource, columns: Sequence[str]) -> list[str]:
    """The columns whose texts the tasks of a source read."""
    needed = [column for task in source.tasks for column in _NEEDED_COLUMNS.get(task, ()) if column != "answers"]
    return list(dict.fromkeys([*needed, *(context_column(task, columns) for task in source.tasks)]))


def with_values(table: pyarrow.Table, column: str, source: Any) -> pyarrow.Table:
    """Take nulls and blank texts out of a column's lists; `ValueError` for a row without a value.

    A context may be blank, and so may a benchmark's question.
    """
    values = without_blanks(table[column])
    kind, place = values.type, (source.columns or {}).get(column, column)
    if len(values) and column != "answers" and not (is_text(kind) or (is_list(kind) and is_text(kind.value_type))):
        raise ValueError(f"source {source.label!r}: column {place!r} must hold texts, not {kind}")
    may_be_blank = column in ("context", "text") or (column == "question" and is_of_benchmark(table.column_names))
    filled = values.is_valid() if may_be_blank and is_text(kind) else has_value(values)
    row = pyarrow.compute.index(filled, False).as_py()
    if row >= 0:
        what = f"source {source.label!r}: column {place!r} has no value in row {row} (counted from 0)"
        raise ValueError(f"{what}; `skip_incomplete: true` leaves such rows out")
    return with_columns(table, {column: values})


def answer_text(answer: Any) -> str:
    """A single answer as it is learned and scored."""
    if isinstance(answer, bool):
        return "yes" if answer else "no"
    return str(int(answer)) if isinstance(answer, float) and answer.is_integer() else str(answer)


def with_answer_lists(table: pyarrow.Table, source: Any) -> pyarrow.Table:
    """Bring answers, see `answer_text`, into lists of strings, none empty or blank; `ValueError` where that fails."""
    table = with_values(table, "answers", source)
    kind = table["answers"].type
    if is_list(kind) and is_text(kind.value_type):
        return table
    if pyarrow.types.is_nested(kind):
        what = f"source {source.label!r}: answers must be strings or lists of strings, not {kind}"
        raise ValueError(f"{what}; name their place with columns, e.g. {{answers: answers.text}}")
    lists = pyarrow.array([[answer_text(answer)] for answer in table["answers"].to_pylist()])
    return with_columns(table, {"answers": lists})


def distinct_texts(table: pyarrow.Table) -> list[str]:
    """The distinct `text` values of a table (`context`, where a row or all of them have no `text`), in order."""
    has_texts = "text" in table.column_names and table["text"].null_count == 0
    texts = table["text" if has_texts else "context"].to_pylist()
    return list(dict.fromkeys(map(as_text, texts)))


def places(first: int, number: int, rng: random.Random) -> Iterator[int]:
    """A row and those that may stand in its place: some that are drawn, and then all in turn, where few will do."""
    yield first
    place = first
    for _ in range(MAX_ATTEMPTS):
        place = rng.randrange(number)
        yield place
    yield from (other % number for other in range(place + 1, place + number))


def generated_document(
    source: DataSource, seed: int, num_tokens: int, tokenizer: PreTrainedTokenizerBase
) -> GeneratedDocument:
    """Generate a document of a source's kind and split in at most so many tokens of this tokenizer."""

    def count_tokens(text: str) -> int:
        return len(encode(tokenizer, text))

    return generate_document(
        seed, num_tokens=num_tokens, kind=source.kind, split=source.split, count_tokens=count_tokens
    )


def draw_document(
    source: DataSource,
    max_tokens: int,
    rng: random.Random,
    tokenizer: PreTrainedTokenizerBase,
    min_tokens: int = MIN_TOKENS,
) -> GeneratedDocument:
    """Generate a document of a random length up to `max_tokens` tokens of this tokenizer, or up to `MAX_TOKENS`."""
    max_tokens = min(max_tokens, MAX_TOKENS)
    length = rng.randint(min_tokens, max(min_tokens, max_tokens))
    while True:
        try:
            return generated_document(source, rng.randrange(10**9), length, tokenizer)
        except ValueError:
            # A few seeds start with a sentence longer than a very short limit.
            if length >= 8 * MIN_TOKENS and length >= max_tokens:
                raise
            length = max_tokens if length < max_tokens else 2 * length


# --- rows with their texts as token ids ---


class TextColumn:
    """The distinct texts of a column as integer arrays, tokenized when they are asked for; the first ones are kept.

    `text_of_row` has the place of each row's text. A column that is not shared stays where it is, such as a mapped
    file.
    """

    def __init__(self, column: pyarrow.ChunkedArray, tokenizer: PreTrainedTokenizerBase, is_shared: bool):
        self.text_of_row: np.ndarray = np.arange(len(column))
        self._texts: pyarrow.Array | pyarrow.ChunkedArray = column
        if is_shared and is_list(column.type):
            places: dict[tuple[str, ...], int] = {}
            rows = [places.setdefault(tuple(passages), len(places)) for passages in column.to_pylist()]
            self.text_of_row, self._texts = np.asarray(rows), pyarrow.array(list(map(list, places)))
        elif is_shared:
            # Chunk by chunk, in a type that has room for more than 2 GiB.
            numbered = column.cast(pyarrow.large_string()).dictionary_encode().combine_chunks()
            self.text_of_row, self._texts = numbered.indices.to_numpy(), numbered.dictionary
        self._tokenizer, self._num_free = tokenizer, _MAX_KEPT_TOKENS
        self._between = encode(tokenizer, DOCUMENT_END)
        self._ids: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, text: int) -> np.ndarray:
        ids = self._ids.get(text)
        if ids is None:
            joined = [token for passage in self.passages(text) for token in (*self._between, *passage)]
            ids = np.asarray(joined[len(self._between) :], dtype=np.int32)
            if len(ids) <= self._num_free:
                self._ids[text] = ids
                self._num_free -= len(ids)
        return ids

    def text(self, text: int) -> str:
        """Return a text itself."""
        return as_text(self._texts[text].as_py() or "")

    def passages(self, text: int) -> list[list[int]]:
        """Return the token ids of a context's passages; of a text, its own."""
        content = self.text(text)
        if isinstance(content, PassageText):
            return encode_all(self._tokenizer, content.passages)
        return [encode(self._tokenizer, content) if content.strip() else []]


class FileSource:
    """Rows of a file or Hub source, whose texts are tokenized once. Pickled, it is its arguments."""

    def __init__(self, source: DataSource, data_dir: str | None, seed: int, tokenizer: PreTrainedTokenizerBase):
        self._made_of = (source, data_dir, seed, tokenizer)
        table = read_rows(source, data_dir, seed)
        self.source, self.num_rows = source, table.num_rows
        wanted = ("id", "question", "answers", "summary", "source_texts")
        self.columns = {name: table[name] for name in wanted if name in table.column_names}
        if {"finished", "truncated"} <= set(table.column_names):
            # Of `write_targets`.
            self.columns["finished"] = table["finished"]
        self._column_of_task = {task: context_column(task, table.column_names) for task in source.tasks}
        # Contexts that are lists are compressed passage by passage.
        self.has_passages = any(is_list(table[name].type) for name in self._column_of_task.values())
        if source.separate_passages and not self.has_passages and source.contexts_per_document == 1:
            what = f"source {source.label!r}: each context is one text"
            raise ValueError(f"{what}: leave out separate_passages, or give contexts_per_document")
        self._texts = {
            name: TextColumn(table[name], tokenizer, is_shared="question" in self.columns)
            for name in dict.fromkeys(self._column_of_task.values())
        }
        self.rows_of_text: dict[int, list[int]] = defaultdict(list)
        if "question_answering" in source.tasks:
            for row, text in enumerate(self.texts("question_answering").text_of_row.tolist()):
                self.rows_of_text[text].append(row)

    def __reduce__(self) -> tuple[type[FileSource], tuple[Any, ...]]:
        # The hash that `datasets` takes of a transform would otherwise go over the whole table.
        return FileSource, self._made_of

    def __deepcopy__(self, memo: dict[int, Any]) -> FileSource:
        return self

    def texts(self, task: str) -> TextColumn:
        """Return the contexts of one of the source's tasks."""
        return self._texts[self._column_of_task[task]]

    def text_of(self, task: str, row: int) -> int:
        """Return the place of a row's context in `texts`; `rows_of_text` has the rows of each."""
        return int(self.texts(task).text_of_row[row])

    def value(self, column: str, row: int) -> Any:
        return self.columns[column][row].as_py()

    def document_ids(self, task: str, row: int) -> list[str]:
        """Return the ids of a row's whole text, and of the documents that the row says it is cut from."""
        return [document_id(self._text(task, row)), *source_ids(self._source_texts(row))]

    def ends(self, task: str, row: int) -> bool:
        """Return True if the text that a task reads of a row comes to the end of a document, see `ends_as_source`."""
        named = self._source_texts(row)
        return not named or ends_as_source(self._text(task, row), named)

    def _text(self, task: str, row: int) -> str:
        return self.texts(task).text(self.text_of(task, row))

    def _source_texts(self, row: int) -> list[str] | None:
        return self.value("source_texts", row) if "source_texts" in self.columns else None

    def target_ends(self, row: int) -> bool:
        """Return False if a row's answer or summary was cut at a teacher's limit."""
        return "finished" not in self.columns or self.value("finished", row) is not False

    def identifier(self, row: int) -> str:
        return f"{self.source.label}/{self.value('id', row) if 'id' in self.columns else row}"
