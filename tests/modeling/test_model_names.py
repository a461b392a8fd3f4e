# SPDX-License-Identifier: Apache-2.0
"""Checksums of weights, and the names of models, by which memories know their maker."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from context_compressors.modeling.checkpoint.fingerprints import checksum, weights_fingerprint


@pytest.mark.slow
@given(st.integers(1, 200), st.integers(0, 2**32), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_a_checksum_tells_any_changed_value(length, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randn(length, generator=generator).to(dtype)
    changed = tensor.clone()
    place = seed % length
    changed[place] = torch.nextafter(changed[place], changed[place] + 1)
    assert checksum(tensor) == checksum(tensor.clone()) == checksum(tensor[None].mT)
    assert checksum(changed) != checksum(tensor)
    # A view that does not start on a word is summed as its copy is.
    assert checksum(tensor[1:]) == checksum(tensor[1:].clone())


@pytest.mark.slow
def test_a_fingerprint_does_not_depend_on_the_type_but_on_every_weight(method_cases):
    model = method_cases["mean_pooling"].build()
    expected = weights_fingerprint(model)
    assert weights_fingerprint(copy.deepcopy(model).to(torch.bfloat16)) == expected
    for name, parameter in model.named_parameters():
        before = parameter.detach().clone()
        parameter.data = parameter.data * 1.5 + 1
        assert weights_fingerprint(model) != expected, name
        parameter.data = before


def test_a_models_name_tells_every_setting_that_changes_slots_or_reading(form_case, monkeypatch):
    model = form_case.build()
    expected, config = model.model_id, model.config
    for part, field, value in (
        (config, "chunk_size", 77),
        (config, "position_layout", "uniform"),
        (config, "bos_before_slots", not config.bos_before_slots),
        (config, "slots_after_ids", [3, 4]),
        (config, "encoder_lora", {"alpha": 99.0}),
        (config, "a_field_of_a_later_method", 1),
        (config.decoder_config, "rms_norm_eps", 0.5),
        (config.decoder_config, "rope_parameters", {"rope_type": "default", "rope_theta": 5.0}),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(part, field, value, raising=False)
            assert model.model_id != expected, field
    assert model.model_id == expected
    for part, field, value in (
        (config, "prompts", {"question_answering": "{question}?"}),
        (config, "compression_ratios", (2,)),
        (config, "base_model_name_or_path", "me/other"),
        (config, "use_cache", False),
        (config.decoder_config, "pad_token_id", 7),
        (config.decoder_config, "_attn_implementation", "eager"),
    ):
        setattr(part, field, value)
        assert model.model_id == expected, field


@pytest.mark.slow
@pytest.mark.parametrize("light", [True, False])
def test_a_checkpoint_has_one_name_in_any_type(form_case, inputs, tmp_path, local_hub, start_light, light):
    model = start_light(form_case, local_hub, dtype=torch.float32)
    model.save_pretrained(tmp_path, include_base=not light)
    memory = model.compress(inputs["context_input_ids"])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        loaded = type(model).from_pretrained(tmp_path, dtype=dtype)
        assert loaded.dtype == dtype
        assert loaded.model_id == model.model_id
    assert copy.deepcopy(loaded).model_id == model.model_id
    assert type(loaded.model).from_pretrained(tmp_path, dtype=dtype).model_id == model.model_id
    assert loaded(inputs["input_ids"], memory=memory).logits.isfinite().all()
    with torch.no_grad():
        loaded.get_input_embeddings().weight.mul_(2)
    assert loaded.model_id != model.model_id
