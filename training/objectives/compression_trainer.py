# SPDX-License-Identifier: Apache-2.0
"""Training of a compressor at several ratios from one encoding of each context."""

from __future__ import annotations

import random
import re
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from transformers.trainer_utils import EvalLoopOutput
from trl import SFTTrainer

from ...modeling.memory.compressed_context import CompressedContext
from ..arguments import TrainingConfig
from ..base_trainer import BaseTrainer
from ..losses import logits_function, negative_log_likelihood, prediction_positions

# What the log calls a loss over rows of different ratios.
MIXED_RATIOS = "mixed_ratios"
# A loss in addition to that of the text; the log's mean over ratios leaves it out.
_OWN_LOSS = "own_loss"


class CompressionTrainer(BaseTrainer, SFTTrainer):
    r"""Trains a compressor at several ratios: a context is encoded once, each ratio's memory is read once.

    The loss is the mean cross-entropy over target tokens, summed over the step's ratios; `loss` in the log is the mean
    over ratios. With `context_mode` "full_context" or "no_context" nothing is compressed (the bounds of EPL, Appendix
    D).

    Args:
        model: a compressor.
        args ([`TrainingConfig`]): `ratio_mode` "all" trains every ratio at each step (mean pooling, section 4.2),
            "random" one ratio, and "per_sample" each row at the ratio that the collator drew (GMSA, section 4.1).
            Evaluation is always at every ratio.
        kwargs: as for `trl.SFTTrainer`; batches come from `CompressionCollator`.
    """

    _is_mean_over_targets = True

    def __init__(self, model: PreTrainedModel, args: TrainingConfig, **kwargs: Any):
        known = list(model.config.compression_ratios)
        if wrong := sorted({ratio for _, ratios in args.ratio_schedule or () for ratio in ratios} - set(known)):
            raise ValueError(f"ratio_schedule has the ratios {wrong}; the model's compression_ratios are {known}")
        # Examples are tokenized already.
        args.dataset_kwargs = {**(args.dataset_kwargs or {}), "skip_prepare_dataset": True}
        args.remove_unused_columns = False
        # Only losses are needed in evaluation; logits would take one more forward pass.
        args.prediction_loss_only = True
        method = model.config.model_type.removesuffix("_compressor").replace("_", "-")
        self._tag_names = ("context-compression", method)
        # Whether texts are read behind memories is for `_check_batch` to say, not for the model to warn of.
        model.base_model.warns_of_no_context = False
        super().__init__(model=model, args=args, **kwargs)
        # Of an evaluation's batches so far, by name: a sum, and over how many.
        self._sums: dict[str, tuple[float, ...]] = {}

    @property
    def _logged(self) -> dict[str, list[float]]:
        return self._metrics["train" if self.model.training else "eval"]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log the loss as the mean over ratios, and the sum that is trained on."""
        counts = self._logged.pop("num_ratios_summed", [])
        count = sum(counts) / len(counts) if counts else 1
        own = self._logged.get(_OWN_LOSS) or [0.0]
        for name in [name for name in logs if re.fullmatch(r"(eval_(\w+_)?)?loss", name)] if count > 1 else []:
            logs[f"{name}_sum_over_ratios"] = logs[name]
            logs[name] = (logs[name] - sum(own) / len(own)) / count
            logs["num_ratios_summed"] = count
        super().log(logs, *args, **kwargs)

    def create_optimizer(self, model: PreTrainedModel | None = None) -> torch.optim.Optimizer:
        """Create the recipe's optimizer; `ValueError` where FSDP cannot put a model together again."""
        if self.is_fsdp_enabled and self.args.context_mode == "compressed" and self.data_collator.memories is None:
            config = self.model.config
            # Gradients reach a layer through keys and values, past FSDP's hooks; of accumulated summaries, processes
            # make as many passes as their own contexts have segments.
            if config.carrier == "key_values" or "segments" in config.objectives:
                raise ValueError(
                    f"FSDP cannot cut up {config.method}: take DDP (accelerate/multi_gpu.yaml) or ZeRO-2 "
                    "(accelerate/deepspeed_zero2.yaml)"
                )
        return super().create_optimizer(model)

    def allowed_ratios(self) -> list[int]:
        """Return the ratios that the present step's place in training has; all of them in evaluation."""
        if self.args.ratio_schedule is None or not self.model.training:
            return list(self.model.config.compression_ratios)
        done = self.state.global_step / max(1, self.state.max_steps)
        return [list(ratios) for start, ratios in self.args.ratio_schedule if start <= done][-1]

    def step_ratios(self) -> list[int]:
        """Return the ratios of the present step: all that are allowed, or with "random" one of them."""
        ratios = self.allowed_ratios()
        if self.args.ratio_mode != "random" or not self.model.training:
            return ratios
        # By step, so that all devices and accumulated batches agree and a resumed run draws the same.
        return [random.Random(f"{self.args.seed}/{self.state.global_step}").choice(ratios)]

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Return the sum of the losses behind all memories of the step, from one encoding."""
        self._check_batch(inputs)

        def step(**batch: Tensor) -> Tensor:
            return self._step_loss(batch, num_items_in_batch)

        with self.accelerator.autocast():
            loss = self.redirected_forward(model, step, **inputs)
        self._count_tokens(inputs)
        # Whoever asks for outputs gets no logits: they are never all in memory.
        return (loss, CausalLMOutput(loss=loss)) if return_outputs else loss

    def _unwrapped(self) -> PreTrainedModel:
        return self.accelerator.unwrap_model(self.model)

    def _check_batch(self, inputs: dict[str, Any]) -> None:
        has_context = not {"context_input_ids", "memory"}.isdisjoint(inputs)
        if has_context != (self.args.context_mode == "compressed"):
            raise ValueError(
                f"context_mode {self.args.context_mode!r} needs batches with{'' if not has_context else 'out'} "
                "context_input_ids: give CompressionCollator the same mode"
            )

    def _memories(self, batch: dict[str, Tensor]) -> tuple[list[tuple[str, CompressedContext | None]], Tensor | float]:
        """Return the step's memories from one encoding, each with the name of its loss, and the method's own loss."""
        if self.args.context_mode != "compressed":
            return [(self.args.context_mode, None)], 0.0
        if "memory" in batch:
            memory: Any = batch["memory"]
            return [(f"ratio_{memory.ratio}" if isinstance(memory.ratio, int) else MIXED_RATIOS, memory)], 0.0
        names = ("context_input_ids", "context_attention_mask", "context_chunk_lengths")
        context = {name.removeprefix("context_"): batch[name] for name in names if name in batch}
        if self.args.ratio_mode == "per_sample" and self.model.training:
            memory, own_loss = self._compressed(context, batch["ratio"])
            return [(MIXED_RATIOS, memory)], own_loss
        ratios = self.step_ratios()
        memories, own_loss = self._compressed(context, ratios)
        self._logged["num_ratios_summed"].append(len(memories))
        return [(f"ratio_{ratio}", memory) for ratio, memory in zip(ratios, memories, strict=True)], own_loss

    def _compressed(self, context: dict[str, Tensor], ratio: Any) -> tuple[Any, Tensor | float]:
        """Return the memories of the contexts, and the loss of the method's own parts."""
        model = self._unwrapped()
        if not (model.base_model.has_own_loss and self.model.training):
            return model.compress(**context, ratio=ratio), 0.0
        own_losses: list[Tensor] = []
        memories = model.compress(**context, ratio=ratio, own_losses=own_losses)
        if not own_losses:
            return memories, 0.0
        losses = torch.cat(own_losses)
        self._record(_OWN_LOSS, losses.sum(), torch.tensor(len(losses), device=losses.device))
        return memories, losses.mean()

    def _states(self, batch: dict[str, Tensor], memory: CompressedContext | None, prefix: str = "") -> Tensor:
        """Last hidden states of a text, `(batch_size, width, hidden_size)`."""
        text = {name: batch[f"{prefix}{name}"] for name in ("input_ids", "attention_mask")}
        if memory is not None and self.model.training:
            self._count_padding(memory, text["attention_mask"])
        return self._unwrapped().base_model(**text, memory=memory, use_cache=False).last_hidden_state

    def _count_padding(self, memory: CompressedContext, text_mask: Tensor) -> None:
        """Log the share of the decoder's places that hold no slot and no token (`padding_share`)."""
        real = memory.num_slots + text_mask.sum(dim=1)
        total, longest = torch.stack([real.sum(), real.max()]).tolist()
        if memory.carrier == "key_values":
            longest = memory.attention_mask.shape[1] + text_mask.shape[1]
        self._metrics["train"]["padding_share"].append(1 - total / (len(real) * longest))

    def _step_loss(self, batch: dict[str, Tensor], num_items_in_batch: Tensor | int | None) -> Tensor:
        target = self._target(batch, num_items_in_batch)
        memories, own_loss = self._memories(batch)
        losses = [
            self._memory_loss(self._states(batch, memory), batch["labels"], target, name) for name, memory in memories
        ]
        return torch.stack(losses).sum() + self._share(own_loss, num_items_in_batch)

    def _share(self, loss: Tensor | float, num_items_in_batch: Tensor | int | None) -> Tensor | float:
        """Scale a mean over a batch as the other losses, which are parts of a step."""
        is_whole = num_items_in_batch is None or not isinstance(loss, Tensor)
        return loss if is_whole else loss / self.current_gradient_accumulation_steps

    def _target(self, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None) -> Tensor:
        """Return the number of target tokens that the loss of each memory is divided by."""
        if num_items_in_batch is None:
            return count_targets(inputs["labels"]).clamp(min=1)
        return self._for_each_process(num_items_in_batch)

    def _for_each_process(self, num_items_in_batch: Tensor | int) -> Tensor:
        count = torch.as_tensor(num_items_in_batch)
        # DDP averages over devices what was divided by the number of targets of all of them.
        return count / (self.accelerator.num_processes if self.args.average_tokens_across_devices else 1)

    def _memory_loss(self, states: Tensor, labels: Tensor, target: Tensor, name: str) -> Tensor:
        return self._text_loss(states, labels, name) / target

    def _text_loss(self, states: Tensor, labels: Tensor, name: str) -> Tensor:
        """The summed cross-entropy of a text's targets, which is logged as a mean."""
        chosen = prediction_positions(labels)
        targets = labels[:, 1:][chosen[:, :-1]]
        total, correct = negative_log_likelihood(states[chosen], targets, logits_function(self._unwrapped()))
        self._record(f"loss_{name}", total, chosen.sum())
        self._record(f"token_accuracy_{name}", correct, chosen.sum())
        return total

    def _record(self, name: str, total: Tensor, count: Tensor) -> None:
        """Note a mean for the log: in training that of this batch, in evaluation that of all batches so far."""
        total, count = total.detach().float(), count.float()
        if self.model.training:
            mean = self.accelerator.gather_for_metrics(total / count.clamp(min=1)).mean()
            self._metrics["train"][name].append(mean.item())
            return
        sums = self.accelerator.reduce(torch.stack([total, count]), reduction="sum").tolist()
        self._sums[name] = tuple(map(sum, zip(sums, self._sums.get(name, (0.0, 0.0)), strict=True)))
        self._metrics["eval"][name] = [self._sums[name][0] / max(1.0, self._sums[name][1])]

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Run the library's, with a loss over all targets in place of the mean of the batches' losses."""
        self._sums.clear()
        output = super().evaluation_loop(*args, **kwargs)
        if self._is_mean_over_targets:
            losses = [name for name in self._sums if name.startswith("loss_")]
            loss = sum(self._loss_weight(name) * self._metrics["eval"][name][0] for name in losses)
            output.metrics.update({name: loss for name in output.metrics if name.endswith("_loss")})
        return output

    def _loss_weight(self, name: str) -> float:
        """Return the weight of a logged loss in the loss of an evaluation."""
        return 1.0

    def _count_tokens(self, inputs: dict[str, Any]) -> None:
        if self.model.training:
            self.run_counts.add(num_tokens=int(inputs["attention_mask"].sum()))


class Seq2SeqCompressionTrainer(CompressionTrainer):
    """`CompressionTrainer` of an encoder-decoder; `token_accuracy_ratio_C` is that of DeCAL's Table 1."""

    def _states(self, batch: dict[str, Tensor], memory: CompressedContext | None, prefix: str = "") -> Tensor:
        text = {name: batch[f"{prefix}{name}"] for name in ("input_ids", "attention_mask")}
        return self._unwrapped().text_states(**text, memory=memory, use_cache=False).last_hidden_state


def count_targets(labels: Tensor) -> Tensor:
    """Return how many tokens of `labels` `(batch_size, width)` are predicted from the one before them."""
    return (labels[:, 1:] != -100).sum()
