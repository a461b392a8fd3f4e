# SPDX-License-Identifier: Apache-2.0
"""Light checkpoints: they leave out the base's weights and find them again."""

import json
import shutil

import pytest
import torch
from decal_models import build as build_decal
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from context_compressors.modeling.checkpoint.base_weights import base_name

GREEDY = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}


def stored(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def trainable(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


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
def test_a_base_in_a_folder_is_stored_unless_told_otherwise(method_cases, inputs, tmp_path, local_hub, start_light):
    case = method_cases["mean_pooling"]
    start_light(case, local_hub)
    base = tmp_path / "my_base"
    shutil.copytree(local_hub.folder / "models--me--base" / "snapshots" / f"{1:040x}", base)
    model = case.method.causal_lm_class.from_base(base, compression_ratios=[2])
    model.save_pretrained(tmp_path / "whole")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "whole").config.external_weights is None
    model.save_pretrained(tmp_path / "light", include_base=False)
    config = (tmp_path / "light" / "config.json").read_text()
    assert str(tmp_path) not in config
    assert json.loads(config)["external_weights"]["decoder"]["repo_id"] is None
    assert "base_model" in (tmp_path / "light" / "README.md").read_text()
    with pytest.raises(OSError, match=r"a folder without a name: point to a copy of it with .*base_model=FOLDER"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "light")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "light", base_model=base)
    assert loaded(**inputs).logits.equal(model(**inputs).logits)


@pytest.mark.slow
def test_a_missing_base_is_named_with_the_way_out(method_cases, inputs, tmp_path, local_hub, start_light):
    model = start_light(method_cases["mean_pooling"], local_hub)
    model.save_pretrained(tmp_path / "light")
    copy_of_base = tmp_path / "copy"
    shutil.copytree(local_hub.folder / "models--me--base" / "snapshots" / f"{1:040x}", copy_of_base)
    shutil.rmtree(local_hub.folder)
    with pytest.raises(OSError, match=rf"base model, me/base, revision {1:040x}.*download it.*base_model=FOLDER"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "light")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "light", base_model=copy_of_base)
    assert loaded(**inputs).logits.equal(model(**inputs).logits)


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
    method_cases, tmp_path, local_hub, start_light, caplog
):
    model = start_light(method_cases["mean_pooling"], local_hub)
    model.save_pretrained(tmp_path / "light")
    trainer = Trainer(model, TrainingArguments(str(tmp_path), report_to=[]))
    trainer._load_from_checkpoint(tmp_path / "light")
    assert not caplog.records
    weights = stored(tmp_path / "light")
    weights["stranger"] = weights.pop("model.slot_projection.weight")
    save_file(weights, tmp_path / "light" / "model.safetensors")
    trainer._load_from_checkpoint(tmp_path / "light")
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == [
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
