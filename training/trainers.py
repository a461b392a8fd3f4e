"""Trainers of a compressor: from the text itself, or from a teacher that reads the whole context."""

from __future__ import annotations

import random
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from trl import SFTTrainer

from .arguments import TrainingConfig
from .losses import distillation_loss, logits_function, negative_log_likelihood, prediction_positions
from .step_guard import StepGuard, without_metadata
from .suggestions import check_choice
from .wrapped_forward import as_forward_pass

_PAPER = {
    "title": "Simple Context Compression: Mean-Pooling and Multi-Ratio Training",
    "id": "2510.20797",
    "citation": textwrap.dedent("""\
        @misc{feldman2025simple,
            title         = {Simple Context Compression: Mean-Pooling and Multi-Ratio Training},
            author        = {Yair Feldman and Yoav Artzi},
            year          = 2025,
            eprint        = {2510.20797},
            archivePrefix = {arXiv},
        }"""),
}


class TeacherTrainer(StepGuard, SFTTrainer):
    """Supervised fine-tuning of a plain language model on full contexts: the teacher of distillation.

    Takes the arguments of `trl.SFTTrainer`; batches come from `CompressionCollator(mode="full_context")`.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        _prepare_arguments(kwargs["args"])
        super().__init__(*args, **kwargs)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """TRL's own loss."""
        return super().compute_loss(model, without_metadata(inputs), return_outputs, num_items_in_batch)


