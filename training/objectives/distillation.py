# SPDX-License-Identifier: Apache-2.0
"""The objective distillation: a compressor learns to answer as a teacher does that reads the whole context."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...modeling.parts.base_pass import trained_base_weights
from ..arguments import DataArguments, ModelArguments, TrainingConfig
from ..loading import teacher_language_model
from ..losses import distillation_loss, logits_function, prediction_positions
from .compression import load, record_prompts, trainer_arguments
from .compression_trainer import CompressionTrainer


class DistillationTrainer(CompressionTrainer):
    r"""Trains a compressor to answer as a teacher does that reads the whole context.

    Equations 5 and 6 of the paper: KL(teacher || student) at the answer's tokens, summed over them and over the step's
    ratios; the mean is taken over rows only. `args.nll_weight` adds the answer's own cross-entropy to `args.kl_weight`
    times this (xRAG: NLL + 2 KL).

    Args:
        teacher: the frozen teacher, of the same vocabulary; `None` for the compressor's own base without its adapters.
        model, args, kwargs: as for `CompressionTrainer`; batches come from `CompressionCollator(mode="distillation")`.
    """

    # It is one over rows.
    _is_mean_over_targets = False

    def __init__(
        self, model: PreTrainedModel, args: TrainingConfig, teacher: PreTrainedModel | None = None, **kwargs: Any
    ):
        super().__init__(model=model, args=args, **kwargs)
        # The loss is a mean over the batch's rows: the Trainer divides by the accumulation steps.
        self.loss_is_scaled_for_ga = self.model_accepts_loss_kwargs = False
        self.teacher = teacher
        if teacher is None:
            if moving := trained_base_weights(model):
                raise ValueError(
                    f"weights of the base itself train, such as {moving[0]}, so that it is no frozen teacher: give a "
                    "teacher, which may be the same base"
                )
            return
        teacher.requires_grad_(False).eval()
        self.teacher = self.accelerator.prepare_model(teacher, device_placement=True, evaluation_mode=True)

    def _target(self, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None) -> Tensor:
        """The teacher's states that predict the answer tokens, `(num_answer_tokens, hidden_size)`."""
        text = {"input_ids": inputs["full_input_ids"], "attention_mask": inputs["full_attention_mask"]}
        chosen = prediction_positions(inputs["full_labels"])
        with torch.no_grad():
            if self.teacher is not None:
                return self.accelerator.unwrap_model(self.teacher).base_model(**text, use_cache=False)[0][chosen]
            student = self._unwrapped()
            was_training = student.training
            student.eval()
            try:
                with student.base_language_model():
                    return student.base_model(**text, use_cache=False)[0][chosen]
            finally:
                student.train(was_training)

    def _memory_loss(self, states: Tensor, labels: Tensor, target: Tensor, name: str) -> Tensor:
        student = self._unwrapped()
        teacher = student if self.teacher is None else self.accelerator.unwrap_model(self.teacher)
        chosen = prediction_positions(labels)
        heads = logits_function(student), logits_function(teacher)
        divergence = distillation_loss(states[chosen], target, *heads)
        self._record(f"kl_per_token_{name}", divergence, chosen.sum())
        total = self.args.kl_weight * divergence
        if self.args.nll_weight:
            total = total + self.args.nll_weight * self._text_loss(states, labels, name)
        return total / labels.shape[0]


def build(model_args: ModelArguments, data_args: DataArguments, args: TrainingConfig) -> DistillationTrainer:
    """Return the trainer of a recipe; its teacher is the compressor's own base where the recipe names none."""
    model, tokenizer = load(model_args, args)
    record_prompts(model.config, tokenizer, data_args)
    teacher = None if model_args.teacher is None else teacher_language_model(model_args)
    return DistillationTrainer(teacher=teacher, **trainer_arguments(model, tokenizer, data_args, args, "distillation"))
