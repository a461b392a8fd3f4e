# SPDX-License-Identifier: Apache-2.0
"""Compressed contexts: their rows, types and sizes, and fields that do not fit."""

from dataclasses import replace

import pytest
import torch
from random_memories import HEAD_DIM, HIDDEN_SIZE, NUM_HEADS, NUM_LAYERS, assert_same, make_memory, tensors_of


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (1, [1]),
        (-1, [3]),
        (slice(0, 2), [0, 1]),
        (slice(None, None, -1), [3, 2, 1, 0]),
        ([2, 0, 0], [2, 0, 0]),
        ([], []),
        (range(1, 3), [1, 2]),
        (torch.tensor([3, 2]), [3, 2]),
        (torch.tensor(2), [2]),
        (torch.tensor([True, False, False, True]), [0, 3]),
    ],
)
def test_rows_are_trimmed_to_their_real_slots(index, expected):
    for carrier in ("embeddings", "key_values"):
        memory = make_memory((3, 5, 0, 1), carrier=carrier, ratio=torch.tensor([4, 3, 2, 1]))
        rows = memory.rows(index)
        length = max([(3, 5, 0, 1)[row] for row in expected], default=0)
        assert rows.attention_mask.shape == (len(expected), length), carrier
        for name, tensor in tensors_of(memory).items():
            if name == "inverse_frequencies":
                continue
            wanted = tensor[torch.tensor(expected, dtype=torch.long)]
            if tensor.dim() > 1:
                wanted = wanted[:, :length] if tensor.dim() < 4 else wanted[:, :, :length]
            assert torch.equal(tensors_of(rows)[name], wanted), (carrier, name)


@pytest.mark.parametrize("carrier", ["embeddings", "key_values"])
def test_rows_are_repeated_for_beams(carrier):
    memory = make_memory((3, 1), carrier=carrier, ratio=torch.tensor([4, 2]))
    repeated = memory.repeat_interleave(3)
    assert_same(repeated, memory.rows([0, 0, 0, 1, 1, 1]))


@pytest.mark.parametrize("carrier", ["embeddings", "key_values"])
def test_to_converts_the_carrier_and_leaves_the_integers(carrier):
    memory = make_memory(carrier=carrier, ratio=torch.tensor([4, 2, 8]))
    for converted in (memory.to(torch.bfloat16), memory.to("cpu", torch.bfloat16), memory.to(dtype=torch.bfloat16)):
        for name, tensor in tensors_of(memory).items():
            is_carrier = tensor.is_floating_point() and name != "inverse_frequencies"
            assert torch.equal(tensors_of(converted)[name], tensor.bfloat16() if is_carrier else tensor)
    for name, tensor in tensors_of(memory.to("meta")).items():
        assert tensor.device.type == "meta", name
    with pytest.raises(TypeError, match="int8"):
        memory.to(torch.int8)


def test_slots_too_large_for_float16_are_refused():
    memory = make_memory((2,))
    memory.embeddings[0, 1, 2] = -70000
    assert memory.to(torch.bfloat16).dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"7e\+04, torch\.float16 ends at 6\.55e\+04"):
        memory.to(torch.float16)


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_bytes_are_those_of_the_real_slots(dtype, width):
    assert make_memory(dtype=dtype).nbytes == (3 + 5) * HIDDEN_SIZE * width
    key_values = make_memory(carrier="key_values", dtype=dtype)
    assert key_values.nbytes == (3 + 5) * NUM_LAYERS * 2 * NUM_HEADS * HEAD_DIM * width
    assert key_values.num_slots.tolist() == [3, 5, 0]
    assert key_values.rows([0, 2]).nbytes * 8 == key_values.nbytes * 3


PAIR = (torch.ones(3, 2, 5, 8), torch.ones(3, 2, 4, 8))


@pytest.mark.parametrize(
    ("carrier", "fields", "message"),
    [
        ("embeddings", {"embeddings": None}, "exactly one"),
        ("embeddings", {"embeddings": torch.ones(3, 5)}, r"embeddings must have 3 dimensions, got shape \(3, 5\)"),
        ("embeddings", {"attention_mask": torch.tensor([[0, 1, 1, 1, 1]] * 3)}, "real slots of each row first"),
        ("embeddings", {"position_ids": -torch.ones(3, 5).long()}, "position_ids must be zero or more"),
        ("embeddings", {"position_layout": "linear"}, "default, uniform, enhanced, got 'linear'"),
        ("key_values", {"key_values": (PAIR,)}, "one shape and dtype"),
    ],
)
def test_fields_that_do_not_fit_are_refused(carrier, fields, message):
    with pytest.raises(ValueError, match=message):
        replace(make_memory(carrier=carrier), **fields)


def test_a_memory_is_shown_in_one_line():
    shown = "CompressedContext(3 rows, slots: 0 to 5, 768 bytes, ratio: 4, model: me/compressor)"
    assert repr(make_memory()) == shown
    assert "slots: on the meta device, ratio" in repr(make_memory().to("meta"))


def test_length_index_and_iteration_are_those_of_rows():
    memory = make_memory((3, 5, 0))
    assert len(memory) == 3
    assert len(memory[[]]) == 0
    assert memory[[]]
    assert_same(memory[1], memory.rows(1))
    assert_same(memory[1:], memory.rows([1, 2]))
    rows = list(memory)
    assert len(rows) == 3
    for index, row in enumerate(rows):
        assert_same(row, memory.rows(index))
    with pytest.raises(IndexError):
        memory[3]
