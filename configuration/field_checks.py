# SPDX-License-Identifier: Apache-2.0
"""Checks of a configuration's fields: each gives the value back, or raises a `ValueError` that names the field."""

from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from .nearest_names import check_choice

# What a checkpoint is asked to do.
PROMPTED_TASKS = ("question_answering", "summarisation", "continuation", "reconstruction")
_LORA_DEFAULTS = {"rank": 16, "alpha": 16.0, "dropout": 0.0, "target_modules": "all-linear"}


def one_of(field: str, value: Any, allowed: tuple[str, ...]) -> str:
    """Return `value` if it is one of `allowed`, else raise a `ValueError` that names the field."""
    if value not in allowed:
        raise ValueError(f"`{field}` must be one of {list(allowed)}, got {value!r}")
    return value


def boolean(field: str, value: Any) -> bool:
    """Return `value` if it is a bool, else raise a `ValueError` that names the field."""
    if not isinstance(value, bool):
        raise ValueError(f"`{field}` must be True or False, got {value!r}")
    return value


def int_between(field: str, value: Any, least: int, most: int | None = None) -> int:
    """Return `value` if it is an int within limits, else raise a `ValueError` that names the field."""
    if not _is_int(value) or value < least or (most is not None and value > most):
        limits = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"`{field}` must be an int {limits}, got {value!r}")
    return value


def is_number(value: Any) -> bool:
    """Whether a value is an int or a float."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def positive_int_or_none(field: str, value: Any) -> int | None:
    if value is not None and (not _is_int(value) or value < 1):
        raise ValueError(f"`{field}` must be an int of at least 1 or None, got {value!r}")
    return value


def token_id_list(field: str, value: Any) -> list[int]:
    if not isinstance(value, (list, tuple)) or not all(_is_int(token_id) and token_id >= 0 for token_id in value):
        raise ValueError(f"`{field}` must be a list of token ids of at least 0, got {value!r}")
    return list(value)


def ratio_tuple(value: Any) -> tuple[int, ...]:
    ratios = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if not ratios or not all(_is_int(ratio) and ratio >= 1 for ratio in ratios) or len(set(ratios)) != len(ratios):
        raise ValueError(f"`compression_ratios` must be one or more different ints of at least 1, got {value!r}")
    return ratios


def base_entries(field: str, value: Any) -> dict[str, dict[str, Any]] | None:
    """Return a light checkpoint's record of its bases, or `None`, else raise a `ValueError` that names the field."""
    if value is None:
        return None
    needed = ("repo_id", "revision", "weights", "samples", "dtype")
    is_mapping = isinstance(value, dict) and value.keys() <= {"decoder", "encoder"}
    if not is_mapping or not all(isinstance(entry, dict) and entry.keys() >= set(needed) for entry in value.values()):
        raise ValueError(f"`{field}` must be None, or of decoder and encoder dicts with {list(needed)}, got {value!r}")
    return value


def language_model_config(field: str, value: Any) -> PreTrainedConfig:
    if isinstance(value, PreTrainedConfig):
        return value
    if not isinstance(value, dict) or "model_type" not in value:
        raise ValueError(f"`{field}` must be a PreTrainedConfig or a dict with `model_type`, got {value!r}")
    fields = dict(value)
    model_type = fields.pop("model_type")
    check_choice(f"model_type of `{field}`:", model_type, CONFIG_MAPPING)
    return CONFIG_MAPPING[model_type](**fields)


def marker_counts(value: Any) -> dict[str, int]:
    """How many learned vectors stand on each side of a chunk's slots."""
    value = {} if value is None else value
    counts = value.values() if isinstance(value, dict) else ()
    known = isinstance(value, dict) and set(value) <= {"before", "after"}
    if not known or not all(_is_int(count) and count >= 0 for count in counts):
        raise ValueError(f"`slot_markers` must map 'before' and 'after' to ints of at least 0, got {value!r}")
    return {"before": 0, "after": 0, **value}


def lora_or(value: Any, default: dict[str, Any] | None) -> dict[str, Any] | None:
    """A method's own adapter where the value is "default"."""
    return default if value == "default" else value


def lora_settings(field: str, value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError(f"`{field}` must be a dict with the keys {sorted(_LORA_DEFAULTS)} or None, got {value!r}")
    unknown = sorted(set(value) - set(_LORA_DEFAULTS))
    if unknown:
        raise ValueError(f"`{field}` has unknown keys {unknown}; allowed are {sorted(_LORA_DEFAULTS)}")
    lora = {**_LORA_DEFAULTS, **value}
    if not _is_int(lora["rank"]) or lora["rank"] < 1:
        raise ValueError(f"`{field}['rank']` must be an int of at least 1, got {lora['rank']!r}")
    targets = lora["target_modules"]
    names = isinstance(targets, (list, tuple)) and targets and all(isinstance(name, str) and name for name in targets)
    if targets != "all-linear" and not names:
        raise ValueError(
            f"`{field}['target_modules']` must be 'all-linear' or a list of module names, got {targets!r}"
        )
    lora["target_modules"] = "all-linear" if targets == "all-linear" else list(targets)
    return lora


def pattern_list(value: Any) -> list[str] | None:
    if value is None:
        return None
    if not isinstance(value, (list, tuple)) or not value or not all(isinstance(pattern, str) for pattern in value):
        raise ValueError(
            f"`trainable_parameters` must be a list of regular expressions, at least one, or None, got {value!r}"
        )
    return list(value)


def text(field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"`{field}` must be a text, got {value!r}")
    return value


def prompt_map(value: Any) -> dict[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, dict) or not all(isinstance(k, str) and isinstance(v, str) for k, v in value.items()):
        raise ValueError(f"`prompts` must map tasks to texts or be None, got {value!r}")
    for task, prompt in value.items():
        check_choice("task of `prompts`:", task, PROMPTED_TASKS)
        if prompt.count("{question}") != (task == "question_answering"):
            raise ValueError(
                f"`prompts` must hold {{question}} once in 'question_answering' and nowhere else, got {task!r}: "
                f"{prompt!r}"
            )
    return dict(value)
