# SPDX-License-Identifier: Apache-2.0
"""`context-compressors train RECIPE.yaml [--field value]`: parse the recipe, build its trainer, train."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import Trainer, set_seed

from .arguments import DataArguments, ModelArguments, TrainingConfig, parse_recipe, recorded_recipe
from .fit_scorers import check_fits_scorers, fit_scorers
from .log_answers import add_sample_answers
from .resume import check_resumed
from .run_record import (
    add_earlier_documents,
    check_output_dir,
    earlier_files,
    earlier_sources,
    latest_checkpoint,
    write_summary,
)
from .weight_files import store_weights_as

# Every other objective's file in objectives/ has its name.
_FILES = {"joint": "joint_pretraining"}
_READING = ("compression", "distillation", "teacher", "windows")
_COMPRESSING = ("compression", "distillation", "joint", "segments", "windows", "denoising")
_COMPRESSORS = (*_COMPRESSING, "retrieval")
# Fields that have no part in other objectives than these.
_OBJECTIVES_WITH = {
    "prompt_format": _READING,
    "task_schedule": _READING,
    "task_per_batch": _READING,
    "pack_texts": ("compression", "distillation", "teacher"),
    # Recipes of other objectives are read over those of questions.
    **dict.fromkeys(("questions_per_example", "context_prefix", "overlong_contexts"), (*_COMPRESSING, "teacher")),
    "ratio_mode": _COMPRESSING,
    **dict.fromkeys(("kl_weight", "nll_weight"), ("distillation",)),
    **dict.fromkeys(("training_substeps", "segments_per_substep", "random_segments"), ("segments",)),
    **dict.fromkeys(("noise_density", "mean_span_length"), ("denoising",)),
    **dict.fromkeys(("max_query_tokens", "contrastive_temperature"), ("retrieval",)),
    "alpha": ("joint",),
    "length_schedule": (*_READING, "joint"),
    "schedule_contexts": _READING,
    "ratio_schedule": _COMPRESSING,
    "eval_sources": (*_READING, "joint", "segments", "denoising"),
    "memories": ("compression", "distillation"),
    "sample_answers_steps": ("compression", "distillation"),
    "teacher_lora": ("teacher",),
    **dict.fromkeys(("method_config", "checkpoint_config", "model_config", "encoder"), _COMPRESSORS),
}
_INSTEAD = {("eval_sources", "retrieval"): "measure rankings with `evaluate-retrieval`"}


def build_trainer(model_args: ModelArguments, data_args: DataArguments, args: TrainingConfig) -> Trainer:
    """The trainer of the recipe's objective, with its model and data.

    Raises:
        ValueError: fields that do not go together, a missing source, column or file.
    """
    for name, objectives in _OBJECTIVES_WITH.items():
        group: Any = next(group for group in (model_args, data_args, args) if hasattr(group, name))
        value, default = getattr(group, name), group.__dataclass_fields__[name].default
        # What is empty is no setting.
        if value not in (default, [], {}) and args.objective not in objectives:
            instead = _INSTEAD.get((name, args.objective), "leave it out")
            *others, last = objectives
            named = f"objectives {', '.join(others)} and {last}" if others else f"objective {last}"
            raise ValueError(f"{name} belongs to the {named}, not to {args.objective}: {instead}")
    evaluates = args.eval_strategy != "no" or args.eval_on_start or args.sample_answers_steps
    if data_args.eval_sources and not evaluates:
        raise ValueError(
            "eval_sources are read at the steps that eval_strategy names, or where answers are sampled: give "
            "eval_strategy or sample_answers_steps, or leave eval_sources out"
        )
    scheduled = [name for name in ("length_schedule", "task_schedule") if getattr(data_args, name) is not None]
    if scheduled and args.max_steps < 1 and args.num_train_epochs not in (0, 1):
        raise ValueError(
            f"{scheduled[0]} is told by the share of one whole pass over the examples, and num_train_epochs is "
            f"{args.num_train_epochs:g}: give max_steps, or num_train_epochs 1"
        )
    if model_args.teacher is not None and args.objective != "distillation":
        raise ValueError(
            f"teacher goes with the objective distillation, not with {args.objective!r}: leave it out, or distil"
        )
    if model_args.adapter is not None and args.objective == "teacher":
        raise ValueError("adapter is what a compressor starts from; the objective teacher goes on from a checkpoint")
    set_seed(args.seed)
    objective = importlib.import_module(f".objectives.{_FILES.get(args.objective, args.objective)}", __package__)
    trainer = objective.build(model_args, data_args, args)
    if args.fit_scorers:
        check_fits_scorers(trainer)
    if args.sample_answers_steps:
        add_sample_answers(trainer, data_args, args.sample_answers_steps)
    return trainer


def main(argv: Sequence[str] | None = None) -> int:
    """Run the train command; returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    arguments = parse_recipe(argv)
    recipe = recorded_recipe(argv, arguments)
    args = arguments[2]
    resume = args.resume_from_checkpoint
    if str(resume).lower() in ("latest", "true"):
        resume = latest_checkpoint(args.output_dir)
    elif str(resume).lower() == "false":
        resume = None
    if resume is None:
        check_output_dir(args.output_dir, args.overwrite)
    trainer = build_trainer(*arguments)
    add_earlier_documents(trainer, recipe)
    earlier = earlier_sources(recipe)
    # The model may have come from there.
    PartialState().wait_for_everyone()
    if resume is None and args.overwrite and trainer.is_world_process_zero():
        for path in earlier_files(args.output_dir):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    if resume is not None:
        check_resumed(trainer.model, resume)
    elif args.fit_scorers:
        fit_scorers(trainer, args.fit_scorers)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(args.output_dir)
    if trainer.is_world_process_zero():
        # The Trainer's arguments are a pickle, which has no place in a folder that people share.
        (Path(args.output_dir) / "training_args.bin").unlink(missing_ok=True)
        if args.save_dtype is not None:
            store_weights_as(getattr(torch, args.save_dtype), Path(args.output_dir))
    write_summary(trainer, recipe, Path(args.output_dir), earlier)
    return 0


def main_of_process(argv: Sequence[str] | None = None) -> int:
    """`main` of a process that does nothing else: threads of a process group that is left open may abort its end."""
    status = main(argv)
    PartialState().destroy_process_group()
    return status


if __name__ == "__main__":
    try:
        raise SystemExit(main_of_process())
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
