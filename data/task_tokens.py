# SPDX-License-Identifier: Apache-2.0
"""Task tokens such as [AE] and [LM] in a tokenizer: they are saved with it, and texts that name them stay texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from ..configuration.configuration_memory_tokens import TASK_TOKENS
from ..modeling.parts.prompting import prefix_ids as prefix_ids
from ..modeling.parts.prompting import text_tokenizer as text_tokenizer


def add_task_tokens(tokenizer: PreTrainedTokenizerBase, names: Sequence[str] = TASK_TOKENS) -> dict[str, int]:
    """Make task tokens special tokens of a tokenizer; those that it has already stay as they are.

    The base's embedding table is left alone: a new id may lie inside a table that is larger than the tokenizer, or
    behind it. A compressor looks task tokens up by id in its own parameters (`config.task_token_ids`).

    Args:
        tokenizer: changed in place.
        names: the tokens, in the order of the embeddings.

    Returns:
        Token -> id.
    """
    known = set(tokenizer.all_special_tokens)
    missing = [name for name in names if name not in known]
    if missing:
        tokenizer.add_special_tokens({"additional_special_tokens": missing}, replace_extra_special_tokens=False)
    return {name: tokenizer.convert_tokens_to_ids(name) for name in names}


def check_task_tokens(tokenizer: PreTrainedTokenizerBase, task_token_ids: Mapping[str, int]) -> None:
    """The tokenizer's task tokens must be the compressor's.

    Raises:
        ValueError: with the first token that the tokenizer lacks or knows by another id.
    """
    for name, task_id in task_token_ids.items():
        found = tokenizer.convert_tokens_to_ids(name) if name in tokenizer.all_special_tokens else None
        if found != task_id:
            raise ValueError(
                f"the compressor's task token {name} has the id {task_id}, in the tokenizer it is {found}: take the "
                "tokenizer that was saved with the checkpoint"
            )
