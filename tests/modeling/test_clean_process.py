# SPDX-License-Identifier: Apache-2.0
"""A saved folder is all that anybody needs: not this package, not this directory, not the network."""

import itertools
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
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from context_compressors import DeCALConfig, DeCALForConditionalGeneration

SCRIPT = """
import json, sys, torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

try:
    import context_compressors
    sys.exit("this package can be imported: the environment is not clean")
except ImportError:
    pass
for source, target, inputs_file, outputs_file, attention in json.load(open(sys.argv[1])):
    inputs = load_file(inputs_file)
    settings = {"trust_remote_code": True, "attn_implementation": attention}
    config = AutoConfig.from_pretrained(source, trust_remote_code=True)
    backbone = AutoModel.from_pretrained(source, **settings)
    model = AutoModelForCausalLM.from_pretrained(source, **settings)
    for thing in (config, backbone, model):
        assert type(thing).__module__.startswith("transformers_modules."), type(thing)
    with torch.no_grad():
        memory = model.compress(inputs["context_input_ids"], inputs["context_attention_mask"])
        memory.save(outputs_file + ".memory")
        memory = type(memory).load(outputs_file + ".memory", model_id=model.model_id)
        layers = enumerate(memory.key_values or ())
        carried = {f"slots.{i}.{j}": part for i, pair in layers for j, part in enumerate(pair)}
        carried = carried or {"slots": memory.embeddings}
        text = {"input_ids": inputs["input_ids"], "memory": memory}
        outputs = {
            **carried,
            "states": backbone(**text).last_hidden_state,
            "logits": model(**text).logits,
            "greedy": model.generate(**text, max_new_tokens=6, min_new_tokens=6, do_sample=False),
            "direct": model(**inputs).logits,
        }
        with model.base_language_model():
            outputs["base"] = model(inputs["input_ids"]).logits
    outputs["trains"] = torch.tensor([parameter.requires_grad for _, parameter in sorted(model.named_parameters())])
    save_file({name: tensor.contiguous() for name, tensor in outputs.items()}, outputs_file)
    model.save_pretrained(target)
"""


@pytest.fixture
def run_clean(clean_python, tmp_path):
    """`run_clean(round, jobs, inputs)`: load each `(source, target, attention)` there; the outputs of all of them.

    `cache` is the Hub's cache there; an empty one if not given.
    """

    def run(number, jobs, inputs, cache=None):
        elsewhere = tmp_path / f"elsewhere-{number}"
        elsewhere.mkdir()
        save_file(inputs, elsewhere / "inputs.safetensors")
        results = [elsewhere / f"outputs-{i}.safetensors" for i in range(len(jobs))]
        lines = [
            [str(source), str(target), str(elsewhere / "inputs.safetensors"), str(result), attention]
            for (source, target, attention), result in zip(jobs, results, strict=True)
        ]
        (elsewhere / "jobs.json").write_text(json.dumps(lines))
        environment = {
            "HF_HOME": str(elsewhere / "empty"),
            "HF_HUB_OFFLINE": "1",
            **({} if cache is None else {"HF_HUB_CACHE": str(cache)}),
            "PATH": os.environ.get("PATH", ""),
            # Another number of threads adds in another order, and logits of 4 then differ in their sixth digit.
            "OMP_NUM_THREADS": str(torch.get_num_threads()),
        }
        done = subprocess.run(
            [clean_python, "-I", "-c", SCRIPT, elsewhere / "jobs.json"],
            cwd=elsewhere,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        return [load_file(result) for result in results]

    return run


@pytest.fixture
def inputs(random_rows, pad_rows):
    context_ids, context_mask = pad_rows(random_rows([13, 5]), "left")
    return {
        "input_ids": torch.stack(random_rows([5, 5], seed=1)),
        "context_input_ids": context_ids,
        "context_attention_mask": context_mask,
    }


@torch.no_grad()
def outputs_here(model, inputs):
    memory = model.compress(inputs["context_input_ids"], inputs["context_attention_mask"])
    text = {"input_ids": inputs["input_ids"], "memory": memory}
    layers = enumerate(memory.key_values or ())
    carried = {f"slots.{i}.{j}": part for i, pair in layers for j, part in enumerate(pair)}
    outputs = {
        **(carried or {"slots": memory.embeddings}),
        "states": model.model(**text).last_hidden_state,
        "logits": model(**text).logits,
        "greedy": model.generate(**text, max_new_tokens=6, min_new_tokens=6, do_sample=False),
        "direct": model(**inputs).logits,
        "trains": torch.tensor([parameter.requires_grad for _, parameter in sorted(model.named_parameters())]),
    }
    with model.base_language_model():
        outputs["base"] = model(inputs["input_ids"]).logits
    return outputs


def assert_same_outputs(found, expected, case):
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(
            tensor, expected[name], atol=1e-5, rtol=1e-5, msg=lambda found, name=name: f"{case}: {name}: {found}"
        )


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.slow
def test_folders_load_without_this_package_save_again_and_load_again(method_case, inputs, run_clean, tmp_path):
    """Every base and every hard setting of a method, two rounds, each in a process of its own."""
    cases = method_case.all_of_its_method
    folders = [[tmp_path / name / str(case) for case in cases] for name in ("first", "second", "third")]
    expected = []
    for case, folder in zip(cases, folders[0], strict=True):
        case.model.save_pretrained(folder)
        expected.append(outputs_here(case.model, inputs))
    attentions = [case.attention for case in cases]
    for number, (sources, targets) in enumerate(itertools.pairwise(folders)):
        found = run_clean(number, list(zip(sources, targets, attentions, strict=True)), inputs)
        for one, other, case, first, target in zip(found, expected, cases, folders[0], targets, strict=True):
            assert_same_outputs(one, other, case)
            assert files(target) == files(first), case
    for case, folder, other in zip(cases, folders[2], expected, strict=True):
        here = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=case.attention)
        assert_same_outputs(outputs_here(here, inputs), other, case)


