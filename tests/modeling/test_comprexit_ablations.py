# SPDX-License-Identifier: Apache-2.0
"""ComprExIT's ablations and its configuration."""

import pytest
import torch
from comprexit_parts import random_like, transmission
from tiny_bases import ids_of

from context_compressors.configuration.configuration_comprexit import ComprExITConfig
from context_compressors.modeling.modeling_comprexit import WindowAttention
from context_compressors.modeling.parts.pooling import mean_pool


@pytest.fixture
def comprexit(method_cases):
    return method_cases["comprexit"]


# --- ablations ---


def test_shuffled_receivers_are_the_same_slots_in_another_order():
    lengths = [21, 10, 3]
    mask = torch.arange(21) < torch.tensor(lengths)[:, None]
    anchors = torch.randn(3, 21, 6)
    in_order, slot_mask = transmission()(anchors, mask, 2)
    mixed, mixed_mask = transmission(shuffled_receivers=True)(anchors, mask, 2)
    assert mixed_mask.equal(slot_mask)
    moved = False
    for row, count in enumerate(slot_mask.sum(dim=1).tolist()):
        for window in range(0, count, 4):
            one, other = (slots[row, window : min(window + 4, count)] for slots in (in_order, mixed))
            distances = torch.cdist(one, other)
            order = distances.argmin(dim=1)
            assert distances.amin(dim=1).max() < 1e-5
            assert sorted(order.tolist()) == list(range(len(one)))
            moved |= order.tolist() != sorted(order.tolist())
    assert moved


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


# --- the configuration ---


def test_defaults_are_the_papers():
    config = ComprExITConfig()
    assert (config.compression_ratios, config.bos_before_slots, config.chunk_size) == ((4,), True, None)
    assert (config.window_size, config.transport_iterations, config.transport_epsilon) == (128, 30, 0.1)
    assert (config.gate_size, config.metric_size, config.gate_temperature) == (256, 256, 0.7)
    assert (config.uniform_sender_share, config.encoder_lora, config.decoder_lora) == (0.05, None, None)
    assert config.task_token_ids == {}
    assert ComprExITConfig(literal_equations=True).uniform_sender_share == 0.0


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("token_anchors", "first", "'gate', 'last_layer' or a layer from 0 to 32"),
        ("token_anchors", 33, "0 to 32"),
        ("token_anchors", -1, "0 to 32"),
        ("slot_aggregation", "attention", "transport"),
        ("window_size", 0, "at least 1"),
        ("transport_iterations", 0, "at least 1"),
    ],
)
def test_a_wrong_value_is_refused_with_what_is_allowed(field, value, allowed):
    with pytest.raises(ValueError, match=f"`{field}`.*{allowed}.*got {value!r}"):
        ComprExITConfig(**{field: value})


@torch.no_grad()
def test_every_ablation_changes_the_slots(comprexit):
    """A value of the configuration that nothing reads would pass all other tests of it."""
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
