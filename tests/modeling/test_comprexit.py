# SPDX-License-Identifier: Apache-2.0
"""ComprExIT's equations beside a naive twin, its worked numbers and sizes."""

import math

import pytest
import torch
from comprexit_parts import random_like, transmission
from torch import nn
from torch.nn import functional

from context_compressors.configuration.configuration_comprexit import ComprExITConfig
from context_compressors.modeling.modeling_comprexit import (
    LayerGate,
)

LN2 = math.log(2)
literally = pytest.mark.parametrize("literal", [False, True], ids=["facts", "printed"])


def plain_transmission(**fields):
    """W_u = W_g = W_rho = identity and no LayerNorm, as in numbers worked by hand."""
    module = transmission(1, **fields)
    module.metric = module.sender_score = module.value_norm = module.value = nn.Identity()
    return module


# --- equations 4 to 7: the gate ---


@literally
def test_worked_gate_weights(literal):
    """Raw scores 0, x, 2x with x so large that the scaled ones are 0, ln 2, ln 4."""
    config = ComprExITConfig(gate_size=256, literal_equations=literal)
    gate = LayerGate(2, 4 if literal else 3, config)
    with torch.no_grad():
        for parameter in gate.parameters():
            parameter.zero_()
        # A token's state is (score, 1): the query reads the 1, the layer's side the score.
        gate.context.weight[0, 1] = gate.layer.weight[0, 0] = 1
    factor = 0.7 if literal else 11.2
    scores = ([123.0] if literal else []) + [0, factor * LN2, 2 * factor * LN2]
    _, weights = gate([torch.tensor([[[score, 1.0]]]) for score in scores])
    torch.testing.assert_close(weights[0, 0], torch.tensor([1 / 7, 2 / 7, 4 / 7]))


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
    for name, ours, theirs in zip(dict(gate.named_parameters()), *gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4, msg=name)


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
    inputs = {"anchors": anchors, **dict(module.named_parameters())}
    gradients = [
        torch.autograd.grad((y * direction).sum(), list(inputs.values()), allow_unused=True) for y in (found, expected)
    ]
    for name, ours, theirs in zip(inputs, *gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3, msg=name)


@literally
def test_worked_sender_mass(literal):
    module = plain_transmission(literal_equations=literal)
    scores = torch.tensor([0, LN2, math.log(3), 7.0])[None, None, :, None]
    mask = torch.tensor([[[True, True, True, False]]])
    mass = module.sender_mass(scores, mask)[0, 0].tolist()
    expected = [1 / 6, 1 / 3, 1 / 2, 0] if literal else [0.175, 1 / 3, 0.49166666666666664, 0]
    assert mass == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("ratio", "lengths", "windows", "num_slots"),
    [
        (4, [300, 130, 128, 1], [[128, 128, 44], [128, 2, 0], [128, 0, 0], [1, 0, 0]], [75, 33, 32, 1]),
        (5, [300], [[125, 125, 50]], [60]),
    ],
)
def test_worked_windows(ratio, lengths, windows, num_slots):
    module = transmission(window_size=128)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    anchors = torch.randn(*mask.shape, 6)
    _, token_mask = module.windows(anchors, mask, ratio)
    assert token_mask.sum(dim=2).tolist() == windows
    _, slot_mask = module(anchors, mask, ratio)
    assert slot_mask.sum(dim=1).tolist() == num_slots


@literally
def test_one_window_by_hand(literal):
    module = plain_transmission(window_size=4, uniform_sender_share=1.0, literal_equations=literal)
    module.sender_score = None
    anchors = torch.tensor([[[1.0, 0], [1, 0], [0, 1], [0, 1]]])
    mask = torch.ones(1, 4, dtype=torch.bool)
    row = torch.tensor([0.2499886505328244, 1.1349467175597594e-05])
    plan = module.weights(anchors[:, None], mask[:, None], 2)[0, 0] * (1 if literal else 0.5)
    torch.testing.assert_close(plan, torch.stack([row, row, row.flip(0), row.flip(0)]))
    near, far = (
        (0.4999773010656488, 2.2698934351195188e-05) if literal else (0.9999546021312976, 4.5397868702390376e-05)
    )
    torch.testing.assert_close(module(anchors, mask, 2)[0][0], torch.tensor([[near, far], [far, near]]))