class CompressionTrainer(StepGuard, SFTTrainer):
    r"""Trains a compressor at several ratios: a context is encoded once, each ratio's memory is read once.

    The loss is cross-entropy of the targets (mean over target tokens), summed over the step's ratios. Logits exist for
    target positions only, `distillation_chunk_size` of them at a time.

    Args:
        model: a compressor (anything with `compress`).
        args ([`TrainingConfig`]): `ratio_mode` "all" trains every ratio of the checkpoint at each step (section 4.2 of
            the paper), "random" one ratio per step, drawn from the seed and the step.
        kwargs: as for `trl.SFTTrainer`; batches come from `CompressionCollator`.

    Raises:
        TypeError: the model cannot compress, or `args` is not a `TrainingConfig`.
    """

    _tag_names = ("context-compression", "mean-pooling")
    _name = "Multi-ratio compression"
    _paper = _PAPER
    _collator_mode = "compressed"

    def __init__(self, model: PreTrainedModel, args: TrainingConfig, **kwargs: Any):
        if not isinstance(args, TrainingConfig):
            raise TypeError(f"args must be a TrainingConfig, got {type(args).__name__}")
        if not callable(getattr(model, "compress", None)):
            raise TypeError(f"model must be a compressor with a compress method, got {type(model).__name__}")
        check_choice("ratio_mode", args.ratio_mode, ("all", "random"))
        _prepare_arguments(args)
        # Only losses are needed in evaluation; logits would take one more forward pass.
        args.prediction_loss_only = True
        super().__init__(model=model, args=args, **kwargs)

    def step_ratios(self) -> list[int]:
        """The ratios of the present step: all, or in training with `ratio_mode="random"` one of them."""
        ratios = list(self.model.config.compression_ratios)
        if self.args.ratio_mode == "all" or not self.model.training:
            return ratios
        # By step, so that all devices and accumulated batches agree and a resumed run draws the same.
        return [random.Random(f"{self.args.seed}/{self.state.global_step}").choice(ratios)]

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Sum of the losses of all ratios of the step, from one encoding."""
        inputs = without_metadata(inputs)
        if "context_input_ids" not in inputs:
            raise ValueError(f"batches need context_input_ids: use CompressionCollator(mode={self._collator_mode!r})")
        ratios = self.step_ratios()

        def step(**batch: Tensor) -> Tensor:
            return self._step_loss(batch, ratios, num_items_in_batch)

        with self.accelerator.autocast():
            loss = as_forward_pass(model, self._unwrapped(), step, **inputs)
        self._count_tokens(inputs)
        # Whoever asks for outputs gets no logits: they are never all in memory.
        return (loss, CausalLMOutput(loss=loss)) if return_outputs else loss

    def _unwrapped(self) -> PreTrainedModel:
        return self.accelerator.unwrap_model(self.model)

    def _step_loss(
        self, batch: dict[str, Tensor], ratios: list[int], num_items_in_batch: Tensor | int | None
    ) -> Tensor:
        model = self._unwrapped()
        target = self._target(batch, num_items_in_batch)
        context = {"input_ids": batch["context_input_ids"], "attention_mask": batch["context_attention_mask"]}
        text = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "use_cache": False}
        losses = []
        for ratio, memory in zip(ratios, model.compress(**context, ratio=ratios), strict=True):
            states = model.base_model(**text, memory=memory).last_hidden_state
            losses.append(self._ratio_loss(states, batch["labels"], target, ratio))
        return torch.stack(losses).sum()

    def _target(self, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None) -> Tensor:
        """What every ratio of the step shares: here the number of target tokens that the loss is divided by."""
        if num_items_in_batch is None:
            return (inputs["labels"][:, 1:] != -100).sum().clamp(min=1)
        count = torch.as_tensor(num_items_in_batch)
        # DDP averages over devices what was divided by the number of targets of all of them.
        return count / (self.accelerator.num_processes if self.args.average_tokens_across_devices else 1)

    def _ratio_loss(self, states: Tensor, labels: Tensor, target: Tensor, ratio: int) -> Tensor:
        chosen = prediction_positions(labels)
        head = logits_function(self._unwrapped())
        total, correct = negative_log_likelihood(
            states[chosen], labels[:, 1:][chosen[:, :-1]], head, self.args.distillation_chunk_size
        )
        count = chosen.sum().clamp(min=1)
        self._record(f"loss_ratio_{ratio}", total / count)
        self._record(f"token_accuracy_ratio_{ratio}", correct / count)
        return total / target

    def _record(self, name: str, value: Tensor) -> None:
        mode = "train" if self.model.training else "eval"
        self._metrics[mode][name].append(self.accelerator.gather_for_metrics(value.detach().float()).mean().item())

    def _count_tokens(self, inputs: dict[str, Any]) -> None:
        if self.model.training:
            count = self.accelerator.gather_for_metrics(inputs["attention_mask"].sum()).sum().item()
            self._total_train_tokens += count
        self._metrics["train" if self.model.training else "eval"]["num_tokens"] = [self._total_train_tokens]


class DistillationTrainer(CompressionTrainer):
    r"""Trains a compressor to answer as a teacher does that reads the whole context.

    Equations 5 and 6 of the paper: KL(teacher || student) at the gold answer tokens, summed over them and over the
    step's ratios; the mean is taken over rows only. Batches come from `CompressionCollator(mode="distillation")`, so
    that teacher and student see the same prompt and answer.

    Args:
        model: a compressor.
        args ([`TrainingConfig`]): training arguments.
        teacher: the frozen teacher, a causal language model of the same vocabulary. `None`: the compressor's own
            base without its adapters, which costs no memory.
        kwargs: as for `CompressionTrainer`.

    Raises:
        ValueError: the teacher has another vocabulary.
    """

    _name = "Distillation from full context"
    _collator_mode = "distillation"

    def __init__(
        self, model: PreTrainedModel, args: TrainingConfig, teacher: PreTrainedModel | None = None, **kwargs: Any
    ):
        super().__init__(model=model, args=args, **kwargs)
        # The loss is a mean over the batch's rows: the Trainer divides by the accumulation steps.
        self.loss_is_scaled_for_ga = False
        self.model_accepts_loss_kwargs = False
        self.teacher = teacher
        if teacher is not None:
            sizes = [m.get_output_embeddings().weight.shape[0] for m in (model, teacher)]
            if sizes[0] != sizes[1]:
                raise ValueError(f"student and teacher must share a vocabulary, got {sizes[0]} and {sizes[1]} tokens")
            teacher.requires_grad_(False).eval()
            self.teacher = self.accelerator.prepare_model(teacher, evaluation_mode=True)

    def _target(self, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None) -> Tensor:
        """The teacher's states that predict the answer tokens, `(num_answer_tokens, hidden_size)`."""
        if "full_input_ids" not in inputs:
            raise ValueError("batches need full_input_ids: use CompressionCollator(mode='distillation')")
        text = {"input_ids": inputs["full_input_ids"], "attention_mask": inputs["full_attention_mask"]}
        chosen = prediction_positions(inputs["full_labels"])
        with torch.no_grad():
            if self.teacher is not None:
                return self.accelerator.unwrap_model(self.teacher).base_model(**text, use_cache=False)[0][chosen]
            student = self._unwrapped()
            with student.base_language_model(), _evaluating(student):
                return student.base_model(**text, use_cache=False)[0][chosen]

    def _ratio_loss(self, states: Tensor, labels: Tensor, target: Tensor, ratio: int) -> Tensor:
        student = self._unwrapped()
        teacher = student if self.teacher is None else self.accelerator.unwrap_model(self.teacher)
        chosen = prediction_positions(labels)
        total = distillation_loss(
            states[chosen],
            target,
            logits_function(student),
            logits_function(teacher),
            self.args.distillation_chunk_size,
        )
        self._record(f"kl_per_token_ratio_{ratio}", total / chosen.sum().clamp(min=1))
        return total / labels.shape[0]


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Switch dropout off for a `with` block."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def _prepare_arguments(args: Any) -> None:
    """What makes TRL leave tokenized examples and our collator alone."""
    args.dataset_kwargs = {**(args.dataset_kwargs or {}), "skip_prepare_dataset": True}
    args.remove_unused_columns = False
