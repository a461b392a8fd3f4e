# SPDX-License-Identifier: Apache-2.0
"""What the small-scale benchmark is asked for: its command line, its jobs, and the budget that all of them have."""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

from benchmarks.common.tools import positive_int
from context_compressors.configuration.methods import METHODS
from context_compressors.configuration.nearest_names import check_choice
from context_compressors.training.fields import OPTIMIZERS
from context_compressors.training.schedules import check_ratio_schedule

RESULTS = Path(__file__).parent / "methods.json"
BASE = Path(__file__).parents[2] / "tests" / "checkpoints" / "base"
_LORA = {"rank": 32, "alpha": 32}
_WIDE_LORA = {"rank": 64, "alpha": 128}
# Where a method's own defaults, which are made for large bases, are not taken. The small base does not read slots that
# it was not tuned for, and adapters on its attention alone hardly learn: all methods but GMSA and its baseline, whose
# first stage is defined by a frozen decoder, get the same adapters on both sides. ComprExIT has no encoder of its own.
METHOD_CONFIGS: dict[str, dict[str, Any]] = {
    "mean_pooling": {"encoder_lora": _LORA, "decoder_lora": _LORA},
    "compression_tokens": {"encoder_lora": _LORA, "decoder_lora": _LORA},
    "icae": {"encoder_lora": _LORA, "decoder_lora": _LORA},
    "five_hundred_x": {"encoder_lora": _LORA, "decoder_lora": _LORA},
    "comprexit": {"decoder_lora": _LORA},
    "gmsa": {"encoder_lora": _WIDE_LORA},
    "tcp_autoencoder": {"encoder_lora": _WIDE_LORA},
}
TASKS = ("question_answering", "reconstruction", "continuation")
_JOB_FIELDS = ("method", "config", "ratios", "prompts")


