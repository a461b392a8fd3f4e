# SPDX-License-Identifier: Apache-2.0
"""How the text behind a memory starts, for each task: the method's own task token or BOS, and then the prompt."""

from __future__ import annotations

from collections.abc import Mapping

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ..data.prompts import TASKS, format_prompt, load_prompts
from ..modeling.parts.prompting import prompt_ids, restored_ids, start_ids, start_token_id


def default_prompts(config: PreTrainedConfig) -> str | dict[str, str] | None:
    """The prompts that a compressor is asked with when none are named.

    Args:
        config: a compressor's configuration.

    Returns:
        Those that the configuration records from training; else the name of the method's usual ones: "memory_tokens"
        with task tokens, whose reconstruction and continuation need no words, "comprexit" for ComprExIT, "chat" in a
        chat; and `None`, the packaged prompts, for all others.
    """
    if config.prompts is None:
        return None if config.usual_prompts == "default" else config.usual_prompts
    return {**{task: load_prompts(config.usual_prompts)[task][0] for task in TASKS}, **config.prompts}


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
        task: one of `data.prompts.TASKS`.
        question: the question, for question answering.
        prompts: name or file of the prompts, or a prompt for each task; those of `default_prompts` when `None`.

    Returns:
        The start token, [AE] or [LM] where the method has them and else BOS or nothing, as its configuration says, and
        the task's first prompt; behind [AE] what stands in front of every context. At least one token.
    """
    prompt = format_prompt(task, question, path=prompts or default_prompts(config))
    ids = prompt_ids(tokenizer, [prompt], config.prompt_format)
    restored = restored_ids(config, tokenizer) if task == "reconstruction" else []
    text = [*start_ids(config, tokenizer, ids.head, task), *ids.turns[0], *restored]
    return text or [start_token_id(tokenizer)]
