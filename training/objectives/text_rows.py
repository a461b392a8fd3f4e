# SPDX-License-Identifier: Apache-2.0
"""Rows of texts as TRL has them, and the document beside them, as examples for the collator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ...modeling.checkpoint.encoder_tokenizer import in_encoder_tokens
from ...modeling.parts.chat_template import DOCUMENT_END, before_answer, chat_ids, prompt_ids
from ...modeling.parts.text_ids import encode, prefix_ids, text_tokenizer

_FORMS = "`messages`, or `prompt` and `completion`, each a text or messages with `role` and `content`"


class TextRows:
    """Makes examples of rows with a `context` and, as TRL has them, `messages` or `prompt` and `completion`.

    Of `messages` every message of the assistant is learned, of `completion` all of it, and each ends as an answer of
    the checkpoint does. In a chat the document stands in the user's first turn, and a `prompt` that is a text is what
    the user says; a plain checkpoint reads a text as it stands, and one question in its own prompt.

    Args:
        config: the compressor's configuration.
        tokenizer: the tokenizer saved with it.
        context_tokenizer: the model's `encoder_tokenizer`, where contexts have another one.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        tokenizer: PreTrainedTokenizerBase,
        context_tokenizer: PreTrainedTokenizerBase | None = None,
    ):
        self._config, self._tokenizer, self._context_tokenizer = config, text_tokenizer(tokenizer), context_tokenizer

    def example(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the example of a row, see [`CompressionDataset`].

        Raises:
            ValueError: a row of another form, or a conversation for a plain checkpoint.
        """
        context = row.get("context")
        passages = [context] if isinstance(context, str) else context
        if not isinstance(passages, (list, tuple)) or not all(isinstance(text, str) for text in passages or [None]):
            raise ValueError(f"a row needs its document in `context`, a text or a list of passages, got {context!r}")
        head, pairs = self._turns(row)
        prefix = prefix_ids(self._tokenizer, self._config.context_prefix)
        context_ids = [*prefix, *encode(self._tokenizer, DOCUMENT_END.join(passages))]
        apart = [[*prefix, *encode(self._tokenizer, text)] for text in passages] if len(passages) > 1 else []
        example: dict[str, Any] = {
            "head_ids": head,
            "context_ids": context_ids,
            "passages": apart,
            "prompt_ids": pairs[0][0],
            "target_ids": pairs[0][1],
            "more_turns": pairs[1:],
            "task": "question_answering",
            "id": row.get("id", ""),
        }
        if self._context_tokenizer is not None:
            tokenizers = (self._tokenizer, self._context_tokenizer)
            example["encoder_context_ids"] = in_encoder_tokens(context_ids, *tokenizers)
            example["encoder_passages"] = [in_encoder_tokens(ids, *tokenizers) for ids in apart]
        return example

    def _turns(self, row: Mapping[str, Any]) -> tuple[list[int], list[tuple[list[int], list[int]]]]:
        """What stands in front of the document, and what is read and learned in each turn."""
        messages, prompt, completion = (row.get(name) for name in ("messages", "prompt", "completion"))
        if isinstance(prompt, str) and isinstance(completion, str):
            prompts = prompt_ids(self._tokenizer, [prompt], self._config.prompt_format)
            return prompts.head, [(prompts.turns[0], [*encode(self._tokenizer, completion), prompts.end])]
        given, learned = ([], messages) if messages is not None else (prompt, completion)
        if given is None or not (_are_messages(given) and _are_messages(learned) and learned):
            raise ValueError(f"a row needs {_FORMS}, got the columns {sorted(row)}")
        if learned[-1]["role"] != "assistant":
            raise ValueError(f"the last message must be the assistant's, whose answer is learned, got {learned[-1]!r}")
        answers = [message["content"] for message in learned if message["role"] == "assistant"]
        asked = [*given, *({**m, "content": None} if m["role"] == "assistant" else m for m in learned)]
        if self._config.prompt_format == "chat":
            prompts, space = chat_ids(self._tokenizer, asked), ""
        elif [message["role"] for message in asked] == ["user", "assistant"]:
            text = self._config.question_prompt.replace("{question}", asked[0]["content"])
            prompts, space = prompt_ids(self._tokenizer, [text]), before_answer(text, "plain")
        else:
            raise ValueError(
                f"a conversation of {len(asked)} messages trains in the tokenizer's chat template: build the "
                "compressor with prompt_format='chat' and its slots_after_ids"
            )
        targets = [[*encode(self._tokenizer, space + answer), prompts.end] for answer in answers]
        return prompts.head, list(zip(prompts.turns, targets, strict=True))


def _are_messages(value: Any) -> bool:
    return isinstance(value, Sequence) and all(
        isinstance(message, Mapping) and isinstance(message.get("content"), str) and "role" in message
        for message in value
    )
