# SPDX-License-Identifier: Apache-2.0
"""Memory tokens (EPL, equation 1, and the compression-token baseline) beside naive twins: slots, numbers, starts."""

import itertools

import pytest
import torch
from tiny_bases import AE, BOS, LM, ids_of
from torch.nn import functional
from transformers import DynamicCache

from context_compressors.configuration.configuration_compression_tokens import CompressionTokensConfig
from context_compressors.configuration.configuration_five_hundred_x import FiveHundredXConfig
from context_compressors.configuration.configuration_icae import ICAEConfig
from context_compressors.evaluation.slot_origins import attention_by_head
from context_compressors.modeling.compressor import memory_token_compressor as memory_tokens
from context_compressors.modeling.compressor import modeling_compressor as decoding
from context_compressors.modeling.modeling_icae import ICAEForCausalLM
from context_compressors.modeling.parts.cache_name import CACHE
from context_compressors.modeling.parts.position_layout import encoder_position_ids

LAYOUTS = ["default", "uniform", "enhanced"]
layouts = pytest.mark.parametrize("layout", LAYOUTS)


@pytest.fixture(params=["compression_tokens", "icae", "five_hundred_x"])
def memory_case(request, method_cases):
    return method_cases[request.param]


@pytest.fixture
def tokens(method_cases):
    return method_cases["compression_tokens"]


@pytest.fixture
def icae(method_cases):
    return method_cases["icae"]


@pytest.fixture
def five_hundred_x(method_cases):
    return method_cases["five_hundred_x"]


