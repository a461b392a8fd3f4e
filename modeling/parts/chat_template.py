# SPDX-License-Identifier: Apache-2.0
"""Prompts around a document, plain or in a chat template that is cut where the document and the answers stand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .text_ids import encode, prefix_ids, words_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# In a chat the document's words and the prompt are one message of the user; this stands between them.
DOCUMENT_END = "\n\n"
# Stands for a text while a chat template is filled; private characters, which no template changes.
_MARK = "\ue000{}\ue001"


@dataclass(frozen=True)
class PromptIds:
    """Token ids around a document and between the answers about it.

    Args:
        head: in front of the document or its slots: the opening of the user's turn in a chat, else nothing.
        turns: in front of each answer; those of the first follow the document.
        end: what ends an answer: the template's end of a turn in a chat, else EOS.
    """

    head: list[int]
    turns: list[list[int]]
    end: int


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], prompt_format: str = "plain") -> PromptIds:
    """Token ids of prompts that are asked one after the other about one document."""
    if prompt_format == "plain":
        return PromptIds([], [encode(tokenizer, prompt) for prompt in prompts], tokenizer.eos_token_id)
    messages: list[dict[str, str | None]] = []
    for prompt in prompts:
        messages += [{"role": "user", "content": prompt}, {"role": "assistant", "content": None}]
    return chat_ids(tokenizer, messages)


def chat_ids(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str | None]]) -> PromptIds:
    """A conversation in the chat template, cut where the document and the answers that are `None` stand."""
    if tokenizer.chat_template is None:
        raise ValueError("the tokenizer has no chat template, and the prompt format is 'chat': ask an instruct model")
    document, answer = _MARK.format("document"), _MARK.format("answer")
    contents: list[str] = []
    filled: list[dict[str, Any]] = []
    for message in messages:
        content, mark = message["content"] or "", _MARK.format(len(contents))
        if message["role"] == "user" and not any(document in other["content"] for other in filled):
            mark, content = document + mark, DOCUMENT_END + content
        elif message["content"] is None:
            mark = answer
        contents.append(content)
        filled.append({**message, "content": mark})
    text = _templated(tokenizer, filled, add_generation_prompt=False)
    opening = _templated(tokenizer, filled)
    if messages[-1]["role"] != "assistant":
        text = opening + answer
    asked = [_MARK.format(place) for place, message in enumerate(messages) if message["role"] == "user"]
    if text.count(document) != 1 or any(mark not in text for mark in asked):
        raise ValueError("the tokenizer's chat template leaves out what the user says, so no document can stand in it")
    head, _, rest = text.partition(document)
    parts = [_filled(tokenizer, part, contents) for part in rest.split(answer)]
    end = parts[-1][0] if parts[-1] and parts[-1][0] in tokenizer.all_special_ids else tokenizer.eos_token_id
    turns = [part[1:] if index and part[:1] == [end] else part for index, part in enumerate(parts[:-1])]
    return PromptIds(_filled(tokenizer, head, contents), turns, end)


def template_ids(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """A conversation in the chat template, up to where the assistant answers; nobody's words are special tokens."""
    contents = [message["content"] for message in messages]
    if any(name in content for content in contents for name in tokenizer.all_special_tokens):
        messages = [{**message, "content": _MARK.format(place)} for place, message in enumerate(messages)]
    return _filled(tokenizer, _templated(tokenizer, messages), contents)


def _templated(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
) -> str:
    try:
        return tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except Exception as error:
        # A template is a program: it raises of itself, such as for a role that it does not know, or is broken.
        raise ValueError(f"the tokenizer's chat template refuses these messages: {error}") from error


def _filled(tokenizer: PreTrainedTokenizerBase, text: str, contents: Sequence[str]) -> list[int]:
    """Token ids of a piece of a filled template, with contents in place of their marks."""
    here = [(mark, content) for place, content in enumerate(contents) if (mark := _MARK.format(place)) in text]
    names = tokenizer.all_special_tokens
    if not any(name in content for _, content in here for name in names):
        for mark, content in here:
            text = text.replace(mark, content)
        return prefix_ids(tokenizer, text)
    # Where somebody's words name a special token, they are characters, and are tokenized apart.
    ids: list[int] = []
    for mark, content in here:
        before, _, text = text.partition(mark)
        ids += prefix_ids(tokenizer, before) + words_ids(tokenizer, content)
    return ids + prefix_ids(tokenizer, text)


def opening_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids that open the user's turn in the tokenizer's chat template: `CompressorConfig.slots_after_ids`.

    They start with the last special token in front of the user's words.
    """
    head = prompt_ids(tokenizer, [""], "chat").head
    special = set(tokenizer.all_special_ids)
    last = max((place for place, token_id in enumerate(head) if token_id in special), default=0)
    return head[last:]


def before_answer(prompt: str, prompt_format: str) -> str:
    """Return what separates a prompt from its answer: a space, or nothing where a line or a turn of a chat starts."""
    return "" if prompt_format == "chat" or prompt.endswith("\n") else " "
