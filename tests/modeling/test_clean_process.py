# SPDX-License-Identifier: Apache-2.0
"""Saved folders load, answer, train and are saved again without this package; children and uploads of them."""

import ast
import inspect
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from decal_models import build as build_decal
from safetensors.torch import load_file, save_file
from tiny_models import ON_EVERY_BASE
from transformers import AutoModelForCausalLM

from context_compressors.configuration.methods import METHODS, config_class
from context_compressors.modeling import model_class
from context_compressors.modeling.checkpoint.remote_code import _LEFT_OUT, write_code


@torch.no_grad()
def outputs_of(model, backbone, inputs):
    """Return slots, states, logits, generated ids and the trainable set."""
    memory = backbone.compress(inputs["context_input_ids"], inputs["context_attention_mask"])
    text = {"input_ids": inputs["input_ids"], "memory": memory}
    parts = [part for pair in memory.key_values for part in pair] if memory.key_values else [memory.embeddings]
    outputs = {f"slots.{number}": part for number, part in enumerate(parts)}
    outputs["logits"] = model(**text).logits
    outputs["greedy"] = model.generate(**text, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    outputs["trains"] = torch.tensor([parameter.requires_grad for _, parameter in sorted(model.named_parameters())])
    if not model.config.is_encoder_decoder:
        outputs["states"] = backbone(**text).last_hidden_state
        outputs["direct"] = model(**inputs).logits
        with model.base_language_model():
            outputs["base"] = model(inputs["input_ids"]).logits
    return {name: tensor.contiguous() for name, tensor in outputs.items()}


SCRIPT = f"""
import json, sys, torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

try:
    import context_compressors
    sys.exit("this package can be imported: the environment is not clean")
except ImportError:
    pass

{inspect.getsource(outputs_of)}

for source, target, inputs_file, outputs_file, attention in json.load(open(sys.argv[1])):
    inputs = load_file(inputs_file)
    settings = dict(trust_remote_code=True, attn_implementation=attention)
    config = AutoConfig.from_pretrained(source, trust_remote_code=True)
    backbone = AutoModel.from_pretrained(source, **settings)
    head = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = head.from_pretrained(source, **settings)
    for kind in (type(config), type(backbone), type(model), model.pipeline_class):
        assert kind.__module__.startswith("transformers_modules."), kind
    memory = model.compress(inputs["context_input_ids"])
    memory.save(outputs_file + ".memory")
    type(memory).load(outputs_file + ".memory", model_id=model.model_id)
    save_file(outputs_of(model, backbone, inputs), outputs_file)
    model.save_pretrained(target)
    if not config.is_encoder_decoder:
        model.train()(**inputs, labels=inputs["input_ids"]).loss.backward()
        assert any(parameter.grad is not None for parameter in model.parameters())
"""


def run_clean(python, folder, jobs, inputs, cache):
    """Outputs of each `(source, target, attention)` in a process without this package, with a cache of the Hub."""
    folder.mkdir()
    save_file(inputs, folder / "inputs.safetensors")
    results = [folder / f"outputs-{number}.safetensors" for number in range(len(jobs))]
    lines = [
        [str(source), str(target), str(folder / "inputs.safetensors"), str(result), attention]
        for (source, target, attention), result in zip(jobs, results, strict=True)
    ]
    (folder / "jobs.json").write_text(json.dumps(lines))
    environment = {"HF_HOME": str(folder / "empty"), "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(cache)}
    # Another number of threads adds in another order, and logits of 4 then differ in their sixth digit.
    environment |= {"PATH": os.environ.get("PATH", ""), "OMP_NUM_THREADS": str(torch.get_num_threads())}
    command = [python, "-I", "-c", SCRIPT, folder / "jobs.json"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return [load_file(result) for result in results]


@pytest.fixture
def inputs(random_rows, pad_rows):
    context_ids, context_mask = pad_rows(random_rows([13, 5]), "left")
    return {
        "input_ids": torch.stack(random_rows([5, 5], seed=1)),
        "context_input_ids": context_ids,
        "context_attention_mask": context_mask,
    }


def assert_same_outputs(found, expected, case):
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(
            tensor, expected[name], atol=1e-5, rtol=1e-5, msg=lambda found, name=name: f"{case}: {name}: {found}"
        )


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.slow
def test_folders_load_without_this_package_save_again_and_load_again(
    method_cases, inputs, clean_environment, tmp_path, local_hub, start_light
):
    """Of every method a checkpoint, and of one for each memory form a light, a merged one and one on another base."""
    models = {f"{name} whole": case.on(variant="enhanced").model for name, case in method_cases.items()}
    models |= {f"decal {setting}": build_decal(setting) for setting in ("decal", "attention_pooling", "baseline")}
    for name in ON_EVERY_BASE:
        models[f"{name} light"] = start_light(method_cases[name], local_hub)
        models[f"{name} gemma2"] = method_cases[name].on(architecture="gemma2", attention="eager").model
        models[f"{name} merged"] = method_cases[name].build()
        models[f"{name} merged"].merge_adapters()
    expected = {name: outputs_of(model, model.model, inputs) for name, model in models.items()}
    for name, model in models.items():
        model.save_pretrained(tmp_path / "first" / name)
    attention = {name: model.config._attn_implementation for name, model in models.items()}
    jobs = [(tmp_path / "first" / name, tmp_path / "second" / name, attention[name]) for name in models]
    python = clean_environment(tmp_path / "environment")("python")
    outputs = run_clean(python, tmp_path / "elsewhere", jobs, inputs, local_hub.folder)
    for name, found in zip(models, outputs, strict=True):
        assert_same_outputs(found, expected[name], name)
        # The same bytes, which a process of that kind has loaded just now; the package alone writes a card.
        first = files(tmp_path / "first" / name)
        del first["README.md"]
        assert files(tmp_path / "second" / name) == first, name
        here = type(models[name]).from_pretrained(tmp_path / "second" / name, attn_implementation=attention[name])
        assert_same_outputs(outputs_of(here, here.model, inputs), expected[name], name)


@pytest.mark.slow
def test_a_child_of_a_hub_checkpoint_names_it_and_a_copy_names_nobody(form_case, tmp_path, local_hub, start_light):
    start_light(form_case, local_hub).save_pretrained(tmp_path / "first")
    repository = local_hub.folder / "models--me--compressor"
    shutil.copytree(tmp_path / "first", repository / "snapshots" / f"{9:040x}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(f"{9:040x}")
    model = AutoModelForCausalLM.from_pretrained("me/compressor")
    model.save_pretrained(tmp_path / "copy")
    assert files(tmp_path / "copy") == files(tmp_path / "first")
    with torch.no_grad():
        next(parameter for parameter in model.parameters() if parameter.requires_grad).add_(0.1)
    model.save_pretrained(tmp_path / "child")
    card = huggingface_hub.ModelCard.load(tmp_path / "child" / "README.md")
    assert card.data.base_model == "me/compressor"
    assert "| Fine-tuned from | me/compressor |" in card.text


@pytest.mark.slow
def test_pushing_uploads_what_saving_writes_and_keeps_a_card_that_is_there(form_case, tmp_path, monkeypatch):
    model, sent, existing = form_case.model, [], set()

    def upload_folder(self, *, folder_path, ignore_patterns, **kwargs):
        sent.append(
            {name: text for name, text in files(Path(folder_path)).items() if name not in (ignore_patterns or ())}
        )
        return "https://huggingface.co/me/compressor/commit/1"

    api = huggingface_hub.HfApi
    monkeypatch.setattr(api, "create_repo", lambda self, repo_id, **kwargs: SimpleNamespace(repo_id=repo_id))
    monkeypatch.setattr(api, "upload_folder", upload_folder)
    monkeypatch.setattr(api, "file_exists", lambda self, repo_id, name, **kwargs: name in existing)
    model.save_pretrained(tmp_path / "saved")
    assert model.push_to_hub("me/compressor", private=True).endswith("/commit/1")
    existing.add("README.md")
    model.push_to_hub("me/compressor")
    saved = files(tmp_path / "saved")
    assert sent == [saved, {name: content for name, content in saved.items() if name != "README.md"}]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_the_code_of_a_method_is_three_files_and_perhaps_one_more(method, tmp_path):
    write_code(model_class(method), config_class(method), tmp_path)
    files = {path.stem: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    own = {f"configuration_{method}", f"modeling_{method}", "compressor_base"}
    assert own <= files.keys()
    assert len(files) <= 4
    assert sum(text.count("\n") for text in files.values()) <= 6_000
    libraries = {"torch", "transformers", "safetensors", "numpy", "huggingface_hub", *sys.stdlib_module_names}
    for text in files.values():
        compile(text, method, "exec")
        assert not [name for name in _LEFT_OUT if f"self.{name}(" in text]
        for node in ast.parse(text).body:
            # Definitions alone: nothing runs when a checkpoint's code is imported.
            assert not isinstance(node, ast.For | ast.While | ast.With), ast.unparse(node)
            if isinstance(node, ast.Import):
                assert {alias.name.partition(".")[0] for alias in node.names} <= libraries
            elif isinstance(node, ast.ImportFrom):
                top = node.module.partition(".")[0]
                assert top in (files if node.level else libraries), ast.unparse(node)
