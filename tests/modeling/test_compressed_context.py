# SPDX-License-Identifier: Apache-2.0
"""Compressed contexts: files that cannot be misread, rows, and memories of several documents joined."""

import os
import re
import struct
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from context_compressors.modeling.compressed_context import CompressedContext
from context_compressors.modeling.position_layout import encoder_position_ids

NUM_HEADS, HEAD_DIM, NUM_LAYERS, HIDDEN_SIZE = 2, 8, 3, 6
FLOAT_DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def rotary():
    config = LlamaConfig(hidden_size=NUM_HEADS * HEAD_DIM, num_attention_heads=NUM_HEADS, head_dim=HEAD_DIM)
    return LlamaRotaryEmbedding(config)


def rotated(keys, position_ids):
    """Keys as a Llama rotates them at these positions."""
    cosine, sine = rotary()(keys, position_ids)
    return apply_rotary_pos_emb(keys, keys, cosine, sine)[1]


def make_memory(num_slots=(3, 5, 0), carrier="embeddings", dtype=torch.float32, layout="default", ratio=4, **fields):
    """A memory of ragged rows with random content, four context tokens to a slot."""
    counts = torch.tensor(num_slots)
    length = int(counts.max())
    attention_mask = (torch.arange(length) < counts[:, None]).long()
    if carrier == "embeddings":
        content = {"embeddings": torch.randn(len(counts), length, HIDDEN_SIZE).to(dtype)}
    else:
        shape = (len(counts), NUM_HEADS, length, HEAD_DIM)
        pairs = [(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)) for _ in range(NUM_LAYERS)]
        content = {"key_values": tuple(pairs), "inverse_frequencies": rotary().inv_freq}
    return CompressedContext(
        **content,
        **{
            "attention_mask": attention_mask,
            "position_ids": torch.arange(length).expand(len(counts), -1) * attention_mask,
            "num_context_tokens": counts * 4,
            "ratio": ratio,
            "model_id": "me/compressor",
            "position_layout": layout,
            **fields,
        },
    )


def tensors_of(memory):
    names = ("embeddings", "attention_mask", "position_ids", "num_context_tokens", "ratio", "inverse_frequencies")
    tensors = {name: getattr(memory, name) for name in names if isinstance(getattr(memory, name), torch.Tensor)}
    for layer, (keys, values) in enumerate(memory.key_values or ()):
        tensors[f"{layer}.keys"], tensors[f"{layer}.values"] = keys, values
    return tensors


def assert_same(left, right):
    tensors, others = tensors_of(left), tensors_of(right)
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == others[name].dtype, name
        assert torch.equal(tensor, others[name]), name
    assert isinstance(left.ratio, torch.Tensor) or left.ratio == right.ratio
    assert (left.model_id, left.position_layout) == (right.model_id, right.position_layout)


@pytest.mark.parametrize("carrier", ["embeddings", "key_values"])
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("ratio", [4, torch.tensor([4, 2, 8])])
def test_a_saved_memory_loads_bit_for_bit(tmp_path, carrier, dtype, ratio):
    memory = make_memory(carrier=carrier, dtype=dtype, ratio=ratio, layout="uniform")
    memory.save(tmp_path / "new folder" / "document.safetensors")
    loaded = CompressedContext.load(tmp_path / "new folder" / "document.safetensors", model_id="me/compressor")
    assert_same(loaded, memory)
    assert os.listdir(tmp_path / "new folder") == ["document.safetensors"]


def test_a_saved_memory_can_be_read_by_whom_any_new_file_can(tmp_path):
    make_memory().save(tmp_path / "memory.safetensors")
    (tmp_path / "other").touch()
    assert (tmp_path / "memory.safetensors").stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.parametrize("carrier", ["embeddings", "key_values"])
def test_a_memory_without_slots_loads(tmp_path, carrier):
    memory = make_memory((0, 0), carrier=carrier)
    memory.save(tmp_path / "empty.safetensors")
    assert_same(CompressedContext.load(tmp_path / "empty.safetensors"), memory)
    assert memory.nbytes == 0


def test_tensors_of_one_storage_with_gradients_are_saved(tmp_path):
    storage = torch.randn(2, 1, NUM_HEADS, 5, HEAD_DIM, requires_grad=True)
    memory = make_memory((5,), carrier="key_values")
    memory = replace(memory, key_values=((storage[0], storage[1]), (storage[0].mT.mT, storage[1])))
    memory.save(tmp_path / "shared.safetensors")
    assert_same(CompressedContext.load(tmp_path / "shared.safetensors"), memory)