def build_parser(description: str | None = None) -> argparse.ArgumentParser:
    """The command line of the benchmark."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--data", metavar="PATH", help="folder with the data files (default: generated documents alone)")
    add("--method", default="mean_pooling", help=f"one of {', '.join(METHODS)} (default: mean_pooling)")
    add("--config", type=_fields, default={}, metavar="JSON", help="fields of the method's configuration")
    add("--prompts", metavar="NAME", help="packaged prompts or a file of prompts (default: the method's, see above)")
    add("--ratios", nargs="+", type=positive_int, default=[4], metavar="R", help="ratios of the model (default: 4)")
    add("--jobs", metavar="FILE", help="a list of runs (JSON), in place of --method, --config, --ratios and --prompts")
    add("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="S", help="default: 0 1 2")
    add("--base", default=str(BASE), metavar="FOLDER", help="base language model (default: tests/checkpoints/base)")
    add("--steps", type=positive_int, default=200, metavar="N", help="optimizer steps (default: 200)")
    add("--batch-size", type=positive_int, default=8, metavar="B", help="contexts per step (default: 8)")
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help="default: adamw")
    add(
        "--muon-learning-rate", type=float, default=0.004, metavar="X", help="for matrices, with muon (default: 0.004)"
    )
    add("--learning-rate", type=float, default=2e-3, metavar="X", help="AdamW's (default: 2e-3)")
    add("--ratio-mode", choices=("all", "random"), default="all", help="ratios of a step: all, or one (default: all)")
    add(
        "--lowest-first",
        type=_share,
        default=0.0,
        metavar="X",
        help="share of steps at the lowest ratio (default: 0)",
    )
    add(
        "--ratio-schedule",
        type=_schedule,
        metavar="JSON",
        help="which ratios are trained from which share of the steps on, such as [[0, [1]], [0.3, [2, 4]]]",
    )
    add(
        "--restore-first",
        type=_share,
        default=0.0,
        metavar="X",
        help="share of steps with reconstruction alone (default: 0)",
    )
    add("--context-tokens", type=positive_int, default=144, metavar="N", help="longest context (default: 144)")
    add(
        "--eval-samples",
        type=positive_int,
        default=128,
        metavar="N",
        help="questions per data set; also texts to continue (default: 128)",
    )
    add(
        "--bleu-samples", type=positive_int, default=24, metavar="N", help="reconstructions per data set (default: 24)"
    )
    add("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="trained and tested (default: all three)")
    add(
        "--restoration-lengths",
        nargs="+",
        type=positive_int,
        metavar="N",
        help="test reconstruction on texts of exactly so many tokens (default: of at most --context-tokens)",
    )
    add("--device", help='such as "cpu" or "cuda" (default: a GPU when there is one)')
    add("--save", metavar="FOLDER", help="keep the trained models, as FOLDER/seed_S/RUN (default: they are not kept)")
    add("--output", metavar="FILE", default=str(RESULTS), help="the result file, also read")
    return parser


def _fields(text: str) -> dict[str, Any]:
    """Configuration fields from the command line."""
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(fields, dict) or "compression_ratios" in fields:
        raise argparse.ArgumentTypeError(f"{text!r} must be a mapping of fields, without the ratios (--ratios)")
    return fields


def _share(text: str) -> float:
    """A number from 0 to below 1 from the command line."""
    try:
        value = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from error
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be at least 0 and less than 1")
    return value


def _schedule(text: str) -> list[list[Any]]:
    """Which ratios are trained when, from the command line."""
    try:
        schedule = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    try:
        return [[fraction, ratios] for fraction, ratios in check_ratio_schedule(schedule)]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def read_jobs(arguments: argparse.Namespace) -> list[argparse.Namespace]:
    """The runs of a job file, or the one that the command line names; each with all arguments.

    Raises:
        ValueError: the file is none of this kind, or a job has an unknown field or method.
    """
    jobs: Any = [{}]
    if arguments.jobs is not None:
        try:
            jobs = json.loads(Path(arguments.jobs).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"--jobs {arguments.jobs} cannot be read: {error}") from error
    if not isinstance(jobs, list) or not jobs or not all(isinstance(job, dict) for job in jobs):
        raise ValueError(f"--jobs {arguments.jobs} must hold a list of mappings, one for each run")
    found = []
    for job in jobs:
        for name in job:
            check_choice(f"--jobs {arguments.jobs}", name, _JOB_FIELDS)
        found.append(argparse.Namespace(**{**vars(arguments), **job}))
        check_choice("--method", found[-1].method, METHODS)
    return found


def budget_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """What all runs of a result file have in common.

    Raises:
        ValueError: the base is not there.
    """
    weights = Path(arguments.base) / "model.safetensors"
    if not weights.is_file():
        raise ValueError(f"there is no base language model in {arguments.base}: name its folder with --base")
    budget = {
        "base": hashlib.sha256(weights.read_bytes()).hexdigest()[:16],
        "data": "generated" if arguments.data is None else "generated and real text",
        "steps": arguments.steps,
        "batch_size": arguments.batch_size,
        "optimizer": arguments.optimizer,
        "muon_learning_rate": arguments.muon_learning_rate,
        "learning_rate": arguments.learning_rate,
        "ratio_mode": arguments.ratio_mode,
        "lowest_first": arguments.lowest_first,
        "context_tokens": arguments.context_tokens,
        "eval_samples": arguments.eval_samples,
        "bleu_samples": arguments.bleu_samples,
    }
    # Only where they were asked for: files of before have runs with all tasks.
    if set(arguments.tasks) != set(TASKS):
        budget["tasks"] = sorted(arguments.tasks)
    if arguments.ratio_schedule is not None:
        budget["ratio_schedule"] = arguments.ratio_schedule
    if arguments.restore_first:
        budget["restore_first"] = arguments.restore_first
    if arguments.restoration_lengths is not None:
        budget["restoration_lengths"] = arguments.restoration_lengths
    return budget


def fields_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Fields of a model's configuration: this benchmark's for the method, and those that were given."""
    return {**METHOD_CONFIGS.get(arguments.method, {}), **arguments.config}
