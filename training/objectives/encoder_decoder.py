# SPDX-License-Identifier: Apache-2.0
"""Batches and trainer of a compressor that is an encoder-decoder (DeCAL)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ...modeling.memory.compressed_context import CompressedContext
from .compression_collator import CompressionCollator
from .compression_trainer import CompressionTrainer


class Seq2SeqCollator(CompressionCollator):
    """`CompressionCollator` for encoder-decoders: questions go where the model's configuration places them.

    With `question_placement="encoder"` the prompt stands in front of the context in `context_input_ids`, and
    `input_ids` are the decoder's start token and the target alone. `context_end_ids` end a compressed context.
    """

    def __init__(
        self,
        *args: Any,
        question_placement: str = "decoder",
        context_end_ids: Sequence[int] = (),
        **kwargs: Any,
    ):
        super().__init__(*args, **{"restored_ids": (), **kwargs})
        self.question_placement, self.context_end_ids = question_placement, list(context_end_ids)

    def _encoder_passages(self, example: Mapping[str, Any]) -> list[list[int]]:
        if not example.get("passages"):
            return super()._encoder_passages(example)
        return [[*ids, *self.context_end_ids] for ids in super()._encoder_passages(example)]

    def _encoder_context(self, example: Mapping[str, Any]) -> list[int]:
        question = example["prompt_ids"] if self.question_placement == "encoder" else []
        return [*question, *super()._encoder_context(example), *self.context_end_ids]

    def _row(self, example: Mapping[str, Any]) -> tuple[list[int], list[int]]:
        if self.question_placement == "encoder":
            example = {**example, "prompt_ids": []}
        return super()._row(example)


class Seq2SeqCompressionTrainer(CompressionTrainer):
    r"""`CompressionTrainer` for an encoder-decoder: the decoder reads the targets, and its cross-attention the slots.

    The log's `token_accuracy_ratio_C` over span-corrupted texts is Table 1's accuracy. Batches come from
    `SpanCorruptionCollator` or `Seq2SeqCollator`.
    """

    def _states(self, batch: dict[str, Tensor], memory: CompressedContext | None, prefix: str = "") -> Tensor:
        text = {name: batch[f"{prefix}{name}"] for name in ("input_ids", "attention_mask")}
        return self._unwrapped().text_states(**text, memory=memory, use_cache=False).last_hidden_state
