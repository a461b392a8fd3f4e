# SPDX-License-Identifier: Apache-2.0
"""What a run leaves beside its checkpoint: a recipe that can be run again, and counts over all its parts."""

import dataclasses
import json
import logging
import shutil
from pathlib import Path

import pytest
import yaml
from small_recipes import GENERATED, write_recipe

import context_compressors.training
from context_compressors.hub_cards.repository import build_repository
from context_compressors.training.arguments import parse_recipe, recorded_recipe
from context_compressors.training.run_counts import COUNTS, RunCounts
from context_compressors.training.run_record import latest_checkpoint, without_folders
from context_compressors.training.train import main

RECIPES = Path(context_compressors.training.__file__).parent / "recipes"


def without_place(arguments):
    """Fields and values of what a recipe was parsed into, but for where the run writes."""
    return [
        {name: str(value) for name, value in vars(group).items() if name not in ("output_dir", "logging_dir")}
        for group in arguments
        if dataclasses.is_dataclass(group)
    ]


def recorded(folder: Path) -> dict:
    return yaml.safe_load((folder / "recipe.yaml").read_text())


def summary_of(folder: Path) -> dict:
    return json.loads((folder / "training_summary.json").read_text())


def losses_of(folder: Path) -> list[float]:
    return [entry["loss"] for entry in summary_of(folder)["log"] if "loss" in entry]


READ_AFTER = {"restore_first": "comprexit", "joint_pretraining": "icae", "keft": "gmsa"}


@pytest.mark.parametrize("path", sorted(RECIPES.glob("embedded/*.yaml")), ids=lambda path: path.stem)
def test_the_recorded_recipe_is_the_one_that_was_run(path, tmp_path):
    first = [f"embedded/{READ_AFTER[path.stem]}.yaml"] if path.stem in READ_AFTER else []
    argv = [
        *first,
        str(path),
        "--seed",
        "3",
        "--average_tokens_across_devices",
        "false",
        "--use_cpu",
        "true",
        "--bf16",
        "false",
    ]
    argv += ["--output_dir", "x", "--sources", GENERATED, "--learning_rate=3e-4", "--max_context_tokens", "128"]
    arguments = parse_recipe(argv)
    again = tmp_path / "again.yaml"
    again.write_text(yaml.safe_dump(recorded_recipe(argv, arguments), sort_keys=False))
    assert without_place(parse_recipe([str(again)])) == without_place(arguments)


@pytest.mark.slow
def test_a_recorded_recipe_trains_again_to_the_same_losses(tmp_path, base_folder):
    recipe = write_recipe(tmp_path, base=str(base_folder), method_config={"compression_ratios": [2]}, seed=5)
    main([recipe, "--output_dir", str(tmp_path / "first"), "--gradient_accumulation_steps", "2"])
    argv = ["--base", str(base_folder), "--output_dir", str(tmp_path / "second")]
    main([str(tmp_path / "first" / "recipe.yaml"), *argv])
    assert losses_of(tmp_path / "second") == losses_of(tmp_path / "first")
    assert recorded(tmp_path / "second") == recorded(tmp_path / "first")
    assert recorded(tmp_path / "first")["gradient_accumulation_steps"] == 2


@pytest.mark.slow
def test_a_recorded_recipe_names_no_folder_of_this_machine(tmp_path, base_folder):
    rows = tmp_path / "secret" / "texts.jsonl"
    rows.parent.mkdir()
    rows.write_text(json.dumps({"text": "one two three four five six seven eight"}) + "\n")
    source = {"path": str(rows), "tasks": ["reconstruction"], "title": "/r/texts"}
    recipe = write_recipe(
        tmp_path,
        base=str(base_folder),
        sources=[source],
        eval_sources=[source],
        eval_strategy="steps",
        min_context_tokens=2,
        method_config={"compression_ratios": [2]},
        context_prefix="/start: ",
    )
    main([recipe])
    text = (tmp_path / "out" / "recipe.yaml").read_text()
    assert str(tmp_path) not in text
    assert "secret" not in text
    kept = recorded(tmp_path / "out")
    assert [kept[name][0]["path"] for name in ("sources", "eval_sources")] == ["texts.jsonl"] * 2
    assert (kept["sources"][0]["title"], kept["context_prefix"]) == ("/r/texts", "/start: ")


