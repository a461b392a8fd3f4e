# SPDX-License-Identifier: Apache-2.0
"""VoCo on text: one masked pass is compressing and then reading; its mask, its positions, what trains."""

import pytest
import torch
from tiny_bases import base_config, ids_of
from voco_positions import voco_position_ids

from context_compressors import VoCoConfig, VoCoForCausalLM
from context_compressors.modeling.parts.cache_name import CACHE

LAYOUTS = ("default", "uniform", "enhanced")


@pytest.fixture
def voco(method_cases):
    return method_cases["voco"]


def seen_inputs(model, monkeypatch):
    """What the language model is given, pass by pass."""
    backbone, calls = model.model.language_model, []
    forward = backbone.forward

    def recorded(*args, **kwargs):
        calls.append(kwargs)
        return forward(*args, **kwargs)

    monkeypatch.setattr(backbone, "forward", recorded)
    return calls


def loss_and_gradients(model, text, mask, **context):
    """Logits at real tokens, and the gradient of everything that trains."""
    outputs = model(text, mask, labels=text.masked_fill(mask == 0, -100), use_cache=False, **context)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return outputs.logits * mask[:, :, None], torch.autograd.grad(outputs.loss, parameters)


@pytest.mark.slow
@pytest.mark.parametrize(
    "base",
    [
        *("llama-sdpa", "gemma2-eager"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama-eager", "mistral-sdpa")),
    ],
)
def test_the_masked_pass_is_compressing_and_then_reading_in_values_and_gradients(case_on, base, random_rows, pad_rows):
    ids, mask = pad_rows(random_rows([15, 4, 11]), "left")
    text, text_mask = pad_rows(random_rows([5, 3, 6], seed=1), "right")
    window = {} if base.startswith("llama") else {"decoder_config": {"sliding_window": 16}}
    for layout in LAYOUTS:
        for chunk_size in (None, 6):
            model = case_on("voco", base).build(position_layout=layout, chunk_size=chunk_size, **window).train()
            for ratio in (3, torch.tensor([2, 3, 8])):
                context = {"context_input_ids": ids, "context_attention_mask": mask, "ratio": ratio}
                logits, gradients = loss_and_gradients(model, text, text_mask, **context)
                memory = model.compress(ids, mask, ratio=ratio)
                expected, wanted = loss_and_gradients(model, text, text_mask, memory=memory)
                torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
                for found, gradient in zip(gradients, wanted, strict=True):
                    assert gradient.abs().max() > 0
                    torch.testing.assert_close(found, gradient, atol=1e-5, rtol=0)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_nothing_behind_the_voco_tokens_sees_the_context_or_its_bos(voco, attention, monkeypatch):
    model = voco.on(attention=attention).build().train()
    calls = seen_inputs(model, monkeypatch)
    model(ids_of(4, seed=1), context_input_ids=torch.cat([torch.tensor([[1]]), ids_of(5)], dim=1), ratio=3)
    (call,) = calls
    mask = call["attention_mask"][0, 0]
    seen = mask if mask.dtype == torch.bool else mask == 0
    expected = torch.zeros(12, 12, dtype=torch.bool)
    for row in range(12):
        for column in range(row + 1):
            # 6 context tokens from BOS on, VoCo tokens 6 and 7, text from 8 on.
            expected[row, column] = column >= 6 if row >= 8 else True
    assert seen.equal(expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_stand_where_figure_8_says(voco, layout, monkeypatch):
    for num_tokens, num_voco in ((6, 2), (4, 2), (7, 3), (12, 4)):
        model = voco.build(num_voco_tokens=num_voco, position_layout=layout).train()
        calls = seen_inputs(model, monkeypatch)
        expected = voco_position_ids(num_tokens, num_voco, 5, layout)
        model(ids_of(5, seed=1), context_input_ids=ids_of(num_tokens))
        assert calls[0]["position_ids"][0].tolist() == torch.cat(expected).tolist()
        memory = model.compress(ids_of(num_tokens))
        model(ids_of(5, seed=1), memory=memory)
        assert calls[1]["position_ids"][0].tolist() == torch.cat(expected[:2]).tolist()
        assert memory.position_ids[0].tolist() == expected[1].tolist()
        assert calls[2]["position_ids"][0].tolist() == expected[2].tolist()
    figure = {"default": ([6, 7], [8, 9]), "uniform": ([1, 4], [8, 9]), "enhanced": ([1, 4], [6, 7])}[layout]
    assert [ids.tolist() for ids in voco_position_ids(6, 2, 2, layout)] == [[0, 1, 2, 3, 4, 5], *figure]


def test_a_pass_that_wants_a_cache_or_cannot_take_the_mask_compresses_first(voco, monkeypatch):
    model = voco.build().train()
    inputs = {"input_ids": ids_of(4, seed=1), "context_input_ids": ids_of(9)}
    calls = seen_inputs(model, monkeypatch)
    joint = model(**inputs)
    assert len(calls) == 1
    assert CACHE not in joint
    cached = model(**inputs, use_cache=True)
    assert len(calls) == 3
    assert cached[CACHE].get_seq_length() == 5 + 4
    monkeypatch.setattr(model.model.language_model.config, "_attn_implementation_internal", "flash_attention_2")
    assert model.model.joint_inputs(model.model.text_rows(inputs["input_ids"], None), None, 2, None, None, {}) is None
    monkeypatch.undo()
    evaluated = model.eval()(**inputs)
    for outputs in (cached, evaluated):
        torch.testing.assert_close(outputs.logits, joint.logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"encoder_config": base_config()}, "`shared_adapter` needs"),
        ({"bos_before_slots": True}, "`bos_before_slots` must be left out"),
        ({"num_voco_tokens": 0}, "`num_voco_tokens` must be an int of at least 1 or None, got 0"),
        ({"vision_language_config": base_config()}, "`vision_language_config` must be that of a model with image"),
    ],
)
def test_settings_that_do_not_go_with_it_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        VoCoForCausalLM(VoCoConfig(**{"decoder_config": base_config(), **fields}))
