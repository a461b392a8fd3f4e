# SPDX-License-Identifier: Apache-2.0
"""Light checkpoints: they leave out the base's weights and find them again."""

import json
import logging
import shutil

import pytest
import torch
from decal_models import build as build_decal
from parameters import trainable
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from context_compressors import MeanPoolingForCausalLM
from context_compressors.modeling.checkpoint.base_weights import base_name

GREEDY = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}


def stored(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def expected_names(model):
    """Of the model's own parts all, of the base's weights those that train."""
    own = {name for name, _ in model.named_parameters() if base_name(name) is None}
    return own | trainable(model)


@pytest.mark.slow
@torch.no_grad()
def test_a_light_checkpoint_is_the_saved_model(method_case, inputs, tmp_path, local_hub, start_light, slots):
    case, model = method_case, start_light(method_case, local_hub)
    model.save_pretrained(tmp_path / "light")
    assert set(stored(tmp_path / "light")) == expected_names(model)
    config = json.loads((tmp_path / "light" / "config.json").read_text())
    assert config["external_weights"]["decoder"]["repo_id"] == config["base_model_name_or_path"] == "me/base"
    assert config["external_weights"]["decoder"]["revision"] == config["base_model_revision"] == f"{1:040x}"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "light", attn_implementation=case.attention)
    assert type(loaded) is case.method.causal_lm_class
    assert not loaded.training
    assert loaded(**inputs).logits.equal(model(**inputs).logits)
    assert loaded.generate(**inputs, **GREEDY).equal(model.generate(**inputs, **GREEDY))
    assert loaded.model_id == model.model_id
    assert trainable(loaded) == trainable(model)
    loaded.save_pretrained(tmp_path / "again")
    again, first = (stored(tmp_path / name) for name in ("again", "light"))
    assert all(tensor.equal(again[name]) for name, tensor in first.items())
    # The whole form needs no base any more.
    loaded.save_pretrained(tmp_path / "whole", include_base=True)
    shutil.rmtree(local_hub.folder)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", attn_implementation=case.attention)
    assert whole(**inputs).logits.equal(model(**inputs).logits)
    assert whole.config.external_weights is None


# --- where the base is ---


@pytest.mark.slow
def test_a_missing_base_is_named_and_a_copy_does(method_cases, inputs, tmp_path, local_hub, start_light):
    start_light(method_cases["mean_pooling"], local_hub).save_pretrained(tmp_path / "of_hub")
    base = tmp_path / "my_base"
    shutil.copytree(local_hub.folder / "models--me--base" / "snapshots" / f"{1:040x}", base)
    shutil.rmtree(local_hub.folder)
    model = MeanPoolingForCausalLM.from_base(base, compression_ratios=[2])
    model.save_pretrained(tmp_path / "whole")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "whole").config.external_weights is None
    model.save_pretrained(tmp_path / "of_folder", include_base=False)
    texts = [
        path for name in ("whole", "of_folder") for path in (tmp_path / name).iterdir() if ".safe" not in path.name
    ]
    assert not [path for path in texts if str(tmp_path) in path.read_text(encoding="utf-8")]
    for name, message in (
        ("of_hub", rf"base model, me/base, revision {1:040x}.*download it.*base_model=FOLDER"),
        ("of_folder", "a folder without a name: point to a copy of it with .*base_model=FOLDER"),
    ):
        with pytest.raises(OSError, match=message):
            AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert AutoModelForCausalLM.from_pretrained(tmp_path / name, base_model=base)(**inputs).logits.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, r"me/other is not the base model \(me/base.*other weights"),
        ({"num_hidden_layers": 1}, "me/other has num_hidden_layers 1.*me/base"),
    ],
    ids=["weights", "layers"],
)
def test_another_base_is_refused_by_name(method_cases, tmp_path, local_hub, start_light, change, message):
    case = method_cases["mean_pooling"]
    start_light(case, local_hub).save_pretrained(tmp_path / "light")
    local_hub("me/other", case.config(decoder_config=change).decoder_config, seed=3)
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path / "light", base_model="me/other")


# --- what is stored ---


def test_a_trainer_that_resumes_names_only_weights_that_are_missing(
    method_cases, tmp_path, local_hub, start_light, monkeypatch
):
    warnings: list[str] = []
    monkeypatch.setattr("transformers.trainer.logger.warning", warnings.append)
    model = start_light(method_cases["mean_pooling"], local_hub)
    model.save_pretrained(tmp_path / "light")
    trainer = Trainer(model, TrainingArguments(str(tmp_path), report_to=[]))
    trainer._load_from_checkpoint(tmp_path / "light")
    assert not warnings
    weights = stored(tmp_path / "light")
    weights["stranger"] = weights.pop("model.slot_projection.weight")
    save_file(weights, tmp_path / "light" / "model.safetensors")
    trainer._load_from_checkpoint(tmp_path / "light")
    assert [warning.rpartition(": ")[2] for warning in warnings] == [
        "['model.slot_projection.weight'].",
        "['stranger'].",
    ]


def test_base_weights_that_have_trained_are_stored_even_when_frozen_again(
    method_cases, inputs, tmp_path, local_hub, start_light
):
    model = start_light(method_cases["mean_pooling"], local_hub)
    name = "model.language_model.embed_tokens.weight"
    # One row alone, as an embedding table trains.
    model.get_parameter(name)[7] += 1e-4
    assert not model.get_parameter(name).requires_grad
    model.save_pretrained(tmp_path / "light")
    assert set(stored(tmp_path / "light")) == expected_names(model) | {name}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "light")
    assert loaded(**inputs).logits.equal(model(**inputs).logits)


@pytest.mark.slow
@torch.no_grad()
def test_a_resized_vocabulary_lies_over_the_base(form_case, inputs, tmp_path, local_hub, start_light):
    model = start_light(form_case, local_hub)
    model.resize_token_embeddings(model.config.vocab_size + 8)
    inputs["input_ids"][0, 1] = model.config.vocab_size - 1
    model.save_pretrained(tmp_path / "light")
    resized = {
        name for name, _ in model.named_parameters() if name.endswith(("model.embed_tokens.weight", "lm_head.weight"))
    }
    assert resized <= set(stored(tmp_path / "light"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "light")
    assert loaded.config.vocab_size == model.config.vocab_size
    assert loaded(**inputs).logits.equal(model(**inputs).logits)


def test_a_merged_model_is_saved_whole(method_cases, tmp_path, local_hub, start_light):
    model = start_light(method_cases["mean_pooling"], local_hub)
    model.merge_adapters()
    model.save_pretrained(tmp_path / "merged")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged").config.external_weights is None
    with pytest.raises(ValueError, match="its adapters are merged"):
        model.save_pretrained(tmp_path / "light", include_base=False)


@pytest.mark.slow
def test_a_whole_model_becomes_light_when_its_base_is_linked(form_case, inputs, tmp_path, local_hub, start_light):
    model = start_light(form_case, local_hub)
    model.save_pretrained(tmp_path / "whole", include_base=True)
    model.save_pretrained(tmp_path / "light")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    with pytest.raises(ValueError, match="loaded whole"):
        loaded.save_pretrained(tmp_path / "again", include_base=False)
    loaded.link_base("me/base")
    loaded.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        tmp_path / "light" / "model.safetensors"
    ).read_bytes()


def test_a_method_that_trains_all_of_its_base_is_saved_whole(tmp_path):
    with pytest.raises(ValueError, match="trains all of its base: its checkpoints are always whole"):
        build_decal().save_pretrained(tmp_path, include_base=False)


# --- rounded copies of the base ---


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
