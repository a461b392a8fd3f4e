# SPDX-License-Identifier: Apache-2.0
"""Documents compressed once, memories by id and answers from them, for LangChain, LlamaIndex and Haystack."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..corpus.corpus_compressor import CorpusCompressor
from ..corpus.memory_store import MemoryStore, import_lance
from ..modeling.compressor.context_compression_qa import LIKELIEST
from ..modeling.memory.compressed_context import CompressedContext

if TYPE_CHECKING:
    from ..modeling.compressor.context_compression_qa import ContextCompressionQAPipeline

# In a document's metadata: the id of its memory.
MEMORY_ID = "memory_id"
# What a pipeline that is read from a file finds again, with its model and memories.
_LIVE: weakref.WeakValueDictionary[str, DocumentMemories] = weakref.WeakValueDictionary()


class DocumentMemories:
    """A compressor, and the memories of the documents that it has read, by an id of text and ratio.

    The model is loaded when it is first needed; threads may share one object.

    ```python
    memories = DocumentMemories("me/compressor", ratio=4, store="pages.lance")
    ids = memories.compress(["One text.", "Another one."])
    memories.answer("What do the texts say?", ids)
    ```

    Args:
        model: Hub id or folder of a compressor, or a loaded pipeline.
        ratio: Context tokens per slot; the checkpoint's default if not given.
        store: A Lance data set that keeps memories, see [`MemoryStore.create`]; the process does if not given.
        options: Further arguments of [`CorpusCompressor`], such as `memory_dtype`, `device` and `dtype`.
    """

    def __init__(
        self,
        model: str | os.PathLike | ContextCompressionQAPipeline,
        ratio: int | None = None,
        store: str | os.PathLike | None = None,
        **options: Any,
    ):
        if store is not None:
            import_lance()
        self.compressor = CorpusCompressor(model, ratio, **options)
        self.place = None if store is None else os.fspath(store)
        self._options = {name: str(value) if name == "device" else value for name, value in options.items()}
        self._in_process: dict[str, CompressedContext] = {}
        self._store: MemoryStore | None = None
        # What loads, reads and writes takes its turn; questions need not wait while documents are compressed.
        self._lock, self._compressing = threading.RLock(), threading.Lock()
        if self.compressor.model is not None:
            _LIVE[json.dumps(self.to_dict(), sort_keys=True)] = self

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments, as JSON holds them; `ValueError` where the model is a loaded pipeline."""
        if self.compressor.model is None:
            raise ValueError("a loaded pipeline is not written down: give the model's folder or Hub id in its place")
        return {"model": self.compressor.model, "ratio": self.compressor.ratio, "store": self.place, **self._options}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DocumentMemories:
        """Return the object of some arguments that this process has already, with its memories, or a new one."""
        return _LIVE.get(json.dumps(dict(data), sort_keys=True)) or cls(**data)

    @property
    def pipe(self) -> ContextCompressionQAPipeline:
        """The pipeline, loaded when it is first asked for."""
        with self._lock:
            return self.compressor.pipe

    @property
    def store(self) -> MemoryStore | None:
        """Return the store, made at first use; nothing where memories are kept in the process."""
        with self._lock:
            if self._store is None and self.place is not None:
                self._store = MemoryStore.find_or_create(self.place, self.compressor.form)
            return self._store

    def compress(self, documents: Sequence[str | None], ids: Sequence[Any] | None = None) -> list[str | None]:
        """Return the ids of documents' memories; compress those that are not there yet, in common batches.

        Blank documents have no id. One of `ids` stays where the store has that text under it, at this ratio.
        """
        texts = [text or "" for text in documents]
        with self._compressing:
            names = self._kept(texts, [None] * len(texts) if ids is None else ids)
            wanted = {name: text for name, text in zip(names, texts, strict=True) if name is not None}
            known = self._contains(list(wanted))
            missing = [name for name, is_known in zip(wanted, known, strict=True) if not is_known]
            if missing:
                self.pipe.check_serves_memories("so that no document is compressed before its question is known")
            for rows, memory in self.compressor.compress([wanted[name] for name in missing]) if missing else ():
                if isinstance(memory, Exception):
                    raise memory
                added = [missing[row] for row in rows]
                with self._lock:
                    if self.store is None:
                        self._in_process.update((id_, memory.rows(row)) for row, id_ in enumerate(added))
                    else:
                        self.store.append(self.store.table_of(added, memory, [wanted[id_] for id_ in added]))
        return names

    def answer(
        self,
        messages: str | Sequence[Mapping[str, str]],
        ids: Sequence[str],
        stop: Sequence[str] | None = None,
        join: bool | str = LIKELIEST,
        **generate_kwargs: Any,
    ) -> str:
        """Ask each document alone, and return the likeliest answer; `ValueError` names ids without a memory.

        Args:
            messages: The question, or a conversation, messages with `role` and `content` whose last is the user's.
            ids: Of the memories that are read; without any, an empty document is.
            stop: Texts that end the answer, and are not part of it.
            join: True reads the memories together, in the order of their ids.
            generate_kwargs: For `generate`; greedily, and at most 64 new tokens if not said otherwise.
        """
        asked: dict[str, Any] = {"question" if isinstance(messages, str) else "messages": messages}
        if stop:
            asked |= {"stop_strings": list(stop), "tokenizer": self.pipe.tokenizer}
        asked |= {"memory": self._memory(ids), "join": join} if ids else {"context": ""}
        text = self.pipe(**asked, **generate_kwargs)["answer"]
        ends = [place for word in stop or () if (place := text.find(word)) >= 0]
        return text[: min(ends, default=None)].strip()

    def _kept(self, texts: list[str], ids: Sequence[Any]) -> list[str | None]:
        """Return for each text the id that it has, where that is still right, or its own; nothing for a blank one."""
        hashes = (hashlib.sha256(text.encode()).hexdigest()[:24] if text.strip() else None for text in texts)
        names = [f"{of_text}-{self._ratio}x" if of_text else None for of_text in hashes]
        asked = [id_ for id_, name in zip(ids, names, strict=True) if isinstance(id_, str) and name is not None]
        if self.store is None or not asked:
            return names
        there = [id_ for id_, is_there in zip(asked, self._contains(asked), strict=True) if is_there]
        rows = self.store.read(there, ["id", "text", "ratio"]).to_pylist() if there else []
        right = {(row["id"], row["text"]) for row in rows if self._ratio == row["ratio"]}
        return [
            id_ if isinstance(id_, str) and (id_, text) in right else name
            for id_, text, name in zip(ids, texts, names, strict=True)
        ]

    @property
    def _ratio(self) -> int:
        ratio = self.compressor.ratio
        return self.pipe.model.config.default_ratio if ratio is None else ratio

    def _contains(self, ids: list[str]) -> list[bool]:
        with self._lock:
            if self.store is None:
                return [id_ in self._in_process for id_ in ids]
            # Other processes add, delete, and take away the files of old versions.
            self.store.refresh()
            return self.store.contains(ids)

    def _memory(self, ids: Sequence[str]) -> CompressedContext:
        with self._lock:
            missing = [id_ for id_, there in zip(ids, self._contains(list(ids)), strict=True) if not there]
            if missing:
                place = "this process" if self.place is None else f"the store {self.place}"
                raise ValueError(f"{place} has no memories with the ids {missing}: compress their documents first")
            if self.store is None:
                memory = CompressedContext.stack([self._in_process[id_] for id_ in ids])
            else:
                memory = self.store.get(ids)
        return memory.to(self.pipe.device, self.pipe.model.dtype)


def memory_ids(texts: Iterable[str | None], metadata: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the ids in documents' metadata; `ValueError` for a document with a text and without an id."""
    ids = []
    for text, described in zip(texts, metadata, strict=True):
        if isinstance(described.get(MEMORY_ID), str):
            ids.append(described[MEMORY_ID])
        elif text and text.strip():
            raise ValueError(f"a document without a {MEMORY_ID!r} in its metadata: compress it first, {text[:60]!r}")
    return ids


def with_memory_id(metadata: Mapping[str, Any], memory_id: str | None) -> dict[str, Any]:
    """Metadata of a document with the id of its memory, or without one where it has none."""
    others = {name: value for name, value in metadata.items() if name != MEMORY_ID}
    return others if memory_id is None else {**others, MEMORY_ID: memory_id}
