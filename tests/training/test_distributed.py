# SPDX-License-Identifier: Apache-2.0
"""Training in two processes without a GPU (gloo): what DDP and FSDP2 give is what one process gives."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import small_recipes
import torch
import yaml
from parameters import disturb
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import context_compressors.training
from context_compressors.modeling.modeling_mean_pooling import MeanPoolingForCausalLM
from context_compressors.training.train import main

CONFIGURATIONS = Path(context_compressors.training.__file__).parent / "accelerate"
WORKER = Path(__file__).with_name("distributed_worker.py")
QUESTIONS = {"generated": True, "tasks": ["question_answering", "reconstruction"], "weight": 1}
DOCUMENTS = {"generated": True, "tasks": ["reconstruction", "continuation"], "weight": 1}
TEXTS = {"generated": True, "tasks": ["continuation"], "weight": 1}

RUNS = {
    "compression_all": {"objective": "compression", "ratio_mode": "all", "gradient_accumulation_steps": 2},
    "compression_random": {"objective": "compression", "ratio_mode": "random", "gradient_checkpointing": True},
    "distillation_all": {"objective": "distillation", "ratio_mode": "all", "learning_rate": 2.0},
    "distillation_teacher": {"objective": "distillation", "teacher": "TEACHER", "learning_rate": 1.0},
    "teacher": {"objective": "teacher"},
    "joint": {"objective": "joint", "gradient_accumulation_steps": 2, "alpha": 0.3},
    "per_sample_gmsa": {"objective": "compression", "method": "gmsa", "ratio_mode": "per_sample"},
    "retrieval": {"objective": "retrieval", "method": "decal", "contrastive_temperature": 0.2},
    "own_loss": {"objective": "compression", "method": "ranked_key_values"},
    "joint_icae": {"objective": "joint", "method": "icae", "gradient_checkpointing": True, "learning_rate": 1.0},
}
METHOD_CONFIGS = {
    "mean_pooling": {"compression_ratios": [2, 4]},
    "icae": {"compression_ratios": [2, 4], "chunk_size": 16, "encoder_lora": {"rank": 4}},
    "gmsa": {"compression_ratios": [2, 4], "encoder_layers": 1, "encoder_lora": {"rank": 4}},
    "ranked_key_values": {"compression_ratios": [2, 4], "encoder_lora": {"rank": 4}},
    "comprexit": {"compression_ratios": [4], "window_size": 16},
    "five_hundred_x": {"encoder_lora": {"rank": 2}},
    "autocompressor": {"encoder_lora": {"rank": 2}, "shared_adapter": True},
}


SMALL_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}


def write_collection(folder: Path) -> dict[str, dict[str, str]]:
    """A source of retrieval whose documents differ in length, so that processes have vectors of different number."""
    rows = range(12)
    tables = {
        "corpus": {"id": [str(i) for i in rows], "text": [f"Record {i} " + "is blue. " * (1 + i % 5) for i in rows]},
        "queries": {"id": [str(i) for i in rows], "query": [f"Which is record {i}?" for i in rows]},
        "relevance": {"query_id": [str(i) for i in rows], "doc_id": [str(i) for i in rows]},
    }
    for name, columns in tables.items():
        pyarrow.parquet.write_table(pyarrow.table(columns), folder / f"{name}.parquet")
    return {name: {"path": f"{name}.parquet"} for name in tables}


@pytest.fixture(scope="module")
def teacher_folder(base_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    torch.manual_seed(1)
    disturb(AutoModelForCausalLM.from_pretrained(base_folder)).save_pretrained(folder)
    return folder


@pytest.fixture
def write_recipe(base_folder: Path, teacher_folder: Path, tmp_path: Path):
    def write(name: str, **fields) -> str:
        # Plain gradient descent: Adam would turn rounding errors of tiny gradients into whole steps.
        descent = {"optim": "sgd", "learning_rate": 0.5, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
        data = {"sources": [QUESTIONS], "max_context_tokens": 60, "max_target_tokens": 64, "max_steps": 3}
        recipe = {**small_recipes.RUN, "base": str(base_folder), **data, **descent, **fields}
        if recipe.get("objective") in ("compression", "distillation", "joint"):
            recipe.setdefault("method_config", METHOD_CONFIGS[recipe.get("method", "mean_pooling")])
        if recipe.get("objective") == "joint":
            recipe |= {"sources": [DOCUMENTS], "min_document_tokens": 24, "max_document_tokens": 90}
        if recipe.get("objective") == "retrieval":
            recipe |= {"base": None, "model_config": SMALL_T5, "tokenizer": str(base_folder)}
            recipe |= {"sources": [write_collection(tmp_path)], "data_dir": str(tmp_path)}
        if "teacher" in recipe:
            recipe["teacher"] = str(teacher_folder)
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump(recipe))
        return str(file)

    return write


def launch(configuration: str, *command: str) -> None:
    """Two processes on this machine; the error output is what a failure shows."""
    line = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--num_processes", "2"]
    line += ["--config_file", str(CONFIGURATIONS / f"{configuration}.yaml"), *command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-6000:]


def run_worker(wrapper: str, configuration: str, runs: list[list[str]], folder: Path) -> None:
    file = folder / "runs.json"
    file.write_text(json.dumps(runs))
    launch(configuration, str(WORKER), wrapper, str(file))


def assert_same_weights(found: Path, expected: Path) -> None:
    first, second = (load_file(folder / "model.safetensors") for folder in (found, expected))
    assert set(first) == set(second)
    for name, weight in first.items():
        torch.testing.assert_close(weight, second[name], rtol=0, atol=1e-5, msg=f"{found.name}: {name}")


def assert_adapters_moved(folder: Path) -> None:
    """Every B starts at zero, so that a gradient reached all adapters."""
    weights = load_file(folder / "model.safetensors")
    one_adapter = {"joint_icae": "encoder", "per_sample_gmsa": "encoder", "own_loss": "shared"}
    for adapter in [one_adapter[folder.name]] if folder.name in one_adapter else ["encoder", "decoder"]:
        moved = [weight.abs().max().item() for name, weight in weights.items() if f".lora_B.{adapter}." in name]
        assert max(moved) > 1e-3, f"{folder.name}: {adapter}"


EACH_OBJECTIVE = ["compression_all", "distillation_all", "joint", "retrieval"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [EACH_OBJECTIVE, pytest.param(sorted(RUNS.keys() - EACH_OBJECTIVE), marks=pytest.mark.release)], ids=len
)
def test_two_processes_give_the_weights_of_one(names, write_recipe, tmp_path):
    recipes = {name: write_recipe(name, **RUNS[name]) for name in names}
    runs = [[recipe, "--output_dir", str(tmp_path / "two" / name)] for name, recipe in recipes.items()]
    run_worker("ddp", "two_cpu_processes", runs, tmp_path)
    for name, recipe in recipes.items():
        whole = [recipe, "--per_device_train_batch_size", "4", "--output_dir", str(tmp_path / "one" / name)]
        main(whole)
        assert_same_weights(tmp_path / "two" / name, tmp_path / "one" / name)
        if name not in ("teacher", "retrieval"):
            assert_adapters_moved(tmp_path / "one" / name)
        logs = [json.loads((tmp_path / n / name / "training_summary.json").read_text())["log"] for n in ("one", "two")]
        for entry, other in zip(*logs, strict=True):
            for field in ("num_context_tokens", "num_cut_tokens", "num_tokens"):
                assert entry.get(field) == other.get(field), (name, field)


@pytest.mark.release
@pytest.mark.slow
def test_fsdp2_gives_the_weights_of_one_process_for_every_kind_of_training_saves_and_resumes(
    base_folder, write_recipe, tmp_path
):
    evaluation = {
        "eval_sources": [{**QUESTIONS, "split": "test"}],
        "num_eval_examples": 4,
        "per_device_eval_batch_size": 2,
        "eval_strategy": "steps",
        "eval_steps": 1,
    }
    keft = {**METHOD_CONFIGS["gmsa"], "training_stage": "keft"}
    decal = {"method": "decal", "method_config": {"compression_ratios": [2]}, "base": None, "model_config": SMALL_T5}
    kinds = {
        "compression": {"objective": "compression", **evaluation},
        "distillation": {"objective": "distillation", "learning_rate": 2.0},
        "icae": {"objective": "compression", "method": "icae"},
        "comprexit": {"objective": "compression", "method": "comprexit"},
        "gmsa": {"objective": "compression", "method": "gmsa", "ratio_mode": "per_sample"},
        "keft": {"objective": "compression", "method": "gmsa", "method_config": keft},
        "retrieval": RUNS["retrieval"],
        "joint_icae": RUNS["joint_icae"],
        "decal": {"objective": "denoising", **decal, "tokenizer": str(base_folder), "sources": [TEXTS]},
    }
    recipes = {name: write_recipe(name, **{**fields, "max_steps": 2}) for name, fields in kinds.items()}
    every_second = {"save_strategy": "steps", "save_steps": 2}
    saving = write_recipe("saving", objective="compression", optim="adamw_torch", learning_rate=1e-2, **every_second)
    kept, resumed = str(tmp_path / "kept"), ["--save_strategy", "no", "--resume_from_checkpoint"]
    runs = [[recipe, "--output_dir", str(tmp_path / "two" / name)] for name, recipe in recipes.items()]
    runs += [
        [saving, "--output_dir", kept],
        [saving, "--output_dir", str(tmp_path / "resumed"), *resumed, f"{kept}/checkpoint-2"],
    ]
    run_worker("fsdp", "fsdp2", runs, tmp_path)
    for name, recipe in recipes.items():
        whole = tmp_path / "one" / name
        every_step = ["--save_strategy", "steps", "--save_steps", "1"]
        main([recipe, "--per_device_train_batch_size", "4", "--output_dir", str(whole), *every_step])
        assert_same_weights(tmp_path / "two" / name, whole)
        before, after = (load_file(folder / "model.safetensors") for folder in (whole / "checkpoint-1", whole))
        assert any(not weight.equal(before[weight_name]) for weight_name, weight in after.items()), name
    for name in ("compression", "distillation"):
        assert_adapters_moved(tmp_path / "one" / name)
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("kept", "resumed"))
    for name, weight in first.items():
        torch.testing.assert_close(weight, second[name], rtol=0, atol=1e-6, msg=name)
    folder = tmp_path / "two" / "compression"
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert type(model).__name__ == "MeanPoolingForCausalLM"
    assert model.compress(torch.arange(5, 17)[None], ratio=4).num_slots == 3
    codes = [sorted(path.name for path in (tmp_path / n / "compression").glob("*.py")) for n in ("two", "one")]
    assert codes[0] == codes[1]
    assert MeanPoolingForCausalLM.from_pretrained(folder).config.compression_ratios == (2, 4)


@pytest.mark.parametrize("path", sorted(CONFIGURATIONS.glob("*.yaml")), ids=lambda path: path.stem)
def test_accelerate_reads_every_configuration(path):
    from accelerate.commands.config.config_args import load_config_from_file

    loaded = load_config_from_file(str(path))
    kind = {"fsdp2": "FSDP", "deepspeed_zero2": "DEEPSPEED"}.get(path.stem, "MULTI_GPU")
    assert loaded.distributed_type.value == kind
    assert loaded.num_processes >= 2
    assert len(list(CONFIGURATIONS.glob("*.yaml"))) == 4
