# SPDX-License-Identifier: Apache-2.0
"""Rows of a file or Hub source with their texts as token ids, each text tokenized when it is first read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow
from transformers import PreTrainedTokenizerBase

from ..modeling.parts.chat_template import DOCUMENT_END
from ..modeling.parts.text_ids import encode, encode_all
from .columns import is_list
from .document_ids import document_id, ends_as_source, source_ids
from .rows import PassageText, context_column, read_rows
from .sources import DataSource


class TokenizedTexts:
    """A column of texts as integer arrays, each tokenized when it is asked for.

    The column stays where it is, which for a data set of the Hub is a memory-mapped file. The arrays that were made
    first are kept, up to `max_kept_tokens` tokens in all.
    """

    def __init__(
        self,
        column: pyarrow.Array | pyarrow.ChunkedArray,
        tokenizer: PreTrainedTokenizerBase,
        max_kept_tokens: int = 2**26,
    ):
        self._column, self._tokenizer, self._num_free = column, tokenizer, max_kept_tokens
        self._between = encode(tokenizer, DOCUMENT_END)
        self._ids: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self._column)

    def __getitem__(self, index: int) -> np.ndarray:
        ids = self._ids.get(index)
        if ids is None:
            joined = [token for passage in self.passages(index) for token in (*self._between, *passage)]
            ids = np.asarray(joined[len(self._between) :], dtype=np.int32)
            if len(ids) <= self._num_free:
                self._ids[index] = ids
                self._num_free -= len(ids)
        return ids

    def _text(self, index: int) -> str | list[str]:
        return self._column[index].as_py() or ""

    def passages(self, index: int) -> list[list[int]]:
        """Token ids of a context's passages; of a text, its own."""
        text = self._text(index)
        if isinstance(text, str):
            return [encode(self._tokenizer, text) if text.strip() else []]
        return encode_all(self._tokenizer, text)

    def document_id(self, index: int) -> str:
        """The id of a whole text, see `document_id`."""
        return document_id(_as_text(self._text(index)))


def _as_text(context: str | Sequence[str]) -> str:
    return context if isinstance(context, str) else PassageText(context)


class TextColumn:
    """A column of texts as token ids, by row."""

    def __init__(self, column: pyarrow.ChunkedArray, tokenizer: PreTrainedTokenizerBase, is_shared: bool):
        self.text_of_row: np.ndarray = np.arange(len(column))
        distinct: pyarrow.Array | pyarrow.ChunkedArray = column
        if is_shared and is_list(column.type):
            places: dict[tuple[str, ...], int] = {}
            rows = [places.setdefault(tuple(passages), len(places)) for passages in column.to_pylist()]
            self.text_of_row, distinct = np.asarray(rows), pyarrow.array(list(map(list, places)))
        elif is_shared:
            # Chunk by chunk, in a type that has room for more than 2 GiB.
            numbered = column.cast(pyarrow.large_string()).dictionary_encode().combine_chunks()
            self.text_of_row, distinct = numbered.indices.to_numpy(), numbered.dictionary
        self.texts = TokenizedTexts(distinct, tokenizer)

    def __getitem__(self, row: int) -> np.ndarray:
        return self.texts[int(self.text_of_row[row])]

    def passages(self, row: int) -> list[list[int]]:
        """Token ids of the passages of a row's context; of a text, its own."""
        return self.texts.passages(int(self.text_of_row[row]))

    def document_id(self, row: int) -> str:
        """The id of a row's whole text, see `document_id`."""
        return self.texts.document_id(int(self.text_of_row[row]))


class FileSource:
    """Rows of a file or Hub source, their texts tokenized once however many questions share them.

    Without questions, rows stay in their table until they are drawn. Pickled, it is what it was made of, and reads the
    rows again.
    """

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
        if "source_texts" in self.columns:
            # By their ends it is known whether a document ends there, too.
            self.columns |= {name: table[name] for name in self._column_of_task.values()}
        # Contexts that are lists are compressed passage by passage.
        self.has_passages = any(is_list(table[name].type) for name in self._column_of_task.values())
        if source.separate_passages and not self.has_passages and source.contexts_per_document == 1:
            raise ValueError(
                f"separate_passages of source {source.label!r} keeps nothing apart, each of its contexts is one text: "
                "leave it out, or give contexts_per_document"
            )
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
        """What one of the source's tasks reads as its context."""
        return self._texts[self._column_of_task[task]]

    def text_of(self, row: int) -> int:
        """Which of the distinct contexts of questions is this row's; `rows_of_text` has the rows of each."""
        return int(self.texts("question_answering").text_of_row[row])

    def value(self, column: str, row: int) -> Any:
        return self.columns[column][row].as_py()

    def document_ids(self, task: str, row: int) -> list[str]:
        """Ids of the whole text that a task reads of a row, and of the documents that the row says it is cut from."""
        named = self.value("source_texts", row) if "source_texts" in self.columns else None
        return [self.texts(task).document_id(row), *source_ids(named)]

    def ends(self, task: str, row: int) -> bool:
        """Return whether the text that a task reads of a row comes to the end of a document, see `ends_as_source`."""
        named = self.value("source_texts", row) if "source_texts" in self.columns else None
        return not named or ends_as_source(_as_text(self.value(self._column_of_task[task], row) or ""), named)

    def target_ends(self, row: int) -> bool:
        """Return whether a row's answer or summary is whole: a teacher's may have been cut at its limit."""
        return "finished" not in self.columns or self.value("finished", row) is not False

    def cut_rows(self, task: str) -> list[int]:
        """Rows whose text, as a task reads it, does not come to the end of a document."""
        rows = range(self.num_rows) if "source_texts" in self.columns else ()
        return [row for row in rows if not self.ends(task, row)]

    def identifier(self, row: int) -> str:
        return f"{self.source.label}/{self.value('id', row) if 'id' in self.columns else row}"
