# SPDX-License-Identifier: Apache-2.0
"""Jobs of the comparison that are not commands of the package. run.py starts each in its own process."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, TrainerCallback

from benchmarks.comparison import page, results
from benchmarks.comparison.plan import SHARED, Comparison, read_json, read_table
from benchmarks.comparison.questions import counted, steps_for, write_sets
from context_compressors.cli.loading import load_model
from context_compressors.data.document_ids import TrainingDocuments
from context_compressors.evaluation.evaluate import can_compress
from context_compressors.modeling import model_class
from context_compressors.reporting.result_files import write_json
from context_compressors.training.arguments import parse_recipe
from context_compressors.training.fields import DataArguments
from context_compressors.training.objectives.compression import record_prompts
from context_compressors.training.run_record import latest_checkpoint
from context_compressors.training.train import build_trainer
from context_compressors.training.train import main as train


def write_questions(comparison: Comparison) -> None:
    """Write all sets, and the steps of the budget."""
    tokenizer, table = AutoTokenizer.from_pretrained(comparison.base), comparison.table
    write_sets(table, comparison.data, tokenizer, comparison.questions, comparison.arguments.questions)
    # Which method reads them makes no difference to the examples.
    recipe = [*SHARED, *comparison.recipe_of(next(iter(table["family"])))]
    longest = ["--max_context_tokens", str(table["context_tokens"][1])]
    where, steps = ([*recipe, *longest], comparison.data, tokenizer), comparison.arguments.steps
    found = counted(steps, *where) if steps else steps_for(table["training_tokens"], *where)
    budget = {"size": table["size"], "trial_steps": max(1, round(table["budget"]["trial_share"] * found["steps"]))}
    write_json({**budget, "run": found}, comparison.questions / "budget.json")


def merge_reader(comparison: Comparison) -> None:
    """Save the reader as a plain language model, with its adapter merged."""
    reader = load_model(comparison.arguments.reader, base_model=str(comparison.base), dtype="bfloat16", device="cpu")
    if can_compress(reader):
        reader = reader.decoder_language_model()
    reader.save_pretrained(comparison.reader)
    # What it has read goes with it.
    if documents := TrainingDocuments.of(comparison.arguments.reader):
        documents.save(comparison.reader)
    AutoTokenizer.from_pretrained(comparison.base).save_pretrained(comparison.reader)


def train_trial(comparison: Comparison, name: str, seed: int, rate: float) -> None:
    """Train the beginning of a run and record its validation loss."""
    folder, table = comparison.trials(name)[rate], comparison.table
    steps = read_json(comparison.questions / "budget.json")["trial_steps"]
    options = {"eval_sources": json.dumps(table["budget"]["choosing"]), "eval_strategy": "steps", "eval_steps": steps}
    options |= {"num_eval_examples": table["choosing_examples"], "per_device_eval_batch_size": 2}
    trainer = build_trainer(*parse_recipe(comparison.training_command(name, seed, rate, folder, **options)))

    class Stop(TrainerCallback):
        """Stop at the end of the trial; the schedules are those of the whole run."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_save |= state.global_step == steps
            control.should_training_stop |= state.global_step >= steps

    trainer.add_callback(Stop())
    trainer.train(resume_from_checkpoint=latest_checkpoint(str(folder)))
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    write_json({"steps": steps, "eval_loss": losses[-1]}, folder / "trial.json")


def train_run(comparison: Comparison, name: str, seed: int) -> None:
    """Continue the better trial with the first seed; train anew at its rate with others."""
    folder, trials = comparison.run_folder(name, seed) / "run", comparison.trials(name)
    rate = best_rate(trials)
    if seed == comparison.arguments.seeds[0] and latest_checkpoint(str(folder)) is None:
        begun = Path(latest_checkpoint(str(trials[rate])) or "")
        # Renamed when it is whole, so that a stop leaves no half of it.
        shutil.copytree(begun, folder / "begun", dirs_exist_ok=True)
        (folder / "begun").rename(folder / begun.name)
    train(comparison.training_command(name, seed, rate, folder))
    # Each holds all weights and the optimizer's states.
    for done in (folder, *trials.values()):
        for checkpoint in done.glob("checkpoint-*"):
            shutil.rmtree(checkpoint)


def best_rate(trials: Mapping[float, Path]) -> float:
    """Return the learning rate of the trial with the lowest validation loss."""
    return min(trials, key=lambda rate: read_json(trials[rate] / "trial.json")["eval_loss"])


def make_untrained(comparison: Comparison, name: str, seed: int) -> None:
    """Save a checkpoint of a method without training, or with fitted scorers, on the reader."""
    entry, folder = comparison.table["family"][name], comparison.checkpoint(name, seed)
    if contexts := entry.get("fit_scorers"):
        _train_no_step(comparison, name, seed, folder, fit_scorers=contexts)
        return
    changes, ratios = entry.get("changes", {}), comparison.table["ratios"]
    model = model_class(name).from_base(comparison.start, dtype="bfloat16", compression_ratios=ratios, **changes)
    tokenizer = AutoTokenizer.from_pretrained(comparison.base)
    record_prompts(model.config, tokenizer, DataArguments(prompts="chat", prompt_format="chat"))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_timed(comparison: Comparison, name: str) -> None:
    """Save an untrained checkpoint of the same sizes, to measure seconds."""
    seed = comparison.arguments.seeds[0]
    if comparison.trains(name) or "fit_scorers" in comparison.table["family"][name]:
        leader = comparison.entry(name).get("behind")
        start = {"checkpoint": comparison.timed_checkpoint(leader)} if leader else {}
        _train_no_step(comparison, name, seed, comparison.timed_checkpoint(name), **start)
    else:
        make_untrained(comparison, name, seed)


def _train_no_step(comparison: Comparison, name: str, seed: int, folder: Path, **options: Any) -> None:
    """Run a training without steps, which fits and saves."""
    options |= {"max_steps": -1, "num_train_epochs": 0, "task_schedule": "null", "length_schedule": "null"}
    train(comparison.training_command(name, seed, 0.0, folder, **options))


def write_page(comparison: Comparison) -> None:
    """Write the result file and the page of the answers so far."""
    page.write(results.gather(comparison), comparison.folder / "page")


def main() -> None:
    """Run the function that the arguments name, with its arguments and the command line as JSON."""
    function, given, command_line = sys.argv[1:]
    arguments = argparse.Namespace(**json.loads(command_line))
    globals()[function](Comparison(arguments, read_table(arguments.size)), *json.loads(given))
