# SPDX-License-Identifier: Apache-2.0
"""Find the memories of a store to read for a question, by BM25 over its texts."""

from __future__ import annotations

import numpy as np

from ..evaluation.alternatives import BM25Index
from .memory_store import MemoryStore


class BM25Search:
    """BM25 over the texts that a store has now, with `bm25s`, in memory; `ValueError` for a store without words."""

    def __init__(self, store: MemoryStore):
        texts = {name: text for name, text in store.texts().items() if text}
        self._ids, self._index = list(texts), BM25Index(list(texts.values()))
        if not self._index.has_words:
            raise ValueError("the store has no text with a word in it: keep texts when you add memories")

    def search(self, question: str, k: int = 5) -> list[tuple[str, float]]:
        """Return the ids and scores of the `k` texts that share words with a question and fit it best."""
        scores = self._index.scores(question)
        best = np.argsort(-scores, kind="stable")[:k]
        return [(self._ids[place], float(scores[place])) for place in best if scores[place] > 0]
