# SPDX-License-Identifier: Apache-2.0
"""A store gives back what was put in, in every form, whoever else writes and whoever is killed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from random_memories import assert_same, make_memory

from context_compressors import MemoryStore
from context_compressors.corpus.memory_columns import MemoryForm
from context_compressors.modeling.memory.carriers import map_carrier, scale_tensors

IDS = ["a", "it's", "empty", "d/e"]


def stored(memory, dtype):
    """The memory as a store keeps it: what stands at pads is not kept."""
    if dtype != "float16":
        return memory.quantize(dtype)
    real = memory.attention_mask.bool()
    real = real[:, None, :, None] if memory.carrier == "key_values" else real[:, :, None]
    return replace(memory, **map_carrier(memory, lambda tensor: tensor.half().where(real, 0)))


def assert_equal(left, right):
    assert_same(left, right)
    for ours, theirs in zip(scale_tensors(left), scale_tensors(right), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", ["int8", "int4", "int2", "float16"])
@pytest.mark.parametrize("carrier", ["embeddings", "key_values"])
def test_memories_come_back_by_id_as_they_were_kept(carrier, dtype, tmp_path):
    memory = make_memory((3, 40, 0, 5), carrier=carrier, layout="enhanced", ratio=torch.tensor([4, 4, 4, 2]))
    memory = replace(memory, position_ids=(memory.position_ids + 7) * memory.attention_mask)
    store = MemoryStore.create(tmp_path / "s.lance", memory, dtype)
    texts, metadata = ["x", None, "z", ""], [{"page": 1}, None, {}, {"ä": [1.5]}]
    store.add(IDS, memory, texts, metadata)
    expected = stored(memory, dtype)
    assert_equal(store.get(IDS), expected)
    assert_equal(store.get(["d/e", "a", "d/e"]), expected.rows([3, 0, 3]))
    assert store.texts(IDS) == dict(zip(IDS, texts, strict=True))
    described = [None if value is None else json.dumps(value, ensure_ascii=False) for value in metadata]
    assert store.read(IDS[::-1], ["metadata"])["metadata"].to_pylist() == described[::-1]


def test_a_damaged_memory_is_named(tmp_path):
    memory = make_memory((3, 5))
    store = MemoryStore.create(tmp_path / "s.lance", memory)
    table = store.table_of(["a", "b"], memory, ["honey", "mill"])
    other = table["text"].to_pylist()
    store.append(table.set_column(table.column_names.index("text"), "text", [[other[0], "Mill"]]))
    with pytest.raises(ValueError, match=r"the store's ids 'b' are damaged: compress them anew"):
        store.verify()
    store.delete(["b"])
    store.verify()


def test_versions_stay_readable_until_they_are_compacted_and_a_reader_keeps_its_own(tmp_path):
    memory = make_memory((3, 5))
    store = MemoryStore.create(tmp_path / "s.lance", memory, "float16")
    store.add(["a", "b"], memory)
    reader = MemoryStore.open(tmp_path / "s.lance", model_id=memory.model_id)
    store.add(["c"], memory.rows(0))
    store.delete(["a"])
    assert (sorted(store.ids()), sorted(reader.ids())) == (["b", "c"], ["a", "b"])
    assert_same(reader.get(["a"]), stored(memory, "float16").rows(0))
    store.compact()
    assert_same(store.get(["c", "b"]), stored(memory, "float16"))
    store.add(["a"], memory.rows(1))
    reader.refresh()
    assert (len(reader), reader.contains(["a", "x", "c"])) == (3, [True, False, True])


def test_of_memories_one_of_which_another_process_adds_meanwhile_none_is_added(tmp_path, monkeypatch):
    memory = make_memory((3, 5))
    store = MemoryStore.create(tmp_path / "s.lance", memory)
    refresh = MemoryStore.refresh

    def others_are_faster(self):
        refresh(self)
        monkeypatch.setattr(MemoryStore, "refresh", refresh)
        MemoryStore.open(tmp_path / "s.lance").add(["x"], memory.rows(0), ["theirs"])

    monkeypatch.setattr(MemoryStore, "refresh", others_are_faster)
    with pytest.raises(ValueError, match="the store has ids 'x' already"):
        store.add(["x", "y"], memory, ["ours", "ours"])
    assert store.texts() == {"x": "theirs"}


def test_what_is_wrong_is_named(tmp_path):
    memory = make_memory((3, 5))
    store = MemoryStore.create(tmp_path / "s.lance", memory)
    store.add(["a", "b"], memory)
    assert store.texts([]) == {}
    other = replace(memory, model_id="other")
    infinite = replace(memory, embeddings=memory.embeddings / 0)
    wrong = {
        "the store has no ids 'x', 'y'": lambda: store.get(["a", "x", "y"]),
        "the store has no ids 'z'": lambda: store.delete(["a", "z"]),
        "the store has ids 'a' already": lambda: store.add(["a", "c"], memory),
        "ids 'c' stand several times": lambda: store.add(["c", "c"], memory),
        "of the model 'me/compressor', not of 'other'": lambda: store.add(["c", "d"], other),
        "store of the model 'me/compressor', not of 'o'": lambda: MemoryStore.open(tmp_path / "s.lance", "o"),
        "slots of shape": lambda: store.add(["c", "d"], make_memory((3, 5), carrier="key_values")),
        "must be finite": lambda: store.add(["c", "d"], infinite),
        "there is a store": lambda: MemoryStore.create(tmp_path / "s.lance", memory),
        "there is no store": lambda: MemoryStore.open(tmp_path / "t.lance"),
        "the store has format version 1, this code reads version 3": lambda: MemoryForm.from_json('{"dtype": "int8"}'),
        "a memory without `model_id`": lambda: MemoryStore.create(tmp_path / "t.lance", replace(memory, model_id="")),
    }
    for message, call in wrong.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            call()
    assert (sorted(store.ids()), store.version) == (["a", "b"], 2)


WRITER = """
import sys
sys.path.append(sys.argv[2])
from random_memories import make_memory
from context_compressors import MemoryStore
from context_compressors.corpus.memory_columns import MemoryForm

store = MemoryStore.open(sys.argv[1])
for number in range(100_000):
    store.append(store.table_of([f"{number}-{row}" for row in range(8)], make_memory((4,) * 8), ["text"] * 8))
    print(number, flush=True)
"""


@pytest.mark.release
@pytest.mark.slow
def test_a_killed_writer_leaves_whole_versions_and_two_writers_keep_each_id_once(tmp_path):
    path = tmp_path / "s.lance"
    MemoryStore.create(path, make_memory((4,)), "float16")
    helpers = os.path.join(os.path.dirname(__file__), "..", "modeling")
    command = [sys.executable, "-c", WRITER, str(path), helpers]
    # Both write the same ids.
    writers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        for _ in range(5):
            for writer in writers:
                writer.stdout.readline()
            ids = list(MemoryStore.open(path).ids())
            assert len(ids) == len(set(ids))
            assert len(ids) % 8 == 0, "a reader sees whole versions"
        time.sleep(0.05)
    finally:
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
    store = MemoryStore.open(path)
    ids = list(store.ids())
    assert len(ids) == len(set(ids)) >= 40
    assert len(ids) % 8 == 0
    assert store.get(ids[::5]).validate(finite=True) is None
    store.add(["after"], make_memory((4,)))
    store.compact()
    assert len(store) == len(ids) + 1
