# SPDX-License-Identifier: Apache-2.0
"""From texts to token ids: a document and a question look to a checkpoint as they did in its training."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

# What a question stands in where a checkpoint's configuration names no prompts of its own.
QUESTION_PROMPT = "\nQuestion: {question}\nAnswer:"
TASK_TOKEN_QUESTION_PROMPT = "### Question: {question}\n### Answer:"


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text, with no special tokens added."""
    # The wrapper's own overhead is ten times the encoding of a short string.
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is not None:
        return fast.encode(text, add_special_tokens=False).ids
    return tokenizer(text, add_special_tokens=False).input_ids


def start_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id that text starts with: BOS, or EOS where the tokenizer has no BOS; `ValueError` when it has neither."""
    for token_id in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return token_id
    raise ValueError("the tokenizer has neither a BOS nor an EOS token: set one before training")


def context_start_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What `tokenizer(document)` puts in front of a document: BOS for most tokenizers, nothing for some.

    People compress what their tokenizer gives them, so training and evaluation put the same in front of a context.
    """
    whole, plain = tokenizer("a").input_ids, encode(tokenizer, "a")
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return whole[:start]
    return []


def context_end_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What `tokenizer(document)` puts behind a document: EOS for T5's tokenizers, nothing for most others."""
    whole, plain = tokenizer("a").input_ids, encode(tokenizer, "a")
    for end in range(len(whole), len(plain) - 1, -1):
        if whole[end - len(plain) : end] == plain:
            return whole[end:]
    return []


def text_tokenizer(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A copy for data: where a document says "[AE]" or "</s>", these are characters and not the special token."""
    plain = copy.deepcopy(tokenizer)
    plain.split_special_tokens = True
    backend = getattr(plain, "backend_tokenizer", None)
    if backend is not None:
        backend.encode_special_tokens = True
    return plain


def prefix_ids(tokenizer: PreTrainedTokenizerBase, prefix: str) -> list[int]:
    """Token ids of what stands in front of every context: special tokens are special in it, unlike in documents.

    Args:
        tokenizer: of the documents, see `text_tokenizer`.
        prefix: such as a heading, or the learned tokens of a prompt-tuned bound.
    """
    reader = copy.deepcopy(tokenizer)
    reader.split_special_tokens = False
    backend = getattr(reader, "backend_tokenizer", None)
    if backend is not None:
        backend.encode_special_tokens = False
    return encode(reader, prefix)


def document_ids(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, document: str) -> list[int]:
    """Token ids of a document as the checkpoint was trained to compress it.

    Args:
        config: a compressor's configuration; its `context_prefix` stands in front.
        tokenizer: the tokenizer saved with it, see `text_tokenizer`.
        document: the text.
    """
    # Tokenized apart, as in training.
    return [
        *context_start_ids(tokenizer),
        *(prefix_ids(tokenizer, config.context_prefix) if config.context_prefix else []),
        *encode(tokenizer, document),
        *(context_end_ids(tokenizer) if config.is_encoder_decoder else []),
    ]


def question_prompt(config: PreTrainedConfig) -> str:
    """The text, with `{question}` in it, that a checkpoint is asked with: its configuration's, or its method's."""
    own = (config.prompts or {}).get("question_answering")
    if own is not None:
        return own
    return TASK_TOKEN_QUESTION_PROMPT if config.task_token_ids else QUESTION_PROMPT


def question_ids(
    config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, question: str, prompt: str | None = None
) -> list[int]:
    """Token ids that stand between a memory and the answer.

    Args:
        config: a compressor's configuration.
        tokenizer: the tokenizer saved with it, see `text_tokenizer`.
        question: the question.
        prompt: text with `{question}` in it; that of `question_prompt` when `None`.

    Returns:
        The start token, [LM] where the method has it and BOS elsewhere, and the prompt.

    Raises:
        ValueError: `prompt` does not hold `{question}` exactly once.
    """
    prompt = question_prompt(config) if prompt is None else prompt
    if prompt.count("{question}") != 1:
        raise ValueError(f"`prompt` must hold {{question}} exactly once, got {prompt!r}")
    start = config.continuation_token_id
    # str.format would trip over braces inside the question.
    text = prompt.replace("{question}", question)
    return [start_token_id(tokenizer) if start is None else start, *encode(tokenizer, text)]


def message_ids(
    config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, messages: str | Sequence[Mapping[str, str]]
) -> list[int]:
    """Token ids of a conversation behind a memory.

    Args:
        config: a compressor's configuration.
        tokenizer: the tokenizer saved with it.
        messages: a question, or messages with `role` and `content`. A single message of the user is a question, too,
            and stands in the checkpoint's own prompt; a longer conversation in the tokenizer's chat template.

    Raises:
        ValueError: no message, or a conversation for a tokenizer without a chat template.
    """
    if not isinstance(messages, str) and len(messages) == 1 and messages[0]["role"] == "user":
        messages = messages[0]["content"]
    if isinstance(messages, str):
        plain = text_tokenizer(tokenizer) if config.task_token_ids else tokenizer
        return question_ids(config, plain, messages)
    if not messages:
        raise ValueError("`messages` is empty: give a question, or messages with `role` and `content`")
    if tokenizer.chat_template is None:
        raise ValueError(
            f"the tokenizer has no chat template for {len(messages)} messages: give one question, as text"
        )
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    start = config.continuation_token_id
    if start is None:
        return ids
    # A task token takes the place of BOS.
    return [start, *(ids[1:] if ids[0] == tokenizer.bos_token_id else ids)]