@pytest.mark.slow
def test_a_merged_model_loads_without_this_package(method_case, inputs, run_clean, tmp_path):
    model = method_case.build()
    model.merge_adapters()
    model.save_pretrained(tmp_path / "first")
    found = run_clean(0, [(tmp_path / "first", tmp_path / "second", "sdpa")], inputs)
    assert_same_outputs(found[0], outputs_here(model, inputs), method_case)


@pytest.mark.slow
def test_a_light_checkpoint_loads_without_this_package(
    method_case, inputs, run_clean, tmp_path, local_hub, start_light
):
    """On its base in the cache, and its copy, which it saves there, again."""
    model = start_light(method_case, local_hub)
    model.save_pretrained(tmp_path / "first")
    attention = method_case.attention
    for number, (source, target) in enumerate(itertools.pairwise(["first", "second", "third"])):
        jobs = [(tmp_path / source, tmp_path / target, attention)]
        found = run_clean(number, jobs, inputs, cache=local_hub.folder)
        assert_same_outputs(found[0], outputs_here(model, inputs), method_case)
        assert files(tmp_path / target) == files(tmp_path / "first")
    assert (tmp_path / "first" / "base_weights.py").is_file()


TRAIN = """
import sys

source, target, kind = sys.argv[1:]
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

# Before this package is imported, so that its own classes are not yet known.
model = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=True)
assert type(model).__module__.startswith("transformers_modules."), type(model)
tokenizer = AutoTokenizer.from_pretrained(source)

from trl import SFTConfig, SFTTrainer
from context_compressors import CompressionCollator, DistillationTrainer
from context_compressors.training.arguments import TrainingConfig

rows = [{"context_ids": [*range(5, 14 + i)], "prompt_ids": [1, 9], "target_ids": [20 + i, 2]} for i in range(8)]
arguments = {
    "output_dir": target, "max_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "use_cpu": True,
    "bf16": False, "gradient_checkpointing": False, "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
    "remove_unused_columns": False, "dataset_kwargs": {"skip_prepare_dataset": True},
}
distils = kind == "distillation"
trainer_class, config_class = (DistillationTrainer, TrainingConfig) if distils else (SFTTrainer, SFTConfig)
trainer = trainer_class(
    model=model,
    args=config_class(**arguments),
    train_dataset=Dataset.from_list(rows),
    data_collator=CompressionCollator.from_tokenizer(tokenizer, **({"mode": "distillation"} if distils else {})),
    processing_class=tokenizer,
)
trainer.train()
model.save_pretrained(target)
tokenizer.save_pretrained(target)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "distillation"])
def test_a_light_checkpoint_is_trained_as_remote_code_and_its_child_loads_without_this_package(
    method_case, inputs, run_clean, tmp_path, local_hub, start_light, tiny_tokenizer, kind
):
    parent, child = tmp_path / "parent", tmp_path / "child"
    model = start_light(method_case, local_hub)
    model.save_pretrained(parent)
    tiny_tokenizer.save_pretrained(parent)
    environment = {
        **os.environ,
        "HF_HOME": str(tmp_path / "empty"),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_CACHE": str(local_hub.folder),
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
    }
    command = [sys.executable, "-c", TRAIN, parent, child, kind]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    weights = [load_file(folder / "model.safetensors") for folder in (parent, child)]
    assert weights[0].keys() == weights[1].keys(), "the child is as light"
    assert any(not weights[1][name].equal(tensor) for name, tensor in weights[0].items())
    assert json.loads((child / "config.json").read_text())["parent_model_name_or_path"] == "parent"
    assert "| Fine-tuned from | parent |" in (child / "README.md").read_text()
    here = AutoModelForCausalLM.from_pretrained(child)
    found = run_clean(0, [(child, tmp_path / "again", "sdpa")], inputs, cache=local_hub.folder)
    assert_same_outputs(found[0], outputs_here(here, inputs), method_case)
    assert not found[0]["logits"].allclose(outputs_here(model, inputs)["logits"], atol=1e-4)


def test_a_child_of_a_hub_checkpoint_names_it_and_a_copy_names_nobody(method_case, tmp_path, local_hub, start_light):
    start_light(method_case, local_hub).save_pretrained(tmp_path / "first")
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
    # A run that goes on from a checkpoint of its own is not that one's child.
    (tmp_path / "child" / "trainer_state.json").write_text("{}")
    resumed = AutoModelForCausalLM.from_pretrained(tmp_path / "child")
    with torch.no_grad():
        next(parameter for parameter in resumed.parameters() if parameter.requires_grad).add_(0.1)
    resumed.save_pretrained(tmp_path / "grandchild")
    assert resumed.config.parent_model_name_or_path == "me/compressor"


@pytest.fixture
def hub(monkeypatch):
    """A Hub that keeps what is uploaded: `files` by name, `calls` in order, `existing` names that it has before."""

    hub = SimpleNamespace(files={}, calls=[], existing=set())

    def create_repo(self, repo_id, **kwargs):
        hub.calls.append(("create_repo", repo_id, kwargs["private"]))
        return SimpleNamespace(repo_id=repo_id)

    def upload_folder(self, *, folder_path, **kwargs):
        hub.calls.append(("upload_folder", kwargs["repo_id"], kwargs["revision"], kwargs["commit_message"]))
        hub.files.update(files(Path(folder_path)))
        return "https://huggingface.co/me/compressor/commit/1"

    def create_branch(self, repo_id, *, branch, **kwargs):
        hub.calls.append(("create_branch", repo_id, branch))

    api = huggingface_hub.HfApi
    monkeypatch.setattr(api, "create_repo", create_repo)
    monkeypatch.setattr(api, "create_branch", create_branch)
    monkeypatch.setattr(api, "upload_folder", upload_folder)
    monkeypatch.setattr(api, "file_exists", lambda self, repo_id, name, **kwargs: name in hub.existing)
    return hub


def test_pushing_uploads_what_saving_writes(method_case, tmp_path, hub):
    model = method_case.model
    model.save_pretrained(tmp_path / "saved")
    saved = files(tmp_path / "saved")
    assert model.push_to_hub("me/compressor", private=True).endswith("/commit/1")
    assert hub.files == saved
    assert hub.calls[0] == ("create_repo", "me/compressor", True)
    hub.files = {}
    model.save_pretrained(tmp_path / "other", push_to_hub=True, repo_id="me/compressor", commit_message="Second")
    assert hub.files == saved == files(tmp_path / "other")
    assert hub.calls[-1] == ("upload_folder", "me/compressor", None, "Second")
    model.save_pretrained(tmp_path / "by_folder", push_to_hub=True)
    assert hub.calls[-1][1] == "by_folder"


def test_pushing_keeps_the_card_that_is_there(method_case, hub):
    hub.existing.add("README.md")
    method_case.model.push_to_hub("me/compressor", revision="v2")
    assert "README.md" not in hub.files
    assert "model.safetensors" in hub.files
    assert ("create_branch", "me/compressor", "v2") in hub.calls


def test_pushing_adds_tags_to_a_new_card_and_stores_another_type(method_case, hub, tmp_path):
    method_case.model.push_to_hub("me/compressor", tags=["rag"], save_dtype="bfloat16")
    card = huggingface_hub.ModelCard(hub.files["README.md"].decode())
    assert "rag" in card.data.tags
    assert "context-compression" in card.data.tags
    (tmp_path / "weights").write_bytes(hub.files["model.safetensors"])
    assert {tensor.dtype for tensor in load_file(tmp_path / "weights").values()} == {torch.bfloat16}


def test_the_code_of_a_folder_imports_siblings_only(variant_case, tmp_path):
    """What stands at the top of a remote file must be there for everybody: torch, transformers, safetensors."""
    variant_case.model.save_pretrained(tmp_path)
    allowed = {"torch", "transformers", "safetensors", "numpy", *sys.stdlib_module_names}
    siblings = {path.stem for path in tmp_path.glob("*.py")}
    for path in tmp_path.glob("*.py"):
        for line in path.read_text(encoding="utf-8").splitlines():
            words = line.split()
            if not line.startswith(("import ", "from ")):
                continue
            if words[1].startswith("."):
                assert words[1][1:] in siblings, f"{path.name}: {line}"
            else:
                assert words[1].split(".")[0] in allowed, f"{path.name}: {line}"
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"]


ENCODER_DECODER_SCRIPT = """
import json, sys, torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM

