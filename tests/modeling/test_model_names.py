# SPDX-License-Identifier: Apache-2.0
"""Checksums of weights, and the name of a model, by which a memory knows who made it."""

import copy
import hashlib
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from context_compressors.modeling.checkpoint import fingerprints
from context_compressors.modeling.checkpoint.fingerprints import checksum, weights_fingerprint


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


def test_a_checksum_tells_the_order_of_values():
    tensor = torch.randn(11)
    assert len({checksum(tensor.roll(shift)) for shift in range(11)}) == 11
    assert checksum(torch.ones(3, device="meta")) is None
    assert checksum(torch.ones(3, dtype=torch.int8)) is None


def test_a_fingerprint_does_not_depend_on_the_type_but_on_every_weight(method_cases):
    model = method_cases["mean_pooling"].build()
    expected = weights_fingerprint(model)
    assert weights_fingerprint(copy.deepcopy(model).to(torch.bfloat16)) == expected
    for name, parameter in model.named_parameters():
        before = parameter.detach().clone()
        parameter.data = parameter.data * 1.5 + 1
        assert weights_fingerprint(model) != expected, name
        parameter.data = before


@pytest.mark.slow
@pytest.mark.costly
def test_a_models_name_tells_any_changed_value(method_case):
    model = method_case.build()
    expected = model.model_id
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.model.named_parameters():
        flat = parameter.data.view(-1)
        place = int(torch.randint(flat.numel(), (), generator=generator))
        with torch.no_grad():
            before = flat[place].clone()
            parameter.view(-1)[place] += 1
            assert model.model_id != expected, name
            parameter.view(-1)[place] = before
    assert model.model_id == expected


@pytest.mark.parametrize("chunk", [1 << 20, 16])
def test_a_models_name_tells_exchanged_rows_and_values(monkeypatch, chunk):
    monkeypatch.setattr(fingerprints, "_CHUNK", chunk)
    layer = nn.Linear(8, 6, bias=False)
    names = {weights_fingerprint(layer, of_answers=True)}
    for order in ([1, 0, 2, 3, 4, 5], [0, 1, 2, 3, 5, 4]):
        layer.weight.data = layer.weight.data[order]
        names.add(weights_fingerprint(layer, of_answers=True))
    layer.weight.data[0, :4] = layer.weight.data[0, [0, 1, 3, 2]]
    assert len({*names, weights_fingerprint(layer, of_answers=True)}) == 4


@given(st.integers(1, 200), st.integers(0, 2**32))
def test_a_fingerprint_of_all_weights_is_one_of_bfloat16_words(length, seed):
    layer = nn.Module()
    layer.weight = nn.Parameter(torch.randn(length, generator=torch.Generator().manual_seed(seed)))
    data = layer.weight.detach().bfloat16().view(torch.int16).tolist() + [0] * (-length % 4)
    words = [struct.unpack("<q", struct.pack("<4h", *data[i : i + 4]))[0] for i in range(0, len(data), 4)]
    total = sum((2 * i + 1) * word for i, word in enumerate(words)) % 2**64
    total -= 2**64 * (total >= 2**63)
    text = f"weight{(length,)}{[total]}"
    assert weights_fingerprint(layer, of_answers=True) == hashlib.sha256(text.encode()).hexdigest()[:16]
    assert weights_fingerprint(layer.bfloat16(), True) == weights_fingerprint(layer.float(), True)


def test_a_models_name_tells_every_setting_that_changes_slots_or_reading(method_case, monkeypatch):
    model = method_case.build()
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
    # What float16 stores are other values.
    type(model).from_pretrained(tmp_path, dtype=dtype).save_pretrained(tmp_path / "half", include_base=True)
    names = {type(model).from_pretrained(tmp_path / "half", dtype=dtype).model_id for dtype in ("float32", "float16")}
    assert len(names) == 1
