# SPDX-License-Identifier: Apache-2.0
"""Semi-dynamic ratios on mean pooling: `ratio="auto"` (arXiv 2603.25926 and its authors' code)."""

import math

import pytest
import torch
from tiny_bases import EOS, ids_of
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from context_compressors.configuration.configuration_mean_pooling import MeanPoolingConfig
from context_compressors.modeling.memory.compressed_context import CompressedContext
from context_compressors.modeling.modeling_mean_pooling import nearest_ratios

RATIOS = (2, 4, 8)
LENGTHS = [23, 9, 16, 12, 30, 7]


@pytest.fixture
def make(method_cases):
    """`make(**fields)`: a model whose selector tells the texts of the tests apart."""

    def build(**fields):
        fields = {"compression_ratios": RATIOS, "ratio_selector": True, **fields}
        model = method_cases["mean_pooling"].build(**fields)
        if model.model.ratio_selector is not None:
            torch.nn.init.constant_(model.model.ratio_selector.bias, 2.0)
        return model

    return build


def log_ratio(model, ids):
    """A naive twin: y of one context that is one chunk."""
    with torch.no_grad():
        positions = torch.arange(ids.shape[1])[None]
        states = model.model.encoder_states(ids, torch.ones_like(ids), positions, is_causal=False)
        return float(functional.linear(states[0, -1], *model.model.ratio_selector.parameters()))


def nearest(y, ratios=RATIOS):
    return min(ratios, key=lambda ratio: abs(2**y - ratio))


def test_thresholds_are_those_of_the_authors():
    """4, 8 and 16 are parted by 6 and 12."""
    predicted = torch.tensor([math.log2(value) for value in (0.1, 5.99, 6.01, 11.99, 12.01, 999)])
    assert nearest_ratios(predicted, (16, 4, 8)).tolist() == [4, 4, 8, 8, 16, 16]
    assert nearest_ratios(torch.tensor([-200.0, 200.0]), (16, 4, 8)).tolist() == [4, 16]


def test_every_row_of_a_batch_has_the_ratio_of_its_own_text(make, random_rows, pad_rows):
    model, rows = make(), random_rows(LENGTHS)
    expected = [nearest(log_ratio(model, row[None])) for row in rows]
    assert set(expected) == set(RATIOS)
    for side in ("left", "right", "middle"):
        memory, fixed = model.compress(*pad_rows(rows, side), ratio=["auto", 4])
        assert memory.ratio.tolist() == expected
        assert memory.num_slots.tolist() == [math.ceil(len(r) / x) for r, x in zip(rows, expected, strict=True)]
        assert fixed.ratio == 4
        for index, (row, ratio) in enumerate(zip(rows, expected, strict=True)):
            alone = model.compress(row[None], ratio="auto")
            assert alone.ratio.tolist() == [ratio]
            torch.testing.assert_close(memory[index].embeddings, alone.embeddings, atol=1e-5, rtol=1e-4)
            assert alone.embeddings.equal(model.compress(row[None], ratio=ratio).embeddings)


def test_a_document_of_several_chunks_asks_for_the_slots_that_these_ask_for(make, random_rows, pad_rows):
    model, rows = make(chunk_size=6), random_rows(LENGTHS, seed=1)
    memory = model.compress(*pad_rows(rows, "left"), ratio="auto")
    predicted = model.model.predicted_log_ratios(*pad_rows(rows, "left")).tolist()
    for index, row in enumerate(rows):
        num_slots = sum(len(part) * 2 ** -log_ratio(model, part[None]) for part in row.split(6))
        y = math.log2(len(row) / num_slots)
        assert predicted[index] == pytest.approx(y, abs=1e-4)
        assert int(memory.ratio[index]) == nearest(y)


def test_the_scale_moves_every_ratio_within_the_set(make, random_rows, pad_rows):
    model, batch = make(), pad_rows(random_rows(LENGTHS))
    predicted, name = model.model.predicted_log_ratios(*batch).tolist(), model.model.model_id
    for scale in (1.0, -1.0, 9, -9):
        model.config.ratio_scale = scale
        assert model.compress(*batch, ratio="auto").ratio.tolist() == [nearest(y + scale) for y in predicted]
        assert model.model.model_id == name


def test_a_given_ratio_is_mean_pooling_and_the_selector_one_map_of_a_state(make, method_cases, random_rows, pad_rows):
    plain = method_cases["mean_pooling"].build(compression_ratios=RATIOS)
    model = make()
    names = {name for name, _ in model.named_parameters()} - {name for name, _ in plain.named_parameters()}
    assert names == {"model.ratio_selector.weight", "model.ratio_selector.bias"}
    assert model.num_parameters() - plain.num_parameters() == model.config.hidden_size + 1
    assert all(parameter.requires_grad for parameter in model.model.ratio_selector.parameters())
    model.load_state_dict(plain.state_dict(), strict=False)
    batch = pad_rows(random_rows(LENGTHS))
    for ratio in (*RATIOS, torch.tensor([2, 8, 4, 2, 8, 4])):
        assert model.compress(*batch, ratio=ratio).embeddings.equal(plain.compress(*batch, ratio=ratio).embeddings)


