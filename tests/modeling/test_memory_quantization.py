# SPDX-License-Identifier: Apache-2.0
"""Memories in int8, int4 and int2: their values, and that they are used as any other."""

import copy
import math
import pickle
from dataclasses import replace
from itertools import product

import pytest
import torch
from random_memories import assert_same, make_memory

from context_compressors.modeling.memory.carriers import carrier_tensors
from context_compressors.modeling.memory.compressed_context import CompressedContext

FORMS = {"int8": (8, 8), "int4": (4, 4), "int2": (4, 2)}
CARRIERS = ("embeddings", "key_values")
# pi as a number; the first of its binary digits behind the point are the signs.
PI = "001001000011111101101010100010001000010110100011"


def wide_memory(carrier, num_slots=(35, 3, 0), **fields):
    """Embeddings of five blocks of eight; heads of one."""
    memory = make_memory(num_slots, carrier=carrier, **fields)
    if carrier == "key_values":
        return memory
    return replace(memory, embeddings=torch.randn(*memory.attention_mask.shape, 40) * 100)


def naive(values, bits, size=8):
    """A list of numbers, rounded block by block."""
    half, rounded = 2 ** (bits - 1), []
    for start in range(0, len(values), size):
        signed = [-x if PI[i] == "1" else x for i, x in enumerate(values[start : start + size])]
        # Of Hadamard's matrix entry i, j is minus where i and j have an odd number of ones in common.
        entries = [[(-1) ** (i & j).bit_count() / size**0.5 for j in range(size)] for i in range(size)]
        turned = [sum(entries[i][j] * signed[i] for i in range(size)) for j in range(size)]
        deviation = (sum(y * y for y in turned) / size) ** 0.5
        step = max(map(abs, turned)) / (half - 0.5) if bits == 8 else {4: 0.3352, 2: 0.9957}[bits] * deviation
        levels = [max(-half, min(half - 1, math.floor(y / step))) + 0.5 for y in turned]
        scale = sum(y * y for y in turned) / sum(y * q for y, q in zip(turned, levels, strict=True))
        scale = float(torch.tensor(scale).half())
        back = [sum(entries[i][j] * scale * levels[j] for j in range(size)) for i in range(size)]
        rounded += [-x if PI[i] == "1" else x for i, x in enumerate(back)]
    return rounded


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("carrier", CARRIERS)
def test_values_and_bytes_are_those_of_a_naive_twin(carrier, form):
    memory = wide_memory(carrier)
    if carrier == "embeddings":
        # What stands at pads counts for nothing.
        memory.embeddings.masked_fill_((memory.attention_mask == 0)[:, :, None], 1e30)
    found, num_bytes = memory.quantize(form), 0
    assert (found.quantization, memory.quantization, found.model_id) == (form, None, memory.model_id)
    tensors = zip(carrier_tensors(memory), carrier_tensors(found.dequantize()), strict=True)
    for place, pair in enumerate(tensors):
        bits = FORMS[form][carrier == "embeddings" or place % 2]
        # Rows of vectors, those of a head behind those of the one before it.
        states, others = (tensor if tensor.dim() == 3 else tensor.transpose(0, 1).flatten(0, 1) for tensor in pair)
        for row, vectors in enumerate(states):
            count = int(memory.num_slots[row % 3])
            assert not others[row, count:].any()
            for vector, other in zip(vectors[:count], others[row, :count], strict=True):
                expected = torch.tensor(naive(vector.tolist(), bits))
                torch.testing.assert_close(other, expected, rtol=1e-3, atol=1e-3 * float(vector.abs().max()))
                num_bytes += len(vector) * bits // 8 + 2 * (len(vector) // 8)
    assert found.nbytes == num_bytes
    for row in range(3):
        assert_same(found.rows(row), memory.rows(row).quantize(form))


