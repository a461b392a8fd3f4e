# SPDX-License-Identifier: Apache-2.0
"""ComprExIT's equations beside naive twins, its segments, ablations and settings."""

import pytest
import torch
from tiny_bases import ids_of
from torch.nn import functional

from context_compressors.configuration.configuration_comprexit import ComprExITConfig
from context_compressors.evaluation.slot_origins import information_flow
from context_compressors.modeling import modeling_comprexit
from context_compressors.modeling.modeling_comprexit import LayerGate, Transmission, WindowAttention
from context_compressors.modeling.parts.pooling import mean_pool

literally = pytest.mark.parametrize("literal", [False, True], ids=["facts", "printed"])


def random_like(module, seed=0):
    """The module with random parameters, so that no start value hides a mistake."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.4 * torch.randn_like(parameter) + (1 if parameter.dim() == 1 else 0))
    return module


def transmission(hidden_size=6, seed=0, **fields):
    config = ComprExITConfig(**{"metric_size": 4, "window_size": 8, **fields})
    return random_like(Transmission(hidden_size, config), seed)


# --- equations 4 to 7: the gate ---


def naive_gate(gate, states, literal):
    """Equations 4 to 7 token by token and layer by layer, in their own order."""
    if literal:
        states = states[1:]
    prior = torch.exp(gate.layer_prior) / torch.exp(gate.layer_prior).sum()
    batch_size, num_tokens, _ = states[0].shape
    anchors = []
    for row in range(batch_size):
        for token in range(num_tokens):
            h = [state[row, token] for state in states]
            query = gate.context(sum(w * x for w, x in zip(prior, h, strict=True)))
            own = (gate.layer.weight, gate.layer.bias)
            keys = [functional.linear(x, *own) + e for x, e in zip(h, gate.layer_embeddings, strict=True)]
            scores = torch.stack([query @ key for key in keys]) / 0.7
            alpha = torch.softmax(scores if literal else scores / gate.context.out_features**0.5, dim=0)
            anchors.append(sum(a * gate.anchor(x) for a, x in zip(alpha, h, strict=True)))
    return torch.stack(anchors).unflatten(0, (batch_size, num_tokens))


@literally
def test_the_gate_is_its_naive_twin(literal):
    gate = random_like(LayerGate(6, 5, ComprExITConfig(gate_size=3, literal_equations=literal)))
    states = [torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(i)) for i in range(5)]
    found, expected = gate(states)[0], naive_gate(gate, states, literal)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    direction = torch.randn(found.shape, generator=torch.Generator().manual_seed(9))
    gradients = [torch.autograd.grad((y * direction).sum(), list(gate.parameters())) for y in (found, expected)]
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)


# --- equations 8 to 12: transmission ---


def log_sinkhorn(cost, source, target, epsilon, num_iterations):
    f, g = torch.zeros_like(source), torch.zeros_like(target)
    for _ in range(num_iterations):
        f = epsilon * (source.log() - torch.logsumexp((g[None] - cost) / epsilon, dim=1))
        g = epsilon * (target.log() - torch.logsumexp((f[:, None] - cost) / epsilon, dim=0))
    return torch.exp((f[:, None] + g[None] - cost) / epsilon)


def naive_slots(module, anchors, ratio, literal):
    """Equations 8 to 12 of one row, window by window, in their own order."""
    length, slots = ratio * max(1, module.window_size // ratio), []
    for window in anchors.split(length):
        receivers = torch.stack([field.mean(dim=0) for field in window.split(ratio)])
        utility = functional.cosine_similarity(module.metric(window)[:, None], module.metric(receivers)[None], dim=-1)
        mass = module.sender_score(window)[:, 0].softmax(dim=0)
        if not literal:
            mass = 0.95 * mass + 0.05 / len(window)
        capacity = torch.full((len(receivers),), 1 / len(receivers))
        plan = log_sinkhorn(1 - utility, mass, capacity, 0.1, 30)
        values = module.value(module.value_norm(window))
        z = torch.stack([sum(plan[t, k] * values[t] for t in range(len(window))) for k in range(len(receivers))])
        slots.append(z if literal else z / capacity[:, None])
    return torch.cat(slots)


@literally
@pytest.mark.parametrize("ratio", [1, 2, 3, 8, 20])
def test_transmission_is_its_naive_twin(literal, ratio):
    module = transmission(literal_equations=literal)
    lengths = [19, 8, 3, 1]
    anchors = torch.randn(4, 19, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
    mask = torch.arange(19) < torch.tensor(lengths)[:, None]
    slots, slot_mask = module(anchors, mask, ratio)
    assert slot_mask.sum(dim=1).tolist() == [-(-length // ratio) for length in lengths]
    expected = torch.cat([naive_slots(module, anchors[i, :n], ratio, literal) for i, n in enumerate(lengths)])
    found = slots[slot_mask.bool()]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    direction = torch.randn(found.shape, generator=torch.Generator().manual_seed(2))
    inputs = [anchors, *module.parameters()]
    gradients = [torch.autograd.grad((y * direction).sum(), inputs, materialize_grads=True) for y in (found, expected)]
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-3)


# --- the whole method ---


def by_hand(model, ids, ratio):
    """One row with all hidden states at once."""
    states = model.language_model(ids, output_hidden_states=True).hidden_states
    anchors = model.layer_gate(states)[0]
    slots, _ = model.transmission(anchors, torch.ones_like(ids).bool(), ratio)
    return model.slot_mlp(slots)


@torch.no_grad()
@pytest.mark.parametrize("segment_windows", [1, 3])
@pytest.mark.parametrize("base", ["llama-sdpa", "mistral-sdpa", "gemma2-eager"])
def test_segments_equal_the_hidden_states_of_the_whole_context(case_on, base, segment_windows, random_rows, pad_rows):
    """Segments of 4 and 12 tokens are shorter and longer than a sliding window."""
    model = case_on("comprexit", base).build(segment_windows=segment_windows).model
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


def test_the_gate_reads_blocks_of_tokens_as_one(comprexit, monkeypatch):
    gate = comprexit.build(decoder_lora=None).model.layer_gate
    states = [torch.randn(2, 13, 32) for _ in range(3)]
    expected = gate(states)
    monkeypatch.setattr(modeling_comprexit, "_GATE_TOKENS_CPU", 4)
    for found, whole in zip(gate(states), expected, strict=True):
        torch.testing.assert_close(found, whole)


@torch.no_grad()
def test_information_flow_is_what_compressing_uses(comprexit):
    model, ids = comprexit.build().model, ids_of(13)
    layers, shares = information_flow(model, ids, torch.ones_like(ids), ratio=3)
    memory = model.compress(ids, ratio=3)
    anchors, weights = model.layer_gate(model.language_model(ids, output_hidden_states=True).hidden_states)
    torch.testing.assert_close(layers, weights, atol=1e-5, rtol=0)
    torch.testing.assert_close(shares.sum(dim=2), torch.ones(1, 5))
    values = model.transmission.value(shares @ model.transmission.value_norm(anchors))
    torch.testing.assert_close(model.slot_mlp(values), memory.embeddings, atol=1e-4, rtol=1e-4)


# --- ablations and settings ---


def test_windowed_attention_is_its_naive_twin():
    module = random_like(WindowAttention(6, 4))
    assert sorted(name for name, _ in module.named_children()) == ["key", "norm", "query"]
    lengths = [7, 2]
    anchors, mask = torch.randn(2, 7, 6), torch.arange(7) < torch.tensor(lengths)[:, None]
    slots, slot_mask = module(anchors, mask, 3)
    expected = []
    for row, length in enumerate(lengths):
        for block in anchors[row, :length].split(3):
            normed = module.norm(block)
            weights = (module.key(normed) @ module.query(normed.mean(dim=0)) / 2).softmax(dim=0)
            expected.append(weights @ block)
    torch.testing.assert_close(slots[slot_mask.bool()], torch.stack(expected), atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("layer", [0, 1, 2, "last_layer"])
def test_one_layer_pooled_is_mean_pooling_of_that_layer(comprexit, layer):
    model = comprexit.build(token_anchors=layer, slot_aggregation="mean").model
    ids, mask = ids_of(13), torch.ones(1, 13).long()
    states = model.language_model(ids, output_hidden_states=True).hidden_states
    pooled, _ = mean_pool(states[-1 if layer == "last_layer" else layer], mask, 3)
    torch.testing.assert_close(model.compress(ids, ratio=3).embeddings, model.slot_mlp(pooled), atol=1e-5, rtol=1e-5)
    assert {name.split(".")[0] for name, p in model.named_parameters() if p.requires_grad} == {"slot_mlp"}


@torch.no_grad()
def test_every_ablation_changes_the_slots(comprexit):
    """A field that nothing reads would pass all other tests."""
    ids = ids_of(15)
    fields = {
        "plain": {},
        "window": {"window_size": 12},
        "epsilon": {"transport_epsilon": 1.0},
        "iterations": {"transport_iterations": 1},
        "uniform": {"uniform_sender_share": 0.5},
        "temperature": {"gate_temperature": 2.0},
        "shuffled": {"shuffled_receivers": True},
    }
    plain = comprexit.build().model
    slots = {}
    for name, changes in fields.items():
        model = comprexit.build(**changes).model
        model.load_state_dict(plain.state_dict())
        slots[name] = model.compress(ids, ratio=2).embeddings
    for name in fields.keys() - {"plain"}:
        assert not slots[name].allclose(slots["plain"], atol=1e-3), name
