# SPDX-License-Identifier: Apache-2.0
"""The base of every trainer: stops at a NaN loss, counts what was cut, records documents, resumes whole states."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import nn

from ..configuration.configuration_compressor import CompressorConfig
from ..data.document_ids import TrainingDocuments
from .optimizers import OptimizerChoice
from .run_counts import RunCounts

logger = logging.getLogger(__name__)

# Counts of some objectives alone.
_NOT_OF_ALL = ("num_tokens", "num_context_tokens")
_METADATA = ("example_ids", "num_cut", "documents")


def without_metadata(inputs: dict[str, Any]) -> dict[str, Any]:
    """The batch without what `CompressionCollator(with_metadata=True)` adds for people."""
    return {key: value for key, value in inputs.items() if key not in _METADATA}


def take_tokenized_examples(args: Any) -> None:
    """Set the arguments that keep TRL from preparing examples, which are tokenized already."""
    args.dataset_kwargs = {**(args.dataset_kwargs or {}), "skip_prepare_dataset": True}
    args.remove_unused_columns = False


class BaseTrainer(OptimizerChoice):
    """A `Trainer` that stops with the batch's ids when the loss is not finite, and logs context and cut-off tokens.

    Weights that are not finite are never saved, so the last checkpoint stays good. A resumed run counts on. Every
    checkpoint has the ids of the documents that trained it and chose beside it.

    Attributes:
        documents: those that this run has read so far, see [`TrainingDocuments`].
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.add_callback(RunCounts())
        self.documents, self._has_warned = TrainingDocuments(), False
        half = {p.dtype for p in self.model.parameters() if p.requires_grad and p.dtype.itemsize == 2}
        # DeepSpeed has float32 copies of its own.
        if half and not self.is_deepspeed_enabled:
            logger.warning(
                "weights train in %s, which rounds away steps below some 0.4 %% of a weight: give dtype float32 (bf16 "
                "true still computes in bfloat16, and save_dtype bfloat16 stores it)",
                half.pop(),
            )

    @property
    def run_counts(self) -> RunCounts:
        """What this run has counted."""
        return next(callback for callback in self.callback_handler.callbacks if isinstance(callback, RunCounts))

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
        if not self._has_warned and not others.isdisjoint(documents):
            self._has_warned = True
            logger.warning(
                "documents of eval_sources are trained on, too: what is chosen by their losses is chosen by what the "
                "model has learned by heart"
            )

    def gather_documents(self) -> None:
        """Put together what all processes have read; every process has to call this."""
        if self.accelerator.num_processes > 1:
            for other in gather_object([self.documents]):
                self.documents.add(other)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, with the counts of all processes so far."""
        if "loss" in logs:
            counts = self.run_counts.put_together(self.accelerator)
            logs |= {name: count for name, count in counts.items() if count or name not in _NOT_OF_ALL}
        super().log(logs, *args, **kwargs)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        # DeepSpeed has loaded its own by now, or has failed.
        if checkpoint is not None and not self.is_deepspeed_enabled:
            _check_states(Path(checkpoint))
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
        if state_dict is not None:
            # Gathered one by one from several processes, tied weights are two tensors, and the file would hold both.
            tied = self.model.all_tied_weights_keys
            state_dict = {name: weight for name, weight in state_dict.items() if name not in tied}
        super()._save(output_dir, state_dict)
        self.documents.save(output_dir or self.args.output_dir)


def _check_states(checkpoint: Path) -> None:
    """Raise `ValueError` when a checkpoint lacks its optimizer or scheduler: the library would make new ones."""
    names = [path.name for path in checkpoint.iterdir()]
    # Several processes may have several files or folders of one.
    missing = [part for part in ("optimizer", "scheduler") if not any(part in name for name in names)]
    if missing:
        raise ValueError(
            f"{checkpoint} has no state of the {' and '.join(missing)}, so training cannot go on as it stopped (was "
            "it saved with `save_only_model`?): start a new run from its weights, with `checkpoint` in place of "
            "`resume_from_checkpoint`"
        )
