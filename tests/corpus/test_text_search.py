# SPDX-License-Identifier: Apache-2.0
"""BM25 finds the memories to read."""

import pytest
from random_memories import make_memory

from context_compressors import MemoryStore
from context_compressors.corpus.text_search import BM25Search

TEXTS = {
    "bees": "Nora keeps eleven hives of bees behind the tower.",
    "mill": "The mill by the river burned down, and Elin built it again.",
    "none": None,
    "pears": "The orchard has forty pear trees and one plum tree.",
}


@pytest.fixture
def store(tmp_path):
    memory = make_memory((2,) * len(TEXTS))
    store = MemoryStore.create(tmp_path / "s.lance", memory)
    store.add(list(TEXTS), memory, list(TEXTS.values()))
    return store


def test_bm25_finds_the_texts_that_share_words_and_no_others(store):
    search = BM25Search(store)
    assert [name for name, _ in search.search("Who built the mill by the river?")] == ["mill"]
    ((name, score),) = search.search("pear trees", k=1)
    assert (name, score > 0) == ("pears", True)
    assert search.search("Zebras?") == []
    store.delete(["bees", "mill", "pears"])
    with pytest.raises(ValueError, match="no text with a word in it"):
        BM25Search(store)
