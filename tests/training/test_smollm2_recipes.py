# SPDX-License-Identifier: Apache-2.0
"""Recipes on SmolLM2-135M-Instruct: compressor, reader and the end of a training, in the chat template."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import context_compressors.training
from context_compressors import ContextCompressionQAPipeline, MeanPoolingForCausalLM, RankedKeyValuesForCausalLM
from context_compressors.data.sources import DataSource
from context_compressors.modeling.parts.chat_template import opening_ids
from context_compressors.training.arguments import parse_recipe
from context_compressors.training.train import main

RECIPES = Path(context_compressors.training.__file__).parent / "recipes" / "smollm2"
TEMPLATE = (
    "{% for m in messages %}<|bos|>{{ m['role'] + '\n' + m['content'] }}<|eos|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|bos|>assistant\n{% endif %}"
)
# Read last: what makes the recipes small enough for a test, and nothing else.
SMALL = {
    "sources": [{"generated": True, "tasks": ["question_answering", "reconstruction"], "weight": 1}],
    "task_schedule": None,
    "length_schedule": None,
    "max_context_tokens": 96,
    "save_steps": 1,
    "save_strategy": "steps",
    "bf16": False,
    "dtype": "float32",
    "use_cpu": True,
    "disable_tqdm": True,
}


@pytest.fixture
def chat_base(base_folder, tmp_path):
    """The tiny base as an instruct model: with a chat template."""
    folder = tmp_path / "base"
    AutoModelForCausalLM.from_pretrained(base_folder).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(base_folder)
    bos, eos = tokenizer.bos_token or tokenizer.eos_token, tokenizer.eos_token
    tokenizer.chat_template = TEMPLATE.replace("<|bos|>", bos).replace("<|eos|>", eos)
    tokenizer.save_pretrained(folder)
    return str(folder)


def run(*arguments, base, folder, max_steps=2):
    small = folder / "small.yaml"
    small.write_text(yaml.safe_dump({**SMALL, "max_steps": max_steps}))
    names = [f"smollm2/{name}.yaml" for name in arguments if not name.startswith("--")]
    options = [argument for argument in arguments if argument.startswith("--")]
    options = [part for option in options for part in option.split("=", 1)]
    main([*names, str(small), "--base", base, *options])


@pytest.mark.parametrize("recipe", ["mean_pooling", "ranked_key_values", "reader"])
def test_what_trains_is_never_what_is_reported_or_chosen_by(recipe, tmp_path):
    _, data, _ = parse_recipe(
        ["smollm2/data.yaml", f"smollm2/{recipe}.yaml", "--output_dir", str(tmp_path), "--use_cpu", "true"]
    )
    for source in map(DataSource.from_mapping, data.sources):
        assert source.generated or "_train" in source.path
        assert source.generated or source.licence.split()[0] in ("CC", "CC0", "Apache-2.0")
        assert source.generated or "NC" not in source.licence
        if source.path == "qa_squad_train.parquet":
            assert source.rows == [0, 85_000]


@pytest.mark.parametrize(
    "method", ["mean_pooling_residual", "compression_tokens", "icae", "five_hundred_x", "comprexit", "gmsa"]
)
def test_the_family_starts_its_slots_as_pooled_embeddings_at_one_budget(method, tmp_path):
    recipes = ["smollm2/data.yaml", "smollm2/family.yaml", f"smollm2/comparison/{method}.yaml"]
    model, data, training = parse_recipe([*recipes, "--output_dir", str(tmp_path), "--use_cpu", "true"])
    assert model.method == method.removesuffix("_residual")
    # Those of 500xCompressor are keys and values.
    assert model.method_config["embedding_residual"] is (method != "five_hundred_x")
    assert model.method_config["compression_ratios"] == [2, 4, 8]
    assert (training.max_steps, training.per_device_train_batch_size, data.max_context_tokens) == (560, 24, 512)


def test_compressors_and_reader_have_the_same_data_and_rank():
    names = ("mean_pooling", "reader", "ranked_key_values")
    compressor, reader, ranked = (yaml.safe_load((RECIPES / f"{name}.yaml").read_text()) for name in names)
    adapter = ranked["method_config"]["encoder_lora"]
    assert {name: reader["teacher_lora"][name] for name in adapter} == adapter
    assert "sources" not in ranked
    config = compressor["method_config"]
    for adapter in (config["encoder_lora"], config["decoder_lora"]):
        assert {name: reader["teacher_lora"][name] for name in adapter} == adapter
    assert not {"sources", "max_steps", "learning_rate"} & (set(compressor) | set(reader))
    shared = ("base", "prompts", "prompt_format", "dtype")
    assert [compressor[name] for name in shared] == [reader[name] for name in shared]


@pytest.mark.slow
def test_the_compressor_trains_goes_on_and_answers(chat_base, tmp_path):
    out, end = tmp_path / "out", tmp_path / "end"
    run("mean_pooling", "data", "cpu", f"--output_dir={out}", base=chat_base, folder=tmp_path)
    model = MeanPoolingForCausalLM.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert (model.config.prompt_format, model.config.chunk_size) == ("chat", 512)
    assert model.config.slots_after_ids == opening_ids(tokenizer)
    assert model.model.slot_projection.weight.abs().max() > 0, "starts at zero, and trains"
    pipe = ContextCompressionQAPipeline(model=model, tokenizer=tokenizer, device="cpu", max_new_tokens=3)
    assert isinstance(pipe("Who?", context="Nora keeps bees.", ratio=4)["answer"], str)
    checkpoint = f"--checkpoint={out / 'checkpoint-1'}"
    for stage in ("annealing", "long_context"):
        options = ["--method_config=null", checkpoint, f"--output_dir={end / stage}"]
        run("mean_pooling", "data", stage, "cpu", *options, base="null", folder=tmp_path)
        after = MeanPoolingForCausalLM.from_pretrained(end / stage).state_dict()
        assert any(not tensor.equal(after[name]) for name, tensor in model.state_dict().items()), stage


@pytest.mark.slow
def test_the_reader_goes_on_as_ranked_key_values(chat_base, tmp_path):
    reader, out = tmp_path / "reader", tmp_path / "out"
    run("reader", "data", "cpu", f"--output_dir={reader}", base=chat_base, folder=tmp_path)
    options = [f"--adapter={reader}", "--fit_scorers=2", f"--output_dir={out}"]
    run("data", "ranked_key_values", "cpu", *options, base=chat_base, folder=tmp_path, max_steps=-1)
    summary = json.loads((out / "training_summary.json").read_text())
    assert (summary["steps"], summary["input_tokens"]) == (0, 0)
    model, tokenizer = RankedKeyValuesForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    opening = opening_ids(tokenizer)
    assert model.config.slots_after_ids == opening
    assert model.config.opening_ids[-len(opening) :] == opening
    weights = load_file(reader / "adapter_model.safetensors")
    adapter = {name: p for name, p in model.named_parameters() if "lora_" in name}
    assert len(adapter) == len(weights)
    stored = {
        name.replace("base_model.model.", "").replace(".weight", ".shared.weight"): w for name, w in weights.items()
    }
    assert all(
        adapter[name.replace("model.", "model.language_model.", 1)].equal(w.bfloat16().float())
        for name, w in stored.items()
    )
    pipe = ContextCompressionQAPipeline(model=model, tokenizer=tokenizer, device="cpu", max_new_tokens=3)
    assert isinstance(pipe("Who?", context="Nora keeps bees.", ratio=16)["answer"], str)


@pytest.mark.slow
def test_the_reader_trains_its_adapter_alone(chat_base, tmp_path):
    out = tmp_path / "out"
    run("reader", "data", "cpu", f"--output_dir={out}", base=chat_base, folder=tmp_path)
    base = AutoModelForCausalLM.from_pretrained(chat_base)
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    adapted = PeftModel.from_pretrained(base, out)
    moved = [p for name, p in adapted.named_parameters() if "lora_B" in name]
    assert moved
    assert all(torch.count_nonzero(p) for p in moved)
    assert all(tensor.equal(before[name]) for name, tensor in adapted.unload().state_dict().items())
