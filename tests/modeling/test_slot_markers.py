# SPDX-License-Identifier: Apache-2.0
"""One adapter for both sides, and learned vectors around each chunk's slots: what COCOM and PISCO are made of."""

import pytest
import torch
from tiny_bases import ids_of
from tiny_models import SMALL_LORA
from transformers import LlamaConfig

from context_compressors import (
    CompressedContext,
    CompressionTokensConfig,
    CompressionTokensForCausalLM,
    FiveHundredXConfig,
    GMSAConfig,
    ICAEConfig,
    ICAEForCausalLM,
    MeanPoolingConfig,
)

ALL_LINEAR = {"rank": 16, "alpha": 32, "dropout": 0.1, "target_modules": "all-linear"}
# The shapes of Llama-3.2-1B and SmolLM2-135M.
ONE_BILLION = LlamaConfig(
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=131072,
    tie_word_embeddings=True,
)
SMOLLM2 = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)
COCOM = {
    "compression_ratios": (16,),
    "chunk_size": 128,
    "linear_after_encoder": False,
    "encoder_lora": ALL_LINEAR,
    "decoder_lora": ALL_LINEAR,
}
PISCO = {
    "compression_ratios": (16,),
    "chunk_size": 128,
    "memory_tokens": "fixed",
    "task_token_ids": {},
    "encoder_lora": ALL_LINEAR,
    "decoder_lora": ALL_LINEAR,
}


def trained(model_class, config):
    with torch.device("meta"):
        model = model_class(config)
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


@pytest.fixture
def separated(method_cases):
    """Two adapters, slots of chunks of 6 tokens, and a separator behind each."""
    return method_cases["icae"].on(variant="separator").build()


@pytest.fixture
def shared(method_cases):
    return method_cases["compression_tokens"].on(variant="shared_adapter").build()


# --- numbers of the papers ---


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "one_adapter", "pisco"), [(ONE_BILLION, 11_272_192, 22_560_768), (SMOLLM2, 4_884_480, 9_773_568)]
)
def test_what_trains_has_the_papers_sizes(base, one_adapter, pisco):
    width, separator = base.hidden_size, {"slot_markers": {"after": 1}}
    cocom = CompressionTokensConfig(decoder_config=base, shared_adapter=True, **COCOM)
    assert trained(CompressionTokensForCausalLM, cocom) == one_adapter + width, "the adapter, and the token"
    apart = CompressionTokensConfig(decoder_config=base, **COCOM)
    assert trained(CompressionTokensForCausalLM, apart) == 2 * one_adapter + width
    cocom = CompressionTokensConfig(decoder_config=base, shared_adapter=True, **COCOM, **separator)
    assert trained(CompressionTokensForCausalLM, cocom) == one_adapter + 2 * width
    assert trained(ICAEForCausalLM, ICAEConfig(decoder_config=base, **PISCO)) == pisco
    assert trained(ICAEForCausalLM, ICAEConfig(decoder_config=base, **PISCO, **separator)) == pisco + width


def test_five_passages_of_cocom_are_forty_slots_and_five_separators():
    config = CompressionTokensConfig(shared_adapter=True, slot_markers={"after": 1}, **COCOM)
    assert config.num_slots(5 * 128, 16) == 40 + 5
    assert sum(config.chunk_slots(128, 16) for _ in range(5)) == 40
    assert config.num_slots(0, 16) == 0
    plain = CompressionTokensConfig(**COCOM)
    assert config.compression_flops(640, 16) == plain.compression_flops(640, 16), "a stored vector is not computed"


def test_a_short_passage_of_pisco_has_eight_slots_too():
    config = ICAEConfig(slot_markers={"after": 1}, **PISCO)
    assert (config.num_memory_tokens, config.chunk_slots(30, 16), config.num_slots(30, 16)) == (8, 8, 9)


def test_without_its_decoder_adapter_pisco_is_icae(method_cases):
    fields = {"chunk_size": 6, "memory_tokens": "fixed", "task_token_ids": {}}
    pisco = method_cases["icae"].build(decoder_lora=SMALL_LORA, **fields)
    icae = method_cases["icae"].build(seed=1, **fields)
    weights = {name.replace(".base_layer.", "."): value for name, value in pisco.state_dict().items()}
    icae.load_state_dict({name: weights[name.replace(".base_layer.", ".")] for name in icae.state_dict()})
    context, text = ids_of(15), ids_of(4, seed=1)
    assert pisco.compress(context).embeddings.equal(icae.compress(context).embeddings)
    adapted, expected = (model(input_ids=text, context_input_ids=context).logits for model in (pisco, icae))
    assert not adapted.allclose(expected, atol=1e-3)
    for name, parameter in pisco.named_parameters():
        if ".lora_B.decoder." in name:
            parameter.data.zero_()
    torch.testing.assert_close(pisco(input_ids=text, context_input_ids=context).logits, expected)


