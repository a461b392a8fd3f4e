# SPDX-License-Identifier: Apache-2.0
"""Compressors on a pretrained base."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from context_compressors import SnapKVForCausalLM, from_base


@pytest.fixture
def base_folder(tiny_base_config, tmp_path):
    """`base_folder(config)`: save a new language model, a tiny Llama by default, and return its folder."""

    def save(config=None):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config or tiny_base_config()).save_pretrained(tmp_path / "base")
        return tmp_path / "base"

    return save


@pytest.mark.slow
@torch.no_grad()
def test_the_bases_own_logits_are_there_in_bfloat16_too(backbone_case, base_folder):
    method, text = backbone_case.method, torch.arange(5, 17)[None]
    base_folder = base_folder(backbone_case.config().decoder_config)
    settings: dict = {"attn_implementation": backbone_case.attention}
    model = method.causal_lm_class.from_base(base_folder, **method.easy, **settings)
    base = AutoModelForCausalLM.from_pretrained(base_folder, **settings)
    expected = base(text).logits
    assert model.config._attn_implementation == backbone_case.attention
    assert not model.training
    assert model(text).logits.equal(expected), "adapters start as the identity"
    with model.base_language_model():
        assert model(text).logits.equal(expected)
    assert model(text, context_input_ids=text).logits.isfinite().all()
    backbone = method.model_class.from_base(base_folder, **method.easy, **settings)
    assert backbone(text).last_hidden_state.equal(base.base_model(text).last_hidden_state)
    # From bfloat16, what trains is in float32.
    settings["dtype"] = torch.bfloat16
    model = method.causal_lm_class.from_base(base_folder, **method.easy, **settings)
    assert model.dtype == torch.bfloat16
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if parameter.requires_grad else torch.bfloat16), name
    base = AutoModelForCausalLM.from_pretrained(base_folder, **settings)
    with model.base_language_model():
        assert model(text).logits.equal(base(text).logits)
    logits = model(text, context_input_ids=text).logits
    assert logits.dtype == torch.bfloat16


def test_a_method_is_started_by_its_name(base_folder):
    model = from_base(base_folder(), method="snap_kv", window_size=4)
    assert (type(model), model.config.window_size, model.training) == (SnapKVForCausalLM, 4, False)
    with pytest.raises(ValueError, match="unknown method 'snapkv'; did you mean 'snap_kv'"):
        from_base(base_folder(), method="snapkv")


@torch.no_grad()
def test_an_encoder_of_its_own_starts_as_a_copy(form_case, base_folder, tiny_base_config, slots):
    models = []
    for fields in ({}, {"encoder_config": tiny_base_config()}):
        torch.manual_seed(0)
        models.append(form_case.method.causal_lm_class.from_base(base_folder(), **form_case.method.easy, **fields))
    shared, apart = (slots(model.compress(torch.arange(5, 30)[None])) for model in models)
    assert apart.equal(shared)
    encoder, decoder = models[1].model.encoder_model, models[1].model.language_model
    assert encoder.embed_tokens.weight.data_ptr() != decoder.embed_tokens.weight.data_ptr()


@pytest.mark.slow
@pytest.mark.parametrize(("pattern", "tied"), [(r"language_model\.", False), ("embed_tokens|lm_head", True)])
def test_any_part_of_a_bfloat16_base_may_train(form_case, tiny_base_config, tmp_path, pattern, tied):
    method, text = form_case.method, torch.arange(5, 17)[None]
    base = AutoModelForCausalLM.from_config(tiny_base_config(tie_word_embeddings=tied), dtype=torch.bfloat16)
    base.save_pretrained(tmp_path / "base")
    started = method.causal_lm_class.from_base(tmp_path / "base", **method.easy, trainable_parameters=[pattern])
    started.save_pretrained(tmp_path / "compressor")
    loaded = method.causal_lm_class.from_pretrained(tmp_path / "compressor", dtype=torch.bfloat16)
    for model in (started, loaded):
        assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
        model(text, context_input_ids=text, labels=text).loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)
        assert model.generate(text, context_input_ids=text, max_new_tokens=2, min_new_tokens=2).shape == (1, 14)
