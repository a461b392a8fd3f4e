# SPDX-License-Identifier: Apache-2.0
"""Find the memories of a store to read for a question, by BM25 over its texts."""

from __future__ import annotations

import numpy as np

from .memory_store import MemoryStore


class BM25Search:
    """BM25 over the texts that a store has now, with `bm25s`, in memory; `ValueError` for a store without words."""

    def __init__(self, store: MemoryStore):
        import bm25s

        texts = {name: text for name, text in store.texts().items() if text}
        words = bm25s.tokenize(list(texts.values()), stopwords="en", return_ids=False, show_progress=False)
        if not any(words):
            raise ValueError("the store has no text with a word in it: keep texts when you add memories")
        self._ids, self._index = list(texts), bm25s.BM25()
        self._index.index(words, show_progress=False)

    def search(self, question: str, k: int = 5) -> list[tuple[str, float]]:
        """Return the ids and scores of the `k` texts that share words with a question and fit it best."""
        import bm25s

        (words,) = bm25s.tokenize([question], stopwords="en", return_ids=False, show_progress=False)
        known = [word for word in words if word in self._index.vocab_dict]
        scores = self._index.get_scores(known) if known else np.zeros(len(self._ids))
        best = np.argsort(-scores, kind="stable")[:k]
        return [(self._ids[place], float(scores[place])) for place in best if scores[place] > 0]
