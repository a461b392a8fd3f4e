# SPDX-License-Identifier: Apache-2.0
"""A run leaves a recipe that can be run again, and counts over all its parts."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from small_recipes import write_recipe
from transformers import AutoTokenizer

from context_compressors import MeanPoolingForCausalLM
from context_compressors.data.prompts import default_prompts
from context_compressors.modeling.parts.text_ids import document_ids, encode, question_ids
from context_compressors.training.train import main

PROMPTS = {"question_answering": ["Q: {question}\nA:", "{question}"], "summarization": ["Sum:"]}
PROMPTS |= {"continuation": [""], "reconstruction": ["Again:"]}


def recorded(folder: Path) -> dict:
    return yaml.safe_load((folder / "recipe.yaml").read_text())


def summary_of(folder: Path) -> dict:
    return json.loads((folder / "training_summary.json").read_text())


def losses_of(folder: Path) -> list[float]:
    return [entry["loss"] for entry in summary_of(folder)["log"] if "loss" in entry]


@pytest.mark.slow
def test_a_recorded_recipe_names_no_folder_of_this_machine_and_a_checkpoint_its_prompts(tmp_path, base_folder):
    rows = tmp_path / "secret" / "texts.jsonl"
    rows.parent.mkdir()
    rows.write_text(json.dumps({"text": "one two three four five six seven eight"}) + "\n")
    source = {"path": str(rows), "tasks": ["reconstruction"], "title": "/r/texts"}
    (tmp_path / "prompts.yaml").write_text(yaml.safe_dump(PROMPTS))
    recipe = write_recipe(
        tmp_path,
        base=str(base_folder),
        sources=[source],
        eval_sources=[source],
        eval_strategy="steps",
        min_context_tokens=2,
        method_config={"compression_ratios": [2]},
        context_prefix="/start: ",
        prompts=str(tmp_path / "prompts.yaml"),
    )
    main([recipe])
    text = (tmp_path / "out" / "recipe.yaml").read_text()
    assert str(tmp_path) not in text
    assert "secret" not in text
    kept = recorded(tmp_path / "out")
    assert [kept[name][0]["path"] for name in ("sources", "eval_sources")] == ["texts.jsonl"] * 2
    assert (kept["sources"][0]["title"], kept["context_prefix"]) == ("/r/texts", "/start: ")
    # The checkpoint is asked with the prompts of its training.
    config = MeanPoolingForCausalLM.from_pretrained(tmp_path / "out").config
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert config.prompts == {task: templates[0] for task, templates in PROMPTS.items()} == default_prompts(config)
    start = [tokenizer.bos_token_id]
    assert question_ids(config, tokenizer, "Who?") == [*start, *encode(tokenizer, "Q: Who?\nA:")]
    words = [*encode(tokenizer, "/start: "), *encode(tokenizer, "Nora.")]
    assert document_ids(config, tokenizer, "Nora.") == [*start, *words]


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
@pytest.mark.parametrize("logging_steps", [1, 100])
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
