# SPDX-License-Identifier: Apache-2.0
"""Saved models come back: outputs, trainable set, types and code, for each class from one checkpoint."""

import json

import pytest
import torch
from accelerate import cpu_offload
from decal_models import build as build_decal
from parameters import trainable
from safetensors import safe_open
from tiny_models import plain_model
from transformers import AutoModel, AutoModelForCausalLM
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from context_compressors import CompressedContext, DeCALForConditionalGeneration, DeCALForRetrieval

GREEDY = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}


@pytest.fixture
def question():
    return torch.tensor([[1, 9, 40, 7]])


def parameter_bytes(model):
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    return sum(storages.values())


@torch.no_grad()
def test_a_loaded_model_is_the_saved_one(weights_case, inputs, tmp_path):
    """The Auto classes load it, alone and with its head, and save it again to the same bytes."""
    case, model, folder = weights_case, weights_case.model, tmp_path / "saved"
    model.save_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=case.attention)
    assert (type(loaded), type(loaded.config)) == (case.method.causal_lm_class, case.method.config_class)
    assert not loaded.training
    assert loaded.config._attn_implementation == case.attention
    assert loaded(**inputs).logits.equal(model(**inputs).logits)
    assert loaded.generate(**inputs, **GREEDY).equal(model.generate(**inputs, **GREEDY))
    assert loaded.model_id == model.model_id
    assert trainable(loaded) == trainable(model)
    # The base is held once, in memory and on disk.
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert 0 <= stored - parameter_bytes(model) < 20_000
    assert parameter_bytes(loaded) == parameter_bytes(model) == 4 * model.num_parameters()
    backbone = AutoModel.from_pretrained(folder, attn_implementation=case.attention)
    assert type(backbone) is case.method.model_class
    assert backbone(**inputs).last_hidden_state.equal(model.model(**inputs).last_hidden_state)
    assert trainable(backbone) == {name.removeprefix("model.") for name in trainable(model)}
    loaded.save_pretrained(tmp_path / "again")
    again = {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()}
    assert again == {path.name: path.read_bytes() for path in folder.iterdir()}


@torch.no_grad()
def test_a_saved_backbone_loads_as_a_backbone(form_case, inputs, tmp_path):
    backbone = form_case.model.model
    backbone.save_pretrained(tmp_path)
    loaded = form_case.method.model_class.from_pretrained(tmp_path)
    assert loaded(**inputs).last_hidden_state.equal(backbone(**inputs).last_hidden_state)
    with pytest.raises(ValueError, match=r"lacks 1 weights.*lm_head\.weight"):
        form_case.method.causal_lm_class.from_pretrained(tmp_path)


def test_checkpoints_of_decal_and_of_other_methods_and_bases_are_told_apart(method_cases, tmp_path):
    model = method_cases["mean_pooling"].model
    model.save_pretrained(tmp_path / "mean_pooling")
    build_decal().save_pretrained(tmp_path / "decal")
    AutoModelForCausalLM.from_config(model.config.decoder_config).save_pretrained(tmp_path / "base")
    for model_class in (DeCALForConditionalGeneration, DeCALForRetrieval):
        with pytest.raises(ValueError, match=r"'mean_pooling_compressor'.*loads 'decal_compressor'"):
            model_class.from_pretrained(tmp_path / "mean_pooling")
    with pytest.raises(ValueError, match="'decal_compressor', MeanPoolingForCausalLM loads"):
        type(model).from_pretrained(tmp_path / "decal")
    with pytest.raises(ValueError, match=r"'llama'.*a base model with `from_base`"):
        type(model).from_pretrained(tmp_path / "base")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mean_pooling", "five_hundred_x"])
