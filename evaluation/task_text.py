# SPDX-License-Identifier: Apache-2.0
"""How the text behind a memory starts, for each task: the method's own task token or BOS, and then the prompt."""

from __future__ import annotations

from collections.abc import Mapping

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ..modeling.prompting import prompt_ids, start_ids
from ..training.prompts import TASKS, format_prompt, load_prompts

TASK_TOKEN_PROMPTS, CHAT_PROMPTS = "memory_tokens", "chat"


def default_prompts(config: PreTrainedConfig) -> str | dict[str, str] | None:
    """The prompts that a compressor is asked with when none are named.

    Args:
        config: a compressor's configuration.

    Returns:
        Those that the configuration records from training; else "memory_tokens" for a method with task tokens, whose
        reconstruction and continuation need no words, and `None`, the packaged prompts, for all others.
    """
    usual = TASK_TOKEN_PROMPTS if config.task_token_ids else None
    if config.prompt_format == "chat":
        usual = CHAT_PROMPTS
    if config.prompts is None:
        return usual
    return {**{task: load_prompts(usual)[task][0] for task in TASKS}, **config.prompts}


def text_ids(
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    task: str,
    question: str = "",
    prompts: str | Mapping[str, str] | None = None,
) -> list[int]:
    """Token ids that stand between a memory and what the model writes.

    Args:
        config: a compressor's configuration.
        tokenizer: the tokenizer saved with it.
        task: one of `training.prompts.TASKS`.
        question: the question, for question answering.
        prompts: name or file of the prompts, or a prompt for each task; those of `default_prompts` when `None`.

    Returns:
        The start token, [AE] or [LM] where the method has them and BOS elsewhere, and the task's first prompt.
    """
    prompt = format_prompt(task, question, path=prompts or default_prompts(config))
    ids = prompt_ids(tokenizer, [prompt], config.prompt_format)
    return [*start_ids(config, tokenizer, ids.head, task), *ids.turns[0]]
