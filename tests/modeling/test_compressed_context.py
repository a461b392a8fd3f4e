# SPDX-License-Identifier: Apache-2.0
"""Compressed contexts: their rows, types and sizes, and fields that do not fit."""

from dataclasses import replace

import pytest
import torch
from random_memories import HIDDEN_SIZE, assert_same, make_memory, rotary, tensors_of
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from context_compressors.modeling.memory.compressed_context import CompressedContext


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


PAIR = (torch.ones(3, 2, 5, 8), torch.ones(3, 2, 4, 8))


@pytest.mark.parametrize(
    ("carrier", "fields", "message"),
    [
        ("embeddings", {"embeddings": None}, "exactly one"),
        ("embeddings", {"embeddings": torch.ones(3, 5)}, r"embeddings must have 3 dimensions, got shape \(3, 5\)"),
        ("embeddings", {"attention_mask": torch.tensor([[0, 1, 1, 1, 1]] * 3)}, "real slots of each row first"),
        ("embeddings", {"position_ids": -torch.ones(3, 5).long()}, "position_ids must be zero or more"),
        ("embeddings", {"position_layout": "linear"}, r"'uniform', 'enhanced'\], got 'linear'"),
        ("key_values", {"key_values": (PAIR,)}, "one shape and dtype"),
    ],
)
def test_fields_that_do_not_fit_are_refused(carrier, fields, message):
    with pytest.raises(ValueError, match=message):
        replace(make_memory(carrier=carrier), **fields)


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
    assert_same(memory.repeat_interleave(2), memory.rows([0, 0, 1, 1, 2, 2]))
    assert memory.nbytes == (3 + 5) * HIDDEN_SIZE * 4


def test_keys_far_along_are_rotated_as_if_from_scratch():
    memory = make_memory((3,), carrier="key_values", layout="enhanced", num_context_tokens=torch.tensor([120_000]))
    joined = CompressedContext.concatenate([memory, memory])
    angles = (memory.position_ids[:, None, :, None] * 0 + 120_000).double() * rotary().inv_freq.double()
    cosine, sine = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)
    keys = memory.key_values[0][0].double()
    expected = apply_rotary_pos_emb(keys, keys, cosine[:, 0], sine[:, 0])[1]
    torch.testing.assert_close(joined.key_values[0][0][:, :, 3:].double(), expected, rtol=0, atol=1e-5)


def test_gradients_flow_through_joined_keys():
    memories = [make_memory(counts, "key_values", layout="enhanced") for counts in ((3, 0, 5), (2, 4, 1), (0, 1, 6))]
    keys = memories[1].key_values[0][0].requires_grad_()
    CompressedContext.concatenate(memories).key_values[0][0].square().sum().backward()
    # A rotation keeps lengths, so the gradient of the squared length is that of the keys themselves.
    real = memories[1].attention_mask[:, None, :, None]
    torch.testing.assert_close(keys.grad, 2 * keys.detach() * real, rtol=0, atol=1e-5)


def test_one_document_is_itself_and_empty_documents_add_nothing():
    memory, empty = make_memory((3, 1)), make_memory((0, 0))
    assert_same(CompressedContext.concatenate([memory]), memory)
    joined = CompressedContext.concatenate([empty, memory, empty])
    assert torch.equal(joined.position_ids, memory.position_ids)
    assert torch.equal(joined.embeddings[0], memory.embeddings[0])
    assert CompressedContext.concatenate([empty, empty]).embeddings.shape == (2, 0, HIDDEN_SIZE)


def test_memories_that_do_not_fit_together_are_refused():
    memory, keys = make_memory(), make_memory(carrier="key_values", layout="enhanced")
    for first, second, message in (
        (memory, make_memory(model_id="me/other"), "models.*me/compressor and me/other"),
        (memory, make_memory(carrier="key_values"), "carriers.*embeddings of width 24 and key/values of 3 layers"),
        (memory, replace(memory, embeddings=torch.ones(3, 5, 9)), "width 24 and embeddings of width 9"),
        (memory, make_memory((1, 2)), "batch sizes.*3 and 2"),
        (memory, make_memory(layout="enhanced"), "layouts.*default and enhanced"),
        (keys, replace(keys, inverse_frequencies=None), "needs inverse_frequencies"),
        (keys, replace(keys, inverse_frequencies=keys.inverse_frequencies * 2), "different inverse_frequencies"),
    ):
        with pytest.raises(ValueError, match=message):
            CompressedContext.concatenate([first, second])
