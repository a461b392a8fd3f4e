# SPDX-License-Identifier: Apache-2.0
"""Collator and trainer of an encoder-decoder: questions in either place, and T5's decoder in the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...modeling.memory.compressed_context import CompressedContext
from ..arguments import TrainingConfig
from .compression_collator import CompressionCollator
from .compression_trainer import CompressionTrainer


class Seq2SeqCollator(CompressionCollator):
    """`CompressionCollator` for encoder-decoders: questions go where the model's configuration places them.

    With `question_placement="encoder"` the prompt stands in front of the context in `context_input_ids`, and
    `input_ids` are the decoder's start token and the target alone.

    Args:
        question_placement: "decoder" or "encoder".
        context_end_ids: ids that a compressed context ends with, see `modeling.parts.text_ids.context_end_ids`.
        kwargs: as for `CompressionCollator`; `task_start_ids` of the model's configuration name the decoder's start
            token, which in T5 is the pad, and not the tokenizer's BOS or EOS.
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
        if self.question_placement == "encoder":
            raise ValueError("a context that is compressed with its question is one text, and not a list of passages")
        return [[*ids, *self.context_end_ids] for ids in super()._encoder_passages(example)]

    def _encoder_context(self, example: Mapping[str, Any]) -> list[int]:
        question = example["prompt_ids"] if self.question_placement == "encoder" else []
        return [*question, *super()._encoder_context(example), *self.context_end_ids]

    def _row(self, example: Mapping[str, Any]) -> tuple[list[int], list[int]]:
        if self.question_placement == "encoder":
            if example.get("more_turns"):
                raise ValueError(
                    "a context that is compressed with its question has one question: questions_per_example must be 1"
                )
            example = {**example, "prompt_ids": []}
        return super()._row(example)


class Seq2SeqCompressionTrainer(CompressionTrainer):
    r"""`CompressionTrainer` for an encoder-decoder: the decoder reads the targets, and its cross-attention the slots.

    The log's `token_accuracy_ratio_C` over span-corrupted texts is Table 1's accuracy.

    Args:
        model: a [`DeCALForConditionalGeneration`].
        args ([`TrainingConfig`]): training arguments; `context_mode` is "compressed".
        kwargs: as for `CompressionTrainer`; batches come from `SpanCorruptionCollator` or `Seq2SeqCollator`.

    Raises:
        ValueError: another `context_mode`.
    """

    def __init__(self, model: PreTrainedModel, args: TrainingConfig, **kwargs: Any):
        if args.context_mode != "compressed":
            raise ValueError(f"an encoder-decoder needs context_mode 'compressed', got {args.context_mode!r}")
        super().__init__(model=model, args=args, **kwargs)

    def _states(self, batch: dict[str, Tensor], memory: CompressedContext | None, prefix: str = "") -> Tensor:
        text = {name: batch[f"{prefix}{name}"] for name in ("input_ids", "attention_mask")}
        return self._unwrapped().text_states(**text, memory=memory, use_cache=False).last_hidden_state


def check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `ValueError` when the tokenizer has tokens that the model has no embedding for."""
    if len(tokenizer) > model.config.vocab_size:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens, the model {model.config.vocab_size}: it lacks sentinels, "
            "which a new model (model_config) gets, or it is another model's"
        )
