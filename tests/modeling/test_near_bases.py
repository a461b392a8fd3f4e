# SPDX-License-Identifier: Apache-2.0
"""A light checkpoint works on a rounded copy of its base, with one warning, and on no other model."""

import json
import logging

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from context_compressors.modeling.checkpoint.base_weights import base_name
from context_compressors.modeling.checkpoint.fingerprints import rounding, sample, sample_text

# The row of the padding token is all zeros.
TINY = 1e-12


def in_groups(bits, size):
    """Rounding with one scale and one offset for `size` neighbours, as in Q4_1 and the like."""

    def to_groups(tensor):
        groups = tensor.float().reshape(-1, size)
        low = groups.amin(1, keepdim=True)
        step = (groups.amax(1, keepdim=True) - low) / (2**bits - 1) + TINY
        return (((groups - low) / step).round() * step + low).view(tensor.shape)

    return to_groups


def by_row(bits):
    def to_rows(tensor):
        step = tensor.float().abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1) + TINY
        return (tensor / step).round() * step

    return to_rows


# With the relative error, at least and at most: that of large matrices, and some room for 512 samples.
ROUNDINGS = {
    "bfloat16": (lambda tensor: tensor.bfloat16().float(), 0.0012, 0.0024, "a cast to bfloat16"),
    "int8": (by_row(8), 0.003, 0.009, "a rounding"),
    "4 bits in groups of 16": (in_groups(4, 16), 0.05, 0.09, "a rounding"),
    "4 bits by row": (by_row(4), 0.08, 0.14, "a rounding"),
}


@pytest.fixture
def warnings(caplog):
    logging.getLogger("transformers").addHandler(caplog.handler)
    yield lambda: [record.getMessage() for record in caplog.records if "nearly the base model" in record.getMessage()]
    logging.getLogger("transformers").removeHandler(caplog.handler)


@pytest.fixture
def light(method_cases, local_hub, start_light, tmp_path):
    model = start_light(method_cases["mean_pooling"], local_hub)
    model.save_pretrained(tmp_path / "light")
    return tmp_path / "light"


def base_model(local_hub):
    return AutoModelForCausalLM.from_pretrained(local_hub.folder / "models--me--base" / "snapshots" / f"{1:040x}")


