# SPDX-License-Identifier: Apache-2.0
"""Which memories of a store to read for a question: by BM25 over its texts, or by vectors in a Lance data set."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow

from .memory_store import MemoryStore, import_lance

# Texts that are encoded, and written, at once.
_TEXTS_AT_ONCE = 1024
Encode = Callable[[list[str]], Sequence[np.ndarray]]


class BM25Search:
    """BM25 over the texts of a store, with `bm25s`, in memory.

    Args:
        store: its texts as they are now; rows without one are not found.

    Raises:
        ValueError: no row has a text with a word in it.
    """

    def __init__(self, store: MemoryStore):
        import bm25s

        texts = {name: text for name, text in store.texts().items() if text}
        words = bm25s.tokenize(list(texts.values()), stopwords="en", return_ids=False, show_progress=False)
        if not any(words):
            raise ValueError("the store has no text with a word in it: keep texts when you add memories")
        self._ids, self._index = list(texts), bm25s.BM25()
        self._index.index(words, show_progress=False)

    def search(self, question: str, k: int = 5) -> list[tuple[str, float]]:
        """The ids of the `k` texts that fit a question best, the best first, and their scores.

        Texts without any of its words are left out.
        """
        import bm25s

        (words,) = bm25s.tokenize([question], stopwords="en", return_ids=False, show_progress=False)
        known = [word for word in words if word in self._index.vocab_dict]
        scores = self._index.get_scores(known) if known else np.zeros(len(self._ids))
        best = np.argsort(-scores, kind="stable")[:k]
        return [(self._ids[place], float(scores[place])) for place in best if scores[place] > 0]


class VectorSearch:
    """Vectors of a store's texts by id, one or several for each text, in a Lance data set that is searched there.

    A question's score with a text is their cosine, or, of several vectors, the sum over the question's vectors of the
    largest cosine with one of the text's (`chamfer`). The search is exact.

    ```python
    search = VectorSearch.with_sentence_transformer("pages.vectors.lance", SentenceTransformer(name))
    search.update(store)
    ids = [name for name, _ in search.search("Who wrote it?")]
    ```

    Args:
        path: of the data set, which `update` makes if it is not there.
        encode_documents: from texts to an array of each: `(vector_size,)`, or `(num_vectors, vector_size)`. All the
            vectors are of one kind; a text without any is not found.
        encode_questions: the same for questions.
    """

    def __init__(self, path: str | os.PathLike, encode_documents: Encode, encode_questions: Encode):
        self._path, self._encode_documents, self._encode_questions = (
            os.fspath(path),
            encode_documents,
            encode_questions,
        )

    @classmethod
    def with_sentence_transformer(cls, path: str | os.PathLike, model: Any, batch_size: int = 32) -> VectorSearch:
        """A search by one vector for each text, of any model of `sentence-transformers` (5.0 or newer)."""
        return cls(
            path,
            lambda texts: model.encode_document(texts, batch_size=batch_size, show_progress_bar=False),
            lambda texts: model.encode_query(texts, batch_size=batch_size, show_progress_bar=False),
        )

    def update(self, store: MemoryStore) -> int:
        """Follow a store: encode the texts that are new or have changed, take out what it has no longer."""
        dataset, have = self._find(), {}
        if dataset is not None:
            table = dataset.to_table(columns=["id", "text_hash"])
            have = dict(zip(table["id"].to_pylist(), table["text_hash"].to_pylist(), strict=True))
        wanted = {name: _hash(text) for name, text in store.each_text() if text}
        gone = sorted(name for name, found in have.items() if wanted.get(name) != found)
        for start in range(0, len(gone), _TEXTS_AT_ONCE):
            quoted = ("'" + name.replace("'", "''") + "'" for name in gone[start : start + _TEXTS_AT_ONCE])
            dataset.delete(f"id IN ({', '.join(quoted)})")
        new, num_encoded = [name for name, found in wanted.items() if have.get(name) != found], 0
        for start in range(0, len(new), _TEXTS_AT_ONCE):
            texts = {name: text for name, text in store.texts(new[start : start + _TEXTS_AT_ONCE]).items() if text}
            table = _vector_table(texts, self._encode_documents(list(texts.values())))
            if table is not None:
                num_encoded += len(table)
                import_lance().write_dataset(table, self._path, mode="append" if self._find() else "create")
        return num_encoded

    def search(self, question: str, k: int = 5) -> list[tuple[str, float]]:
        """The ids of the `k` texts that fit a question best, the best first, and their scores."""
        dataset = self._find()
        if dataset is None:
            raise ValueError(f"there are no vectors in {self._path}: call `update` first")
        (vectors,) = self._encode_questions([question])
        if not np.size(vectors):
            return []
        asked = np.asarray(vectors, np.float32)
        nearest = {"column": "vector", "q": asked, "k": k, "metric": "cosine"}
        found = dataset.to_table(columns=["id", "_distance"], nearest=nearest)
        # Each vector of a question is at a distance of 1 - cosine.
        num_vectors = len(asked) if asked.ndim == 2 else 1
        scores = [num_vectors - distance for distance in found["_distance"].to_pylist()]
        return list(zip(found["id"].to_pylist(), scores, strict=True))

    def _find(self) -> Any:
        lance = import_lance()
        try:
            return lance.dataset(self._path)
        except ValueError as error:
            if "not found" not in str(error):
                raise
            return None


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _vector_table(texts: dict[str, str], vectors: Sequence[np.ndarray]) -> pyarrow.Table | None:
    """Ids, hashes and vectors of the texts that have some; nothing where none has."""
    rows = [np.asarray(row, np.float32) for row in vectors]
    kept = [place for place, row in enumerate(rows) if row.size]
    rows = [rows[place] for place in kept]
    if not rows:
        return None
    flat = np.concatenate([row.reshape(-1) for row in rows])
    column = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(flat), rows[0].shape[-1])
    if rows[0].ndim == 2:
        offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int32)
        column = pyarrow.ListArray.from_arrays(pyarrow.array(offsets), column)
    ids = list(texts)
    names = [ids[place] for place in kept]
    return pyarrow.table({"id": names, "text_hash": [_hash(texts[name]) for name in names], "vector": column})
