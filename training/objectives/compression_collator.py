# SPDX-License-Identifier: Apache-2.0
"""Collators: examples of `CompressionDataset` become batches for a compressor, a full-context model, or both."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...configuration.nearest_names import check_choice
from ...data.task_tokens import text_starts
from ...modeling.memory.compressed_context import CompressedContext
from ...modeling.parts.text_ids import context_start_ids as find_context_start_ids
from ...modeling.parts.text_ids import start_token_id as find_start_token_id
from ..fields import CONTEXT_MODES
from .text_rows import TextRows

MODES = ("compressed", "full_context", "no_context", "distillation", "joint")
JOINT_TASKS = ("reconstruction", "continuation")
_Row = tuple[list[int], list[int]]


class CompressionCollator:
    """Turns examples into `input_ids`, `attention_mask`, `labels` and the context's ids and mask.

    The same prompt and target stand behind all three kinds of context:

    - "compressed": start, prompt, target in `input_ids`; the context in `context_input_ids`, and where it is made of
      passages, which all start like a context, their lengths in `context_chunk_lengths`;
    - "full_context": start, context, prompt, target in `input_ids`;
    - "no_context": start, prompt, target in `input_ids`;
    - "distillation": "compressed", and "full_context" beside it as `full_input_ids`, `full_attention_mask`,
      `full_labels`, as a plain language model reads it: without task tokens;
    - "joint": examples of `JointDataset`; two texts about one context, start and `reconstruction_ids` in
      `reconstruction_input_ids`, `reconstruction_attention_mask`, `reconstruction_labels`, start and
      `continuation_ids` in `continuation_input_ids` and so on.

    Start is BOS, or the task's token, such as [AE] or [LM], where `task_start_ids` has one; there is one in a text,
    however many turns it has. Behind a task token a reconstruction's target starts with what every context starts with
    (`restored_ids`), which is learned, too: the target is the context as the encoder read it. An example's `head_ids`,
    the opening of the user's turn in a chat, take the place of BOS. With a task token a full context stands where the
    slots would, and as they are made: context start ids, context, task token, prompt, target.

    Examples with a `log_ratio` give `log_ratios` `(batch_size,)`, what a ratio selector learns; NaN where unknown.

    Labels are -100 on everything but the targets. The batch goes to a stock `trl.SFTTrainer` with
    `dataset_kwargs={"skip_prepare_dataset": True}` and `remove_unused_columns=False`.

    Args:
        pad_token_id: id that fills up.
        start_token_id: id that the text starts with: BOS, or EOS where a tokenizer has no BOS.
        context_start_ids: ids that a compressed context starts with, see `data.context_start_ids`.
        mode: one of `MODES`.
        task_start_ids: task -> id of the token that its text starts with, see `data.task_start_ids`; a task that is
            missing starts with `start_token_id`.
        context_mode: how "joint" gives the context, one of `CONTEXT_MODES`.
        ratios: draw one of these for every row and give it to the model as `ratio` `(batch_size,)`; a row's ratio
            depends on the row itself and `seed` only, in whatever batch or process it comes. `None` leaves the ratio
            to the model or the trainer.
        padding_side: "right" or "left", of text and context.
        pad_to_multiple_of: widths are multiples of this.
        with_metadata: add `example_ids` (list of str), `num_cut` (list of int) and `documents` (list of str, of all
            examples together), which this project's trainers take out again; a stock trainer would hand them to the
            model.
        seed: of the drawn ratios.
        restored_ids: ids that the target of a reconstruction starts with behind its task token, see
            `modeling.parts.prompting.restored_ids`; `context_start_ids` when `None`.
        bos_before_text: whether a text behind a compressed context starts with `start_token_id` where it has no task
            token. Where it does not, one without a prompt still does, so that all of its target is predicted.
        opens_context: whether what opens a text, `head_ids` or `start_token_id`, is compressed in front of a context.
        bos_before_task_token: whether `start_token_id` stands in front of a task token behind a compressed context.
        memories: folder of memory files that stand in place of compressed contexts, as `memory`: of the one of an
            example's `documents`, `DOCUMENT_ID.safetensors`.
        model_id: name of the compressor that has made these memories.
        encoder_start_ids: where the encoder reads other tokens than the decoder: ids that a compressed context starts
            with; the rest of it is the example's `encoder_context_ids`, and its `context_ids` are for the decoder.

    Raises:
        ValueError: an unknown mode or side, an empty list of ratios or one below 1, ratios in a mode without context,
            or a context mode beside another mode than "joint".
    """

    def __init__(
        self,
        pad_token_id: int,
        start_token_id: int,
        context_start_ids: Sequence[int] = (),
        mode: str = "compressed",
        ratios: Sequence[int] | None = None,
        padding_side: str = "right",
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
        check_choice("context_mode", context_mode, CONTEXT_MODES)
        if context_mode != "compressed" and mode != "joint":
            raise ValueError(f"context_mode {context_mode!r} goes with mode 'joint'; here it is mode={context_mode!r}")
        check_choice("padding_side", padding_side, ("left", "right"))
        if pad_to_multiple_of < 1:
            raise ValueError(f"pad_to_multiple_of must be at least 1, got {pad_to_multiple_of}")
        if ratios is not None:
            if not ratios or any(not isinstance(ratio, int) or ratio < 1 for ratio in ratios):
                raise ValueError(f"ratios must be one or more ints of at least 1, got {ratios!r}")
            if mode in ("full_context", "no_context") or (mode == "joint" and context_mode != "compressed"):
                raise ValueError(f"ratios go with compressed contexts, not with {mode!r} and {context_mode!r}")
            if memories is not None:
                raise ValueError("ratios go with contexts that are compressed here; stored memories have theirs")
        self.pad_token_id, self.start_token_id = pad_token_id, start_token_id
        self.context_start_ids = list(context_start_ids)
        self.encoder_start_ids = None if encoder_start_ids is None else list(encoder_start_ids)
        self.mode, self.ratios, self.padding_side = mode, ratios, padding_side
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
        """A collator whose texts start as a compressor's do, and which takes rows of texts, too.

        Rows may have a `context` and, as TRL has them, `messages` or `prompt` and `completion`: see [`TextRows`].

        Args:
            model: a compressor that is no encoder-decoder.
            tokenizer: the tokenizer saved with it.
            kwargs: arguments of the collator. In mode "compressed" contexts are read at `ratios`, which are all of the
                checkpoint's if not given, one drawn for each row.
        """
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
        """A collator with the tokenizer's pad (or EOS), BOS (or EOS) and context start ids.

        Args:
            tokenizer: that of texts.
            context_tokenizer: the model's `encoder_tokenizer`, where contexts have another one.
            kwargs: the other arguments.
        """
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
                rows = [self._joint_row(example, task) for example in examples]
                batch |= self._padded_text(rows, f"{task}_")
        else:
            batch |= self._padded_text([self._row(example) for example in examples])
        if self.context_mode == "compressed":
            passages = [self._encoder_passages(example) for example in examples]
            contexts = [[token for ids in row for token in ids] for row in passages]
            if self.memories is None:
                batch["context_input_ids"] = self._pad(contexts, self.pad_token_id)
                batch["context_attention_mask"] = self._pad([[1] * len(ids) for ids in contexts], 0)
                if any(len(row) > 1 for row in passages):
                    lengths = [[len(ids) for ids in row] for row in passages]
                    batch["context_chunk_lengths"] = self._pad(lengths, 0)
            else:
                stored = [self._stored_memory(*of_row) for of_row in zip(examples, contexts, strict=True)]
                batch["memory"] = CompressedContext.stack(stored)
        if self.mode == "distillation":
            batch |= self._padded_text([self._teacher_row(example) for example in examples], "full_")
        if self.ratios is not None:
            batch["ratio"] = torch.tensor([self._ratio(example) for example in examples])
        if "log_ratio" in examples[0]:
            batch["log_ratios"] = torch.tensor([example["log_ratio"] for example in examples])
        return batch | self._metadata(examples)

    def _metadata(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
        """What `with_metadata` adds."""
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

    def _context(self, example: Mapping[str, Any]) -> list[int]:
        return [*self.context_start_ids, *example["context_ids"]]

    def _encoder_passages(self, example: Mapping[str, Any]) -> list[list[int]]:
        """What is compressed, passage by passage; a context without passages is one."""
        if self.opens_context:
            return [[*(example.get("head_ids") or [self.start_token_id]), *example["context_ids"]]]
        is_own = self.encoder_start_ids is not None
        passages = example.get("encoder_passages" if is_own else "passages")
        if not passages:
            return [self._encoder_context(example)]
        start = self.encoder_start_ids or () if is_own else self.context_start_ids
        return [[*start, *ids] for ids in passages]

    def _encoder_context(self, example: Mapping[str, Any]) -> list[int]:
        if self.encoder_start_ids is None:
            return self._context(example)
        if "encoder_context_ids" not in example:
            raise ValueError(
                "examples need encoder_context_ids, the context in the encoder's own tokens: give the data set the "
                "model's encoder_tokenizer"
            )
        return [*self.encoder_start_ids, *example["encoder_context_ids"]]

    def _stored_memory(self, example: Mapping[str, Any], context: Sequence[int]) -> CompressedContext:
        """The memory of an example's context, from its file."""
        name, documents = example.get("id", ""), example.get("documents", ())
        if len(documents) != 1:
            raise ValueError(
                f"example {name!r} is of {len(documents)} documents of the data, and a memory file is of one: leave "
                "generated sources and contexts_per_document out"
            )
        path = Path(self.memories or "") / f"{documents[0]}.safetensors"
        if not path.is_file():
            raise ValueError(
                f"there is no memory {path} of example {name!r}: write them with `context-compressors compress MODEL "
                f"DATA --by-document --output {self.memories}`"
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
        """What stands in front of a text: its start token or head, and in "full_context" the context."""
        task_id, head = self.task_start_ids.get(task or ""), example.get("head_ids") or []
        if self.opens_context and self.context_mode == "compressed":
            head = []
        in_words = self.context_mode == "full_context"
        if task_id is not None:
            has_bos = self.bos_before_task_token and self.context_mode == "compressed" and not head
            first = self._context(example) if in_words else [self.start_token_id][:has_bos]
            return [*first, task_id, *head]
        if self.context_mode == "compressed" and not self.bos_before_text and example.get("prompt_ids"):
            return list(head)
        return [*(head or [self.start_token_id]), *(example["context_ids"] if in_words else ())]

    def _restored(self, task: str | None) -> list[int]:
        """What the target of a task's text starts with, in front of the example's own."""
        return self.restored_ids if task == "reconstruction" and task in self.task_start_ids else []

    def _row(self, example: Mapping[str, Any]) -> _Row:
        task = example.get("task")
        if restored := self._restored(task):
            if self.mode == "distillation":
                # A teacher's text does not have them: they are given, and not learned.
                example = {**example, "prompt_ids": [*example["prompt_ids"], *restored]}
            else:
                example = {**example, "target_ids": [*restored, *example["target_ids"]]}
        return _with_turns(self._start(example, task), example)

    def _teacher_row(self, example: Mapping[str, Any]) -> _Row:
        return _with_turns([*(example.get("head_ids") or [self.start_token_id]), *example["context_ids"]], example)

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
        fill = [[value] * (width - len(row)) for row in rows]
        if self.padding_side == "left":
            return torch.tensor([[*pads, *row] for pads, row in zip(fill, rows, strict=True)])
        return torch.tensor([[*row, *pads] for pads, row in zip(fill, rows, strict=True)])


def _with_turns(start: list[int], example: Mapping[str, Any]) -> _Row:
    """Ids and labels of a text: start, then prompt and target of every turn."""
    ids, labels = list(start), [-100] * len(start)
    for prompt, target in ((example["prompt_ids"], example["target_ids"]), *example.get("more_turns", ())):
        ids += [*prompt, *target]
        labels += [*[-100] * len(prompt), *target]
    return ids, labels
