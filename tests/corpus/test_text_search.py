# SPDX-License-Identifier: Apache-2.0
"""What finds the memories to read: BM25, one vector for each text, DeCAL's several."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from context_compressors import DeCALConfig, DeCALForRetrieval, MemoryStore, chamfer
from context_compressors.corpus.text_search import BM25Search, VectorSearch
from context_compressors.data.sources import DataSource
from context_compressors.training.tokenizer import train_tokenizer

sys.path.append(str(Path(__file__).parents[1] / "modeling"))
from random_memories import make_memory

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


class Letters:
    """Counts of letters, under the names of sentence-transformers' model."""

    def encode_document(self, texts, **options):
        return np.array([[text.lower().count(letter) for letter in "abcdefghijklmnop"] for text in texts], np.float32)

    encode_query = encode_document


def test_vectors_follow_the_store_and_are_found_by_their_cosine(store, tmp_path):
    search = VectorSearch.with_sentence_transformer(tmp_path / "v.lance", Letters())
    with pytest.raises(ValueError, match="call `update` first"):
        search.search("bees")
    assert (search.update(store), search.update(store)) == (3, 0)
    found = search.search(TEXTS["mill"], k=3)
    assert found[0][0] == "mill"
    vectors = Letters().encode_document([TEXTS["mill"], TEXTS[found[1][0]]])
    cosine = vectors[0] @ vectors[1] / np.linalg.norm(vectors[0]) / np.linalg.norm(vectors[1])
    assert [score for _, score in found[:2]] == pytest.approx([1, cosine], abs=1e-5)
    store.delete(["mill"])
    store.add(["more"], make_memory((2,)), ["A mill."])
    assert search.update(store) == 1
    assert {name for name, _ in search.search("mill", k=9)} == {"bees", "pears", "more"}
    # The same id with another text.
    store.delete(["more"])
    store.add(["more"], make_memory((2,)), ["A ferry."])
    assert (search.update(store), search.update(store)) == (1, 0)
    ((name, score),) = search.search("A ferry.", k=1)
    assert (name, score) == ("more", pytest.approx(1, abs=1e-5))
    assert len(search.search("mill", k=9)) == 3


def test_several_vectors_of_a_text_find_what_their_chamfer_similarity_ranks_first_exactly(store, tmp_path):
    torch.manual_seed(0)
    tokenizer = train_tokenizer([DataSource(generated=True, tasks=("reconstruction",))], vocab_size=300, num_texts=10)
    shape = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    config = DeCALConfig(decoder_config=shape | {"vocab_size": len(tokenizer)}, compression_ratios=(2, 3))
    model = DeCALForRetrieval(config).eval()

    @torch.no_grad()
    def encode(texts):
        rows = [tokenizer(text, return_tensors="pt") for text in texts]
        return [model.encode(row["input_ids"], row["attention_mask"], 2).vectors[0].numpy() for row in rows]

    search = VectorSearch(tmp_path / "v.lance", encode, encode)
    assert search.update(store) == 3
    found = dict(search.search("How many trees?", k=3))
    for name, score in found.items():
        sides = []
        for text in ("How many trees?", TEXTS[name]):
            row = tokenizer(text, return_tensors="pt")
            with torch.no_grad():
                sides += model.encode(row["input_ids"], row["attention_mask"], 2).to_tuple()
        assert score == pytest.approx(float(chamfer(*sides)), abs=1e-4)
    assert list(found.values()) == sorted(found.values(), reverse=True)
    assert set(found) == {"bees", "mill", "pears"}