@torch.no_grad()
def rounded_copy(model, change, folder):
    """A copy whose matrices are rounded; vectors stay, as in quantised files."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.copy_(change(parameter))
    model.save_pretrained(folder)
    return model


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", ROUNDINGS)
def test_a_rounded_base_is_used_with_one_warning_that_names_the_error(light, local_hub, tmp_path, warnings, name):
    change, least, most, word = ROUNDINGS[name]
    copy = rounded_copy(base_model(local_hub), change, tmp_path / "copy")
    assert not AutoModelForCausalLM.from_pretrained(light).training
    assert warnings() == []
    loaded = AutoModelForCausalLM.from_pretrained(light, base_model=tmp_path / "copy")
    (warning,) = warnings()
    error = float(warning.partition("weights are ")[2].partition("%")[0]) / 100
    assert least < error < most
    assert word in warning
    assert "me/base" in warning
    weights = copy.base_model.state_dict() | {"lm_head.weight": copy.lm_head.weight}
    for key, tensor in loaded.state_dict().items():
        if base_name(key) is not None:
            assert tensor.equal(weights[base_name(key)[1]]), key
    # What is saved names the base that it was trained on.
    loaded.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == json.loads(
        (light / "config.json").read_text()
    )


@pytest.mark.slow
@torch.no_grad()
def test_a_checkpoint_of_a_rounded_base_is_used_on_the_unrounded_one(
    method_cases, local_hub, start_light, tmp_path, warnings
):
    case = method_cases["mean_pooling"]
    start_light(case, local_hub)
    rounded_copy(base_model(local_hub), in_groups(4, 16), tmp_path / "copy")
    model = case.method.causal_lm_class.from_base(tmp_path / "copy", hub_id="me/base", **case.method.easy)
    model.save_pretrained(tmp_path / "light")
    ids = torch.arange(5, 18)[None]
    logits = AutoModelForCausalLM.from_pretrained(tmp_path / "light")(ids, context_input_ids=ids).logits
    (warning,) = warnings()
    assert "a rounding" in warning
    expected = model(ids, context_input_ids=ids).logits
    assert 0 < (logits - expected).norm() < 0.8 * expected.norm()


def test_another_base_of_the_same_shape_is_refused(light, local_hub, warnings):
    local_hub("me/other", base_model(local_hub).config, seed=3)
    with pytest.raises(ValueError, match=r"me/other is not the base model \(me/base.*other weights"):
        AutoModelForCausalLM.from_pretrained(light, base_model="me/other")
    assert warnings() == []


@pytest.mark.parametrize(("rate", "steps"), [(1e-4, 10), (3e-2, 5)])
def test_a_fine_tuned_base_is_refused_although_it_is_as_near_as_a_rounded_one(light, local_hub, tmp_path, rate, steps):
    model = base_model(local_hub)
    before = sample_text(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    torch.manual_seed(0)
    for _ in range(steps):
        ids = torch.randint(5, 128, (4, 12))
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert rounding(model, before, torch.float32)[0] < 0.3
    model.save_pretrained(tmp_path / "tuned")
    with pytest.raises(ValueError, match=r"other weights.*a fine-tuned base is another model"):
        AutoModelForCausalLM.from_pretrained(light, base_model=tmp_path / "tuned")


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_changed_weight_is_not_taken_for_a_cast(light, local_hub, tmp_path, dtype):
    def rows_exchanged(model):
        table = model.get_input_embeddings().weight
        table[[40, 41]] = table[[41, 40]]

    def one_more(model):
        model.model.layers[1].mlp.up_proj.weight[5, 7] += 0.5

    def not_a_number(model):
        model.model.layers[1].mlp.up_proj.weight[5, 7] = torch.nan

    for change in (rows_exchanged, one_more, not_a_number):
        model = base_model(local_hub).to(dtype)
        change(model)
        model.save_pretrained(tmp_path / "other")
        with pytest.raises(ValueError, match="other weights"):
            AutoModelForCausalLM.from_pretrained(light, base_model=tmp_path / "other")


def test_casts_of_a_base_are_known_by_all_weights(light, local_hub, tmp_path, warnings):
    for dtype, wide in ((torch.bfloat16, False), (torch.float16, False), (torch.bfloat16, True)):
        model = base_model(local_hub).to(dtype)
        (model.float() if wide else model).save_pretrained(tmp_path / "copy")
        AutoModelForCausalLM.from_pretrained(light, base_model=tmp_path / "copy")
        assert f"a cast to {str(dtype)[6:]}. " in warnings()[-1]
    assert len(warnings()) == 3


@torch.no_grad()
@pytest.mark.parametrize("kind", ["norm", "k_proj"])
def test_a_base_with_one_kind_of_weights_of_another_model_is_refused(light, local_hub, tmp_path, kind):
    model = base_model(local_hub)
    for name, parameter in model.named_parameters():
        if kind in name:
            parameter.copy_(torch.randn_like(parameter))
    model.bfloat16().save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="other weights"):
        AutoModelForCausalLM.from_pretrained(light, base_model=tmp_path / "other")


@pytest.mark.slow
@torch.no_grad()
def test_one_layer_of_another_model_is_refused_though_it_is_not_in_the_sample(
    method_cases, local_hub, tiny_base_config, tmp_path
):
    method = method_cases["mean_pooling"].method
    model = AutoModelForCausalLM.from_config(tiny_base_config(num_hidden_layers=12)).bfloat16()
    model.save_pretrained(tmp_path / "base")
    light = method.causal_lm_class.from_base(tmp_path / "base", hub_id="me/deep", **method.easy)
    light.save_pretrained(tmp_path / "light")
    before = sample(model, torch.bfloat16)
    for parameter in model.model.layers[1].mlp.parameters():
        parameter.copy_(torch.randn_like(parameter))
    assert sample(model, torch.bfloat16).equal(before)
    model.save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="other weights"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "light", base_model=tmp_path / "other")


def test_a_rounding_that_leaves_too_little_is_refused(light, local_hub, tmp_path):
    rounded_copy(base_model(local_hub), in_groups(2, 16), tmp_path / "copy")
    with pytest.raises(ValueError, match="other weights"):
        AutoModelForCausalLM.from_pretrained(light, base_model=tmp_path / "copy")


def test_samples_are_short_and_the_same_in_the_type_that_they_were_taken_in():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(40)))
    for dtype, size in ((torch.float32, 2732), (torch.bfloat16, 1368), (torch.float16, 1368)):
        model.dtype = dtype
        text = sample_text(model.to(dtype))
        assert len(text) == size
        assert rounding(model, text, dtype) == (0.0, False)
        # A wider copy of the same values is the same.
        assert rounding(model.float(), text, dtype)[0] == 0.0
