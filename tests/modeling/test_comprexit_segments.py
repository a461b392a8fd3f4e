# SPDX-License-Identifier: Apache-2.0
"""ComprExIT as a whole: segments, what is held in memory, types, and what slots are made of."""

import weakref

import pytest
import torch
from tiny_bases import ids_of
from transformers import LlamaConfig

from context_compressors.configuration.configuration_comprexit import ComprExITConfig
from context_compressors.evaluation.slot_origins import information_flow
from context_compressors.modeling import modeling_comprexit
from context_compressors.modeling.modeling_comprexit import ComprExITModel

# transformers has no sdpa for Gemma 2.
BASES = ["llama-sdpa", "llama-eager", "qwen2-sdpa", "qwen3-sdpa", "mistral-sdpa", "mistral-eager", "gemma2-eager"]


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


def test_a_frozen_base_keeps_no_activations(comprexit):
    """What a training step holds of the encoder are its states, and no graph behind them."""
    model = comprexit.build().train()
    held = []
    model.model.language_model.register_forward_hook(lambda _, __, outputs: held.append(outputs.hidden_states))
    model.compress(ids_of(9))
    assert len(held[0]) == 3
    assert not any(states.requires_grad for states in held[0])
    assert model.compress(ids_of(9)).embeddings.requires_grad


def test_later_windows_leave_the_slots_of_earlier_ones_alone(comprexit):
    model, ids = comprexit.build(), ids_of(14)
    before = model.compress(ids, ratio=2).embeddings
    ids[0, 8] = 4
    after = model.compress(ids, ratio=2).embeddings
    assert after[0, :4].equal(before[0, :4])
    assert (after[0, 4:] != before[0, 4:]).any(dim=1).all()


def test_slots_start_about_as_large_as_token_embeddings():
    """On a base of the usual start values: neither lost in rounding nor far outside what the decoder reads."""
    torch.manual_seed(0)
    base = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
    )
    model = ComprExITModel(ComprExITConfig(decoder_config=base)).eval()
    slots = model.compress(torch.randint(5, 512, (1, 256))).embeddings
    ratio = slots.std() / model.get_input_embeddings().weight.std()
    assert 0.3 < ratio < 10
    assert not model.slot_mlp[0].bias.any()
    assert not model.transmission.sender_score[1].weight.any()
    torch.testing.assert_close(model.layer_gate.layer_embeddings.std(), torch.tensor(0.02), atol=0.002, rtol=0)


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


def test_information_flow_without_a_gate_has_no_layer_weights(comprexit):
    model = comprexit.build(token_anchors="last_layer", slot_aggregation="mean", chunk_size=16).model
    flow = information_flow(model, ids_of(9), ratio=2)
    assert flow.layer_weights is None
    assert flow.allocation[0, :2].tolist() == [[0.5, 0.5] + [0.0] * 7, [0, 0, 0.5, 0.5] + [0.0] * 5]
    assert flow.allocation[0, 4].tolist() == [0.0] * 8 + [1.0]


def test_information_flow_of_several_chunks_or_of_nothing_is_refused(comprexit):
    model = comprexit.build(chunk_size=8).model
    with pytest.raises(ValueError, match=r"1 to 8 tokens \(one chunk\), got 9"):
        information_flow(model, ids_of(9))
    with pytest.raises(ValueError, match="got 0"):
        information_flow(model, ids_of(0))