def naive_rows(model, ids, ratio, cache=None, mask=None):
    """`[S(i); M(i)]` of one unpadded chunk through the plain backbone, by hand."""
    backbone, count = model.model.language_model, -(-ids.shape[1] // ratio)
    context_ids, memory_ids = encoder_position_ids(ids.shape[1], count, model.config.position_layout)
    memory = model.model.memory_vectors(count)[None]
    return backbone(
        inputs_embeds=torch.cat([backbone.get_input_embeddings()(ids), memory], dim=1),
        position_ids=torch.cat([context_ids, memory_ids])[None],
        attention_mask=torch.ones(1, ids.shape[1] + count).long() if mask is None else mask,
        **{CACHE: cache},
        use_cache=cache is not None,
    ).last_hidden_state[:, ids.shape[1] :]


# --- encoder, against a naive twin ---


@layouts
def test_icaes_slots_and_gradients_equal_a_naive_pass(icae, layout):
    model = icae.build(encoder_lora=None, position_layout=layout).train()
    for length, ratio in itertools.product((1, 2, 7, 12), (2, 3)):
        ids = ids_of(length)
        slots = model.compress(ids, ratio=ratio).embeddings
        expected = naive_rows(model, ids, ratio)
        torch.testing.assert_close(slots, expected, atol=1e-5, rtol=0)
        weights = torch.randn(slots.shape, generator=torch.Generator().manual_seed(1))
        found, wanted = (
            torch.autograd.grad((states * weights).sum(), model.model.memory_embeddings)[0]
            for states in (slots, expected)
        )
        assert found.abs().max() > 0
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@layouts
def test_500xs_keys_and_values_equal_a_naive_cache(five_hundred_x, layout):
    model = five_hundred_x.build(encoder_lora=None, position_layout=layout).train()
    for length in (1, 7, 12):
        ids = ids_of(length)
        memory, cache = model.compress(ids, ratio=3), DynamicCache()
        naive_rows(model, ids, 3, cache)
        assert len(memory.key_values) == len(cache.layers) == 2
        both = (
            [part for pair in memory.key_values for part in pair],
            [part[:, :, length:] for layer in cache.layers for part in (layer.keys, layer.values)],
        )
        torch.testing.assert_close(*both, atol=1e-5, rtol=0)
        found, wanted = (
            torch.autograd.grad(sum(part.square().sum() for part in parts), model.model.memory_embeddings)[0]
            for parts in both
        )
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@layouts
@pytest.mark.parametrize("token_attention", ["causal", "bidirectional"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@torch.no_grad()
def test_compression_tokens_equal_a_naive_pass(tokens, layout, token_attention, attention):
    model = tokens.on(attention=attention).build(
        encoder_lora=None, decoder_lora=None, position_layout=layout, token_attention=token_attention
    )
    ids = ids_of(9)
    for ratio, count in ((2, 5), (3, 3), (8, 2)):
        visible = torch.ones(9 + count, 9 + count, dtype=torch.bool).tril()
        if token_attention == "bidirectional":
            visible[9:] = True
        mask = visible[None, None]
        if attention == "eager":
            mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
        expected = functional.linear(naive_rows(model, ids, ratio, mask=mask), model.model.slot_projection.weight)
        torch.testing.assert_close(model.compress(ids, ratio=ratio).embeddings, expected, atol=1e-5, rtol=0)


@pytest.mark.only(lambda case: case.method.memory_tokens and not case.method.recurrent)
@torch.no_grad()
def test_many_ratios_equal_separate_passes_on_every_base(backbone_case, random_rows, pad_rows, slots):
    attentions = [{}]
    if "token_attention" in backbone_case.method.hard.get("bidirectional", {}):
        attentions.append({"token_attention": "bidirectional"})
    for layout, fields in itertools.product(("default", "uniform", "enhanced"), attentions):
        model = backbone_case.build(position_layout=layout, **fields)
        ids, mask = pad_rows(random_rows([13, 0, 6]), "left")
        together = model.compress(ids, mask, ratio=[8, 2, 3])
        for ratio, memory in zip([8, 2, 3], together, strict=True):
            alone = model.compress(ids, mask, ratio=ratio)
            assert slots(memory).allclose(slots(alone), atol=1e-4, rtol=0), (layout, fields, ratio)
            assert memory.position_ids.equal(alone.position_ids), (layout, fields, ratio)


# --- attention implementations that drop a mask of ones ---


@pytest.mark.parametrize("cache", [None, "static"])
def test_a_pad_in_front_changes_nothing(memory_case, cache, monkeypatch):
    """FlashAttention needs it for one row whose ids fall; here it stands in front of eager and sdpa, too."""
    model = memory_case.on(variant="enhanced").model
    ids, text = ids_of(15), torch.tensor([[BOS if memory_case.method.name == "compression_tokens" else AE, 9, 12]])
    settings = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "cache_implementation": cache}

    def outputs():
        memory = model.compress(ids)
        return model(text, memory=memory).logits, model.generate(text, memory=memory, **settings)

    expected = outputs()
    for module in (decoding, memory_tokens):
        monkeypatch.setattr(module, "reads_falling_ids_as_packed", lambda config, batch_size: batch_size == 1)
    found = outputs()
    torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=0)
    assert found[1].equal(expected[1])


def test_without_pairwise_masks_ratios_go_one_by_one_and_copies_cannot_see_each_other(tokens, monkeypatch):
    monkeypatch.setattr(memory_tokens, "PAIRWISE_MASKS", ())
    ids = ids_of(12)
    model, passes = tokens.build(position_layout="uniform"), []
    original = model.model.encoder_states
    monkeypatch.setattr(model.model, "encoder_states", lambda **kwargs: passes.append(1) or original(**kwargs))
    model.compress(ids, ratio=[2, 3])
    assert len(passes) == 2
    with pytest.raises(ValueError, match=r"see each other.*'sdpa'"):
        tokens.build(token_attention="bidirectional").compress(ids)


# --- attention as a picture ---


@layouts
def test_memory_attention_is_the_encoders_own(memory_case, layout):
    settings = {"encoder_lora": None, "decoder_lora": None, "position_layout": layout}
    model = memory_case.build(**settings)
    ids = ids_of(9)
    found = attention_by_head(model.model, ids, ratio=3)
    assert [tuple(weights.shape) for weights in found] == [(1, 4, 3, 9)] * 2
    naive = memory_case.on(attention="eager").build(**settings)
    backbone = naive.model.language_model
    context_ids, memory_ids = encoder_position_ids(9, 3, layout)
    expected = backbone(
        inputs_embeds=torch.cat([backbone.get_input_embeddings()(ids), naive.model.memory_vectors(3)[None]], dim=1),
        position_ids=torch.cat([context_ids, memory_ids])[None],
        attention_mask=torch.ones(1, 12).long(),
        output_attentions=True,
    ).attentions
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs[:, :, 9:, :9], atol=1e-5, rtol=0)
    assert model.model.language_model.config._attn_implementation == "sdpa"


# --- numbers and positions of memory tokens ---


def test_the_papers_sizes():
    """EPL, section 4: 510 context tokens, 102 memory tokens."""
    for config in (ICAEConfig(), FiveHundredXConfig()):
        assert (config.chunk_size, config.num_memory_tokens, config.compression_ratios) == (510, 102, (5,))
        assert config.encoder_lora["target_modules"] == ["q_proj", "v_proj"]
        assert (config.encoder_lora["rank"], config.encoder_lora["alpha"]) == (128, 256.0)
        assert config.decoder_lora is None


