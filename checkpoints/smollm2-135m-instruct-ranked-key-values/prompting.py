# SPDX-License-Identifier: Apache-2.0
"""From texts to token ids: a document and a question look to a checkpoint as they did in its training."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

# In a chat the document's words and the prompt are one message of the user; this stands between them.
DOCUMENT_END = "\n\n"
# Stands for a text while a chat template is filled; private characters, which no template changes.
_MARK = "\ue000{}\ue001"
_READERS: weakref.WeakKeyDictionary[PreTrainedTokenizerBase, PreTrainedTokenizerBase] = weakref.WeakKeyDictionary()
_PLAIN: weakref.WeakKeyDictionary[PreTrainedTokenizerBase, PreTrainedTokenizerBase] = weakref.WeakKeyDictionary()


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text, with no special tokens added."""
    # The wrapper's own overhead is ten times the encoding of a short string; it forgets what an earlier call cut at.
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is not None and fast.truncation is None and fast.padding is None:
        return fast.encode(text, add_special_tokens=False).ids
    return tokenizer(text, add_special_tokens=False).input_ids


def encode_all(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """`encode` of several texts, on all cores where the tokenizer is a fast one."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
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
    """What `tokenizer(document)` puts in front of a document: BOS for most tokenizers, nothing for some.

    People compress what their tokenizer gives them, so training and evaluation put the same in front of a context.
    """
    whole, plain = tokenizer("a").input_ids, encode(tokenizer, "a")
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return whole[:start]
    return []


def context_opening(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What a compressor reads in front of a document and its prefix: `context_start_ids`, or what opens the text."""
    if not config.opens_context:
        return context_start_ids(tokenizer)
    return prompt_ids(tokenizer, [""], config.prompt_format).head or [start_token_id(tokenizer)]


def context_end_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What `tokenizer(document)` puts behind a document: EOS for T5's tokenizers, nothing for most others."""
    whole, plain = tokenizer("a").input_ids, encode(tokenizer, "a")
    for end in range(len(whole), len(plain) - 1, -1):
        if whole[end - len(plain) : end] == plain:
            return whole[end:]
    return []


def leave_out_bos(tokenizer: PreTrainedTokenizerBase) -> None:
    """Let a tokenizer put nothing around a text any more, in place; saved and loaded again it does not either."""
    if getattr(tokenizer, "backend_tokenizer", None) is not None:
        from tokenizers import processors

        tokenizer.backend_tokenizer.post_processor = processors.Sequence([])
    tokenizer.add_bos_token = False


def text_tokenizer(tokenizer: PreTrainedTokenizerBase, splits: bool = True) -> PreTrainedTokenizerBase:
    """A copy for data: where a document says "[AE]" or "</s>", these are characters and not the special token.

    Args:
        tokenizer: the tokenizer; calls of it with truncation or padding leave the copy as it is.
        splits: `False` leaves special tokens special.
    """
    return _copy_that_splits(tokenizer, splits)


def _copy_that_splits(tokenizer: PreTrainedTokenizerBase, splits: bool) -> PreTrainedTokenizerBase:
    """A copy that reads special tokens' names as characters, or as the tokens."""
    copied = copy.deepcopy(tokenizer)
    copied.split_special_tokens = splits
    backend = getattr(copied, "backend_tokenizer", None)
    if backend is not None:
        backend.encode_special_tokens = splits
        backend.no_truncation()
        backend.no_padding()
    return copied


def _kept_copy(tokenizer: PreTrainedTokenizerBase, splits: bool) -> PreTrainedTokenizerBase:
    """`_copy_that_splits`, made once: a copy takes a thousand times as long as the encoding of a question."""
    kept = _PLAIN if splits else _READERS
    found = kept.get(tokenizer)
    if found is None or len(found) != len(tokenizer):
        found = kept[tokenizer] = _copy_that_splits(tokenizer, splits)
    return found


def prefix_ids(tokenizer: PreTrainedTokenizerBase, prefix: str) -> list[int]:
    """Token ids of what stands in front of every context: special tokens are special in it, unlike in documents.

    Args:
        tokenizer: of the documents, see `text_tokenizer`.
        prefix: such as a heading, or the learned tokens of a prompt-tuned bound.
    """
    return encode(_kept_copy(tokenizer, False), prefix) if prefix else []


def document_ids(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, document: str) -> list[int]:
    """Token ids of a document as the checkpoint was trained to compress it.

    Args:
        config: a compressor's configuration; its `context_prefix` stands in front.
        tokenizer: the tokenizer saved with it, see `text_tokenizer`.
        document: the text.
    """
    return documents_ids(config, tokenizer, [document])[0]


def documents_ids(
    config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, documents: Sequence[str]
) -> list[list[int]]:
    """`document_ids` of several documents."""
    # Tokenized apart, as in training.
    start = context_opening(config, tokenizer)
    start += prefix_ids(tokenizer, config.context_prefix) if config.context_prefix else []
    end = context_end_ids(tokenizer) if config.is_encoder_decoder else []
    return [[*start, *ids, *end] for ids in encode_all(tokenizer, documents)]


def passages_ids(
    config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, documents: Sequence[str | Sequence[str]]
) -> list[list[list[int]]]:
    """Token ids of each document's passages, each as a document of its own; a text is one passage.

    Args:
        config, tokenizer: as in `document_ids`.
        documents: texts, or lists of passages.
    """
    passages = [[document] if isinstance(document, str) else list(document) for document in documents]
    rows = iter(documents_ids(config, tokenizer, [passage for document in passages for passage in document]))
    return [[next(rows) for _ in document] for document in passages]


def cut_passages(
    passages: Sequence[Sequence[int]], num_tokens: int | None, keeps_end: bool = False
) -> list[list[int]]:
    """As many tokens of a document's passages; passages of which none is left are left out.

    Args:
        passages: token ids.
        num_tokens: most tokens of all passages together; `None` for all.
        keeps_end: whether the last tokens stay, and not the first.
    """
    left, kept = num_tokens, []
    for passage in reversed(passages) if keeps_end else passages:
        if left is not None:
            passage = passage[max(0, len(passage) - left) :] if keeps_end else passage[:left]
            left -= len(passage)
        kept += [list(passage)] if passage else []
    return kept[::-1] if keeps_end else kept


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
    """Token ids of prompts that are asked one after the other about one document.

    Args:
        tokenizer: the tokenizer saved with the checkpoint.
        prompts: such as questions, one or more.
        prompt_format: see `CompressorConfig`; in a chat, the words of prompts are never special tokens.

    Raises:
        ValueError: a chat for a tokenizer without a chat template, or with one that does not hold the user's words.
    """
    if prompt_format == "plain":
        return PromptIds([], [encode(tokenizer, prompt) for prompt in prompts], tokenizer.eos_token_id)
    messages = []
    for prompt in prompts:
        messages += [{"role": "user", "content": prompt}, {"role": "assistant", "content": ""}]
    return chat_ids(tokenizer, messages)


def chat_ids(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]]) -> PromptIds:
    """A conversation in the chat template, cut where the document and the empty messages of the assistant stand."""
    if tokenizer.chat_template is None:
        raise ValueError("the tokenizer has no chat template, and the prompt format is 'chat': ask an instruct model")
    document, answer = _MARK.format("document"), _MARK.format("answer")
    contents: list[str] = []
    filled: list[dict[str, str]] = []
    for message in messages:
        content, mark = message["content"], _MARK.format(len(contents))
        if message["role"] == "user" and not any(document in other["content"] for other in filled):
            mark, content = document + mark, DOCUMENT_END + content
        elif message["role"] == "assistant" and not content:
            mark = answer
        contents.append(content)
        filled.append({**message, "content": mark})
    text = tokenizer.apply_chat_template(filled, tokenize=False, add_generation_prompt=False)
    opening = tokenizer.apply_chat_template(filled, tokenize=False, add_generation_prompt=True)
    if messages[-1]["role"] != "assistant":
        text = opening + answer
    if text.count(document) != 1 or any(_MARK.format(place) not in text for place in _asked(filled)):
        raise ValueError("the tokenizer's chat template leaves out what the user says, so no document can stand in it")
    head, _, rest = text.partition(document)
    parts = [_filled(tokenizer, part, contents) for part in rest.split(answer)]
    end = parts[-1][0] if parts[-1] and parts[-1][0] in tokenizer.all_special_ids else tokenizer.eos_token_id
    turns = [part[1:] if index and part[:1] == [end] else part for index, part in enumerate(parts[:-1])]
    return PromptIds(_filled(tokenizer, head, contents), turns, end)