@torch.no_grad()
def test_memories_of_a_checkpoints_own_code_and_of_the_package_mix(method_cases, name, inputs, question, tmp_path):
    model = method_cases[name].model
    model.save_pretrained(tmp_path)
    # The Auto classes would take this package's code.
    remote_class = get_class_from_dynamic_module(model.config.auto_map["AutoModelForCausalLM"], tmp_path)
    remote = remote_class.from_pretrained(tmp_path, attn_implementation=method_cases[name].attention)
    memories = [remote.compress(inputs["context_input_ids"]), model.compress(inputs["context_input_ids"])]
    classes = [type(memory) for memory in memories]
    assert classes[0].__module__.startswith("transformers_modules.")
    assert classes[1] is CompressedContext
    expected = CompressedContext.concatenate(memories[1:] * 2)
    for order in (memories, memories[::-1]):
        for own in classes:
            joined = own.concatenate(order)
            assert joined.position_ids.equal(expected.position_ids)
            for reader in (model, remote):
                assert reader(question, memory=joined).logits.equal(model(question, memory=expected).logits)


@pytest.mark.costly
def test_the_configuration_comes_back(method_case, tmp_path):
    for case in method_case.all_of_its_method:
        config = case.config()
        config.save_pretrained(tmp_path)
        loaded = case.method.config_class.from_pretrained(tmp_path)
        assert loaded.to_dict() == config.to_dict(), case
        assert loaded.compression_ratios == config.compression_ratios, case
        for name in ("decoder_config", "encoder_config"):
            assert type(getattr(loaded, name)) is type(getattr(config, name)), case


@pytest.mark.slow
@torch.no_grad()
def test_bfloat16_keeps_what_trains_in_float32(method_case, inputs, tmp_path):
    model = method_case.build(**({} if method_case.method.ranks else {"task_token_ids": {"[AE]": 128}}))
    model.save_pretrained(tmp_path)
    loaded = method_case.method.causal_lm_class.from_pretrained(
        tmp_path, dtype=torch.bfloat16, attn_implementation=method_case.attention
    )
    types = {name: parameter.dtype for name, parameter in loaded.named_parameters()}
    for name, parameter in loaded.named_parameters():
        assert types[name] == (torch.float32 if parameter.requires_grad else torch.bfloat16), name
        if parameter.requires_grad:
            assert parameter.equal(model.get_parameter(name)), name
    logits = loaded(**inputs).logits
    assert logits.dtype == torch.bfloat16
    expected = model(**inputs).logits
    assert (logits - expected).norm() < 0.3 * expected.norm()
    assert loaded.generate(**inputs, **GREEDY).shape == (1, 9)
    loaded.save_pretrained(tmp_path / "again")
    again = method_case.method.causal_lm_class.from_pretrained(
        tmp_path / "again", attn_implementation=method_case.attention
    )
    assert {name: parameter.dtype for name, parameter in again.named_parameters()} == types
    assert again(**inputs).logits.equal(logits)
    assert again.model_id == loaded.model_id


@pytest.mark.costly
def test_types_are_the_same_from_a_configuration_as_from_a_checkpoint(method_case, tmp_path):
    started = AutoModelForCausalLM.from_config(method_case.config(), dtype=torch.bfloat16)
    started.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    expected = {name: parameter.dtype for name, parameter in loaded.named_parameters()}
    assert {name: parameter.dtype for name, parameter in started.named_parameters()} == expected


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn"])
def test_weights_can_be_stored_in_another_type(form_case, inputs, tmp_path, name):
    model = form_case.model
    model.save_pretrained(tmp_path, save_dtype=name)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert {file.get_tensor(key).dtype for key in file.keys()} == {getattr(torch, name)}  # noqa: SIM118
    loaded = form_case.method.causal_lm_class.from_pretrained(tmp_path)
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    expected = model(**inputs).logits
    assert (loaded(**inputs).logits - expected).norm() < 0.3 * expected.norm()
    assert {p.dtype for p in model.parameters()} == {torch.float32}, "the saved model keeps its own"


@torch.no_grad()
def test_a_changed_trainable_set_is_part_of_the_checkpoint(form_case, tmp_path):
    patterns = [r"\.lora_B\.(encoder|decoder)\.", r"language_model\.norm\.weight$"]
    lora = form_case.fields.get("encoder_lora") or {"rank": 4}
    model = form_case.build(encoder_lora=lora, trainable_parameters=patterns)
    names = trainable(model)
    assert "model.language_model.norm.weight" in names
    assert all(".lora_B." in name or name.endswith(".norm.weight") for name in names)
    assert len(names) > 1
    model.save_pretrained(tmp_path)
    loaded = form_case.method.causal_lm_class.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert trainable(loaded) == names
    assert {p.dtype for p in loaded.parameters() if p.requires_grad} == {torch.float32}


