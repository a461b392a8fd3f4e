# SPDX-License-Identifier: Apache-2.0
"""Going on from a checkpoint: with some fields of its configuration changed, or exactly where a run stopped."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from ..configuration.nearest_names import check_choice

# What decides which parameters train.
_TRAINABLE_SET = ("training_stage", "trainable_parameters")


def changed_config(config: PreTrainedConfig, changes: Mapping[str, Any]) -> PreTrainedConfig:
    """A checkpoint's configuration with other values of some fields, such as the next stage of a training.

    Args:
        config: the checkpoint's; it is left as it is.
        changes: field -> value. A mapping for a model's configuration in it, such as `decoder_config`, changes fields
            of that one.

    Raises:
        ValueError: a field that the configuration does not have, or a value that it does not allow.
    """
    kinds: Any = type(config).__mro__[:-1]
    own = [inspect.signature(base.__init__).parameters for base in kinds]
    known = {name for parameters in own for name in parameters if hasattr(config, name)}
    for name in changes:
        check_choice(f"field of {type(config).__name__}:", name, sorted(known))
    fields = config.to_dict()
    for name, value in changes.items():
        if isinstance(getattr(config, name), PreTrainedConfig) and isinstance(value, Mapping):
            for field in value:
                check_choice(f"field of {name}:", field, sorted(fields[name]))
            value = {**fields[name], **value}
        fields[name] = value
    changed = type(config).from_dict(fields)
    changed.name_or_path = config.name_or_path
    return changed


def check_resumed(model: PreTrainedModel, folder: str) -> None:
    """Check that a checkpoint was trained with the parameters that the recipe trains.

    Args:
        model: what the recipe built.
        folder: the checkpoint that its training is resumed from.

    Raises:
        ValueError: the checkpoint is of another stage, or of another set of trainable parameters.
    """
    file = Path(folder) / "config.json"
    if not file.is_file():
        return
    stored = type(model.config).from_pretrained(folder)
    for name in _TRAINABLE_SET:
        ours, theirs = (getattr(config, name, None) for config in (model.config, stored))
        if ours != theirs:
            raise ValueError(
                f"{folder} was trained with {name} {theirs!r}, this recipe says {ours!r}: resume with the recipe of "
                "that run, or start the next one with `checkpoint` instead of `resume_from_checkpoint`"
            )
