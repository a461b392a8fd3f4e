# SPDX-License-Identifier: Apache-2.0
"""What a training run leaves beside its checkpoint, and where it goes on after a stop."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME

from ..evaluation.report import environment
from .arguments import TrainingConfig

_PRIVATE_FIELDS = ("data_dir", "output_dir", "logging_dir", "hub_token", "resume_from_checkpoint")


def latest_checkpoint(output_dir: str) -> str | None:
    """The newest complete checkpoint of a run, or `None`; one that a kill left half written is passed over."""
    folders = [path for path in Path(output_dir).glob("checkpoint-*") if path.name.split("-")[1].isdigit()]
    for folder in sorted(folders, key=lambda path: int(path.name.split("-")[1]), reverse=True):
        # The Trainer writes its state last.
        try:
            json.loads((folder / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        return str(folder)
    return None


def _device_name(args: TrainingConfig) -> str:
    """What the run computes on, such as "2 x NVIDIA H200" or a CPU's name and its number of threads."""
    if args.device.type == "cuda":
        return f"{args.world_size} x {torch.cuda.get_device_name(args.device)}"
    hardware = environment()
    threads = hardware["torch_threads"]
    return f"{hardware['cpu']}, {threads} thread{'s' if threads > 1 else ''}"


def _over_all_parts(log_history: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """A quantity that grows over a run and starts anew when it is resumed, added up; `None` when it is not logged."""
    values = [entry[name] for entry in log_history if name in entry]
    if not values:
        return None
    return sum(value for value, later in zip(values, [*values[1:], 0], strict=True) if later < value)


def training_hours(log_history: Sequence[Mapping[str, Any]], resumed: bool) -> float | None:
    """Wall-clock hours of a run, all its parts together when it was resumed; `None` when the log does not tell."""
    seconds = _over_all_parts(log_history, "train_runtime")
    # Only where tokens are counted does every entry show the clock; elsewhere the parts before the last are not timed.
    untimed = resumed and any("loss" in entry and "train_runtime" not in entry for entry in log_history)
    return None if seconds is None or untimed else float(f"{seconds / 3600:.3g}")


def _without_folder(value: Any) -> Any:
    """A path on this machine by its last part alone; anything else as it is."""
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def write_summary(trainer: Trainer, arguments: Sequence[object], output_dir: Path, resumed: bool) -> None:
    """Beside the checkpoint: the recipe as it was run, and what came of it."""
    recipe = {}
    for group in arguments[:2]:
        recipe |= {name: value for name, value in dataclasses.asdict(group).items() if value is not None}
    changed = {
        field.name: getattr(arguments[2], field.name)
        for field in dataclasses.fields(arguments[2])
        if field.default is not dataclasses.MISSING and getattr(arguments[2], field.name) != field.default
    }
    # Where this machine keeps its files, and tokens, are nobody else's business.
    shown = {n: _without_folder(value) for n, value in (recipe | changed).items() if n not in _PRIVATE_FIELDS}
    plain = json.loads(json.dumps(shown, default=str))
    (output_dir / "recipe.yaml").write_text(yaml.safe_dump(plain, sort_keys=False), encoding="utf-8")
    history = trainer.state.log_history
    summary = {
        "steps": trainer.state.global_step,
        "input_tokens": trainer.state.num_input_tokens_seen,
        # Each process counts its own.
        "context_tokens": _over_all_parts(history, "num_context_tokens") if trainer.args.world_size == 1 else None,
        "seed": trainer.args.seed,
        "hours": training_hours(history, resumed),
        "device": _device_name(trainer.args),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "log": history[-20:],
    }
    (output_dir / "training_summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