def test_loading_converts_the_carrier_alone(tmp_path):
    make_memory(carrier="key_values").save(tmp_path / "memory.safetensors")
    loaded = CompressedContext.load(str(tmp_path / "memory.safetensors"), device="cpu", dtype=torch.bfloat16)
    assert loaded.dtype == torch.bfloat16
    assert loaded.inverse_frequencies.dtype == torch.float32
    assert loaded.attention_mask.dtype == torch.long


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "memory.safetensors"
    old = make_memory()
    old.save(path)

    def fail(*arguments):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        make_memory((1,)).save(path)
    assert_same(CompressedContext.load(path), old)
    assert os.listdir(tmp_path) == ["memory.safetensors"]


@pytest.mark.parametrize(
    ("carrier", "expectation", "message"),
    [
        ("embeddings", {"model_id": "me/other"}, "'me/compressor', not of 'me/other'"),
        ("embeddings", {"hidden_size": 64}, "holds embeddings of width 6, the model reads embeddings of width 64"),
        ("key_values", {"hidden_size": 16}, "holds key/values of 3 layers with 2 heads of 8"),
        ("key_values", {"key_value_shape": (3, 4, 8)}, "the model reads key/values of 3 layers with 4 heads of 8"),
        ("embeddings", {"key_value_shape": (3, 2, 8)}, "holds embeddings of width 6"),
    ],
)
def test_the_memory_of_another_model_is_refused(tmp_path, carrier, expectation, message):
    path = tmp_path / "memory.safetensors"
    make_memory(carrier=carrier).save(path)
    with pytest.raises(ValueError, match=message) as error:
        CompressedContext.load(path, **expectation)
    assert str(path) in str(error.value)


def test_the_memory_of_the_right_model_is_accepted(tmp_path):
    make_memory(carrier="key_values").save(tmp_path / "keys.safetensors")
    CompressedContext.load(tmp_path / "keys.safetensors", key_value_shape=(NUM_LAYERS, NUM_HEADS, HEAD_DIM))
    make_memory().save(tmp_path / "slots.safetensors")
    CompressedContext.load(tmp_path / "slots.safetensors", model_id="me/compressor", hidden_size=HIDDEN_SIZE)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing\.safetensors"):
        CompressedContext.load(tmp_path / "nothing.safetensors")
    with pytest.raises(ValueError, match="is a folder"):
        CompressedContext.load(tmp_path)


def test_other_files_are_refused(tmp_path):
    save_file({"weight": torch.ones(2)}, tmp_path / "weights.safetensors")
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "note.txt").write_text("The quick brown fox jumps over the lazy dog." * 10)
    (tmp_path / "list.json").write_bytes(struct.pack("<Q", 2) + b"[]")
    (tmp_path / "empty").touch()
    for name in ("weights.safetensors", "model.safetensors", "note.txt", "list.json", "empty"):
        with pytest.raises(ValueError, match="not a memory file") as error:
            CompressedContext.load(tmp_path / name)
        assert name in str(error.value)


@pytest.mark.parametrize("carrier", ["embeddings", "key_values"])
def test_every_truncation_is_detected(tmp_path, carrier):
    path = tmp_path / "memory.safetensors"
    make_memory((2, 1), carrier=carrier).save(path)
    content = path.read_bytes()
    for size in [*range(0, len(content), 7), len(content) - 1]:
        path.write_bytes(content[:size])
        with pytest.raises(ValueError, match="truncated") as error:
            CompressedContext.load(path)
        assert str(path) in str(error.value)


@pytest.mark.parametrize("carrier", ["embeddings", "key_values"])
def test_an_altered_byte_anywhere_is_detected(tmp_path, carrier):
    path = tmp_path / "memory.safetensors"
    make_memory((2, 1), carrier=carrier, ratio=torch.tensor([4, 2])).save(path)
    content = path.read_bytes()
    for index in range(len(content)):
        # This bit turns letters into the other case, and a padding blank of the header into a control character.
        altered = bytearray(content)
        altered[index] ^= 0x20
        path.write_bytes(altered)
        with pytest.raises(ValueError, match=re.escape(str(path))):
            CompressedContext.load(path)
    path.write_bytes(content + b"\0")
    with pytest.raises(ValueError, match="altered"):
        CompressedContext.load(path)


def test_a_file_of_a_later_version_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "memory.safetensors"
    with monkeypatch.context() as patch:
        patch.setattr("context_compressors.modeling.memory_file.FORMAT_VERSION", "2")
        make_memory().save(path)
    with pytest.raises(ValueError, match="version 2, this code reads version 1"):
        CompressedContext.load(path)


