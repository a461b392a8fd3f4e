# SPDX-License-Identifier: Apache-2.0
"""GMSA and TCP-AE beside naive twins, on two bases, and in their two stages."""

import copy

import pytest
import torch
from parameters import trainable
from tiny_bases import ids_of
from torch.nn import functional
from transformers import AutoModel, AutoModelForCausalLM

from context_compressors.configuration.configuration_gmsa import GMSAConfig
from context_compressors.modeling.modeling_gmsa import GMSAForCausalLM
from context_compressors.modeling.parts.pooling import mean_pool

# Norms of heads and a window of their own; transformers has no sdpa for Gemma 2.
on_every_base = pytest.mark.parametrize("base", ["llama-sdpa", "qwen3-sdpa", "gemma2-eager"])
both = pytest.mark.parametrize("method", ["gmsa", "tcp_autoencoder"])


def plain_backbone(backbone):
    """The same language model without this project's adapters, as `transformers` has it."""
    plain = AutoModel.from_config(backbone.config, attn_implementation=backbone.config._attn_implementation)
    weights = {name.replace(".base_layer", ""): tensor for name, tensor in backbone.state_dict().items()}
    plain.load_state_dict({name: tensor for name, tensor in weights.items() if "lora_" not in name})
    return plain.eval()


# --- equations 2 and 3 ---


def naive_soft_tokens(decoder, final_norm, hidden_states, ratio):
    """Groups one by one, then the first block of a whole decoder, of which nothing else is looked at."""
    groups = [hidden_states[start : start + ratio] for start in range(0, len(hidden_states), ratio)]
    merged = torch.stack([sum(group) / len(group) for group in groups])
    aligned = decoder(inputs_embeds=merged[None], output_hidden_states=True).hidden_states[1][0]
    if final_norm is None:
        return aligned
    scale = aligned.float().pow(2).mean(dim=-1, keepdim=True).add(1e-6).rsqrt()
    return aligned * scale * final_norm


@on_every_base
@pytest.mark.parametrize("has_norm", [True, False], ids=["final_norm", "no_final_norm"])
def test_soft_tokens_equal_a_naive_twins_values_and_gradients(base, has_norm, case_on):
    model = case_on("gmsa", base).build(encoder_lora=None, lsa_final_norm=has_norm).train()
    own = model.model.layer_semantic_alignment.blocks
    decoder = plain_backbone(model.model.language_model)
    decoder.layers[0].load_state_dict(own.layers[0].state_dict())
    norm = model.model.language_model.norm.weight
    final_norm = (1 + norm if base.startswith("gemma2") else norm) if has_norm else None
    context = ids_of(11)
    # Equation 2 from the encoder's own table, block and norm, without their model around them.
    encoder = plain_backbone(model.model.encoder_model)
    assert len(encoder.layers) == 1
    hidden_states = encoder(context).last_hidden_state[0]
    for ratio in (2, 3, 8):
        expected = naive_soft_tokens(decoder, final_norm, hidden_states.detach(), ratio)
        found = model.compress(context, ratio=ratio).embeddings[0]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
        names, parameters = zip(*own.named_parameters(), strict=True)
        mine = torch.autograd.grad((found * weights).sum(), parameters)
        theirs = torch.autograd.grad((expected * weights).sum(), [decoder.get_parameter(name) for name in names])
        torch.testing.assert_close(mine, theirs, atol=2e-3, rtol=2e-3)


@on_every_base
def test_the_encoder_is_the_first_layers_of_its_base_and_the_final_norm(base, case_on, tiny_base_config, tmp_path):
    architecture, attention = base.split("-")
    torch.manual_seed(0)
    config = tiny_base_config(architecture, num_hidden_layers=3)
    whole = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    whole.save_pretrained(tmp_path)
    model = GMSAForCausalLM.from_base(
        tmp_path,
        encoder_layers=2,
        lsa_layers=0,
        encoder_lora={"rank": 2},
        compression_ratios=3,
        attn_implementation=attention,
    )
    assert len(model.model.encoder_model.layers) == 2
    assert len(model.model.language_model.layers) == 3
    context = ids_of(10)
    states = whole.model(context, output_hidden_states=True, attention_mask=torch.ones_like(context)).hidden_states[2]
    expected, _ = mean_pool(whole.model.norm(states), torch.ones_like(context), 3)
    torch.testing.assert_close(model.compress(context).embeddings, expected, atol=1e-5, rtol=1e-5)


def test_alignment_starts_as_the_decoders_first_blocks(tiny_base_config, tmp_path):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny_base_config(num_hidden_layers=3)).save_pretrained(tmp_path)
    config = GMSAConfig(decoder_config=tiny_base_config(), encoder_layers=1, lsa_layers=2)
    started = GMSAForCausalLM.from_base(tmp_path, encoder_layers=1, lsa_layers=2)
    for model in (started, GMSAForCausalLM(config)):
        own, decoder = model.model.layer_semantic_alignment.blocks, model.model.language_model
        assert len(own.layers) == 2
        for name, parameter in own.named_parameters():
            assert parameter.equal(decoder.get_parameter(name)), name
            assert parameter.data_ptr() != decoder.get_parameter(name).data_ptr(), name


# --- the baseline ---


def test_tcp_slots_equal_a_naive_twins_values_and_gradients(method_cases):
    model = method_cases["tcp_autoencoder"].build(encoder_lora=None).train()
    backbone = model.model
    encoder = plain_backbone(backbone.encoder_model)
    context, mlp = ids_of(9), copy.deepcopy(backbone.slot_mlp)
    tokens = backbone.memory_embeddings.detach().clone().requires_grad_()
    for ratio, count in ((2, 5), (3, 3), (8, 2)):
        row = torch.cat([encoder.embed_tokens(context), tokens[None, :count]], dim=1)
        states = encoder(inputs_embeds=row).last_hidden_state[0, 9:]
        hidden = functional.gelu(states @ mlp[0].weight.T + mlp[0].bias)
        expected = hidden @ mlp[2].weight.T + mlp[2].bias
        found = model.compress(context, ratio=ratio).embeddings[0]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
        mine = torch.autograd.grad(
            (found * weights).sum(), [backbone.memory_embeddings, *backbone.slot_mlp.parameters()]
        )
        theirs = torch.autograd.grad((expected * weights).sum(), [tokens, *mlp.parameters()])
        torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=1e-3)


# --- the two stages ---


@both
def test_each_stage_trains_its_own_parts(method, method_cases):
    """First the adapter and the method's parts, then query, key and value maps of every decoder layer."""
    model = method_cases[method].build()
    parts = ("layer_semantic_alignment",) if method == "gmsa" else ("slot_mlp", "memory_embeddings")
    adapter = {name for name, _ in model.named_parameters() if "lora_" in name}
    own = {name for name, _ in model.named_parameters() if name.split(".")[1] in parts}
    assert trainable(model) == own | adapter
    assert adapter
    assert all(name.startswith("model.encoder_model.layers.0.") for name in adapter)
    prefix = "model.language_model.layers"
    second = trainable(method_cases[method].build(training_stage="keft"))
    assert second == {f"{prefix}.{n}.self_attn.{part}_proj.weight" for n in range(2) for part in "qkv"}
