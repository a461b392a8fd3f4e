# SPDX-License-Identifier: Apache-2.0
"""Special tokens that a method adds to a tokenizer, such as [AE] and [LM], and what each task's text starts with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..configuration.configuration_memory_tokens import TASK_TOKENS
from ..modeling.parts.text_ids import restored_ids
from .prompts import TASKS


def add_task_tokens(tokenizer: PreTrainedTokenizerBase, names: Sequence[str] = TASK_TOKENS) -> dict[str, int]:
    """Make task tokens special tokens of a tokenizer, whose base's table stays as it is, and return token -> id."""
    known = set(tokenizer.all_special_tokens)
    missing = [name for name in names if name not in known]
    if missing:
        tokenizer.add_special_tokens({"additional_special_tokens": missing}, replace_extra_special_tokens=False)
    return {name: tokenizer.convert_tokens_to_ids(name) for name in names}


def add_sentinel_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Make T5's 100 sentinels special tokens of a tokenizer; those that it has already stay as they are."""
    return list(add_task_tokens(tokenizer, [f"<extra_id_{index}>" for index in range(100)]).values())


def check_task_tokens(tokenizer: PreTrainedTokenizerBase, task_token_ids: Mapping[str, int]) -> None:
    """Raise `ValueError` naming the first task token that the tokenizer lacks or knows by another id."""
    for name, task_id in task_token_ids.items():
        own_id = tokenizer.convert_tokens_to_ids(name) if name in tokenizer.all_special_tokens else None
        if own_id != task_id:
            what = f"the compressor's task token {name} has the id {task_id}, in the tokenizer it is {own_id}"
            raise ValueError(f"{what}: take the tokenizer that was saved with the checkpoint")


def task_start_ids(config: Any) -> dict[str, int]:
    """The token that the text of each task starts with, where a compressor has task tokens; else nothing."""
    starts = dict.fromkeys(TASKS, config.continuation_token_id)
    starts["reconstruction"] = config.reconstruction_token_id
    return {task: token_id for task, token_id in starts.items() if token_id is not None}


def text_starts(config: Any, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the start of a compressor's texts, as arguments of a collator."""
    return {
        "task_start_ids": task_start_ids(config),
        "restored_ids": restored_ids(config, tokenizer),
        "bos_before_text": config.bos_before_text,
        "opens_context": config.opens_context,
        "bos_before_task_token": config.bos_before_task_token,
    }