def test_a_folder_holds_weights_code_configuration_and_card_and_nothing_of_this_machine(form_case, tmp_path):
    form_case.model.save_pretrained(tmp_path)
    texts = {path.name: path.read_text("utf-8") for path in tmp_path.iterdir() if path.suffix != ".safetensors"}
    assert {"config.json", "generation_config.json", "README.md"} < texts.keys()
    assert {name.rpartition(".")[2] for name in texts} == {"json", "md", "py"}
    config = json.loads(texts["config.json"])
    assert set(config["auto_map"]) == {"AutoConfig", "AutoModel", "AutoModelForCausalLM"}
    for file, class_name in (target.split(".") for target in config["auto_map"].values()):
        assert f"class {class_name}(" in texts[f"{file}.py"]
    assert not [name for name, text in texts.items() if str(tmp_path) in text or "/work" in text]


# --- adapters ---


@pytest.mark.slow
@torch.no_grad()
def test_adapters_can_be_off_and_can_be_merged(adapter_case, inputs, question, tmp_path):
    case, model = adapter_case, adapter_case.build()
    base, adapted = plain_model(model), model(question).logits
    with model.base_language_model():
        assert model(question).logits.equal(base(question).logits)
        assert model.generate(question, **GREEDY).equal(base.generate(question, **GREEDY))
    assert adapted.allclose(base(question).logits, atol=1e-3) == (model.config.decoder_lora is None)
    with pytest.raises(RuntimeError, match="inside"), model.base_language_model():
        raise RuntimeError("inside")
    assert model(question).logits.equal(adapted), "adapters are on again after an error"
    expected, generated = model(**inputs).logits, model.generate(**inputs, **GREEDY)
    model.merge_adapters()
    assert not [name for name, _ in model.named_parameters() if "lora" in name]
    # Rounding grows over AutoCompressor's segments; in float64 there is none.
    torch.testing.assert_close(model(**inputs).logits, expected, atol=3e-4, rtol=0)
    model.save_pretrained(tmp_path)
    loaded = case.method.causal_lm_class.from_pretrained(tmp_path, attn_implementation=case.attention)
    assert loaded.config.encoder_lora is None
    assert loaded.config.decoder_lora is None
    torch.testing.assert_close(loaded(**inputs).logits, expected, atol=3e-4, rtol=0)
    assert loaded.generate(**inputs, **GREEDY).equal(generated)
    loaded.merge_adapters()
    torch.testing.assert_close(loaded(**inputs).logits, expected, atol=3e-4, rtol=0)


# --- names of models, by which memories know their maker ---


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


# --- weights on the disk or in host memory ---


@pytest.mark.slow
@pytest.mark.parametrize("place", ["disk", "cpu"])
def test_an_offloaded_model_compresses_reads_and_answers_as_a_plain_one(form_case, inputs, slots, tmp_path, place):
    model = form_case.build()
    model.save_pretrained(tmp_path / "model")
    size = sum(parameter.numel() for parameter in model.parameters()) * 4
    loading = {"device_map": "auto", "max_memory": {"cpu": int(0.8 * size)}, "offload_folder": tmp_path / "weights"}
    offloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", **(loading if place == "disk" else {}))
    if place == "cpu":
        cpu_offload(offloaded)
    assert any(parameter.is_meta for parameter in offloaded.parameters())
    memory = offloaded.compress(inputs["context_input_ids"])
    expected = model.compress(inputs["context_input_ids"])
    assert slots(memory).equal(slots(expected))
    assert memory.model_id == expected.model_id
    logits = model(**inputs).logits
    assert offloaded(**inputs).logits.equal(logits)
    torch.testing.assert_close(offloaded(inputs["input_ids"], memory=memory).logits, logits, atol=1e-4, rtol=0)
    assert offloaded.generate(**inputs, **GREEDY).equal(model.generate(**inputs, **GREEDY))
    # Nothing stays in place.
    assert any(parameter.is_meta for parameter in offloaded.parameters())
