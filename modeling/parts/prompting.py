# SPDX-License-Identifier: Apache-2.0
"""A document and a question look to a checkpoint as they did in its training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from .chat_template import chat_ids, prompt_ids, template_ids
from .text_ids import (
    context_end_ids,
    context_start_ids,
    encode_all,
    kept_text_tokenizer,
    prefix_ids,
    start_token_id,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


def context_opening(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return what a compressor reads in front of a document: `context_start_ids`, or what opens the text."""
    if not config.opens_context:
        return context_start_ids(tokenizer)
    return prompt_ids(tokenizer, [""], config.prompt_format).head or [start_token_id(tokenizer)]


def document_ids(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, document: str) -> list[int]:
    """Return the token ids of a document as the checkpoint was trained to compress it."""
    return passages_ids(config, tokenizer, [document])[0][0]


def decoder_document_ids(
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    document: str | Sequence[str],
    max_tokens: int | None = None,
) -> list[int]:
    """Return a document's ids for `question_ids`: what opens a text is the prompt's, or a task token follows."""
    passages = cut_passages(passages_ids(config, tokenizer, [document])[0], max_tokens)
    opening = 0 if config.task_token_ids else len(context_opening(config, tokenizer))
    return [token for passage in passages for token in passage[opening:]]


def passages_ids(
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[str | Sequence[str]],
    most: int | None = None,
) -> list[list[list[int]]]:
    """Return the token ids of each document's passages, each as a document of its own; a text is one passage."""
    passages = [[document] if isinstance(document, str) else list(document) for document in documents]
    # Tokenized apart, as in training.
    start = document_start(config, tokenizer)
    end = context_end_ids(tokenizer) if config.is_encoder_decoder else []
    rows = iter(encode_all(tokenizer, [passage for document in passages for passage in document], most))
    return [[[*start, *next(rows), *end] for _ in document] for document in passages]


def document_start(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids that open every document: BOS or the like, and the configuration's `context_prefix`."""
    return context_opening(config, tokenizer) + prefix_ids(tokenizer, config.context_prefix)


def cut_passages(
    passages: Sequence[Sequence[int]], num_tokens: int | None, keeps_end: bool = False
) -> list[list[int]]:
    """Return the first or last tokens of a document's passages, without passages of which none is left."""
    left, kept = num_tokens, []
    for passage in reversed(passages) if keeps_end else passages:
        if left is not None:
            passage = passage[max(0, len(passage) - left) :] if keeps_end else passage[:left]
            left -= len(passage)
        kept += [list(passage)] if passage else []
    return kept[::-1] if keeps_end else kept


def question_ids(
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    question: str,
    prompt: str | None = None,
    document_ids: Sequence[int] | None = None,
) -> list[int]:
    """Return the token ids that stand between a memory and the answer, or those of a question behind a whole document.

    Returns:
        The start token, [LM] where the method has it and else BOS or nothing, as its configuration says, and the
        prompt; in a chat the filled template around it, without what the memory stands for.
    """
    prompt = config.question_prompt if prompt is None else prompt
    if prompt.count("{question}") != 1:
        raise ValueError(f"`prompt` must hold {{question}} exactly once, got {prompt!r}")
    # str.format would trip over braces inside the question.
    ids = prompt_ids(tokenizer, [prompt.replace("{question}", question)], config.prompt_format)
    head, tail = start_ids(config, tokenizer, ids.head), ids.turns[0]
    if document_ids is not None:
        return _with_document(config, tokenizer, head, document_ids, tail)
    return tail if config.opens_context else [*head, *tail]


def _with_document(
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    head: Sequence[int],
    document_ids: Sequence[int],
    tail: Sequence[int],
) -> list[int]:
    if config.continuation_token_id is not None:
        # As the collator has it in training: the task token stands behind the document.
        return [*document_ids, *head, *tail]
    return [*(head or [start_token_id(tokenizer)]), *document_ids, *tail]


def start_ids(
    config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, head: Sequence[int], task: str = "continuation"
) -> list[int]:
    """Return what a text behind slots starts with: the method's task token, or else the template's opening in a chat
    and elsewhere BOS, or nothing where `config.bos_before_text` is false."""
    token = config.reconstruction_token_id if task == "reconstruction" else config.continuation_token_id
    if token is not None:
        has_bos = config.bos_before_task_token and not head
        return [*[start_token_id(tokenizer)][:has_bos], token, *head]
    return list(head) or [start_token_id(tokenizer)][: config.bos_before_text]


def restored_ids(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return what a reconstruction starts with behind its task token: the first tokens of every context, such as BOS.

    Under the enhanced layout [AE] has position 0 and the text 1, 2, ...: the ids that the encoder gave the same
    tokens, BOS among them.
    """
    token = config.reconstruction_token_id
    if not config.restores_context_start or token is None or config.is_encoder_decoder:
        return []
    return context_start_ids(tokenizer)


def message_ids(
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    messages: str | Sequence[Mapping[str, str]],
    document_ids: Sequence[int] | None = None,
) -> list[int]:
    """Return the token ids of a conversation behind a memory, or behind a whole document."""
    if not isinstance(messages, str):
        messages = list(messages)
        for message in messages:
            texts = [message.get(key) for key in ("role", "content")] if isinstance(message, Mapping) else [None]
            if not all(isinstance(text, str) for text in texts):
                raise ValueError(f"a message must be a mapping with the texts `role` and `content`, got {message!r}")
        if len(messages) == 1 and messages[0]["role"] == "user":
            messages = messages[0]["content"]
    if isinstance(messages, str):
        plain = kept_text_tokenizer(tokenizer) if config.task_token_ids else tokenizer
        return question_ids(config, plain, messages, document_ids=document_ids)
    if not messages:
        raise ValueError("`messages` is empty: give a question, or messages with `role` and `content`")
    if messages[-1]["role"] != "user":
        raise ValueError(f"the last of `messages` must be the user's, who asks, got {messages[-1]!r}")
    if config.prompt_format == "chat":
        chat = chat_ids(tokenizer, messages)
        if document_ids is not None:
            head = start_ids(config, tokenizer, chat.head)
            return _with_document(config, tokenizer, head, document_ids, chat.turns[0])
        if not config.opens_context:
            return [*start_ids(config, tokenizer, chat.head), *chat.turns[0]]
        if chat.head != prompt_ids(tokenizer, [""], "chat").head:
            raise ValueError(
                "the memory holds the opening of the chat, which is the template's own: leave out what `messages` say "
                "before the user"
            )
        return chat.turns[0]
    ids = template_ids(tokenizer, messages)
    start = [] if config.continuation_token_id is None else [config.continuation_token_id]
    if document_ids is None and not start:
        return ids
    # A task token takes the place of BOS, and a document stands behind it.
    ids = ids[1:] if ids[0] == tokenizer.bos_token_id else ids
    return [*start, *ids] if document_ids is None else _with_document(config, tokenizer, start, document_ids, ids)
