# SPDX-License-Identifier: Apache-2.0
"""Mean pooling: the paper's equations, start values and ablations."""

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from context_compressors.configuration.configuration_mean_pooling import MeanPoolingConfig
from context_compressors.modeling.modeling_mean_pooling import MeanPoolingForCausalLM

IDS = torch.arange(5, 16)[None]


@pytest.fixture
def mean_pooling(method_cases):
    return method_cases["mean_pooling"]


def windows(states, ratio):
    return torch.stack([window.mean(dim=0) for window in states[0].split(ratio)])[None]


@torch.no_grad()
def test_slots_start_as_the_mean_of_the_bases_bidirectional_states(tiny_base_config, tmp_path):
    """The linear map is the identity at the start, and LoRA adds nothing yet."""
    base = AutoModelForCausalLM.from_config(tiny_base_config()).eval()
    base.save_pretrained(tmp_path)
    model = MeanPoolingForCausalLM.from_base(tmp_path, compression_ratios=(4, 3))
    states = base.base_model(IDS, is_causal=False).last_hidden_state
    for ratio in (3, 4):
        torch.testing.assert_close(model.compress(IDS, ratio=ratio).embeddings, windows(states, ratio))
    assert model.model.slot_projection.weight.equal(torch.eye(model.config.hidden_size))


@torch.no_grad()
def test_the_linear_map_follows_the_pooling(mean_pooling):
    model = mean_pooling.model.model
    states = model.encoder_states(IDS, torch.ones_like(IDS), torch.arange(11)[None], is_causal=False)
    expected = functional.linear(windows(states, 3), model.slot_projection.weight)
    torch.testing.assert_close(model.compress(IDS, ratio=3).embeddings, expected)


@torch.no_grad()
def test_without_an_encoder_token_embeddings_are_pooled(mean_pooling):
    model = mean_pooling.on(variant="embeddings").build(linear_after_pooling=False).model
    embeddings = model.get_input_embeddings()(IDS)
    torch.testing.assert_close(model.compress(IDS, ratio=3).embeddings, windows(embeddings, 3))


def test_the_papers_ablations_are_configuration_values(mean_pooling):
    """Table 3: which parts each of them has and trains."""

    def parts(**fields):
        names = {name for name, p in mean_pooling.build(**fields).named_parameters() if p.requires_grad}
        found = {"encoder": ".encoder.", "decoder": ".decoder.", "linear": "slot_projection"}
        return {part for part, mark in found.items() if any(mark in name for name in names)}

    assert parts() == {"encoder", "decoder", "linear"}
    assert parts(decoder_lora=None) == {"encoder", "linear"}
    assert parts(encoder_lora=None) == {"decoder", "linear"}
    assert parts(encoder_type="embeddings", encoder_lora=None) == {"decoder", "linear"}
    assert parts(linear_after_pooling=False) == {"encoder", "decoder"}


def test_the_papers_adapters_are_the_default():
    """Table 6."""
    config = MeanPoolingConfig()
    expected = {"rank": 16, "alpha": 16.0, "dropout": 0.0, "target_modules": "all-linear"}
    assert config.encoder_lora == config.decoder_lora == expected
    assert config.compression_ratios == (4, 8, 16, 32, 64, 128)
    assert MeanPoolingConfig(encoder_type="embeddings").encoder_lora is None
