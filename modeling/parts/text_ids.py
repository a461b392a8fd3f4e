# SPDX-License-Identifier: Apache-2.0
"""Token ids of texts, documents, questions and conversations, as a checkpoint was trained to read them.

In plain text the names of special tokens are words. A chat template is cut where the document stands.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

# In a chat the document's words and the prompt are one message of the user; this stands between them.
DOCUMENT_END = "\n\n"
# Stands for a text while a chat template is filled; private characters, which no template changes.
_MARK = "\ue000{}\ue001"
# Of most texts, more than there are; tokens behind those that are wanted, so that none of these is a cut word's.
_CHARACTERS_PER_TOKEN, _MORE_TOKENS = 16, 64
# Copies of tokenizers by whether they split special tokens.
_COPIES: dict[bool, weakref.WeakKeyDictionary[PreTrainedTokenizerBase, PreTrainedTokenizerBase]] = {
    splits: weakref.WeakKeyDictionary() for splits in (True, False)
}


def _backend(tokenizer: PreTrainedTokenizerBase) -> Any:
    """The tokenizers library's tokenizer inside a fast one; `None` inside another."""
    return getattr(tokenizer, "backend_tokenizer", None)


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text, with no special tokens added."""
    # The wrapper's own overhead is ten times the encoding of a short string; it forgets what an earlier call cut at.
    fast = _backend(tokenizer)
    if fast is not None and fast.truncation is None and fast.padding is None:
        return fast.encode(text, add_special_tokens=False).ids
    return tokenizer(text, add_special_tokens=False).input_ids


def encode_all(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], most: int | None = None) -> list[list[int]]:
    """`encode` of several texts, on all cores where the tokenizer is a fast one."""
    if most is not None:
        size = _CHARACTERS_PER_TOKEN * (most + _MORE_TOKENS)
        starts = encode_all(tokenizer, [text[:size] for text in texts])
        # Where the start ends inside a word, its last tokens are not the text's.
        return [
            ids if len(text) <= size or len(ids) >= most + _MORE_TOKENS else encode(tokenizer, text)
            for text, ids in zip(texts, starts, strict=True)
        ]
    fast = _backend(tokenizer)
    if fast is not None and fast.truncation is None and fast.padding is None:
        return [encoding.ids for encoding in fast.encode_batch_fast(list(texts), add_special_tokens=False)]
    return [encode(tokenizer, text) for text in texts]


def start_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id that text starts with: BOS, or EOS where the tokenizer has no BOS; `ValueError` when it has neither."""
    for token_id in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return token_id
    raise ValueError("the tokenizer has neither a BOS nor an EOS token: set one before training")


def context_start_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that `tokenizer(document)` puts in front of a document: BOS for most tokenizers.

    People compress what their tokenizer gives them, so training and evaluation put the same in front of a context.
    """
    return _around_text(tokenizer)[0]


def context_end_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that `tokenizer(document)` puts behind a document: EOS for T5's tokenizers, none for most
    others."""
    return _around_text(tokenizer)[1]


def _around_text(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    full, plain = tokenizer("a").input_ids, encode(tokenizer, "a")
    for start in range(len(full) - len(plain) + 1):
        end = start + len(plain)
        if full[start:end] == plain:
            return full[:start], full[end:]
    return [], []


def leave_out_bos(tokenizer: PreTrainedTokenizerBase) -> None:
    """Let a tokenizer put nothing around a text any more, in place; saved and loaded again it does not either."""
    if (backend := _backend(tokenizer)) is not None:
        from tokenizers import processors

        backend.post_processor = processors.Sequence([])
    tokenizer.add_bos_token = False


def text_tokenizer(tokenizer: PreTrainedTokenizerBase, splits: bool = True) -> PreTrainedTokenizerBase:
    """A copy for data: where a document says "[AE]" or "</s>", these are characters and not the special token."""
    copied = copy.deepcopy(tokenizer)
    copied.split_special_tokens = splits
    backend = _backend(copied)
    if backend is not None:
        backend.encode_special_tokens = splits
        backend.no_truncation()
        backend.no_padding()
    return copied


def words_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """`encode` of somebody's words, in which special tokens' names are characters, whatever the tokenizer does."""
    return encode(kept_text_tokenizer(tokenizer, True), text)


def prefix_ids(tokenizer: PreTrainedTokenizerBase, prefix: str) -> list[int]:
    """Token ids of what stands in front of every context: special tokens are special in it, unlike in documents."""
    return encode(kept_text_tokenizer(tokenizer, False), prefix) if prefix else []


def kept_text_tokenizer(tokenizer: PreTrainedTokenizerBase, splits: bool = True) -> PreTrainedTokenizerBase:
    """`text_tokenizer`, made once: a copy takes a thousand times as long as the encoding of a question."""
    copied = _COPIES[splits].get(tokenizer)
    if copied is None or len(copied) != len(tokenizer):
        copied = _COPIES[splits][tokenizer] = text_tokenizer(tokenizer, splits)
    return copied


def check_texts(name: str, texts: Sequence[Any]) -> None:
    """Every text must be a `str` that can be written as UTF-8."""
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"`{name}` must be a text or a list of texts, got {text!r}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"`{name}` holds {text[error.start]!r} at character {error.start}, which is half of one (a lone "
                "surrogate): decode the text anew, with errors='replace'"
            ) from None


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
            raise ValueError("the memory holds the opening of the chat: leave out what `messages` say before the user")
        return chat.turns[0]
    contents = [message["content"] for message in messages]
    # Nobody's words are special tokens.
    if any(name in content for content in contents for name in tokenizer.all_special_tokens):
        messages = [{**message, "content": _MARK.format(place)} for place, message in enumerate(messages)]
    ids = _filled(tokenizer, _templated(tokenizer, messages), contents)
    start = [] if config.continuation_token_id is None else [config.continuation_token_id]
    if document_ids is None and not start:
        return ids
    # A task token takes the place of BOS, and a document stands behind it.
    ids = ids[1:] if ids[0] == tokenizer.bos_token_id else ids
    return [*start, *ids] if document_ids is None else _with_document(config, tokenizer, start, document_ids, ids)


# --- prompts and chat templates ---


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
