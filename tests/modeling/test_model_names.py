# SPDX-License-Identifier: Apache-2.0
"""Checksums of weights, and the names of models, by which memories know their maker."""

import pytest
import torch


@pytest.mark.slow
@torch.no_grad()
def test_a_models_name_depends_on_every_weight(form_case):
    model = form_case.build()
    expected = model.model_id
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.model.named_parameters():
        place = int(torch.randint(parameter.numel(), (), generator=generator))
        before = parameter.view(-1)[place].clone()
        parameter.view(-1)[place] += 1
        assert model.model_id != expected, name
        parameter.view(-1)[place] = before
    assert model.model_id == expected


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
