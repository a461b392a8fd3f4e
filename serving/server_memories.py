# SPDX-License-Identifier: Apache-2.0
"""A server's memories by id, in its process up to some bytes, or in a store."""

from __future__ import annotations

import datetime
import logging
import threading
from collections.abc import Sequence

import pyarrow

from ..corpus.memory_columns import in_store_dtype, memory_of_columns
from ..corpus.memory_store import MemoryStore
from ..modeling.memory.compressed_context import CompressedContext

logger = logging.getLogger(__name__)

# Versions of a store after which it is compacted, how old they are then kept, and rows of a file that is left alone.
_COMPACTED_EVERY = 256
_KEPT = datetime.timedelta(minutes=10)
_ROWS_OF_A_FILE = 1024


class ProcessMemories:
    """Memories that last as long as the process; where there is no room, the oldest go."""

    def __init__(self, max_bytes: int):
        self.max_bytes, self.nbytes = max_bytes, 0
        # In the order in which they were made.
        self._memories: dict[str, tuple[CompressedContext, str]] = {}
        self._lock = threading.Lock()

    @property
    def absence(self) -> str:
        """Return the reasons why an id may be unknown."""
        return (
            f"it was never made, was deleted, or was the oldest when the {self.max_bytes:,} bytes for memories were "
            "full; a server with --store forgets none"
        )

    def add(
        self, ids: Sequence[str], rows: Sequence[CompressedContext], texts: Sequence[str]
    ) -> Sequence[CompressedContext]:
        """Keep memories of one row each; they come back as they are kept."""
        kept = list(zip(rows, texts, strict=True))
        if (size := sum(map(_size, kept))) > self.max_bytes:
            raise ValueError(f"{len(ids)} memories of {size:,} bytes: this server keeps {self.max_bytes:,} in all")
        with self._lock:
            self._memories.update(zip(ids, kept, strict=True))
            self.nbytes += size
            while self.nbytes > self.max_bytes:
                self.nbytes -= _size(self._memories.pop(next(iter(self._memories))))
        return rows

    def get(self, ids: Sequence[str]) -> dict[str, CompressedContext]:
        """Return the memories that are there, of one row each."""
        with self._lock:
            return {name: self._memories[name][0] for name in ids if name in self._memories}

    def text(self, memory_id: str) -> str | None:
        """Return the text of a memory."""
        with self._lock:
            return self._memories[memory_id][1] if memory_id in self._memories else None

    def delete(self, memory_id: str) -> None:
        """Delete a memory, if it is there."""
        with self._lock:
            if memory_id in self._memories:
                self.nbytes -= _size(self._memories.pop(memory_id))


def _size(kept: tuple[CompressedContext, str]) -> int:
    """Bytes of a memory and its text."""
    return kept[0].nbytes + len(kept[1].encode())


class StoredMemories:
    """Memories of one model in a store, which other processes may write to meanwhile."""

    absence = "it is not in the store: it was never made, or was deleted"
    # None of them is in the process.
    nbytes = 0

    def __init__(self, store: MemoryStore):
        self.store = store
        # A store changes the version that it reads.
        self._lock = threading.Lock()
        self._compact_at = _next_compaction(store)

    def add(
        self, ids: Sequence[str], rows: Sequence[CompressedContext], texts: Sequence[str]
    ) -> Sequence[CompressedContext]:
        """Keep memories of one row each, as one new version; they come back as they are kept."""
        dtype = self.store.form.dtype
        rows = [in_store_dtype(row, dtype) for row in rows]
        tables = [self.store.table_of([name], row, [text]) for name, row, text in zip(ids, rows, texts, strict=True)]
        with self._lock:
            # Each id is new.
            self.store.append(pyarrow.concat_tables(tables))
            self._compact()
        return rows

    def get(self, ids: Sequence[str]) -> dict[str, CompressedContext]:
        """Return the memories that are there, of one row each, in the store's type."""
        with self._lock:
            self.store.refresh()
            there = [name for name, is_there in zip(ids, self.store.contains(ids), strict=True) if is_there]
            if not there:
                return {}
            table = self.store.read(there)
        # Not together: each would be padded to the longest.
        return {name: memory_of_columns(table.take([row]), self.store.form) for row, name in enumerate(there)}

    def text(self, memory_id: str) -> str | None:
        """Return the text of a memory, or `None` where the store has none."""
        with self._lock:
            return self.store.texts([memory_id])[memory_id]

    def delete(self, memory_id: str) -> None:
        """Delete a memory."""
        with self._lock:
            self.store.delete([memory_id])
            self._compact()

    def _compact(self) -> None:
        """Join the small files of many versions, from time to time: each version names all files."""
        if self.store.version < self._compact_at:
            return
        try:
            self.store.compact(_KEPT, _ROWS_OF_A_FILE)
        except OSError as error:
            # Another process has changed the same files meanwhile.
            logger.warning("the store is compacted later: %s", error)
            self.store.refresh()
        self._compact_at = _next_compaction(self.store)


def _next_compaction(store: MemoryStore) -> int:
    """A version; counted from 0, so that a server that is often started anew comes to it, too."""
    return (store.version // _COMPACTED_EVERY + 1) * _COMPACTED_EVERY