def _asked(filled: Sequence[Mapping[str, str]]) -> list[int]:
    return [place for place, message in enumerate(filled) if message["role"] == "user"]


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
        ids += prefix_ids(tokenizer, before) + encode(_kept_copy(tokenizer, True), content)
    return ids + prefix_ids(tokenizer, text)


def opening_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids that open the user's turn in the tokenizer's chat template: `CompressorConfig.slots_after_ids`.

    They start with the last special token in front of the user's words.
    """
    head = prompt_ids(tokenizer, [""], "chat").head
    special = set(tokenizer.all_special_ids)
    last = max((place for place, token_id in enumerate(head) if token_id in special), default=0)
    return head[last:]


def question_ids(
    config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, question: str, prompt: str | None = None
) -> list[int]:
    """Token ids that stand between a memory and the answer.

    Args:
        config: a compressor's configuration.
        tokenizer: the tokenizer saved with it, see `text_tokenizer`.
        question: the question.
        prompt: text with `{question}` in it; the configuration's `question_prompt` when `None`.

    Returns:
        The start token, [LM] where the method has it and else BOS or nothing, as its configuration says, and the
        prompt; in a chat the filled template around it, without what the memory stands for.

    Raises:
        ValueError: `prompt` does not hold `{question}` exactly once.
    """
    head, tail = _around_document(config, tokenizer, question, prompt)
    return tail if config.opens_context else [*head, *tail]


def full_context_ids(
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    document_ids: Sequence[int],
    question: str,
    prompt: str | None = None,
) -> list[int]:
    """Token ids of a question behind the whole document, as a checkpoint's decoder reads it without a memory.

    Args:
        config, tokenizer, question, prompt: as in `question_ids`.
        document_ids: token ids of the document.
    """
    head, tail = _around_document(config, tokenizer, question, prompt)
    if config.continuation_token_id is not None:
        # As the collator has it in training: the task token stands behind the document.
        return [*document_ids, *head, *tail]
    return [*(head or [start_token_id(tokenizer)]), *document_ids, *tail]


def _around_document(
    config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, question: str, prompt: str | None
) -> tuple[list[int], list[int]]:
    """What stands in front of a document or its slots, and behind it."""
    prompt = config.question_prompt if prompt is None else prompt
    if prompt.count("{question}") != 1:
        raise ValueError(f"`prompt` must hold {{question}} exactly once, got {prompt!r}")
    # str.format would trip over braces inside the question.
    ids = prompt_ids(tokenizer, [prompt.replace("{question}", question)], config.prompt_format)
    return start_ids(config, tokenizer, ids.head), ids.turns[0]


def start_ids(
    config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, head: Sequence[int], task: str = "continuation"
) -> list[int]:
    """What a text behind slots starts with: the method's task token, or else the template's opening in a chat and
    elsewhere BOS, or nothing where `config.bos_before_text` is false.

    Args:
        config: a compressor's configuration.
        tokenizer: the tokenizer saved with it.
        head: of `PromptIds`.
        task: "reconstruction" starts with [AE] where the method has it, everything else with [LM].
    """
    token = config.reconstruction_token_id if task == "reconstruction" else config.continuation_token_id
    if token is not None:
        has_bos = config.bos_before_task_token and not head
        return [*[start_token_id(tokenizer)][:has_bos], token, *head]
    return list(head) or [start_token_id(tokenizer)][: config.bos_before_text]


def restored_ids(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What a reconstruction's text starts with behind its task token: the first tokens of every context, such as BOS.

    Under the enhanced layout [AE] has position 0 and the text 1, 2, ...: the ids that the encoder gave the same
    tokens, BOS among them.

    Args:
        config: a compressor's configuration.
        tokenizer: the tokenizer saved with it.
    """
    token = config.reconstruction_token_id
    if not config.restores_context_start or token is None or config.is_encoder_decoder:
        return []
    start = context_start_ids(tokenizer)
    # A BOS that is the task token stands for that of the context, except where it takes the position in front of it.
    return [] if token in start and config.position_layout != "enhanced" else start


