# SPDX-License-Identifier: Apache-2.0
"""Where a server keeps memories by id: in its process, up to some bytes, or in a store."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

from ..corpus.memory_store import MemoryStore
from ..modeling.memory.compressed_context import CompressedContext
from ..modeling.memory.memory_quantization import QUANTIZATIONS


class ProcessMemories:
    """Memories that last as long as the process; where there is no room, the oldest go.

    Args:
        max_bytes: of all slots together.
    """

    def __init__(self, max_bytes: int):
        self.max_bytes, self.nbytes = max_bytes, 0
        # In the order in which they were made.
        self._memories: dict[str, CompressedContext] = {}
        self._lock = threading.Lock()

    @property
    def absence(self) -> str:
        """Why an id may be unknown."""
        return (
            f"it was never made, was deleted, or was the oldest when the {self.max_bytes:,} bytes for memories were "
            "full; a server with --store forgets none"
        )

    def add(self, ids: Sequence[str], memory: CompressedContext, texts: Sequence[str]) -> list[CompressedContext]:
        """Keep the rows of a memory; they come back as they are kept.

        Raises:
            ValueError: they alone are larger than all that is kept.
        """
        rows = [_alone(memory.rows(row).to("cpu")) for row in range(len(ids))]
        if (size := sum(row.nbytes for row in rows)) > self.max_bytes:
            raise ValueError(f"{len(ids)} memories of {size:,} bytes: this server keeps {self.max_bytes:,} in all")
        with self._lock:
            self._memories.update(zip(ids, rows, strict=True))
            self.nbytes += size
            while self.nbytes > self.max_bytes:
                self.nbytes -= self._memories.pop(next(iter(self._memories))).nbytes
        return rows

    def get(self, memory_id: str) -> CompressedContext | None:
        """A memory of one row, or nothing."""
        with self._lock:
            return self._memories.get(memory_id)

    def delete(self, memory_id: str) -> bool:
        """Whether there was such a memory, which is gone now."""
        with self._lock:
            memory = self._memories.pop(memory_id, None)
            self.nbytes -= 0 if memory is None else memory.nbytes
            return memory is not None


class StoredMemories:
    """Memories of one model in a store, which other processes may write to meanwhile.

    Args:
        store: where.
        keeps_texts: whether what was compressed is kept beside its memory.
    """

    absence = "it is not in the store: it was never made, or was deleted"
    # None of them is in the process.
    nbytes = 0

    def __init__(self, store: MemoryStore, keeps_texts: bool = True):
        self.store, self.keeps_texts = store, keeps_texts
        # A store changes the version that it reads.
        self._lock = threading.Lock()

    def add(self, ids: Sequence[str], memory: CompressedContext, texts: Sequence[str]) -> list[CompressedContext]:
        """Keep the rows of a memory; they come back as they are kept."""
        dtype = self.store.form.dtype
        memory = memory.quantize(dtype) if dtype in QUANTIZATIONS else memory.to(dtype=dtype)
        with self._lock:
            self.store.add(ids, memory, texts=texts if self.keeps_texts else None)
        return [memory.rows(row) for row in range(len(ids))]

    def get(self, memory_id: str) -> CompressedContext | None:
        """A memory of one row in the store's type, or nothing."""
        with self._lock:
            return self.store.get([memory_id]) if self._has(memory_id) else None

    def delete(self, memory_id: str) -> bool:
        """Whether there was such a memory, which is gone now."""
        with self._lock:
            found = self._has(memory_id)
            if found:
                self.store.delete([memory_id])
            return found

    def _has(self, memory_id: str) -> bool:
        self.store.refresh()
        return self.store.contains([memory_id])[0]


def _alone(memory: CompressedContext) -> CompressedContext:
    """A row of a batch in tensors of its own: it would hold the padding of the whole batch's longest row."""
    if memory.embeddings is not None:
        return replace(memory, check=False, embeddings=memory.embeddings.clone())
    pairs = tuple((keys.clone(), values.clone()) for keys, values in memory.key_values or ())
    return replace(memory, check=False, key_values=pairs)
