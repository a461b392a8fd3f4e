# SPDX-License-Identifier: Apache-2.0
"""Memory tokens (EPL, equation 1, and the compression-token baseline) beside naive twins: slots, numbers, starts."""

import itertools

import pytest
import torch
from tiny_bases import AE, BOS, ids_of
from torch.nn import functional
from transformers import DynamicCache

from context_compressors.modeling.compressor import memory_token_compressor as memory_tokens
from context_compressors.modeling.compressor import modeling_compressor as decoding
from context_compressors.modeling.parts.base_pass import CACHE
from context_compressors.modeling.parts.position_layout import encoder_position_ids

LAYOUTS = ["default", "uniform", "enhanced"]
layouts = pytest.mark.parametrize("layout", LAYOUTS)


@pytest.fixture(params=["compression_tokens", "icae", "five_hundred_x"])
def memory_case(request, method_cases):
    return method_cases[request.param]


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
def test_compression_tokens_equal_a_naive_pass(compression_tokens, layout, token_attention, attention):
    model = compression_tokens.on(attention=attention).build(
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


def test_without_pairwise_masks_ratios_go_one_by_one_and_copies_cannot_see_each_other(compression_tokens, monkeypatch):
    monkeypatch.setattr(memory_tokens, "PAIRWISE_MASKS", ())
    ids = ids_of(12)
    model, passes = compression_tokens.build(position_layout="uniform"), []
    original = model.model.encoder_outputs
    monkeypatch.setattr(model.model, "encoder_outputs", lambda **kwargs: passes.append(1) or original(**kwargs))
    model.compress(ids, ratio=[2, 3])
    assert len(passes) == 2
    with pytest.raises(ValueError, match=r"see each other.*'sdpa'"):
        compression_tokens.build(token_attention="bidirectional").compress(ids)


# --- numbers and positions of memory tokens ---


def test_more_memory_tokens_than_there_are_is_an_error(method_cases):
    with pytest.raises(ValueError, match="17 memory tokens, the checkpoint has 16: take a higher ratio, or shorter"):
        method_cases["tcp_autoencoder"].model.compress(ids_of(33), ratio=2)


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
