"""A saved folder is all that anybody needs: not this package, not this directory, not the network."""

import itertools
import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

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


@pytest.fixture(scope="session")
def clean_python(tmp_path_factory) -> Path:
    """An environment with this one's dependencies, and without this package.

    A line of a .pth file adds the folder alone: the .pth files inside it, the editable install's among them, are not
    read.
    """
    folder = tmp_path_factory.mktemp("clean") / "environment"
    venv.create(folder, with_pip=False)
    paths = {"base": str(folder), "platbase": str(folder)}
    own = Path(sysconfig.get_path("purelib", scheme="venv", vars=paths))
    dependencies = list(dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]))
    (own / "dependencies.pth").write_text("\n".join(dependencies) + "\n", encoding="utf-8")
    return Path(sysconfig.get_path("scripts", scheme="venv", vars=paths)) / Path(sys.executable).name


@pytest.fixture
def run_clean(clean_python, tmp_path):
    """`run_clean(round, jobs, inputs)`: load each `(source, target, attention)` there; the outputs of all of them."""

    def run(number, jobs, inputs):
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
