# SPDX-License-Identifier: Apache-2.0
"""The objective windows: the next token, in windows that are read behind the beacons of those before them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..arguments import DataArguments, ModelArguments, TrainingConfig
from .compression import load, record_prompts, trainer_arguments
from .compression_dataset import CompressionDataset
from .compression_trainer import MIXED_RATIOS, CompressionTrainer


class WindowDataset(CompressionDataset):
    """Examples without a context, whose `target_ids` are a window of a text from a random place, learned whole.

    Of questions and summaries answers alone are learned. Rows with texts below `min_context_tokens` are passed over.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.shortest_row = max(2, self.shortest)

    def _text_example(
        self, task: str, ids: list[int], limit: int, identifier: str, rng: random.Random, text_ends: bool = True
    ) -> dict[str, Any]:
        if task != "continuation":
            return super()._text_example(task, ids, limit, identifier, rng, text_ends)
        longest = max(1, min(limit, len(ids)))
        length = rng.randint(min(self.shortest, longest), longest)
        start = rng.randrange(len(ids) - length + 1)
        target = [*ids[start : start + length], *[self.end] * (text_ends and start + length == len(ids))]
        texts: dict[str, Any] = {"head_ids": [], "context_ids": [], "prompt_ids": [], "target_ids": target}
        return {**texts, "more_turns": [], "passages": None, "task": task, "id": identifier, "num_cut": 0}


class WindowTrainer(CompressionTrainer):
    r"""Trains Activation Beacon to predict the next token of a text in every window.

    A window is read behind the beacons of all windows before it, whose keys and values carry the gradient. In training
    a ratio is drawn for each window of a step; evaluation has one loss for each ratio, and their sum.

    Args:
        model: an Activation Beacon compressor.
        args ([`TrainingConfig`]): `ratio_mode` is "random"; `ratio_schedule` says what is drawn from when.
        kwargs: as for `CompressionTrainer`; batches come from `CompressionCollator(mode="full_context")`.
    """

    def __init__(self, model: PreTrainedModel, args: TrainingConfig, **kwargs: Any):
        if args.ratio_mode != "random":
            raise ValueError(f"a ratio is drawn for each window: ratio_mode must be 'random', got {args.ratio_mode!r}")
        super().__init__(model=model, args=args, **kwargs)

    def _check_batch(self, inputs: dict[str, Any]) -> None:
        """Every batch of texts will do."""

    def window_ratios(self, num_tokens: int) -> list[tuple[str, Sequence[int]]]:
        """Return the losses of a step over texts of so many tokens by name, each with the ratios of its windows."""
        ratios = self.allowed_ratios()
        if not self.model.training:
            self._metrics["eval"]["num_ratios_summed"].append(len(ratios))
            return [(f"ratio_{ratio}", [ratio]) for ratio in ratios]
        # By step, so that all devices agree and a resumed run draws the same.
        rng = random.Random(f"{self.args.seed}/{self.state.global_step}")
        shortest = min(map(self.model.config.window_tokens, ratios))
        return [(MIXED_RATIOS, [rng.choice(ratios) for _ in range(-(-num_tokens // shortest))])]

    def _step_loss(self, batch: dict[str, Tensor], num_items_in_batch: Tensor | int | None) -> Tensor:
        target, backbone = self._target(batch, num_items_in_batch), self._unwrapped().base_model
        text = batch["input_ids"], batch["attention_mask"]
        losses = [
            self._memory_loss(backbone.read_windows(*text, ratios), batch["labels"], target, name)
            for name, ratios in self.window_ratios(text[0].shape[1])
        ]
        return torch.stack(losses).sum()


def build(model_args: ModelArguments, data_args: DataArguments, args: TrainingConfig) -> WindowTrainer:
    """Return the trainer of a recipe."""
    model, tokenizer = load(model_args, args)
    record_prompts(model.config, tokenizer, data_args)
    return WindowTrainer(**trainer_arguments(model, tokenizer, data_args, args, "full_context", WindowDataset))