source, target, inputs_file, outputs_file = sys.argv[1:]
inputs = load_file(inputs_file)
config = AutoConfig.from_pretrained(source, trust_remote_code=True)
encoder = AutoModel.from_pretrained(source, trust_remote_code=True)
model = AutoModelForSeq2SeqLM.from_pretrained(source, trust_remote_code=True)
for thing in (config, encoder, model):
    assert type(thing).__module__.startswith("transformers_modules."), type(thing)
with torch.no_grad():
    memory = encoder.compress(inputs["context_input_ids"], inputs["context_attention_mask"])
    greedy = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    outputs = {
        "slots": memory.embeddings,
        "logits": model(inputs["input_ids"], memory=memory).logits,
        "greedy": model.generate(inputs["input_ids"], memory=memory, **greedy),
    }
save_file({name: tensor.contiguous() for name, tensor in outputs.items()}, outputs_file)
model.save_pretrained(target)
"""


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["latents", "attention_pooling", "none"])
def test_an_encoder_decoder_loads_without_this_package_and_saves_again(compression, inputs, clean_python, tmp_path):
    torch.manual_seed(0)
    shape = {"vocab_size": 128, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    model = DeCALForConditionalGeneration(DeCALConfig(decoder_config=shape, compression=compression)).eval()
    model.save_pretrained(tmp_path / "first")
    save_file(inputs, tmp_path / "inputs.safetensors")
    paths = [tmp_path / name for name in ("first", "second", "inputs.safetensors", "outputs.safetensors")]
    environment = {"HF_HOME": str(tmp_path / "empty"), "HF_HUB_OFFLINE": "1", "PATH": os.environ.get("PATH", "")}
    environment["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    command = [clean_python, "-I", "-c", ENCODER_DECODER_SCRIPT, *paths]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert files(tmp_path / "second") == files(tmp_path / "first")
    with torch.no_grad():
        memory = model.compress(inputs["context_input_ids"], inputs["context_attention_mask"])
        expected = {
            "slots": memory.embeddings,
            "logits": model(inputs["input_ids"], memory=memory).logits,
            "greedy": model.generate(
                inputs["input_ids"], memory=memory, max_new_tokens=6, min_new_tokens=6, do_sample=False
            ),
        }
    assert_same_outputs(load_file(paths[3]), expected, compression)