def test_a_whole_file_with_wrong_content_is_refused(tmp_path):
    path = tmp_path / "memory.safetensors"
    memory = make_memory((2, 1))
    memory.attention_mask = torch.ones(2, 7, dtype=torch.long)
    memory.save(path)
    with pytest.raises(ValueError, match=r"does not hold a valid memory: attention_mask must have shape \(2, 2\)"):
        CompressedContext.load(path)


@pytest.mark.parametrize("carrier", ["embeddings", "key_values"])
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
def test_rows_are_trimmed_to_their_real_slots(carrier, index, expected):
    memory = make_memory((3, 5, 0, 1), carrier=carrier, ratio=torch.tensor([4, 3, 2, 1]))
    rows = memory.rows(index)
    length = max([(3, 5, 0, 1)[row] for row in expected], default=0)
    assert rows.attention_mask.shape == (len(expected), length)
    for name, tensor in tensors_of(memory).items():
        if name == "inverse_frequencies":
            continue
        wanted = tensor[torch.tensor(expected, dtype=torch.long)]
        if tensor.dim() > 1:
            wanted = wanted[:, :length] if tensor.dim() < 4 else wanted[:, :, :length]
        assert torch.equal(tensors_of(rows)[name], wanted), name


@pytest.mark.parametrize("index", [4, [0, 4], torch.tensor([-5])])
def test_rows_outside_the_batch_are_refused(index):
    with pytest.raises(IndexError):
        make_memory((3, 5, 0, 1)).rows(index)


@pytest.mark.parametrize("carrier", ["embeddings", "key_values"])
def test_rows_are_repeated_for_beams(carrier):
    memory = make_memory((3, 1), carrier=carrier, ratio=torch.tensor([4, 2]))
    repeated = memory.repeat_interleave(3)
    assert_same(repeated, memory.rows([0, 0, 0, 1, 1, 1]))
    with pytest.raises(ValueError, match="got 0"):
        memory.repeat_interleave(0)


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


def documents(carrier, layout, batches=((3, 0, 5), (2, 4, 1), (0, 1, 6))):
    """Documents as an encoder would leave each alone, and the same keys before their rotation."""
    memories, unrotated = [], []
    for counts in batches:
        memory = make_memory(counts, carrier=carrier, layout=layout)
        for row, count in enumerate(counts):
            memory.position_ids[row, :count] = encoder_position_ids(4 * count, count, layout)[1]
        unrotated.append(memory)
        if carrier == "key_values":
            pairs = tuple((rotated(keys, memory.position_ids), values) for keys, values in memory.key_values)
            memory = replace(memory, key_values=pairs)
        elif layout != "enhanced":
            memory = replace(memory, position_ids=(memory.attention_mask.cumsum(1) - 1) * memory.attention_mask)
        memories.append(memory)
    return memories, unrotated


@pytest.mark.parametrize("layout", ["default", "uniform", "enhanced"])
@pytest.mark.parametrize("carrier", ["embeddings", "key_values"])
def test_joined_documents_equal_one_chunked_context(carrier, layout):
    memories, unrotated = documents(carrier, layout)
    joined = CompressedContext.concatenate(memories)
    totals = [5, 5, 12]
    assert joined.num_slots.tolist() == totals
    assert joined.num_context_tokens.tolist() == [4 * total for total in totals]
    assert (joined.ratio, joined.model_id, joined.position_layout) == (4, "me/compressor", layout)
    for row, total in enumerate(totals):
        assert joined.attention_mask[row].tolist() == [1] * total + [0] * (12 - total)
        encoded, start = [], 0
        for memory in memories:
            count = int(memory.num_slots[row])
            encoded.append(encoder_position_ids(4 * count, count, layout, start)[1])
            start += 4 * count
        encoded = torch.cat(encoded)
        is_running = carrier == "embeddings" and layout != "enhanced"
        expected_ids = torch.arange(total) if is_running else encoded
        assert torch.equal(joined.position_ids[row, :total], expected_ids)

        def real_slots(parts, slot_dim, row=row):
            counts = [int(memory.num_slots[row]) for memory in memories]
            return torch.cat(
                [part[row].narrow(slot_dim, 0, n) for part, n in zip(parts, counts, strict=True)], slot_dim
            )

        if carrier == "embeddings":
            assert torch.equal(joined.embeddings[row, :total], real_slots([m.embeddings for m in memories], 0))
            assert (joined.embeddings[row, total:] == 0).all()
            continue
        for layer in range(NUM_LAYERS):
            keys, values = (real_slots([m.key_values[layer][part] for m in unrotated], 1) for part in (0, 1))
            assert all((tensor[row, :, total:] == 0).all() for tensor in joined.key_values[layer])
            found_keys, found_values = (tensor[row, :, :total] for tensor in joined.key_values[layer])
            from_scratch = rotated(keys[None], encoded[None])[0]
            torch.testing.assert_close(found_keys, from_scratch, rtol=0, atol=1e-5)
            assert torch.equal(found_values, values)