def test_it_is_saved_moved_cut_repeated_and_copied_as_any_other(tmp_path):
    for carrier, form in product(CARRIERS, FORMS):
        memory = wide_memory(carrier, ratio=torch.tensor([4, 2, 8])).quantize(form)
        memory.save(tmp_path / "memory.safetensors")
        loaded = CompressedContext.load(tmp_path / "memory.safetensors", model_id=memory.model_id)
        for same in (loaded, copy.deepcopy(memory), pickle.loads(pickle.dumps(memory)), memory.to("cpu")):
            assert_same(same, memory)
            same.validate(finite=True)
        half = CompressedContext.load(tmp_path / "memory.safetensors", dtype="float16")
        assert_same(half, memory.dequantize("float16"))
        for index in ([1], [2], [1, 2, 0], slice(0, 2)):
            assert_same(memory.rows(index).dequantize(), memory.dequantize().rows(index))
            memory.rows(index).validate(finite=True)
        assert_same(memory.repeat_interleave(2).dequantize(), memory.dequantize().repeat_interleave(2))
        assert_same(CompressedContext.stack([memory.rows(1), memory.rows([2, 0])]).rows([2, 0, 1]), memory)
        assert memory.quantize(form) is memory
        assert f"{memory.nbytes:,} bytes in {form}," in repr(memory)
        assert memory.to("meta").quantization == form


def test_joining_rounds_nothing_a_second_time():
    """Embeddings of one form stay in it; mixed forms and key/values are joined as what they stand for."""
    of_forms = (("int8", "int8"), ("int2", "int2"), ("int8", "int4"), ("int2", "int4"), ("int4", None))
    for carrier, forms in product(CARRIERS, of_forms):
        memories = [wide_memory(carrier, counts, layout="uniform") for counts in ((35, 3, 0), (2, 0, 33))]
        rounded = [m if form is None else m.quantize(form) for m, form in zip(memories, forms, strict=True)]
        values = [m.dequantize() for m in rounded]
        joined, below = CompressedContext.concatenate(rounded), CompressedContext.stack(rounded)
        assert_same(joined.dequantize(), CompressedContext.concatenate(values))
        assert_same(below.dequantize(), CompressedContext.stack(values))
        is_same_form = forms[0] == forms[1]
        assert joined.quantization == (forms[0] if is_same_form and carrier == "embeddings" else None)
        assert below.quantization == (forms[0] if is_same_form else None)
    halves = [memories[0].quantize("int8"), memories[1].to(torch.bfloat16)]
    assert CompressedContext.concatenate(halves).dtype == torch.bfloat16


@pytest.mark.slow
@torch.no_grad()
def test_models_read_it_as_what_it_stands_for(form_case, random_rows):
    model, length = form_case.model, {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    context, ids = torch.stack(random_rows([12, 12])), torch.stack(random_rows([5, 5], seed=1))
    memory = model.compress(context, ratio=2)
    for rounded in map(memory.quantize, FORMS):
        values = rounded.dequantize()
        expected = model(ids, memory=values).logits
        torch.testing.assert_close(model(ids, memory=rounded).logits, expected)
        assert not torch.equal(expected, model(ids, memory=memory).logits)
        generated = [
            model.generate(ids, memory=each, use_cache=cached, **length)
            for each in (rounded, values)
            for cached in (True, False)
        ]
        assert all(torch.equal(generated[0], other) for other in generated[1:])


def test_what_cannot_be_rounded_is_refused():
    memory = wide_memory("embeddings")
    with pytest.raises(ValueError, match="unknown quantization"):
        memory.quantize("int3")
    with pytest.raises(ValueError, match=r"is in int8: call `dequantize\(\)` first"):
        memory.quantize("int8").quantize("int4")
    # Too small for float16, and zeros.
    tiny = replace(memory, embeddings=torch.full_like(memory.embeddings, 1e-8)).quantize("int4")
    assert not tiny.dequantize().embeddings.any()
