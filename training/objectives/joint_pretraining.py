# SPDX-License-Identifier: Apache-2.0
"""The objective joint: a compressor learns to repeat its context and to go on after it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...data.rows import draw_document
from ...data.sources import DataSource
from ...data.synthetic_documents import GeneratedDocument
from ...modeling.parts.text_ids import context_start_ids
from ..arguments import DataArguments, ModelArguments, TrainingConfig
from .compression import load, trainer_arguments
from .compression_collator import JOINT_TASKS
from .compression_dataset import CompressionDataset
from .compression_trainer import CompressionTrainer, count_targets

# More tokens than a generated sentence has: a document so much longer is long enough after its last whole sentence.
_SPARE_TOKENS = 128


class JointDataset(CompressionDataset):
    """Examples of `context_ids`, `reconstruction_ids` and `continuation_ids` for the collator's mode "joint".

    A document X is a window of a text, its length |X| uniform from `min_document_tokens` to `max_document_tokens`. Its
    first p = floor(|X| / 2) tokens are the context, the rest is the completion (EPL, section 3.1.1 and Appendix C).
    The tokens that every compressed context starts with, such as BOS, count in |X| and p; the collator puts them
    there.
    """

    tasks = frozenset(JOINT_TASKS)

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.shortest_row = self.shortest - len(self.start_ids)

    def _lengths(self) -> tuple[int, int]:
        self.start_ids = context_start_ids(self.tokenizer)
        least = 2 * (len(self.start_ids) + 1)
        shortest, longest = self.data.min_document_tokens, self.data.max_document_tokens
        if not least <= shortest <= longest:
            raise ValueError(f"min_document_tokens must be {least} to max_document_tokens ({longest}), got {shortest}")
        return shortest, longest

    @staticmethod
    def num_tokens(example: Mapping[str, Any]) -> int:
        """Return the length of an example: context and both texts together."""
        return sum(len(example[f"{name}_ids"]) for name in ("context", *JOINT_TASKS))

    def _draw(self, source: DataSource, limit: int, rng: random.Random) -> GeneratedDocument:
        return draw_document(source, limit + _SPARE_TOKENS, rng, self.tokenizer, self.shortest + _SPARE_TOKENS)

    def _room(self, task: str, limit: int) -> int:
        return limit

    def _text_example(
        self, task: str, ids: list[int], limit: int, identifier: str, rng: random.Random, text_ends: bool = True
    ) -> dict[str, Any]:
        """A document from a random place of a text, cut in the middle."""
        num_start = len(self.start_ids)
        length = rng.randint(self.shortest, max(self.shortest, min(limit, len(ids) + num_start)))
        first = rng.randrange(len(ids) + num_start - length + 1)
        text = ids[first : first + length - num_start]
        split = length // 2 - num_start
        return {
            "context_ids": text[:split],
            "reconstruction_ids": [*text[:split], self.end],
            "continuation_ids": text[split:] + [self.end] * (text_ends and first + len(text) == len(ids)),
            "id": identifier,
            "num_cut": 0,
        }


class JointPretrainingTrainer(CompressionTrainer):
    r"""Trains a compressor to repeat its context and to go on after it: alpha * AE + (1 - alpha) * LM.

    EPL, section 3.1.1, equations 2 and 3. Both texts are read behind the same slots, at every ratio of the step. Each
    loss is a mean over its own target tokens of the whole step. A text without weight is not read. Arguments are as
    for `CompressionTrainer`.
    """

    def __init__(self, model: PreTrainedModel, args: TrainingConfig, **kwargs: Any):
        super().__init__(model=model, args=args, **kwargs)
        weights = dict(zip(JOINT_TASKS, (args.alpha, 1 - args.alpha), strict=True))
        self.weights = {task: weight for task, weight in weights.items() if weight > 0}

    def _step_loss(self, batch: dict[str, Tensor], num_items_in_batch: Tensor | int | None) -> Tensor:
        counts = self._target(batch, num_items_in_batch)
        losses = []
        memories, own_loss = self._memories(batch)
        for name, memory in memories:
            for (task, weight), count in zip(self.weights.items(), counts, strict=True):
                states = self._states(batch, memory, f"{task}_")
                losses.append(weight * self._memory_loss(states, batch[f"{task}_labels"], count, f"{task}_{name}"))
        return torch.stack(losses).sum() + self._share(own_loss, num_items_in_batch)

    def _loss_weight(self, name: str) -> float:
        return next((weight for task, weight in self.weights.items() if name.startswith(f"loss_{task}_")), 1.0)

    def _target(self, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None) -> Tensor:
        """Number of target tokens of each text with a weight, `(num_texts,)`."""
        if num_items_in_batch is None:
            return self._count_targets([inputs]).clamp(min=1)
        return self._for_each_process(num_items_in_batch)

    def _count_targets(self, batches: Sequence[dict[str, Any]]) -> Tensor:
        counts: list[Any] = [sum(count_targets(batch[f"{task}_labels"]) for batch in batches) for task in self.weights]
        return torch.stack(counts)

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> Tensor | None:
        """Target tokens of each text in a whole step: the Trainer would count a single `labels`."""
        if not batch_samples:
            return None
        counts = self._count_targets(batch_samples).to(device)
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            counts = self.accelerator.reduce(counts, reduction="sum")
        return counts

    def _count_tokens(self, inputs: dict[str, Any]) -> None:
        for task in self.weights:
            super()._count_tokens({"attention_mask": inputs[f"{task}_attention_mask"]})

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        for task in self.weights:
            text = {name: inputs[f"{task}_{name}"] for name in ("input_ids", "attention_mask")}
            super()._track_num_input_tokens(text)


def build(model_args: ModelArguments, data_args: DataArguments, args: TrainingConfig) -> JointPretrainingTrainer:
    """Return the trainer of a recipe."""
    model, tokenizer = load(model_args, args)
    return JointPretrainingTrainer(**trainer_arguments(model, tokenizer, data_args, args, "joint", JointDataset))
