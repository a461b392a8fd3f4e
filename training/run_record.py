# SPDX-License-Identifier: Apache-2.0
"""Records of a training run in its checkpoint's folder, and the checkpoint that a stopped run resumes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
import transformers
import yaml
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import logging

from ..data.document_ids import TrainingDocuments, record_file
from ..data.yaml_text import read_yaml
from ..reporting.environment import environment
from .base_trainer import BaseTrainer

logger = logging.get_logger(__name__)

RECIPE_NAME, SUMMARY_NAME = "recipe.yaml", "training_summary.json"
# What a run may start from, which an earlier one may have trained.
_STARTS = ("checkpoint", "base", "adapter", "teacher")
_PRIVATE_FIELDS = ("data_dir", "output_dir", "logging_dir", "hub_token", "resume_from_checkpoint", "overwrite")
# Fields of words, names of columns and their values, which may start like a path.
_TEXTS = ("context_prefix", "title", "columns", "where")


def latest_checkpoint(output_dir: str) -> str | None:
    """Return the newest complete checkpoint of a run, or `None`; warn of those that a kill left half written."""
    folders = [path for path in Path(output_dir).glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    for folder in sorted(folders, key=lambda path: int(path.name.split("-")[1]), reverse=True):
        # The Trainer writes its state last.
        try:
            json.loads((folder / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            logger.warning(f"{folder.name} is incomplete: training goes on from an earlier one, or from the start")
        else:
            return str(folder)
    return None


def earlier_files(output_dir: str | Path) -> list[Path]:
    """Return weights, code and checkpoints of an earlier run in an output folder."""
    return [path for pattern in ("*.safetensors*", "*.py", "checkpoint-*") for path in Path(output_dir).glob(pattern)]


def check_output_dir(output_dir: str | Path, overwrite: bool) -> None:
    """Raise `ValueError` where a folder holds an earlier run that may not be replaced."""
    earlier = [] if overwrite else earlier_files(output_dir)
    # A kill may have left a first checkpoint half written.
    earlier = [path for path in earlier if path.is_file() or (path / TRAINER_STATE_NAME).is_file()]
    if earlier:
        raise ValueError(
            f"{output_dir} holds an earlier run ({earlier[0].name}): name another folder, go on with it "
            "(--resume_from_checkpoint latest), or replace it (--overwrite true)"
        )


def without_folders(value: Any) -> Any:
    """Return a value whose paths are shortened to their last part, inside lists and mappings, too."""
    if isinstance(value, Mapping):
        is_text = {name: name in _TEXTS or (name == "prompts" and isinstance(value[name], Mapping)) for name in value}
        shown = {name: inside if is_text[name] else without_folders(inside) for name, inside in value.items()}
        if isinstance(value.get("name"), str) and Path(value["name"]).is_dir():
            shown["name"] = f"./{Path(value['name']).resolve().name}"
        return shown
    if isinstance(value, (list, tuple)):
        return [without_folders(inside) for inside in value]
    is_path = isinstance(value, str) and (
        value.startswith("~") or any(kind(value).is_absolute() for kind in (PurePosixPath, PureWindowsPath))
    )
    return PureWindowsPath(value).name if is_path else value


def add_earlier_documents(trainer: BaseTrainer, recipe: Mapping[str, Any]) -> None:
    """Take over the documents of what a run starts from, where it left a record."""
    for name in _STARTS:
        if recipe.get(name) is not None:
            earlier = TrainingDocuments.of(recipe[name], on_hub=name == "checkpoint")
            # Bases and teachers of others have none, and say nothing about a training with this package.
            if earlier is not None or name == "checkpoint":
                trainer.documents.add(earlier)


def earlier_sources(recipe: Mapping[str, Any]) -> list[Any]:
    """Return the sources of what a run starts from, in all stages that left a record."""
    sources: list[Any] = []
    for name in _STARTS:
        place, on_hub = recipe.get(name) or "", name == "checkpoint"
        summary = record_file(place, SUMMARY_NAME, on_hub)
        ran = None if summary is None else record_file(place, RECIPE_NAME, on_hub)
        if summary is None or ran is None:
            continue
        sources += json.loads(summary.read_text(encoding="utf-8")).get("earlier_sources", [])
        sources += read_yaml(ran).get("sources") or []
    return [entry for index, entry in enumerate(sources) if entry not in sources[:index]]


def write_summary(
    trainer: BaseTrainer, recipe: Mapping[str, Any], output_dir: Path, earlier: Sequence[Any] = ()
) -> None:
    """Write `recipe.yaml`, `training_summary.json` and `training_documents.json`; every process has to call this."""
    counts = trainer.run_counts.put_together(trainer.accelerator)
    trainer.gather_documents()
    if not trainer.is_world_process_zero():
        return
    # The file is shared: it names no folder of this machine, and no token.
    shown = without_folders({name: value for name, value in recipe.items() if name not in _PRIVATE_FIELDS})
    (output_dir / RECIPE_NAME).write_text(yaml.safe_dump(shown, sort_keys=False), encoding="utf-8")
    hardware = environment()
    num_threads = hardware["torch_threads"]
    device = f"{hardware['cpu']}, {num_threads} thread{'s' if num_threads > 1 else ''}"
    if trainer.args.device.type == "cuda":
        device = f"{trainer.args.world_size} x {torch.cuda.get_device_name(trainer.args.device)}"
    summary = {
        "steps": trainer.state.global_step,
        "input_tokens": trainer.state.num_input_tokens_seen,
        "context_tokens": counts["num_context_tokens"] or None,
        "seed": trainer.args.seed,
        "hours": float(f"{trainer.run_counts.seconds / 3600:.3g}"),
        "device": device,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        **({"earlier_sources": without_folders(earlier)} if earlier else {}),
        "log": trainer.state.log_history[-20:],
    }
    (output_dir / SUMMARY_NAME).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    trainer.documents.save(output_dir)
