# SPDX-License-Identifier: Apache-2.0
"""The trainings of the comparison at toy size: one budget for all methods."""

from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from context_compressors.training.arguments import parse_recipe
from context_compressors.training.train import build_trainer
from context_compressors.training.train import main as train

CHAT = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
# Read last: sources of a toy, and what keeps it small. Nothing of the methods.
SMALL = {
    "sources": [{"generated": True, "tasks": ["question_answering", "reconstruction"], "weight": 1}],
    "task_schedule": None,
    "length_schedule": None,
    "max_context_tokens": 96,
    "max_steps": 2,
    "bf16": False,
    "dtype": "float32",
}


def trained(table: dict) -> dict:
    return {name: entry for name, entry in table["family"].items() if entry.get("trains", True)}


@pytest.fixture
def chat_base(base: Path, tokenizer, tmp_path: Path) -> Path:
    """The tiny base as an instruct model."""
    folder = tmp_path / "base"
    AutoModelForCausalLM.from_pretrained(base).save_pretrained(folder)
    own = type(tokenizer).from_pretrained(base)
    own.chat_template = CHAT
    own.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_all_methods_learn_from_the_same_examples_in_the_same_order(
    script, comparison, chat_base: Path, tmp_path: Path
):
    plan, systems = script("comparison.plan"), comparison(tmp_path)
    small = tmp_path / "small.yaml"
    small.write_text(yaml.safe_dump(SMALL))
    seen, schedules, ratios = {}, {}, {}
    for name in trained(systems.table):
        recipe = [*plan.SHARED, *systems.recipe_of(name), "smollm2/cpu.yaml"]
        entry = systems.table["family"][name]
        leader = entry.get("behind")
        start = ["--base", "null", "--checkpoint", str(tmp_path / leader)] if leader else ["--base", str(chat_base)]
        options = [*start, "--output_dir", str(tmp_path / name)]
        options += ["--encoder", str(chat_base)] if "sentence_encoder" in entry else []
        model, data, args = parse_recipe([*recipe, *options])
        schedules[name] = (data, args.lr_scheduler_type, args.warmup_steps)
        # Of a checkpoint the ratios are its own.
        has_all = leader or model.method_config["compression_ratios"] == systems.table["ratios"]
        ratios[name] = (args.ratio_schedule, args.ratio_mode) if has_all else ()
        if entry.get("round", 1) == 1:
            is_shallow = "encoder_layers" in recipe_file(recipe[-2]).read_text()
            changes = {"method_config": {"encoder_layers": 1}} if is_shallow else {}
            small.write_text(yaml.safe_dump({**SMALL, **changes}))
            trainer = build_trainer(*parse_recipe([*recipe, str(small), *options]))
            if any(other.get("behind") == name for other in systems.table["family"].values()):
                trainer.save_model(str(tmp_path / name))
            seen[name] = [dict(example) for example in trainer.train_dataset]
    first = next(iter(seen))
    assert len(seen[first]) == 8
    # Some have more in them: xRAG's are in its encoder's tokens, too.
    keys = seen[first][0].keys()
    read = {name: [{key: example[key] for key in keys} for example in examples] for name, examples in seen.items()}
    assert [name for name, examples in read.items() if examples != read[first]] == []
    assert [name for name, schedule in schedules.items() if schedule != schedules[first]] == []
    assert {name for name, schedule in ratios.items() if not schedule} == {
        *(f"mean_pooling_{ratio}x" for ratio in (2, 4, 8)),
        "xrag",
    }
    assert {schedule for schedule in map(str, ratios.values()) if schedule != "()"} == {str(ratios[first])}


def recipe_file(name: str) -> Path:
    import context_compressors.training

    return Path(context_compressors.training.__file__).parent / "recipes" / name


@pytest.mark.slow
def test_a_run_is_its_better_trial_gone_on_with_as_if_it_had_not_stopped(
    script, comparison, chat_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    plan, jobs = script("comparison.plan"), script("comparison.jobs")
    systems = comparison(tmp_path, "--base", str(chat_base))
    small, command = tmp_path / "small.yaml", plan.Comparison.training_command
    toy_fields = {**{name: value for name, value in SMALL.items() if name != "max_steps"}, "logging_steps": 1}
    small.write_text(yaml.safe_dump(toy_fields))
    systems.table["budget"]["choosing"] = [{"generated": True, "tasks": ["question_answering"], "weight": 1}]
    systems.table["choosing_examples"] = 2

    def toy(self, *args, **options):
        recipes, fields = (found := command(self, *args, **options))[: (first := found.index("--base"))], found[first:]
        return [*recipes, str(small), *fields, "--max_context_tokens", "96"]

    monkeypatch.setattr(plan.Comparison, "training_command", toy)
    systems.questions.mkdir()
    jobs.write_json({"trial_steps": 2, "run": {"steps": 4}}, systems.questions / "budget.json")
    trials = systems.trials("mean_pooling")
    for rate in trials:
        jobs.train_trial(systems, "mean_pooling", 1, rate)
    folder = systems.run_folder("mean_pooling", 1) / "run"
    # What a stop leaves of a copy.
    (folder / "begun").mkdir(parents=True)
    (folder / "begun" / "trainer_state.json").write_text("{")
    jobs.train_run(systems, "mean_pooling", 1)
    losses = {rate: plan.read_json(trials[rate] / "trial.json")["eval_loss"] for rate in trials}
    rate = min(losses, key=losses.__getitem__)
    assert len(set(losses.values())) == 2
    assert plan.summary(folder)["steps"] == 4
    assert not list(systems.folder.glob("family/**/checkpoint-*"))
    train(systems.training_command("mean_pooling", 1, rate, tmp_path / "whole"))
    weights, expected = (load_file(place / "model.safetensors") for place in (folder, tmp_path / "whole"))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
