# SPDX-License-Identifier: Apache-2.0
"""Joint pretraining of memory-token methods: reconstruct and continue a document from the same slots."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..arguments import TrainingConfig
from .compression import CompressionTrainer, count_targets
from .compression_collator import JOINT_TASKS


class JointPretrainingTrainer(CompressionTrainer):
    r"""Trains a compressor to repeat its context and to go on after it: alpha * AE + (1 - alpha) * LM.

    EPL, section 3.1.1, equations 2 and 3 and the weighted loss. A context is encoded once; both texts are read behind
    the same slots, at every ratio of the step. Each loss is a mean over its own target tokens, of the whole step
    (accumulated batches and all processes); ratios are summed.

    A text starts with its task token, [AE] or [LM]; with BOS in methods that have none, which then cannot tell from
    its start what to do. With `context_mode` "full_context" or "no_context" nothing is compressed, as in
    [`CompressionTrainer`].

    Args:
        model: a compressor.
        args ([`TrainingConfig`]): `alpha` is the weight of the reconstruction; with 0 or 1 the text without weight is
            not read at all.
        kwargs: as for `CompressionTrainer`; batches come from `CompressionCollator(mode="joint")`.
    """

    _name = "Joint pretraining on reconstruction and continuation"
    _paper = {
        "title": "Position IDs Matter: An Enhanced Position Layout for Efficient Context Compression in Large "
        "Language Models",
        "id": "2409.14364",
        "citation": textwrap.dedent("""\
            @inproceedings{zhao2025position,
                title     = {Position {IDs} Matter: An Enhanced Position Layout for Efficient Context Compression in
                             Large Language Models},
                author    = {Runsong Zhao and Xin Liu and Xinyu Liu and Pengcheng Huang and Chunyang Xiao and
                             Tong Xiao and JingBo Zhu},
                booktitle = {Findings of the Association for Computational Linguistics: EMNLP 2025},
                year      = 2025,
            }"""),
    }
    _collator_mode = "joint"

    def __init__(self, model: PreTrainedModel, args: TrainingConfig, **kwargs: Any):
        super().__init__(model=model, args=args, **kwargs)
        weights = dict(zip(JOINT_TASKS, (args.alpha, 1 - args.alpha), strict=True))
        self.weights = {task: weight for task, weight in weights.items() if weight > 0}

    def _check_batch(self, inputs: dict[str, Any]) -> None:
        super()._check_batch(inputs)
        if "reconstruction_input_ids" not in inputs:
            raise ValueError(
                "batches need two texts, reconstruction and continuation: use mode='joint' in the collator"
            )

    def _step_loss(self, batch: dict[str, Tensor], num_items_in_batch: Tensor | None) -> Tensor:
        counts = self._target(batch, num_items_in_batch)
        losses = []
        for name, memory in self._memories(batch):
            for (task, weight), count in zip(self.weights.items(), counts, strict=True):
                states = self._states(batch, memory, f"{task}_")
                losses.append(weight * self._memory_loss(states, batch[f"{task}_labels"], count, f"{task}_{name}"))
        return torch.stack(losses).sum()

    def _target(self, inputs: dict[str, Any], num_items_in_batch: Tensor | None) -> Tensor:
        """Number of target tokens of each text with a weight, `(num_texts,)`."""
        if num_items_in_batch is None:
            return self._count_targets([inputs]).clamp(min=1)
        return self._for_each_process(num_items_in_batch)

    def _count_targets(self, batches: Sequence[dict[str, Any]]) -> Tensor:
        counts = [sum(count_targets(batch[f"{task}_labels"]) for batch in batches) for task in self.weights]
        return torch.stack(counts)

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> Tensor | None:
        """Target tokens of each text in a whole step: the Trainer would count a single `labels`."""
        if not batch_samples or "reconstruction_labels" not in batch_samples[0]:
            return None
        counts = self._count_targets(batch_samples).to(device)
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            counts = self.accelerator.reduce(counts, reduction="sum")
        return counts

    def _texts(self, inputs: dict[str, Any]) -> list[dict[str, Tensor]]:
        names = ("input_ids", "attention_mask")
        return [{name: inputs[f"{task}_{name}"] for name in names} for task in self.weights]

    def _count_tokens(self, inputs: dict[str, Any]) -> None:
        masks = [text["attention_mask"] for text in self._texts(inputs)]
        super()._count_tokens({"attention_mask": torch.cat([mask.flatten() for mask in masks])})

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        for text in self._texts(inputs):
            super()._track_num_input_tokens(text)