@pytest.mark.parametrize("carrier", ["embeddings", "key_values"])
def test_two_documents_of_510_tokens_get_the_ids_of_table_13(carrier):
    counts = torch.tensor([102])
    ids = encoder_position_ids(510, 102, "enhanced")[1][None]
    memories, keys = [], []
    for _ in range(2):
        memory = make_memory((102,), carrier=carrier, layout="enhanced", position_ids=ids, ratio=5)
        memory = replace(memory, num_context_tokens=counts * 5)
        if carrier == "key_values":
            keys.append(memory.key_values[0][0])
            memory = replace(memory, key_values=((rotated(keys[-1], ids), memory.key_values[0][1]),))
        memories.append(memory)
    joined = CompressedContext.concatenate(memories)
    assert torch.equal(joined.position_ids, torch.cat([torch.arange(3, 509, 5), torch.arange(513, 1019, 5)])[None])
    if carrier == "key_values":
        from_scratch = rotated(torch.cat(keys, dim=2), joined.position_ids)
        torch.testing.assert_close(joined.key_values[0][0], from_scratch, rtol=0, atol=1e-4)


def test_keys_far_along_are_rotated_as_if_from_scratch():
    memory = make_memory((3,), carrier="key_values", layout="enhanced", num_context_tokens=torch.tensor([120_000]))
    joined = CompressedContext.concatenate([memory, memory])
    angles = (memory.position_ids[:, None, :, None] * 0 + 120_000).double() * rotary().inv_freq.double()
    cosine, sine = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)
    keys = memory.key_values[0][0].double()
    expected = apply_rotary_pos_emb(keys, keys, cosine[:, 0], sine[:, 0])[1]
    torch.testing.assert_close(joined.key_values[0][0][:, :, 3:].double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rotated_keys_keep_their_dtype(dtype):
    memory = make_memory((2,), carrier="key_values", layout="enhanced", dtype=dtype)
    joined = CompressedContext.concatenate([memory, memory])
    assert joined.dtype == dtype
    exact = CompressedContext.concatenate([memory.to(torch.float64)] * 2).key_values[0][0]
    torch.testing.assert_close(joined.key_values[0][0].double(), exact, rtol=0.01, atol=0.01)


def test_gradients_flow_through_joined_keys():
    memories, _ = documents("key_values", "enhanced")
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


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ((4, 4), 4),
        ((torch.tensor([4, 2]), torch.tensor([4, 2])), [4, 2]),
        ((torch.tensor([4, 4]), 4), [4, 4]),
        ((8, 4), [6, 1]),
    ],
)
def test_documents_of_different_ratios_get_their_common_one(ratios, expected):
    memories = [
        make_memory((2, 0), ratio=ratio, num_context_tokens=torch.tensor([tokens, 0]))
        for ratio, tokens in zip(ratios, (16, 7), strict=True)
    ]
    ratio = CompressedContext.concatenate(memories).ratio
    assert (ratio.tolist() if isinstance(ratio, torch.Tensor) else ratio) == expected


@pytest.mark.parametrize(
    ("left", "right", "message"),
    [
        ({}, {"model_id": "me/other"}, "models.*me/compressor and me/other"),
        ({}, {"carrier": "key_values"}, "carriers.*embeddings of width 6 and key/values of 3 layers"),
        ({}, {"embeddings": torch.ones(3, 5, 9)}, "width 6 and embeddings of width 9"),
        ({}, {"dtype": torch.bfloat16}, "dtypes.*float32 and torch.bfloat16"),
        ({}, {"num_slots": (1, 2)}, "batch sizes.*3 and 2"),
        ({}, {"layout": "enhanced"}, "layouts.*default and enhanced"),
    ],
)
def test_memories_that_do_not_fit_together_are_refused(left, right, message):
    right = dict(right)
    embeddings = right.pop("embeddings", None)
    second = make_memory(**right) if embeddings is None else replace(make_memory(), embeddings=embeddings)
    with pytest.raises(ValueError, match=message):
        CompressedContext.concatenate([make_memory(**left), second])


