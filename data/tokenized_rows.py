# SPDX-License-Identifier: Apache-2.0
"""Rows of a file or Hub source with their texts as token ids, each text tokenized when it is first read."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow
import pyarrow.compute
from transformers import PreTrainedTokenizerBase

from ..modeling.parts.chat_template import DOCUMENT_END
from ..modeling.parts.text_ids import encode, encode_all
from .columns import is_list, joined_lists
from .document_ids import document_id, ends_as_source, source_ids
from .rows import PassageText, context_column, read_rows
from .sources import DataSource


class _Tokenized:
    """What keeps texts, or contexts of passages, as integer arrays.

    Args:
        tokenizer: makes the token ids.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self._lengths: dict[int, list[int]] = {}

    def __getitem__(self, index: int) -> np.ndarray:
        raise NotImplementedError

    def _encoded(self, index: int, text: str | Sequence[str]) -> np.ndarray:
        """Token ids of a text, none of a blank one, or of passages with blank lines between them."""
        if isinstance(text, str):
            return np.asarray(encode(self._tokenizer, text) if text.strip() else [], dtype=np.int32)
        passages, between = encode_all(self._tokenizer, text), encode(self._tokenizer, DOCUMENT_END)
        self._lengths[index] = [len(passage) for passage in passages]
        ids = [token for passage in passages for token in (*between, *passage)]
        return np.asarray(ids[len(between) :], dtype=np.int32)

    def passages(self, index: int) -> list[list[int]]:
        """Token ids of a context's passages; of a text, its own."""
        ids = self[index].tolist()
        if index not in self._lengths:
            return [ids]
        found, start, between = [], 0, len(encode(self._tokenizer, DOCUMENT_END))
        for length in self._lengths[index]:
            found.append(ids[start : start + length])
            start += length + between
        return found


def _as_text(context: str | Sequence[str] | None) -> str:
    return context or "" if context is None or isinstance(context, str) else PassageText(context)


class TokenizedRows(_Tokenized):
    """A column of texts as integer arrays, each read and tokenized when it is asked for.

    The column stays where it is, which for a data set of the Hub is a memory-mapped file. The arrays that were made
    first are kept, up to `max_kept_tokens` tokens in all.

    Args:
        column: the texts, or lists of passages; a missing one is empty.
        tokenizer: makes the token ids.
        max_kept_tokens: with 4 bytes each.
    """

    def __init__(self, column: pyarrow.ChunkedArray, tokenizer: PreTrainedTokenizerBase, max_kept_tokens: int = 2**26):
        super().__init__(tokenizer)
        self._column = column
        self._ids: dict[int, np.ndarray] = {}
        self._num_free = max_kept_tokens

    def __getitem__(self, row: int) -> np.ndarray:
        ids = self._ids.get(row)
        if ids is None:
            ids = self._encoded(row, self._column[row].as_py() or "")
            if len(ids) <= self._num_free:
                self._ids[row] = ids
                self._num_free -= len(ids)
        return ids

    def document_id(self, row: int) -> str:
        """The id of a row's whole text, see `document_id`."""
        return document_id(_as_text(self._column[row].as_py()))


class TokenizedTexts(_Tokenized):
    """Texts as integer arrays, each tokenized when it is first asked for and then kept.

    Args:
        texts: the texts, or lists of passages.
        tokenizer: makes the token ids.
    """

    def __init__(self, texts: Sequence[str | Sequence[str]], tokenizer: PreTrainedTokenizerBase):
        super().__init__(tokenizer)
        self._texts = list(texts)
        self._ids: list[np.ndarray | None] = [None] * len(self._texts)
        self._document_ids = [""] * len(self._texts)

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> np.ndarray:
        ids = self._ids[index]
        if ids is None:
            ids = self._ids[index] = self._encoded(index, self._texts[index])
            self._document_ids[index] = document_id(_as_text(self._texts[index]))
            self._texts[index] = ""
        return ids

    def document_id(self, index: int) -> str:
        """The id of a whole text, see `document_id`."""
        return self._document_ids[index] or document_id(_as_text(self._texts[index]))

    def window(self, length: int, rng: random.Random) -> list[int]:
        """A window of `length` tokens from a random offset of a random text (the whole text when it is shorter)."""
        ids = self[rng.randrange(len(self))]
        start = rng.randrange(max(1, len(ids) - length + 1))
        return ids[start : start + length].tolist()


