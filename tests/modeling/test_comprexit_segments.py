# SPDX-License-Identifier: Apache-2.0
"""ComprExIT as a whole: segments, what is held in memory, types, and what slots are made of."""

import weakref

import pytest
import torch
from tiny_bases import ids_of

from context_compressors.evaluation.slot_origins import information_flow
from context_compressors.modeling import modeling_comprexit

# transformers has no sdpa for Gemma 2.
BASES = ["llama-sdpa", "mistral-sdpa", "gemma2-eager"]


@pytest.fixture
def comprexit(method_cases):
    return method_cases["comprexit"]


# --- the whole method ---


def by_hand(model, ids, ratio):
    """One row with all hidden states at once."""
    states = model.language_model(ids, output_hidden_states=True).hidden_states
    anchors = model.layer_gate(states)[0]
    slots, _ = model.transmission(anchors, torch.ones_like(ids).bool(), ratio)
    return model.slot_mlp(slots)


@torch.no_grad()
@pytest.mark.parametrize("segment_windows", [1, 3])
@pytest.mark.parametrize("base", BASES)
def test_segments_equal_the_hidden_states_of_the_whole_context(
    comprexit, base, segment_windows, random_rows, pad_rows
):
    """In causal segments of 4 and 12 tokens, shorter and longer than a sliding window."""
    architecture, attention = base.split("-")
    case = comprexit.on(architecture=architecture, attention=attention)
    model = case.build(segment_windows=segment_windows).model
    rows = random_rows([37, 12, 5, 0])
    calls = []
    model.language_model.register_forward_pre_hook(lambda *_: calls.append(1))
    memories = model.compress(*pad_rows(rows, "left"), ratio=[2, 3])
    assert len(calls) == -(-37 // (4 * segment_windows))
    for memory, ratio in zip(memories, (2, 3), strict=True):
        for i, row in enumerate(rows[:3]):
            expected = by_hand(model, row[None], ratio)[0]
            found = memory.embeddings[i, memory.attention_mask[i].bool()]
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def peak_of_held_states(model, call):
    """Most bytes of hidden states that are alive while the backbone or the gate runs."""
    alive, peak = [], 0

    def measure(*_):
        nonlocal peak
        peak = max(peak, sum(ref().nbytes for ref in alive if ref() is not None))

    def remember(module, arguments, outputs):
        alive.extend(weakref.ref(states) for states in outputs.hidden_states or ())
        measure()

    hooks = [
        model.language_model.register_forward_pre_hook(measure),
        model.language_model.register_forward_hook(remember),
        *(layer.register_forward_pre_hook(measure) for layer in model.language_model.layers),
        model.transmission.register_forward_pre_hook(measure),
    ]
    call()
    for hook in hooks:
        hook.remove()
    return peak


def test_only_one_segments_states_are_held_in_inference(comprexit):
    model, ids = comprexit.build(segment_windows=2).model, ids_of(64)
    num_states, width = 3, 32
    found = peak_of_held_states(model, lambda: model.compress(ids, ratio=2))
    assert found == num_states * 8 * width * 4
    whole = peak_of_held_states(model.train(), lambda: model.compress(ids, ratio=2))
    assert whole == num_states * 64 * width * 4


def test_the_gate_reads_blocks_of_tokens_as_one(comprexit, monkeypatch):
    gate = comprexit.build(decoder_lora=None).model.layer_gate
    states = [torch.randn(2, 13, 32) for _ in range(3)]
    expected = gate(states)
    monkeypatch.setattr(modeling_comprexit, "_GATE_TOKENS_CPU", 4)
    for found, whole in zip(gate(states), expected, strict=True):
        torch.testing.assert_close(found, whole)


def test_an_accelerator_reads_longer_segments(comprexit):
    model = comprexit.build(window_size=128).model
    assert model._segment_length(torch.empty(2, 2048)) == 4 * 128
    assert model._segment_length(torch.empty(2, 2048, device="meta")) == 4096
    assert model._segment_length(torch.empty(64, 2048, device="meta")) == 4 * 128


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_method_parts_compute_in_float32_whatever_comes_in(comprexit, dtype):
    model = comprexit.build(decoder_lora=None).model
    anchors, mask = torch.randn(1, 13, 32), torch.ones(1, 13, dtype=torch.bool)
    states = [torch.randn(1, 13, 32) for _ in range(3)]
    expected = model.layer_gate(states)[0], model._slots(anchors, mask, 2)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model.layer_gate(states)[0], model._slots(anchors, mask, 2)[0]
    assert all(a.equal(b) for a, b in zip(found, expected, strict=True))
    parts = model.layer_gate, model.transmission, model.slot_mlp
    for part in parts:
        part.to(dtype)
    rounded = model.layer_gate([state.to(dtype) for state in states])[0]
    assert rounded.dtype == torch.float32
    assert (rounded - expected[0]).norm() < 0.05 * expected[0].norm()
    assert (model._slots(anchors, mask, 2)[0] - expected[1]).norm() < 0.05 * expected[1].norm()


# --- what slots are made of ---


@torch.no_grad()
def test_information_flow_is_what_compressing_uses(comprexit, random_rows, pad_rows):
    model = comprexit.build().model
    rows = random_rows([13, 6])
    ids, mask = pad_rows(rows, "left")
    flow, memory = information_flow(model, ids, mask, ratio=3), model.compress(ids, mask, ratio=3)
    assert flow.layer_weights.shape == (2, 13, 3)
    assert flow.allocation.shape == (2, 5, 13)
    for i, row in enumerate(rows):
        states = model.language_model(row[None], output_hidden_states=True).hidden_states
        anchors, weights = model.layer_gate(states)
        torch.testing.assert_close(flow.layer_weights[i, : len(row)], weights[0], atol=1e-5, rtol=0)
        slots, tokens = -(-len(row) // 3), len(row)
        allocation = flow.allocation[i, :slots, :tokens]
        torch.testing.assert_close(allocation.sum(dim=1), torch.ones(slots))
        values = model.transmission.value(allocation @ model.transmission.value_norm(anchors[0]))
        torch.testing.assert_close(model.slot_mlp(values), memory.embeddings[i, :slots], atol=1e-4, rtol=1e-4)
    # The short row's pads have nothing, and windows of 3 tokens stay apart.
    assert not flow.allocation[1, 2:].any()
    assert not flow.allocation[1, :, 6:].any()
    assert not flow.layer_weights[1, 6:].any()
    assert not flow.allocation[0, 0, 3:].any()
