# SPDX-License-Identifier: Apache-2.0
"""Checks of a configuration's fields: each gives the value back, or raises a `ValueError` that names the field."""

from collections.abc import Iterable
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from .nearest_names import check_choice

# What a checkpoint is asked to do.
PROMPTED_TASKS = ("question_answering", "summarization", "continuation", "reconstruction")
_LORA_DEFAULTS = {"rank": 16, "alpha": 16.0, "dropout": 0.0, "target_modules": "all-linear"}


def one_of(field: str, value: Any, allowed: tuple[str, ...]) -> str:
    """Return `value` if it is one of `allowed`, else raise a `ValueError` that names the field."""
    if value not in allowed:
        raise ValueError(f"`{field}` must be one of {list(allowed)}, got {value!r}")
    return value


def int_between(field: str, value: Any, least: int, most: int | None = None) -> int:
    """Return `value` if it is an int within limits, else raise a `ValueError` that names the field."""
    if not isinstance(value, int) or value < least or (most is not None and value > most):
        limits = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"`{field}` must be an int {limits}, got {value!r}")
    return value


def check_left_out(config: PreTrainedConfig, fields: Iterable[str], reason: str) -> None:
    """Raise a `ValueError` that names the first of some fields of a configuration that has a value."""
    for field in fields:
        if value := getattr(config, field):
            raise ValueError(f"`{field}` must be left out: {reason}, got {value}")


def positive_int_or_none(field: str, value: Any) -> int | None:
    """Return `value` if it is `None` or an int of at least 1, else raise a `ValueError` that names the field."""
    if value is not None and (not isinstance(value, int) or value < 1):
        raise ValueError(f"`{field}` must be an int of at least 1 or None, got {value!r}")
    return value


def ratio_tuple(value: Any) -> tuple[int, ...]:
    """Return one or more different ratios as a tuple, else raise a `ValueError`."""
    ratios = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    are_ints = all(isinstance(ratio, int) and not isinstance(ratio, bool) and ratio >= 1 for ratio in ratios)
    if not ratios or not are_ints or len(set(ratios)) != len(ratios):
        raise ValueError(f"`compression_ratios` must be one or more different ints of at least 1, got {value!r}")
    return ratios


def language_model_config(field: str, value: Any) -> PreTrainedConfig:
    """Return a language model's configuration, which may come as a dict with `model_type`."""
    if isinstance(value, PreTrainedConfig):
        return value
    if not isinstance(value, dict) or "model_type" not in value:
        raise ValueError(f"`{field}` must be a PreTrainedConfig or a dict with `model_type`, got {value!r}")
    fields = dict(value)
    model_type = fields.pop("model_type")
    check_choice(f"model_type of `{field}`:", model_type, CONFIG_MAPPING)
    return CONFIG_MAPPING[model_type](**fields)


def lora_or(value: Any, default: dict[str, Any] | None) -> dict[str, Any] | None:
    """A method's own adapter where the value is "default"."""
    return default if value == "default" else value


def lora_settings(field: str, value: Any) -> dict[str, Any] | None:
    """Return an adapter's settings with the defaults of those that are left out, or `None` for no adapter."""
    if value is None:
        return None
    if not isinstance(value, dict) or not value.keys() <= _LORA_DEFAULTS.keys():
        raise ValueError(f"`{field}` must be a dict with the keys {sorted(_LORA_DEFAULTS)} or None, got {value!r}")
    lora = {**_LORA_DEFAULTS, **value}
    int_between(f"{field}['rank']", lora["rank"], 1)
    targets = lora["target_modules"]
    if targets != "all-linear":
        if isinstance(targets, str) or not targets:
            raise ValueError(f"`{field}['target_modules']` must be 'all-linear' or a list of names, got {targets!r}")
        lora["target_modules"] = list(targets)
    return lora


def prompt_map(value: dict[str, str] | None) -> dict[str, str] | None:
    """Return prompts by task; that of questions holds `{question}` once, and no other does."""
    if value is None:
        return None
    for task, prompt in value.items():
        check_choice("task of `prompts`:", task, PROMPTED_TASKS)
        if prompt.count("{question}") != (task == "question_answering"):
            raise ValueError(
                f"`prompts` hold {{question}} once in 'question_answering' alone, got {task!r}: {prompt!r}"
            )
    return value
