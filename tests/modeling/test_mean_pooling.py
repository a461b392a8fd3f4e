# SPDX-License-Identifier: Apache-2.0
"""Mean pooling alone: what the paper's equations and start values say."""

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from context_compressors.configuration.configuration_mean_pooling import MeanPoolingConfig
from context_compressors.modeling.modeling_mean_pooling import MeanPoolingForCausalLM, MeanPoolingModel

IDS = torch.arange(5, 16)[None]


@pytest.fixture
def mean_pooling(method_cases):
    return method_cases["mean_pooling"]


def windows(states, ratio):
    return torch.stack([window.mean(dim=0) for window in states[0].split(ratio)])[None]


@pytest.mark.parametrize("model_class", [MeanPoolingForCausalLM, MeanPoolingModel])
@torch.no_grad()
def test_slots_start_as_the_mean_of_the_bases_bidirectional_states(pretrained_base, model_class):
    """The linear map is the identity at the start, and LoRA adds nothing yet."""
    model = model_class.from_base(pretrained_base, compression_ratios=(4, 3))
    base = AutoModelForCausalLM.from_pretrained(pretrained_base).base_model
    states = base(IDS, is_causal=False).last_hidden_state
    for ratio in (3, 4):
        torch.testing.assert_close(model.compress(IDS, ratio=ratio).embeddings, windows(states, ratio))
    backbone = getattr(model, "model", model)
    assert backbone.slot_projection.weight.equal(torch.eye(backbone.config.hidden_size))


def test_a_model_from_a_configuration_starts_alike(tiny_base_config):
    model = MeanPoolingForCausalLM(MeanPoolingConfig(decoder_config=tiny_base_config()))
    assert model.model.slot_projection.weight.equal(torch.eye(32))
    parts = {name: parameter for name, parameter in model.named_parameters() if ".lora_" in name}
    assert parts
    assert all(bool(parameter.any()) == (".lora_A." in name) for name, parameter in parts.items())


def test_a_wide_encoders_projection_starts_at_the_first_coordinates(tiny_base_config):
    encoder = tiny_base_config(hidden_size=48, num_attention_heads=4)
    model = MeanPoolingForCausalLM(MeanPoolingConfig(decoder_config=tiny_base_config(), encoder_config=encoder))
    assert model.model.slot_projection.weight.equal(torch.eye(32, 48))


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


def test_without_an_encoder_a_context_may_be_longer_than_the_positions(mean_pooling):
    model = mean_pooling.on(variant="embeddings").build(decoder_config={"max_position_embeddings": 16})
    assert model.compress(torch.full((1, 40), 9), ratio=8).num_slots.tolist() == [5]


def test_widths_that_differ_need_the_linear_map(tiny_base_config):
    encoder = tiny_base_config(hidden_size=48, num_attention_heads=4)
    config = MeanPoolingConfig(
        decoder_config=tiny_base_config(), encoder_config=encoder, linear_after_pooling=False, encoder_lora=None
    )
    with pytest.raises(ValueError, match=r"width 48.*32.*`linear_after_pooling`"):
        MeanPoolingModel(config)


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


@torch.no_grad()
def test_with_a_residual_slots_start_as_scaled_sums_of_token_embeddings(pretrained_base):
    model = MeanPoolingForCausalLM.from_base(pretrained_base, compression_ratios=(4, 3), embedding_residual=True)
    embeddings = model.get_input_embeddings()(IDS)[0]
    for ratio in (3, 4):
        # The last window is short, and is divided by the root of its own length.
        sums = [window.sum(dim=0) / len(window) ** 0.5 for window in embeddings.split(ratio)]
        torch.testing.assert_close(model.compress(IDS, ratio=ratio).embeddings[0], torch.stack(sums))
    assert not model.model.slot_projection.weight.any()


@torch.no_grad()
def test_a_perceptron_survives_a_cast(mean_pooling):
    model = mean_pooling.build(mlp_after_pooling=True)
    expected = model.compress(IDS, ratio=2).embeddings
    slots = model.bfloat16().compress(IDS, ratio=2).embeddings
    torch.testing.assert_close(slots.float(), expected, atol=0.1, rtol=0.1)


@torch.no_grad()
def test_the_residual_joins_what_the_encoder_makes(mean_pooling):
    model = mean_pooling.build(embedding_residual=True, mlp_after_pooling=True)
    backbone = model.model
    torch.nn.init.normal_(backbone.slot_projection.weight, std=0.1)
    torch.nn.init.normal_(backbone.slot_perceptron[2].weight, std=0.1)
    states = backbone.encoder_states(IDS, torch.ones_like(IDS), torch.arange(11)[None], is_causal=False)
    pooled, embeddings = windows(states, 3), model.get_input_embeddings()(IDS)
    hidden = functional.gelu(functional.linear(pooled, *backbone.slot_perceptron[0].parameters()))
    expected = functional.linear(pooled, backbone.slot_projection.weight)
    expected = expected + functional.linear(hidden, *backbone.slot_perceptron[2].parameters())
    expected = expected + windows(embeddings, 3) * torch.tensor([3.0, 3.0, 3.0, 2.0]).sqrt()[None, :, None]
    torch.testing.assert_close(model.compress(IDS, ratio=3).embeddings, expected)


def test_what_stands_beside_the_linear_map_needs_it(tiny_base_config):
    for name in ("embedding_residual", "mlp_after_pooling"):
        with pytest.raises(ValueError, match="go with `linear_after_pooling=True`"):
            MeanPoolingConfig(linear_after_pooling=False, **{name: True})
        with pytest.raises(ValueError, match=f"`{name}` must be True or False, got 'yes'"):
            MeanPoolingConfig(**{name: "yes"})
    for fields in ({"encoder_config": tiny_base_config(vocab_size=64)}, {"encoder_name_or_path": "me/encoder"}):
        with pytest.raises(ValueError, match="must be False with another language model as encoder"):
            MeanPoolingConfig(decoder_config=tiny_base_config(), embedding_residual=True, **fields)