def before_answer(prompt: str, prompt_format: str) -> str:
    """What stands between a prompt and its answer: a space, or nothing where a line or a turn of a chat starts."""
    return "" if prompt_format == "chat" or prompt.endswith("\n") else " "


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
        ValueError: messages that are none, that do not end with the user's, or a conversation for a tokenizer without
            a chat template.
    """
    if not isinstance(messages, str):
        messages = list(messages)
        for message in messages:
            texts = [message.get(key) for key in ("role", "content")] if isinstance(message, Mapping) else [None]
            if not all(isinstance(text, str) for text in texts):
                raise ValueError(f"a message must be a mapping with the texts `role` and `content`, got {message!r}")
    if not isinstance(messages, str) and len(messages) == 1 and messages[0]["role"] == "user":
        messages = messages[0]["content"]
    if isinstance(messages, str):
        plain = text_tokenizer(tokenizer) if config.task_token_ids else tokenizer
        return question_ids(config, plain, messages)
    if not messages:
        raise ValueError("`messages` is empty: give a question, or messages with `role` and `content`")
    if messages[-1]["role"] != "user":
        raise ValueError(f"the last of `messages` must be the user's, who asks, got {messages[-1]!r}")
    if tokenizer.chat_template is None:
        raise ValueError(
            f"the tokenizer has no chat template for {len(messages)} messages: give one question, as text"
        )
    if config.prompt_format == "chat":
        ids = chat_ids(tokenizer, messages)
        if not config.opens_context:
            return [*start_ids(config, tokenizer, ids.head), *ids.turns[0]]
        if ids.head != prompt_ids(tokenizer, [""], "chat").head:
            raise ValueError(
                "the memory holds the opening of the chat, which is the template's own: leave out what `messages` say "
                "before the user"
            )
        return ids.turns[0]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    start = config.continuation_token_id
    if start is None:
        return ids
    # A task token takes the place of BOS.
    return [start, *(ids[1:] if ids[0] == tokenizer.bos_token_id else ids)]