def test_other_refusals_of_concatenate():
    with pytest.raises(ValueError, match="at least one"):
        CompressedContext.concatenate([])
    with pytest.raises(TypeError, match="Tensor"):
        CompressedContext.concatenate([torch.ones(2)])
    memory = make_memory(carrier="key_values", layout="enhanced")
    with pytest.raises(ValueError, match="needs inverse_frequencies"):
        CompressedContext.concatenate([memory, replace(memory, inverse_frequencies=None)])
    with pytest.raises(ValueError, match="different inverse_frequencies"):
        CompressedContext.concatenate([memory, replace(memory, inverse_frequencies=memory.inverse_frequencies * 2)])


def test_default_keys_join_without_frequencies():
    memory = replace(make_memory(carrier="key_values"), inverse_frequencies=None)
    assert CompressedContext.concatenate([memory, memory]).num_slots.tolist() == [6, 10, 0]


def test_bool_masks_and_short_integers_become_long():
    memory = make_memory(
        attention_mask=torch.ones(3, 5).bool(), position_ids=torch.ones(3, 5).int(), ratio=torch.ones(3).short()
    )
    assert {memory.attention_mask.dtype, memory.position_ids.dtype, memory.ratio.dtype} == {torch.long}


PAIR = (torch.ones(3, 2, 5, 8), torch.ones(3, 2, 5, 8))


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"embeddings": None}, ValueError, "exactly one"),
        ({"key_values": (PAIR,)}, ValueError, "exactly one"),
        ({"embeddings": torch.ones(3, 5)}, ValueError, r"embeddings must have shape.*\(3, 5\)"),
        ({"embeddings": torch.ones(3, 5, 6).long()}, TypeError, "int64"),
        ({"attention_mask": torch.ones(3, 4).long()}, ValueError, r"attention_mask must have shape \(3, 5\)"),
        ({"attention_mask": torch.ones(3, 5)}, TypeError, "attention_mask.*float32"),
        ({"attention_mask": None}, TypeError, "attention_mask.*None"),
        ({"attention_mask": torch.full((3, 5), 2)}, ValueError, "ones and zeros"),
        ({"attention_mask": torch.tensor([[0, 1, 1, 1, 1]] * 3)}, ValueError, "real slots of each row first"),
        ({"position_ids": torch.ones(5).long()}, ValueError, "position_ids"),
        ({"num_context_tokens": torch.ones(2).long()}, ValueError, "num_context_tokens"),
        ({"num_context_tokens": -torch.ones(3).long()}, ValueError, "num_context_tokens must be zero or more"),
        ({"ratio": 0}, ValueError, "got 0"),
        ({"ratio": 2.5}, TypeError, "2.5"),
        ({"ratio": torch.tensor([4, 0, 4])}, ValueError, "ratio must be 1 or more"),
        ({"ratio": torch.tensor([4, 4])}, ValueError, r"ratio must have shape \(3,\)"),
        ({"ratio": torch.ones(3)}, TypeError, "ratio.*float32"),
        ({"model_id": None}, TypeError, "model_id"),
        ({"position_layout": "linear"}, ValueError, "default, uniform, enhanced, got 'linear'"),
        ({"inverse_frequencies": torch.ones(4)}, ValueError, "belong to key_values"),
        ({"position_ids": torch.zeros(3, 5, dtype=torch.long, device="meta")}, ValueError, "one device"),
    ],
)
def test_fields_of_embeddings_that_do_not_fit_are_refused(fields, error, message):
    with pytest.raises(error, match=message):
        replace(make_memory(), **fields)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"key_values": torch.ones(2, 2)}, TypeError, "pair of keys and values"),
        ({"key_values": ((PAIR[0],),)}, TypeError, "pair of keys and values"),
        ({"key_values": ()}, ValueError, "at least one layer"),
        ({"key_values": ((PAIR[0], PAIR[1][:, :1]),)}, ValueError, "one shape and dtype"),
        ({"key_values": ((PAIR[0], PAIR[1].double()),)}, ValueError, "one shape and dtype"),
        ({"key_values": ((PAIR[0][0], PAIR[1][0]),)}, ValueError, r"\(2, 5, 8\)"),
        ({"key_values": ((PAIR[0].long(), PAIR[1].long()),)}, TypeError, "int64"),
        ({"inverse_frequencies": torch.ones(8)}, ValueError, r"must have shape \(4,\).*got \(8,\)"),
    ],
)
def test_fields_of_key_values_that_do_not_fit_are_refused(fields, error, message):
    with pytest.raises(error, match=message):
        replace(make_memory(carrier="key_values"), **fields)


def test_lists_of_key_values_are_taken():
    memory = replace(make_memory(carrier="key_values"), key_values=[list(PAIR), PAIR])
    assert memory.key_values == (PAIR, PAIR)
    assert memory.carrier_name == "key/values of 2 layers with 2 heads of 8"