def test_more_memory_tokens_than_there_are_is_an_error(icae, method_cases):
    ways_out = "take a higher ratio, or shorter contexts or chunks"
    with pytest.raises(ValueError, match=f"12 memory tokens, the checkpoint has 6: {ways_out}"):
        icae.build(chunk_size=12).compress(ids_of(12), ratio=1, allow_untrained_ratio=True)
    # A higher one than the lowest, where the context is longer than the checkpoint is made for.
    with pytest.raises(ValueError, match=f"17 memory tokens, the checkpoint has 16: {ways_out}"):
        method_cases["tcp_autoencoder"].model.compress(ids_of(33), ratio=2)


def test_task_tokens_stand_behind_the_vocabulary_by_default(tiny_base_config):
    base = tiny_base_config()
    assert ICAEConfig(decoder_config=base).task_token_ids == {"[AE]": AE, "[LM]": LM}
    assert ICAEConfig(decoder_config=base, task_token_ids={}).task_token_ids == {}
    assert CompressionTokensConfig(decoder_config=base).task_token_ids == {}


def test_memory_and_task_tokens_start_from_two_scalars_of_the_whole_table(tiny_base_config):
    """A table whose dimensions differ widely, as real ones do, gives start values that don't."""
    model = ICAEForCausalLM(ICAEConfig(decoder_config=tiny_base_config()))
    table = model.get_input_embeddings().weight
    with torch.no_grad():
        table.copy_(torch.randn_like(table) * torch.linspace(0.01, 5, 32) + torch.linspace(-3, 4, 32))
    for parameter in (model.model.memory_embeddings, model.model.task_embeddings):
        torch.manual_seed(3)
        expected = table.mean().item() + table.std().item() * torch.randn(parameter.shape)
        torch.manual_seed(3)
        model._init_like_embeddings(parameter, model.model.language_model)
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-5, atol=1e-5)


# --- refused inputs ---


def test_scores_of_earlier_tokens_leave_task_tokens_out(icae):
    """Their ids lie outside the vocabulary, where a repetition penalty would look them up."""
    model = icae.model
    memory = model.compress(ids_of(9))
    settings = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    generated = model.generate(torch.tensor([[AE, 9]]), memory=memory, repetition_penalty=1.5, **settings)
    assert generated[0, :2].tolist() == [AE, 9]
    plain = model.generate(torch.tensor([[9, 9]]), memory=memory, repetition_penalty=1e9, **settings)
    assert 9 not in plain[0, 2:].tolist()


# --- vectors around slots, and one adapter for both sides ---


@pytest.fixture
def separated(method_cases):
    """Two adapters, slots of chunks of 6 tokens, and a separator behind each."""
    return method_cases["icae"].on(variant="separator").build()


@pytest.fixture
def shared(method_cases):
    return method_cases["compression_tokens"].on(variant="shared_adapter").build()


def test_the_separator_stands_behind_the_slots_of_each_chunk_and_trains(separated):
    marker = separated.model.marker_embeddings
    memory = separated.compress(ids_of(15), ratio=3)
    assert memory.num_slots.tolist() == [3 * (2 + 1)] == [separated.config.num_slots(15, 3)]
    assert memory.position_ids.tolist() == [list(range(9))]
    assert (memory.embeddings[0, [2, 5, 8]] == marker).all()
    plain = separated.compress(ids_of(15)[:, :6], ratio=3)
    assert memory.embeddings[0, :3].equal(plain.embeddings[0])
    assert memory.nbytes == 9 * 32 * 4, "they are kept with the slots"
    assert separated.compress(ids_of(15)[:, :0]).num_slots.tolist() == [0]
    separated.train()
    separated(input_ids=ids_of(4), labels=ids_of(4), context_input_ids=ids_of(15)).loss.backward()
    assert marker.grad.abs().sum() > 0


def test_a_shared_adapter_is_one_set_of_weights_with_gradient_from_both_sides(shared):
    adapters = {name: p for name, p in shared.named_parameters() if ".lora_" in name}
    assert {name.split(".")[-2] for name in adapters} == {"shared"}
    assert shared.model.encoder_backbone is shared.model.language_model
    context, text = ids_of(10), ids_of(4, seed=1)
    shared.train()

    def gradients(memory):
        shared.zero_grad()
        shared(input_ids=text, labels=text, memory=memory).loss.backward()
        return {name: p.grad.clone() for name, p in adapters.items()}

    def detached(memory):
        memory.embeddings = memory.embeddings.detach()
        return memory

    both = gradients(shared.compress(context))
    of_decoder = gradients(detached(shared.compress(context)))
    memory = shared.compress(context)
    with shared.base_language_model():
        of_encoder = gradients(memory)
    for name, gradient in both.items():
        assert of_decoder[name].abs().sum() > 0, name
        assert of_encoder[name].abs().sum() > 0, name
        assert not gradient.allclose(of_decoder[name]), name
