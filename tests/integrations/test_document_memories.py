# SPDX-License-Identifier: Apache-2.0
"""Documents compressed once and memories by id, which the modules for other frameworks share."""

import datetime
import json
import threading

import pytest

from context_compressors import MemoryStore
from context_compressors.corpus.corpus_compressor import CorpusCompressor
from context_compressors.integrations.document_memories import DocumentMemories

TEXTS = ["Nora Lind keeps bees.", "The mill burned down in 1902.", "The ferry runs twice a day."]
QUESTION, LONG = "Who keeps bees?", {"max_new_tokens": 12, "min_new_tokens": 12}


@pytest.fixture
def folder(small_checkpoints):
    return small_checkpoints / "mean_pooling"


def count_compressed(memories, monkeypatch):
    """The texts that are compressed from now on."""
    compressed, compress = [], memories.compressor.compress

    def counting(texts):
        compressed.extend(texts)
        return compress(texts)

    monkeypatch.setattr(memories.compressor, "compress", counting)
    return compressed


@pytest.mark.slow
def test_documents_are_compressed_once_and_again_when_they_change(folder, tmp_path, monkeypatch):
    place = tmp_path / "s.lance"
    for options in ({}, {"store": place}):
        memories = DocumentMemories(folder, 4, device="cpu", **options)
        pipe, compressed = memories.pipe, count_compressed(memories, monkeypatch)
        ids = memories.compress([*TEXTS, "", None, " \n", TEXTS[0]])
        assert ids[3:] == [None, None, None, ids[0]]
        assert sorted(compressed) == sorted(TEXTS)
        assert memories.compress(TEXTS, [None, *ids[1:3]]) == ids[:3] == json.loads(json.dumps(ids[:3]))
        assert len(compressed) == 3
        # One that has changed since is another document, whatever id it carries.
        changed, kept = memories.compress([TEXTS[0].upper(), TEXTS[1]], ids[:2])
        assert (changed not in ids, kept, compressed[3:]) == (True, ids[1], [TEXTS[0].upper()])
        # Threads that find the same documents at once.
        threads = [
            threading.Thread(target=memories.compress, args=([f"{text} So." for text in TEXTS],)) for _ in "123"
        ]
        _ = [thread.start() for thread in threads], [thread.join() for thread in threads]
        assert len(compressed) == 7
        # The pipeline's own answers, from the same documents in the same order.
        for order in ([0, 2, 1], [1]):
            rows = [pipe.compress(TEXTS[row], ratio=4).quantize("int8").dequantize() for row in order]
            for join in (True, "likeliest"):
                answer = pipe(QUESTION, memory=rows, join=join, **LONG)["answer"]
                assert memories.answer(QUESTION, [ids[row] for row in order], join=join, **LONG) == answer != ""
            assert memories.answer(QUESTION, [ids[row] for row in order], **LONG) == answer
        assert memories.answer(QUESTION, [], **LONG) == pipe(QUESTION, context="", **LONG)["answer"]
        with pytest.raises(ValueError, match=r"has no memories with the ids \['x'\]: compress their documents first"):
            memories.answer(QUESTION, [ids[0], "x"])
        with pytest.raises(ValueError, match="surrogates not allowed"):
            memories.compress(["half \ud800"])
    # Another process adds to the store, under ids of its own, and finds what was added here.
    store = MemoryStore.open(place)
    store.add(["page-1"], pipe.compress("A page.", ratio=4), texts=["A page."])
    store.add(["page-2"], pipe.compress("A page.", ratio=2), texts=["A page."])
    other = DocumentMemories(pipe, 4, place)
    compressed = count_compressed(other, monkeypatch)
    assert other.compress(["A page.", TEXTS[0]], ["page-1", None]) == ["page-1", ids[0]]
    assert compressed == []
    assert other.compress(["A page."], ["page-2"]) != ["page-2"], "it is kept at another ratio"
    assert memories.answer(QUESTION, ["page-1"], **LONG) == other.answer(QUESTION, ["page-1"], **LONG)
    with pytest.raises(ValueError, match="memories of dtype 'int8', not of 'int4'"):
        DocumentMemories(pipe, 4, place, memory_dtype="int4").compress(TEXTS)
    written = memories.to_dict()
    assert DocumentMemories.from_dict(json.loads(json.dumps(written))) is memories
    assert DocumentMemories.from_dict({**written, "ratio": 2}) is not memories
    with pytest.raises(ValueError, match="a loaded pipeline is not written down"):
        DocumentMemories(pipe).to_dict()


@pytest.mark.slow
def test_others_compact_a_shared_store_and_delete_from_it(folder, tmp_path):
    memories = DocumentMemories(folder, 4, store=tmp_path / "s.lance", device="cpu")
    ids = [name for text in TEXTS for name in memories.compress([text])]
    answer = memories.answer(QUESTION, ids, **LONG)
    other = MemoryStore.open(tmp_path / "s.lance")
    other.compact(keep_versions=datetime.timedelta(0))
    assert memories.answer(QUESTION, ids, **LONG) == answer
    other.compact(keep_versions=datetime.timedelta(0))
    assert memories.compress(TEXTS) == ids
    other.delete(ids[:1])
    with pytest.raises(ValueError, match="has no memories with the ids"):
        memories.answer(QUESTION, ids)


@pytest.mark.slow
def test_an_answer_ends_before_the_first_stop(folder):
    memories = DocumentMemories(CorpusCompressor(folder, device="cpu").pipe, 4)
    ids = memories.compress(TEXTS)
    answer = memories.answer(QUESTION, ids, join=True, **LONG)
    for size in (1, 3):
        stop = answer[len(answer) // 2 :][:size]
        expected = answer[: answer.index(stop)].rstrip()
        assert memories.answer(QUESTION, ids, ["no such end", stop], join=True, **LONG) == expected