def test_a_data_set_in_a_folder_is_no_repository(tmp_path, monkeypatch):
    (tmp_path / "sets" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for name in ("sets/mine", str(tmp_path / "sets" / "mine")):
        assert without_folders([{"name": name, "split": "train"}]) == [{"name": "./mine", "split": "train"}]
    assert without_folders([{"name": "org/mine"}]) == [{"name": "org/mine"}]


def test_words_are_no_folders():
    words = {"prompts": {"question_answering": "/ask a/b: {question}"}, "context_prefix": "~ ", "title": "C:/x"}
    words |= {"where": {"section": ["/intro", "~"]}, "columns": {"context": "/text"}}
    assert without_folders({"checkpoint_config": words}) == {"checkpoint_config": words}
    paths = ["/a/b.yaml", "~/b.yaml", r"C:\a\b.yaml", "b.yaml"]
    assert without_folders({"prompts": "/a/b.yaml", "x": [paths, 1, None]}) == {
        "prompts": "b.yaml",
        "x": [["b.yaml"] * 4, 1, None],
    }


@pytest.mark.slow
def test_a_run_of_epochs_that_is_resumed_inside_of_one_is_the_same(tmp_path, base_folder):
    rows = [{"text": " ".join(f"word{n}x{i}" for i in range(40))} for n in range(9)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = {
        "base": str(base_folder),
        "sources": [{"path": str(tmp_path / "rows.jsonl"), "tasks": ["reconstruction", "continuation"]}],
        **{"max_steps": -1, "num_train_epochs": 3, "per_device_train_batch_size": 2, "ratio_mode": "per_sample"},
        **{"method_config": {"compression_ratios": [2, 4]}, "save_strategy": "steps", "save_steps": 7},
        **{"logging_steps": 1, "min_context_tokens": 4, "max_context_tokens": 24, "max_target_tokens": 24},
    }
    recipe = write_recipe(tmp_path, **fields)
    main([recipe, "--output_dir", str(tmp_path / "whole")])
    losses = losses_of(tmp_path / "whole")
    assert len(losses) == 15
    shutil.copytree(tmp_path / "whole" / "checkpoint-7", tmp_path / "again" / "checkpoint-7")
    main([recipe, "--output_dir", str(tmp_path / "again"), "--resume_from_checkpoint", "latest"])
    assert losses_of(tmp_path / "again") == losses
    # Workers that would outlive an epoch draw the next one's examples, too.
    workers = ["--dataloader_num_workers", "1", "--dataloader_persistent_workers", "true"]
    main([recipe, "--output_dir", str(tmp_path / "workers"), *workers])
    assert losses_of(tmp_path / "workers") == losses


@pytest.mark.slow
def test_an_earlier_run_is_replaced_where_that_is_said_and_as_a_whole(tmp_path, base_folder):
    folder = tmp_path / "out"
    fields = {"base": str(base_folder), "max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    main([write_recipe(tmp_path, **fields, method_config={"compression_ratios": [2]})])
    (folder / "notes.txt").write_text("mine")
    before = (folder / "model.safetensors").read_bytes()
    other = write_recipe(tmp_path, **fields, method="icae", method_config={"compression_ratios": [4]})
    for latest in ([], ["--resume_from_checkpoint", "false"]):
        with pytest.raises(ValueError, match=r"out holds an earlier run \(model\.safetensors\)"):
            main([other, *latest])
    assert (folder / "model.safetensors").read_bytes() == before
    main([other, "--overwrite", "true"])
    assert not (folder / "modeling_mean_pooling.py").exists()
    assert "overwrite" not in recorded(folder)
    assert (folder / "notes.txt").read_text() == "mine"
    # A run goes on from what it replaces.
    main([write_recipe(tmp_path, max_steps=1, checkpoint=str(folder)), "--overwrite", "true"])
    assert [path.name for path in folder.glob("checkpoint-*")] == []


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["compression", "teacher"])
def test_a_resumed_run_counts_its_tokens_on(tmp_path, base_folder, objective):
    fields = {"method_config": {"compression_ratios": [2]}} if objective == "compression" else {}
    fields |= {"objective": objective, "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    recipe = write_recipe(tmp_path, base=str(base_folder), **fields)

    def tokens():
        return [entry["num_tokens"] for entry in summary_of(tmp_path / "out")["log"] if "loss" in entry]

    main([recipe])
    whole = tokens()
    main([recipe, "--resume_from_checkpoint", str(tmp_path / "out" / "checkpoint-1")])
    assert tokens() == whole
    assert 0 < whole[0] < whole[1]


@pytest.mark.slow
@pytest.mark.parametrize("logging_steps", [1, 2, 100])
def test_a_resumed_run_counts_as_one_that_was_never_stopped(tmp_path, base_folder, logging_steps):
    fields = {"method_config": {"compression_ratios": [2]}, "max_steps": 5, "include_num_input_tokens_seen": True}
    recipe = write_recipe(
        tmp_path, base=str(base_folder), **fields, logging_steps=logging_steps, save_strategy="steps", save_steps=2
    )
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    main([recipe, "--output_dir", str(whole)])
    shutil.copytree(whole, stopped)
    for step in (4, 5):
        shutil.rmtree(stopped / f"checkpoint-{step}")
    counts = json.loads((stopped / "checkpoint-2" / "trainer_state.json").read_text())
    at_two = counts["stateful_callbacks"]["RunCounts"]["attributes"]
    main([recipe, "--output_dir", str(stopped), "--resume_from_checkpoint", "latest"])
    expected = summary_of(whole)
    assert expected["context_tokens"] > at_two["counts"]["num_context_tokens"] > 0
    found = summary_of(stopped)
    assert (found["context_tokens"], found["input_tokens"]) == (expected["context_tokens"], expected["input_tokens"])
    assert found["hours"] * 3600 > at_two["earlier_seconds"] > 0


@pytest.mark.slow
def test_a_checkpoint_without_counts_goes_on_without_them(tmp_path, base_folder):
    fields = {"method_config": {"compression_ratios": [2]}, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    recipe = write_recipe(tmp_path, base=str(base_folder), **fields)
    main([recipe])
    out = tmp_path / "out"
    shutil.rmtree(out / "checkpoint-4")
    state = json.loads((out / "checkpoint-2" / "trainer_state.json").read_text())
    del state["stateful_callbacks"]["RunCounts"]
    (out / "checkpoint-2" / "trainer_state.json").write_text(json.dumps(state))
    main([recipe, "--resume_from_checkpoint", "latest"])
    assert (summary_of(out)["steps"], summary_of(out)["context_tokens"], summary_of(out)["hours"]) == (4, None, None)


@pytest.mark.slow
def test_counts_come_back_with_the_callbacks_of_a_checkpoint(tmp_path, base_folder):
    fields = {"method_config": {"compression_ratios": [2]}, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    recipe = write_recipe(tmp_path, base=str(base_folder), **fields)
    main([recipe])
    out = tmp_path / "out"
    expected = summary_of(out)["context_tokens"]
    shutil.rmtree(out / "checkpoint-4")
    main([recipe, "--resume_from_checkpoint", "latest", "--restore_callback_states_from_checkpoint", "true"])
    assert summary_of(out)["context_tokens"] == expected


def test_counts_of_a_process():
    counts = RunCounts()
    counts.add(num_context_tokens=3)
    counts.add(num_context_tokens=4, num_cut_tokens=1, num_cut_examples=1)
    assert counts.state()["attributes"]["counts"] == dict(zip(COUNTS, (0, 7, 1, 1), strict=True))
    with pytest.raises(KeyError):
        counts.add(num_words=1)


def test_a_run_with_an_incomplete_checkpoint_alone_says_that_it_starts_anew(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    assert latest_checkpoint(str(tmp_path)) is None
    assert not caplog.records
    (tmp_path / "checkpoint-4").mkdir()
    assert latest_checkpoint(str(tmp_path)) is None
    assert f"checkpoint-4 incomplete, and {tmp_path} has no other: training starts anew" in caplog.text
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / "trainer_state.json").write_text("{}")
    assert latest_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-2")
    assert "checkpoint-4 incomplete: training goes on from checkpoint-2" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["optimizer", "scheduler"])
def test_a_checkpoint_without_optimizer_or_scheduler_is_refused(tmp_path, base_folder, missing):
    fields = {"method_config": {"compression_ratios": [2]}, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    recipe = write_recipe(tmp_path, base=str(base_folder), **fields)
    main([recipe])
    folder = tmp_path / "out" / "checkpoint-2"
    (folder / f"{missing}.pt").unlink()
    with pytest.raises(
        ValueError, match=f"checkpoint-2 has no state of the {missing}, .*save_only_model.*`checkpoint`"
    ):
        main([recipe, "--resume_from_checkpoint", str(folder)])


@pytest.mark.slow
def test_a_training_runs_own_folder_can_be_uploaded(tmp_path, base_folder, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    fields = {"method_config": {"compression_ratios": [2]}, "save_strategy": "steps", "save_steps": 1}
    main([write_recipe(tmp_path, base=str(base_folder), **fields)])
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "# MeanPooling compressor" in card
    assert "memory = model.compress(" in card
    built = build_repository(tmp_path / "out", tmp_path / "built", license="mit")
    assert "left out, since this package does not write them (--include): checkpoint-1/, checkpoint-2/" in caplog.text
    names = {path.name for path in built.iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "recipe.yaml", "README.md"} <= names
    assert not [path for path in built.rglob("*") if "checkpoint" in path.name and path.suffix != ".py"]