def test_questions_are_answered_from_memories_of_many_ratios(make, random_rows, pad_rows):
    model, rows = make(), random_rows(LENGTHS)
    context, mask = pad_rows(rows)
    question = torch.tensor([[1, 9, 10]]).repeat(len(rows), 1)
    options = {"max_new_tokens": 5, "eos_token_id": EOS, "pad_token_id": 0}
    given = {"context_input_ids": context, "context_attention_mask": mask, "ratio": "auto"}
    answers = model.generate(question, **given, **options)
    memory = model.compress(context, mask, ratio="auto")
    assert model.generate(question, memory=memory, **options).equal(answers)
    torch.testing.assert_close(model(question, **given).logits, model(question, memory=memory).logits)
    for row, answer in zip(rows, answers, strict=True):
        alone = model.generate(question[:1], memory=model.compress(row[None], ratio="auto"), **options)
        assert answer[: alone.shape[1]].tolist() == alone[0].tolist()


@pytest.mark.slow
def test_a_saved_checkpoint_selects_the_same(make, random_rows, pad_rows, tmp_path):
    model, batch = make(normed_mlp_size=24, linear_after_pooling=False), pad_rows(random_rows(LENGTHS))
    memory = model.compress(*batch, ratio="auto")
    model.save_pretrained(tmp_path / "model")
    memory.save(tmp_path / "memory.safetensors")
    for code in ({}, {"trust_remote_code": True}):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", **code)
        again = loaded.compress(*batch, ratio="auto")
        assert again.ratio.equal(memory.ratio)
        assert again.embeddings.equal(memory.embeddings)
    stored = CompressedContext.load(tmp_path / "memory.safetensors")
    assert stored.ratio.equal(memory.ratio)
    doubled = AutoModelForCausalLM.from_pretrained(tmp_path / "model", ratio_scale=99)
    assert doubled.compress(*batch, ratio="auto").ratio.tolist() == [8] * len(LENGTHS)
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    assert half.model.ratio_selector.weight.dtype == torch.float32
    assert AutoConfig.from_pretrained(tmp_path / "model").ratio_selector is True


def test_the_normed_perceptron_stands_in_the_linear_maps_place(make, method_cases):
    """RMS norm, linear map, GELU, linear map, without biases."""
    model = make(normed_mlp_size=24, linear_after_pooling=False, ratio_selector=False)
    plain = method_cases["mean_pooling"].build(compression_ratios=RATIOS, linear_after_pooling=False)
    size = model.config.hidden_size
    assert model.num_parameters() - plain.num_parameters() == size + 24 * 2 * size
    ids, (norm, up, _, down) = ids_of(11), model.model.slot_mlp
    with torch.no_grad():
        states = model.model.encoder_states(ids, torch.ones_like(ids), torch.arange(11)[None], is_causal=False)
        pooled = torch.stack([window.mean(dim=0) for window in states[0].split(4)])
        normed = pooled / (pooled.square().mean(dim=1, keepdim=True) + 1e-6).sqrt() * norm.weight
        expected = functional.gelu(normed @ up.weight.T) @ down.weight.T
    torch.testing.assert_close(model.compress(ids, ratio=4).embeddings[0], expected)


def test_what_cannot_be_is_refused_with_its_name(make, method_cases):
    ids = ids_of(9)
    plain, model = method_cases["mean_pooling"].model, make()
    for ratio in ("auto", [2, "auto"]):
        with pytest.raises(TypeError, match=r"needs a checkpoint with a ratio selector.*'auto'"):
            plain.compress(ids, ratio=ratio)
    with pytest.raises(ValueError, match=r"not trained for the ratio 16; it has \[2, 4, 8\]"):
        model.compress(ids, ratio=16)
    with pytest.raises(TypeError, match="got 'Auto'"):
        model.compress(ids, ratio="Auto")
    with pytest.raises(ValueError, match="compressed at ratio 2, `ratio` is auto"):
        model(ids, memory=model.compress(ids), ratio="auto")
    wrong = [
        ({"ratio_selector": True, "compression_ratios": 4}, r"two or more `compression_ratios`, got .*\[4\]"),
        ({"ratio_selector": True, "encoder_type": "embeddings"}, "`encoder_type='embeddings'`"),
        ({"normed_mlp_size": 8}, "goes with `linear_after_pooling=False`, got 8"),
    ]
    for fields, message in wrong:
        with pytest.raises(ValueError, match=message):
            MeanPoolingConfig(**fields)
