# SPDX-License-Identifier: Apache-2.0
"""Base of all trainers: it stops at a NaN loss, counts tokens, records documents and resumes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, is_compiled_module
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainerCallback
from transformers.optimization import Adafactor
from transformers.trainer_callback import ExportableState

from ..configuration.configuration_compressor import CompressorConfig
from ..data.document_ids import TrainingDocuments

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

COUNTS = ("num_tokens", "num_context_tokens", "num_cut_tokens", "num_cut_examples")
# Some objectives do not count these.
_OPTIONAL_COUNTS = ("num_tokens", "num_context_tokens")
_METADATA = ("example_ids", "num_cut", "documents")


def without_metadata(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the batch without what `CompressionCollator(with_metadata=True)` adds for people."""
    return {key: value for key, value in inputs.items() if key not in _METADATA}


class RunCounts(TrainerCallback, ExportableState):
    """Counts of a training run that its checkpoints hold, so that a resumed run goes on from them."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(COUNTS, 0)
        self.earlier_seconds = 0.0
        self._began: float | None = None

    @property
    def seconds(self) -> float:
        """Wall-clock seconds of training so far."""
        return self.earlier_seconds + (0.0 if self._began is None else time.perf_counter() - self._began)

    def add(self, **counts: int) -> None:
        """Count what a batch has."""
        for name, number in counts.items():
            self.counts[name] += number

    def put_together(self, accelerator: Accelerator) -> dict[str, int]:
        """Return the counts of all processes, which process 0 keeps from now on; every process has to call this."""
        own = torch.tensor([self.counts[name] for name in COUNTS], device=accelerator.device)
        total = dict(zip(COUNTS, accelerator.reduce(own, reduction="sum").tolist(), strict=True))
        self.counts = dict(total) if accelerator.is_main_process else dict.fromkeys(COUNTS, 0)
        return total

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        return {"args": {}, "attributes": {"counts": dict(self.counts), "earlier_seconds": self.seconds}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Go on from the counts of a resumed checkpoint."""
        saved = state.stateful_callbacks.get(type(self).__name__)
        if saved is not None and state.global_step:
            # They are those of all processes.
            counts = saved["attributes"]["counts"] if state.is_world_process_zero else dict.fromkeys(COUNTS, 0)
            self.counts, self.earlier_seconds = dict(counts), saved["attributes"]["earlier_seconds"]
        state.stateful_callbacks[type(self).__name__] = self.state()
        self._began = time.perf_counter()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop the clock."""
        self.earlier_seconds, self._began = self.seconds, None


class BaseTrainer(Trainer):
    """A `Trainer` that stops with the batch's ids when the loss is not finite, and logs context and cut-off tokens.

    Weights that are not finite are never saved. Checkpoints hold the counts and the ids of `documents` so far.
    """

    optimizer: torch.optim.Optimizer | None

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.run_counts = RunCounts()
        self.add_callback(self.run_counts)
        self.documents, self._has_warned = TrainingDocuments(), False
        half = {p.dtype for p in self.model.parameters() if p.requires_grad and p.dtype.itemsize == 2}
        # DeepSpeed has float32 copies of its own.
        if half and not self.is_deepspeed_enabled:
            logger.warning(
                "weights train in %s, which rounds away steps below some 0.4 %% of a weight: give dtype float32 (bf16 "
                "true still computes in bfloat16, and save_dtype bfloat16 stores it)",
                half.pop(),
            )

    def redirected_forward(self, wrapped: nn.Module, function: Callable[..., Result], **inputs: Any) -> Result:
        """Run a step, `function(**inputs)`, in place of the model's forward pass, called through what wraps the model.

        A step makes several passes, where DDP and FSDP count on a single one.
        """
        if isinstance(wrapped, nn.DataParallel):
            raise ValueError(
                "one process sees several GPUs (DataParallel), which this training step does not support: start one "
                "process for each GPU with `accelerate launch`, or show it one GPU with CUDA_VISIBLE_DEVICES=0"
            )
        module = self.accelerator.unwrap_model(self.model)
        if is_compiled_module(module):
            raise ValueError("torch_compile is not supported here: the step would run without it; leave it out")
        own_forward = vars(module).get("forward")
        module.forward = function
        try:
            return wrapped(**inputs)
        finally:
            if own_forward is None:
                del module.forward
            else:
                module.forward = own_forward

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """One forward and backward pass; `ValueError` names step and batch ids when the loss is NaN or infinite."""
        ids, cut = inputs.get("example_ids"), inputs.get("num_cut", ())
        contexts, memory = inputs.get("context_attention_mask"), inputs.get("memory")
        contexts = contexts if memory is None else memory.num_context_tokens
        self._note_documents(self.documents.trained, inputs, self.documents.chose)
        self.run_counts.add(
            num_cut_tokens=sum(cut),
            num_cut_examples=sum(tokens > 0 for tokens in cut),
            num_context_tokens=0 if contexts is None else int(contexts.sum()),
        )
        loss = super().training_step(model, without_metadata(inputs), *args, **kwargs)
        if not torch.isfinite(loss):
            batch = f"batch ids {ids}" if ids is not None else f"a batch of {len(next(iter(inputs.values())))} rows"
            raise ValueError(
                f"the loss is {loss.item()} at step {self.state.global_step + 1}, {batch}; training stops. The last "
                "checkpoint is intact: resume it (`--resume_from_checkpoint latest`) with `--dtype float32`, "
                "`--attn_implementation eager` or a lower `--learning_rate`"
            )
        return loss

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """One forward pass of an evaluation, whose documents are noted as those that choose."""
        self._note_documents(self.documents.chose, inputs, self.documents.trained)
        return super().prediction_step(model, without_metadata(inputs), *args, **kwargs)

    def _note_documents(self, noted: set[str], inputs: Mapping[str, Any], others: set[str]) -> None:
        documents = inputs.get("documents", ())
        noted.update(documents)
        self.documents.is_whole &= "documents" in inputs
        if not self._has_warned and not others.isdisjoint(documents):
            self._has_warned = True
            logger.warning(
                "documents of eval_sources are trained on, too: their losses measure what was learned by heart"
            )

    def create_optimizer(self, model: PreTrainedModel | None = None) -> torch.optim.Optimizer:
        """Create T5's Adafactor when the recipe says so, and else the library's optimizer."""
        if self.optimizer is None and self.args.optimizer == "adafactor":
            # Updates are clipped at a root mean square of 1, before a rate that is relative to each parameter's.
            trained = [parameter for parameter in (model or self.model).parameters() if parameter.requires_grad]
            scaling = {"scale_parameter": True, "relative_step": False, "warmup_init": False}
            self.optimizer = Adafactor(
                trained, self.args.learning_rate, weight_decay=self.args.weight_decay, **scaling
            )
        return super().create_optimizer(model)

    def gather_documents(self) -> None:
        """Put together what all processes have read; every process has to call this."""
        if self.accelerator.num_processes > 1:
            for other in gather_object([self.documents]):
                self.documents.add(other)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, with the counts of all processes so far."""
        if "loss" in logs:
            counts = self.run_counts.put_together(self.accelerator)
            logs |= {name: count for name, count in counts.items() if count or name not in _OPTIONAL_COUNTS}
        super().log(logs, *args, **kwargs)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self.documents.add(TrainingDocuments.of(checkpoint))
        super()._load_optimizer_and_scheduler(checkpoint)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and not torch.isfinite(parameter).all():
                raise ValueError(
                    f"{name} is not finite after step {self.state.global_step} (a gradient was not); nothing is saved"
                )
        self.run_counts.put_together(self.accelerator)
        self.gather_documents()
        super()._save_checkpoint(*args, **kwargs)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write TRL's draft of a plain language model; a compressor has a card of its own from when it is saved."""
        if not isinstance(self.model.config, CompressorConfig):
            super().create_model_card(*args, **kwargs)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        # The run's result alone: checkpoints resume exactly. It is read back in the type that its configuration names.
        save_dtype = self.args.save_dtype if output_dir == self.args.output_dir else None
        if save_dtype is not None:
            dtype, weights = getattr(torch, save_dtype), state_dict or self.model.state_dict()
            state_dict = {name: w.to(dtype) if w.is_floating_point() else w for name, w in weights.items()}
        if state_dict is not None:
            # Gathered or converted one by one, tied weights are two tensors, and the file would hold both.
            tied = self.model.all_tied_weights_keys
            state_dict = {name: weight for name, weight in state_dict.items() if name not in tied}
        super()._save(output_dir, state_dict)
        self.documents.save(output_dir or self.args.output_dir)
