# SPDX-License-Identifier: Apache-2.0
"""Examples of `CompressionDataset`, and rows of texts as TRL has them, become batches."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ...configuration.nearest_names import check_choice
from ...data.task_tokens import text_starts
from ...modeling.checkpoint.encoder_tokenizer import in_encoder_tokens
from ...modeling.memory.compressed_context import CompressedContext
from ...modeling.parts.text_ids import (
    DOCUMENT_END,
    before_answer,
    chat_ids,
    encode,
    prefix_ids,
    prompt_ids,
    text_tokenizer,
)
from ...modeling.parts.text_ids import context_start_ids as find_context_start_ids
from ...modeling.parts.text_ids import start_token_id as find_start_token_id

MODES = ("compressed", "full_context", "no_context", "distillation", "joint")
JOINT_TASKS = ("reconstruction", "continuation")
_Row = tuple[list[int], list[int]]


class CompressionCollator:
    """Turns examples into `input_ids`, `attention_mask`, `labels` and the context's ids and mask.

    - "compressed": start, prompt, target in `input_ids`; the context in `context_input_ids`, and the lengths of its
      passages in `context_chunk_lengths`;
    - "full_context": start, context, prompt, target in `input_ids`; "no_context": the same without the context;
    - "distillation": "compressed", and the teacher's text in `full_input_ids`, `full_attention_mask`, `full_labels`;
    - "joint": two texts about one context, `reconstruction_input_ids`, `continuation_input_ids`, masks and labels.

    Start is BOS, the opening of the user's turn (`head_ids`), or the task's token. A stock `trl.SFTTrainer` takes the
    batch with `remove_unused_columns=False` and `dataset_kwargs={"skip_prepare_dataset": True}`.

    Args:
        start_token_id: BOS, or EOS where a tokenizer has no BOS.
        context_start_ids: ids that a compressed context starts with; `encoder_start_ids` in the encoder's own tokens.
        mode: one of `MODES`; `context_mode` is that of the context in "joint".
        ratios: draw one of these for every row, by the row and `seed`, as `ratio` `(batch_size,)` of the batch.
        with_metadata: add `example_ids`, `num_cut` and `documents`, which this package's trainers take out again.
        task_start_ids, restored_ids, bos_before_text, opens_context, bos_before_task_token: see `text_starts`.
        memories: folder of files `DOCUMENT_ID.safetensors` of the compressor `model_id`, which replace the contexts.
    """

    def __init__(
        self,
        pad_token_id: int,
        start_token_id: int,
        context_start_ids: Sequence[int] = (),
        mode: str = "compressed",
        ratios: Sequence[int] | None = None,
        pad_to_multiple_of: int = 1,
        with_metadata: bool = False,
        seed: int = 0,
        task_start_ids: Mapping[str, int] | None = None,
        context_mode: str = "compressed",
        encoder_start_ids: Sequence[int] | None = None,
        restored_ids: Sequence[int] | None = None,
        bos_before_text: bool = True,
        opens_context: bool = False,
        bos_before_task_token: bool = False,
        memories: str | os.PathLike | None = None,
        model_id: str | None = None,
    ):
        check_choice("mode", mode, MODES)
        self.pad_token_id, self.start_token_id = pad_token_id, start_token_id
        self.context_start_ids = list(context_start_ids)
        self.encoder_start_ids = None if encoder_start_ids is None else list(encoder_start_ids)
        self.mode, self.ratios = mode, ratios
        self.pad_to_multiple_of, self.with_metadata, self.seed = pad_to_multiple_of, with_metadata, seed
        self.task_start_ids = dict(task_start_ids or {})
        self.restored_ids = list(self.context_start_ids if restored_ids is None else restored_ids)
        self.opens_context = opens_context
        self.bos_before_text, self.bos_before_task_token = bos_before_text, bos_before_task_token
        self.memories, self.model_id = memories, model_id
        self.context_mode = {"joint": context_mode, "distillation": "compressed"}.get(mode, mode)
        self.text_rows: TextRows | None = None

    @classmethod
    def from_model(
        cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, **kwargs: Any
    ) -> CompressionCollator:
        """Return a collator for a compressor that takes rows of texts, too; `ratios` are all of its own by default."""
        own, known = model.encoder_tokenizer, list(model.config.compression_ratios)
        if len(known) > 1 and kwargs.get("mode", "compressed") == "compressed" and kwargs.get("memories") is None:
            kwargs.setdefault("ratios", known)
        collator = cls.from_tokenizer(tokenizer, own, **{**text_starts(model.config, tokenizer), **kwargs})
        collator.text_rows = TextRows(model.config, tokenizer, own)
        return collator

    @classmethod
    def from_tokenizer(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        context_tokenizer: PreTrainedTokenizerBase | None = None,
        **kwargs: Any,
    ) -> CompressionCollator:
        """Return a collator with the start and pad ids of a tokenizer; contexts may have one of their own."""
        if context_tokenizer is not None:
            kwargs["encoder_start_ids"] = find_context_start_ids(context_tokenizer)
        start = find_start_token_id(tokenizer)
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        return cls(start if pad is None else pad, start, find_context_start_ids(tokenizer), **kwargs)

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return a batch; every tensor is `(batch_size, width)` of int64."""
        if self.text_rows is not None:
            examples = [row if "context_ids" in row else self.text_rows.example(row) for row in examples]
        batch: dict[str, Any] = {}
        if self.mode == "joint":
            for task in JOINT_TASKS:
                batch |= self._padded_text([self._joint_row(example, task) for example in examples], f"{task}_")
        else:
            batch |= self._padded_text([self._row(example) for example in examples])
        if self.context_mode == "compressed":
            batch |= self._contexts(examples)
        if self.mode == "distillation":
            starts = [[*(row.get("head_ids") or [self.start_token_id]), *row["context_ids"]] for row in examples]
            batch |= self._padded_text(list(map(_with_turns, starts, examples)), "full_")
        if self.ratios is not None:
            batch["ratio"] = torch.tensor([self._ratio(example) for example in examples])
        return batch | self._metadata(examples)

    def _contexts(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        passages = [self._encoder_passages(example) for example in examples]
        contexts = [[token for ids in row for token in ids] for row in passages]
        if self.memories is not None:
            stored = [self._stored_memory(*of_row) for of_row in zip(examples, contexts, strict=True)]
            return {"memory": CompressedContext.stack(stored)}
        batch = {
            "context_input_ids": self._pad(contexts, self.pad_token_id),
            "context_attention_mask": self._pad([[1] * len(ids) for ids in contexts], 0),
        }
        if any(len(row) > 1 for row in passages):
            batch["context_chunk_lengths"] = self._pad([[len(ids) for ids in row] for row in passages], 0)
        return batch

    def _metadata(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
        if not self.with_metadata:
            return {}
        return {
            "example_ids": [str(example.get("id", "")) for example in examples],
            "num_cut": [int(example.get("num_cut", 0)) for example in examples],
            "documents": [name for example in examples for name in example.get("documents", ())],
        }

    def _ratio(self, example: Mapping[str, Any]) -> int:
        # A data set that comes to a row once more has another index for it. Of a row without one its context and its
        # question draw along, so that nothing can be told of an answer by its ratio.
        row = [example.get(name, "") for name in ("id", "index", "context_ids", "prompt_ids", "target_ids")]
        return random.Random("/".join(map(str, [self.seed, *row]))).choice(self.ratios or ())

    def _encoder_passages(self, example: Mapping[str, Any]) -> list[list[int]]:
        """Return the ids to compress, passage by passage; a context without passages is one."""
        if self.opens_context:
            return [[*(example.get("head_ids") or [self.start_token_id]), *example["context_ids"]]]
        is_own = self.encoder_start_ids is not None
        start = self.encoder_start_ids or () if is_own else self.context_start_ids
        context = example["encoder_context_ids" if is_own else "context_ids"]
        passages = example.get("encoder_passages" if is_own else "passages") or [context]
        return [[*start, *ids] for ids in passages]

    def _stored_memory(self, example: Mapping[str, Any], context: Sequence[int]) -> CompressedContext:
        name, documents = example.get("id", ""), example.get("documents", ())
        path = Path(self.memories or "") / f"{documents[0] if len(documents) == 1 else None}.safetensors"
        if not path.is_file():
            raise ValueError(
                f"example {name!r} of the documents {list(documents)} has no memory in {self.memories}: write one for "
                f"each document with `context-compressors compress MODEL DATA --by-document --output {self.memories}`"
            )
        memory = CompressedContext.load(path, model_id=self.model_id)
        num_tokens = int(memory.num_context_tokens.sum())
        if num_tokens != len(context):
            raise ValueError(
                f"{path} is a memory of {num_tokens} tokens, and the context of example {name!r} has {len(context)}: "
                "give max_context_tokens and context_prefix as they were when it was made"
            )
        return memory

    def _start(self, example: Mapping[str, Any], task: str | None) -> list[int]:
        """Return the ids in front of a text: its start token or head, and in "full_context" the context."""
        task_id, head = self.task_start_ids.get(task or ""), example.get("head_ids") or []
        if self.opens_context and self.context_mode == "compressed":
            head = []
        is_full = self.context_mode == "full_context"
        if task_id is not None:
            # A full context stands where the slots would, and as they are made.
            has_bos = self.bos_before_task_token and self.context_mode == "compressed" and not head
            context = [*self.context_start_ids, *example["context_ids"]] if is_full else []
            return [*context, *[self.start_token_id][:has_bos], task_id, *head]
        if self.context_mode == "compressed" and not self.bos_before_text and example.get("prompt_ids"):
            return list(head)
        return [*(head or [self.start_token_id]), *(example["context_ids"] if is_full else ())]

    def _restored(self, task: str | None) -> list[int]:
        """Return the ids in front of the example's own target."""
        return self.restored_ids if task == "reconstruction" and task in self.task_start_ids else []

    def _row(self, example: Mapping[str, Any]) -> _Row:
        task = example.get("task")
        if restored := self._restored(task):
            # A teacher's text does not have them: they are given, and not learned.
            name = "prompt_ids" if self.mode == "distillation" else "target_ids"
            ids = example[name]
            example = {**example, name: [*ids, *restored] if name == "prompt_ids" else [*restored, *ids]}
        return _with_turns(self._start(example, task), example)

    def _joint_row(self, example: Mapping[str, Any], task: str) -> _Row:
        start, target = self._start(example, task), [*self._restored(task), *example[f"{task}_ids"]]
        return [*start, *target], [*[-100] * len(start), *target]

    def _padded_text(self, rows: Sequence[_Row], prefix: str = "") -> dict[str, torch.Tensor]:
        return {
            f"{prefix}input_ids": self._pad([ids for ids, _ in rows], self.pad_token_id),
            f"{prefix}attention_mask": self._pad([[1] * len(ids) for ids, _ in rows], 0),
            f"{prefix}labels": self._pad([labels for _, labels in rows], -100),
        }

    def _pad(self, rows: Sequence[Sequence[int]], value: int) -> torch.Tensor:
        # At least one place: a batch of empty contexts is a column of pads.
        width = max(1, *(len(row) for row in rows))
        width = -(-width // self.pad_to_multiple_of) * self.pad_to_multiple_of
        return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows])


def _with_turns(start: list[int], example: Mapping[str, Any]) -> _Row:
    """Ids and labels of a text: start, then prompt and target of every turn."""
    ids, labels = list(start), [-100] * len(start)
    for prompt, target in ((example["prompt_ids"], example["target_ids"]), *example.get("more_turns", ())):
        ids += [*prompt, *target]
        labels += [*[-100] * len(prompt), *target]
    return ids, labels


class Seq2SeqCollator(CompressionCollator):
    """`CompressionCollator` for encoder-decoders (DeCAL), whose prompts may stand in front of the context."""

    def __init__(
        self, *args: Any, question_placement: str = "decoder", context_end_ids: Sequence[int] = (), **kwargs: Any
    ):
        super().__init__(*args, **{"restored_ids": (), **kwargs})
        self.question_placement, self.context_end_ids = question_placement, list(context_end_ids)

    def _encoder_passages(self, example: Mapping[str, Any]) -> list[list[int]]:
        passages = [[*ids, *self.context_end_ids] for ids in super()._encoder_passages(example)]
        if self.question_placement == "encoder" and not example.get("passages"):
            return [[*example["prompt_ids"], *passages[0]]]
        return passages

    def _row(self, example: Mapping[str, Any]) -> _Row:
        if self.question_placement == "encoder":
            example = {**example, "prompt_ids": []}
        return super()._row(example)


_FORMS = "`messages`, or `prompt` and `completion`, each a text or messages with `role` and `content`"


class TextRows:
    """Makes examples of rows with a `context` and, as TRL has them, `messages` or `prompt` and `completion`.

    Of `messages` every message of the assistant is learned, of `completion` all of it. In a chat the document stands
    in the user's first turn.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        tokenizer: PreTrainedTokenizerBase,
        context_tokenizer: PreTrainedTokenizerBase | None = None,
    ):
        self._config, self._tokenizer, self._context_tokenizer = config, text_tokenizer(tokenizer), context_tokenizer

    def example(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the example of a row, see [`CompressionDataset`]; `ValueError` for a row of another form."""
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
        """Return the ids in front of the document, and those that are read and learned in each turn."""
        messages, prompt, completion = (row.get(name) for name in ("messages", "prompt", "completion"))
        if isinstance(prompt, str) and isinstance(completion, str):
            prompts = prompt_ids(self._tokenizer, [prompt], self._config.prompt_format)
            return prompts.head, [(prompts.turns[0], [*encode(self._tokenizer, completion), prompts.end])]
        asked_messages, learned = ([], messages) if messages is not None else (prompt, completion)
        if asked_messages is None or not (_are_messages(asked_messages) and _are_messages(learned) and learned):
            raise ValueError(f"a row needs {_FORMS}, got the columns {sorted(row)}")
        if learned[-1]["role"] != "assistant":
            raise ValueError(f"the last message must be the assistant's, whose answer is learned, got {learned[-1]!r}")
        answers = [message["content"] for message in learned if message["role"] == "assistant"]
        asked = [*asked_messages, *({**m, "content": None} if m["role"] == "assistant" else m for m in learned)]
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
