# SPDX-License-Identifier: Apache-2.0
"""A light checkpoint works on a rounded copy of its base with one warning, and on no other model."""

import json
import logging

import pytest
import torch
from transformers import AutoModelForCausalLM


def to_four_bits(tensor):
    """Round with one scale and one offset for 16 neighbours, as Q4_1 and the like do."""
    groups = tensor.float().reshape(-1, 16)
    low = groups.amin(1, keepdim=True)
    # The row of the padding token is all zeros.
    step = (groups.amax(1, keepdim=True) - low) / 15 + 1e-12
    return (((groups - low) / step).round() * step + low).view(tensor.shape)


# With the relative error, at least and at most: that of large matrices, and some room for 512 samples.
ROUNDINGS = {
    "bfloat16": (lambda tensor: tensor.bfloat16().float(), 0.0012, 0.0024, "a cast to bfloat16"),
    "4 bits in groups of 16": (to_four_bits, 0.05, 0.09, "a rounding"),
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
    ids = torch.arange(5, 18)[None]
    with loaded.base_language_model():
        assert loaded(ids).logits.equal(copy(ids).logits)
    # What is saved names the base that it was trained on.
    loaded.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == json.loads(
        (light / "config.json").read_text()
    )


def test_a_fine_tuned_base_is_refused(light, local_hub, tmp_path):
    model = base_model(local_hub)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    torch.manual_seed(0)
    for _ in range(5):
        ids = torch.randint(5, 128, (4, 12))
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(tmp_path / "tuned")
    with pytest.raises(ValueError, match=r"other weights.*a fine-tuned base is another model"):
        AutoModelForCausalLM.from_pretrained(light, base_model=tmp_path / "tuned")


@torch.no_grad()
@pytest.mark.parametrize("value", [0.5, torch.nan])
def test_one_changed_weight_is_not_taken_for_a_cast(light, local_hub, tmp_path, value):
    model = base_model(local_hub).bfloat16()
    model.model.layers[1].mlp.up_proj.weight[5, 7] += value
    model.save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="other weights"):
        AutoModelForCausalLM.from_pretrained(light, base_model=tmp_path / "other")
