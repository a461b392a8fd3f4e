# SPDX-License-Identifier: Apache-2.0
"""Training runs: what they leave, and how they go on, from a checkpoint or after they were killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from small_recipes import write_recipe
from transformers import AutoModelForCausalLM, AutoTokenizer

from context_compressors.data.document_ids import document_id
from context_compressors.data.rows import PassageText
from context_compressors.modeling.modeling_mean_pooling import MeanPoolingForCausalLM
from context_compressors.training.arguments import parse_recipe
from context_compressors.training.run_record import latest_checkpoint
from context_compressors.training.train import build_trainer, main


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["compression", "teacher"])
def test_a_gguf_file_is_trained_like_any_other_base(tiny_gguf_folder, tmp_path, objective):
    fields = {"compression": {"method_config": {"compression_ratios": [2]}}, "teacher": {}}[objective]
    recipe = write_recipe(
        tmp_path, objective=objective, base=str(tiny_gguf_folder), base_gguf_file="tiny.gguf", **fields
    )
    main([recipe])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert isinstance(model, MeanPoolingForCausalLM) == (objective == "compression")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.tokenize("123") == ["1", "2", "3"]
    assert str(tiny_gguf_folder) not in (tmp_path / "out" / "config.json").read_text()


@pytest.mark.slow
def test_a_teacher_goes_on_with_its_adapter(tmp_path, base_folder):
    first, again = tmp_path / "first", tmp_path / "again"
    fields = {"objective": "teacher", "teacher_lora": {"rank": 2, "alpha": 4}}
    main([write_recipe(tmp_path, **fields, base=str(base_folder), learning_rate=1e-2), "--output_dir", str(first)])
    # A rate of zero: what is saved is what it started from.
    recipe = write_recipe(tmp_path, **fields, checkpoint=str(first), learning_rate=0.0)
    main([recipe, "--output_dir", str(again)])
    before, after = (load_file(folder / "adapter_model.safetensors") for folder in (first, again))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert any(value.any() for name, value in before.items() if "lora_B" in name)
    trainer = build_trainer(*parse_recipe([recipe, "--output_dir", str(again)]))
    trained = [name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad]
    assert len(trained) == len(before)
    assert all("lora_" in name for name in trained)
    with pytest.raises(ValueError, match="adapter_config"):
        build_trainer(*parse_recipe([recipe, "--checkpoint", str(base_folder)]))


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, {"rank": 2, "alpha": 4}])
def test_teacher_then_distillation_then_going_on(tmp_path, base_folder, lora):
    teacher, student, further = (tmp_path / name for name in ("teacher", "student", "further"))
    fields = {"base": str(base_folder), "learning_rate": 1e-2}
    settings = {} if lora is None else {"teacher_lora": lora}
    main([write_recipe(tmp_path, objective="teacher", **fields, **settings), "--output_dir", str(teacher)])
    recipe = write_recipe(tmp_path, objective="distillation", **fields, method_config={"compression_ratios": [2, 4]})
    main([recipe, "--teacher", str(teacher), "--output_dir", str(student)])
    ran = (student / "recipe.yaml").read_text()
    assert yaml.safe_load(ran)["teacher"] == teacher.name
    assert str(tmp_path) not in ran
    trained = MeanPoolingForCausalLM.from_pretrained(student)
    assert trained.config.compression_ratios in ((2, 4), [2, 4])
    recipe = write_recipe(tmp_path, objective="compression", checkpoint=str(student))
    main([recipe, "--output_dir", str(further)])
    assert (further / "model.safetensors").exists()


@pytest.mark.slow
def test_eval_sources_are_evaluated_and_asked(tmp_path, base_folder, capsys):
    # Each a document of two passages.
    contexts = [[f"Berth {n} is Nora's.", "It is red."] for n in range(9)]
    rows = [{"context": c, "question": f"Whose | {n}?", "answers": ["Nora's"]} for n, c in enumerate(contexts)]
    (tmp_path / "berths.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    held_out = {"path": str(tmp_path / "berths.jsonl"), "tasks": ["question_answering"], "weight": 1}
    recipe = write_recipe(
        tmp_path,
        objective="compression",
        base=str(base_folder),
        method_config={"compression_ratios": [2]},
        eval_sources=[{"generated": True, "split": "test", "tasks": ["reconstruction"], "weight": 1}, held_out],
        sample_answers_steps=2,
        save_dtype="float8_e4m3fn",
        # Of the training alone: the first task is none of theirs.
        task_schedule=[[0.0, ["question_answering"]], [0.5, ["reconstruction"]]],
        num_eval_examples=4,
        eval_strategy="steps",
        eval_steps=2,
    )
    main([recipe])
    assert b"F8_E4M3" in (tmp_path / "out" / "model.safetensors").read_bytes()
    log = json.loads((tmp_path / "out" / "training_summary.json").read_text())["log"]
    assert any("eval_loss_ratio_2" in entry for entry in log)
    asked = [line.split(" | ")[:2] for line in capsys.readouterr().out.splitlines() if "Whose" in line]
    assert [(step.strip("| "), question.strip()) for step, question in asked] == [
        (step, f"Whose \\| {n}?") for step in "02" for n in range(4)
    ]
    documents = json.loads((tmp_path / "out" / "training_documents.json").read_text())
    assert {document_id(PassageText(row["context"])) for row in rows[:4]} <= set(documents["chose"].split())
    # It trains as it does unasked, and questions that are trained on are none to look at.
    main([recipe, "--sample_answers_steps", "0", "--output_dir", str(tmp_path / "unasked")])
    unasked = json.loads((tmp_path / "unasked" / "training_summary.json").read_text())["log"]
    assert [entry.get("loss") for entry in unasked] == [entry.get("loss") for entry in log]
    with pytest.raises(ValueError, match="sample_answers_steps needs a compressor"):
        main([recipe, "--eval_sources", "null", "--eval_strategy", "no", "--overwrite", "true"])


def losses_of(folder: Path) -> dict[int, float]:
    states = sorted(
        folder.glob("checkpoint-*/trainer_state.json"), key=lambda path: int(path.parent.name.split("-")[1])
    )
    log = json.loads(states[-1].read_text())["log_history"]
    return {entry["step"]: entry["loss"] for entry in log if "loss" in entry}


def test_a_half_written_checkpoint_is_passed_over(tmp_path):
    assert latest_checkpoint(str(tmp_path / "missing")) is None
    for step, state in ((9, "{}"), (10, "{}"), (11, '{"global'), (12, None)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if state is not None:
            (folder / "trainer_state.json").write_text(state)
    other = tmp_path / "checkpoint-13-from-another-run"
    other.mkdir()
    (other / "trainer_state.json").write_text("{}")
    assert latest_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-10")


def kill_behind_step_20(command: list[str], folder: Path) -> None:
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        deadline = time.monotonic() + 120
        while not (folder / "checkpoint-20").exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert process.poll() is None, "the run ended before it could be killed"
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGKILL
    assert not (folder / "checkpoint-40").exists()


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["compression", pytest.param("joint", marks=pytest.mark.release)])
def test_a_killed_run_goes_on_with_the_same_loss_curve(tmp_path, base_folder, objective):
    fields = {"objective": objective, "base": str(base_folder), "ratio_mode": "random"}
    fields |= {"method_config": {"compression_ratios": [2, 4]}, "max_steps": 40, "gradient_accumulation_steps": 2}
    if objective == "joint":
        fields["sources"] = [{"generated": True, "tasks": ["reconstruction", "continuation"], "weight": 1}]
        fields |= {"min_document_tokens": 24, "max_document_tokens": 80}
    recipe = write_recipe(tmp_path, **fields, save_steps=10, length_schedule=[[0.0, 40], [1.0, 60]], seed=3)
    command = [sys.executable, "-m", "context_compressors.training.train", recipe, "--save_strategy", "steps"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    main([*command[3:], "--output_dir", str(whole)])
    if objective == "compression":
        kill_behind_step_20([*command, "--output_dir", str(killed)], killed)
    else:
        # What a kill leaves is the same whatever trains.
        shutil.copytree(whole, killed)
        for step in (30, 40):
            shutil.rmtree(killed / f"checkpoint-{step}")
    argv = [*command[3:], "--output_dir", str(killed), "--resume_from_checkpoint", "latest"]
    main(argv)
    expected = losses_of(whole)
    assert set(losses_of(killed)) == set(expected) == set(range(1, 41))
    for step, loss in losses_of(killed).items():
        assert loss == pytest.approx(expected[step], rel=1e-4), step