class TextColumn:
    """A column of texts as token ids, by row.

    Args:
        column: the texts, or lists of passages.
        tokenizer: makes the token ids.
        is_shared: whether rows have texts in common, which are then tokenized once; else rows stay in their table
            until they are drawn.
    """

    def __init__(self, column: pyarrow.ChunkedArray, tokenizer: PreTrainedTokenizerBase, is_shared: bool):
        if not is_shared:
            self.texts: TokenizedRows | TokenizedTexts = TokenizedRows(column, tokenizer)
            self.text_of_row: np.ndarray = np.arange(len(column))
            return
        has_passages = is_list(column.type)
        if has_passages:
            between = _unused_mark(column)
            column = joined_lists(column, between)
        # Chunk by chunk, in a type that has room for more than 2 GiB.
        distinct = column.cast(pyarrow.large_string()).dictionary_encode().combine_chunks()
        texts = distinct.dictionary.to_pylist()
        self.texts = TokenizedTexts([text.split(between) for text in texts] if has_passages else texts, tokenizer)
        self.text_of_row = distinct.indices.to_numpy()

    def __getitem__(self, row: int) -> np.ndarray:
        return self.texts[self.text_of_row[row]]

    def passages(self, row: int) -> list[list[int]]:
        """Token ids of the passages of a row's context; of a text, its own."""
        return self.texts.passages(int(self.text_of_row[row]))

    def document_id(self, row: int) -> str:
        """The id of a row's whole text, see `document_id`."""
        return self.texts.document_id(int(self.text_of_row[row]))


def _unused_mark(column: pyarrow.ChunkedArray) -> str:
    """A character that stands in no passage: while contexts are looked up, it stands between theirs."""
    passages = pyarrow.compute.list_flatten(column)
    # From the one on that separates records.
    marks = map(chr, range(0x1E, 0xD800))
    compute = pyarrow.compute
    return next(mark for mark in marks if not compute.any(compute.match_substring(passages, mark)).as_py())


class FileSource:
    """Rows of a file or Hub source, their texts tokenized once however many questions share them.

    Without questions, rows stay in their table until they are drawn. Pickled, it is what it was made of, and reads the
    rows again.

    Args:
        source: where to read; not a generated one.
        data_dir: folder that local paths are relative to.
        seed: draws the rows that `max_samples` keeps.
        tokenizer: makes the token ids.

    Raises:
        ValueError: see `read_rows`; or `separate_passages` of contexts that are one text each.
    """

    def __init__(self, source: DataSource, data_dir: str | None, seed: int, tokenizer: PreTrainedTokenizerBase):
        self._made_of = (source, data_dir, seed, tokenizer)
        table = read_rows(source, data_dir, seed)
        self.source, self.num_rows = source, table.num_rows
        wanted = ("id", "question", "answers", "summary", "source_texts")
        self.columns = {name: table[name] for name in wanted if name in table.column_names}
        if {"finished", "truncated"} <= set(table.column_names):
            # Of `write-targets`.
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
        """Whether the text that a task reads of a row comes to the end of a document, see `ends_as_source`."""
        named = self.value("source_texts", row) if "source_texts" in self.columns else None
        return not named or ends_as_source(_as_text(self.value(self._column_of_task[task], row)), named)

    def target_ends(self, row: int) -> bool:
        """Whether a row's answer or summary is whole: a teacher's may have been cut at its limit."""
        return "finished" not in self.columns or self.value("finished", row) is not False

    def cut_rows(self, task: str) -> list[int]:
        """Rows whose text, as a task reads it, does not come to the end of a document."""
        rows = range(self.num_rows) if "source_texts" in self.columns else ()
        return [row for row in rows if not self.ends(task, row)]

    def identifier(self, row: int) -> str:
        return f"{self.source.label}/{self.value('id', row) if 'id' in self.columns else row}"