# --- the vectors around slots ---


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


def test_markers_in_front_and_behind_of_rows_of_any_length(shared, pad_rows, random_rows):
    rows = random_rows([13, 0, 5, 9])
    ids, mask = pad_rows(rows, "left")
    batch = shared.compress(ids, mask, ratio=torch.tensor([2, 2, 3, 8]))
    before, after = shared.model.marker_embeddings
    assert batch.num_slots.tolist() == [3 * 2 + 3 + 3 + 2, 0, 2 + 2, 2 * 2 + 2]
    for row, (tokens, ratio) in enumerate(zip(rows, (2, 2, 3, 8), strict=True)):
        alone = shared.compress(tokens[None], ratio=ratio)
        count = int(alone.num_slots)
        torch.testing.assert_close(batch.embeddings[row, :count], alone.embeddings[0], atol=1e-5, rtol=0)
        assert not batch.embeddings[row, count:].any()
        if count:
            assert alone.embeddings[0, 0].equal(before)
            assert alone.embeddings[0, -1].equal(after)


def test_memories_with_markers_are_saved_and_joined_as_they_are_read(shared, tmp_path):
    first, second, text = ids_of(5), ids_of(5, seed=1), ids_of(4, seed=2)
    parts = [shared.compress(ids) for ids in (first, second)]
    parts[0].save(tmp_path / "first.safetensors")
    parts[0] = CompressedContext.load(tmp_path / "first.safetensors", model_id=shared.model_id)
    joined = CompressedContext.concatenate(parts)
    whole = shared.compress(torch.cat([first, second], dim=1))
    torch.testing.assert_close(joined.embeddings, whole.embeddings, atol=1e-5, rtol=0)
    assert joined.num_slots.equal(whole.num_slots)
    found, expected = (shared(input_ids=text, memory=memory).logits for memory in (joined, whole))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_other_markers_make_another_model(method_cases, tiny_base_config):
    """A memory with separators is not read by a model that has none."""
    names = {method_cases["icae"].build(slot_markers={"after": count}).model_id for count in (0, 1, 2)}
    assert len(names) == 3
    base = tiny_base_config()
    for value in ({"behind": 1}, {"after": -1}, {"after": True}, 1):
        with pytest.raises(ValueError, match="`slot_markers` must map 'before' and 'after'"):
            ICAEConfig(decoder_config=base, slot_markers=value)
    for config_class, fields in ((FiveHundredXConfig, {}), (ICAEConfig, {"position_layout": "enhanced"})):
        with pytest.raises(ValueError, match="`slot_markers` must be left out"):
            config_class(decoder_config=base, slot_markers={"after": 1}, **fields)


# --- one adapter for both sides ---


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


def test_a_shared_adapter_is_merged_once_and_exported_as_one(shared, tmp_path):
    inputs = {"input_ids": ids_of(4, seed=1), "context_input_ids": ids_of(10)}
    expected = shared(**inputs).logits
    decoder = shared.decoder_language_model()
    assert not [name for name, _ in decoder.named_parameters() if "lora" in name]
    with torch.no_grad():
        plain = decoder(inputs["input_ids"]).logits
    torch.testing.assert_close(plain, shared(inputs["input_ids"]).logits, atol=1e-4, rtol=0)
    shared.merge_adapters()
    assert shared.model.encoder_model is None
    assert not shared.config.shared_adapter
    torch.testing.assert_close(shared(**inputs).logits, expected, atol=1e-4, rtol=0)


def test_a_shared_adapter_needs_one_model_with_one_adapter(tiny_base_config):
    base = tiny_base_config()
    config = ICAEConfig(decoder_config=base, shared_adapter=True)
    assert config.decoder_lora == config.encoder_lora
    for config_class, fields in (
        (ICAEConfig, {"encoder_lora": None}),
        (ICAEConfig, {"encoder_config": base}),
        (ICAEConfig, {"decoder_lora": {"rank": 2}}),
        (MeanPoolingConfig, {"encoder_type": "embeddings", "decoder_lora": None}),
        (GMSAConfig, {"encoder_layers": 1}),
    ):
        with pytest.raises(ValueError, match="`shared_adapter`"):
            config_class(decoder_config=base, shared_adapter=True, **fields)
