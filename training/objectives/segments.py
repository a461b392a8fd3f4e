# SPDX-License-Identifier: Apache-2.0
"""The objective segments: the next token, in segments that are read behind the summaries of those before them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...modeling.parts.text_ids import context_start_ids
from ..arguments import DataArguments, ModelArguments, TrainingConfig
from .compression import load, trainer_arguments
from .compression_collator import CompressionCollator
from .compression_trainer import CompressionTrainer, count_targets
from .packed_texts import PackedBlocks

SoftPrompt = tuple[Tensor, Tensor]


class SegmentDataset(PackedBlocks):
    """Blocks of `max_document_tokens`, what every context starts with included; the collator puts that there."""

    def _block_size(self) -> int:
        return self.data.max_document_tokens - len(context_start_ids(self.tokenizer))


class SegmentCollator(CompressionCollator):
    """Makes `input_ids`, `attention_mask`, `labels` and `segment_lengths`, which all rows of a batch share, of blocks.

    A batch is cut into equal substeps, and these into segments: at random by the seed, or in equal parts. The first
    token of a substep has no label, since the state before it belongs to another backward pass.
    """

    def __init__(
        self,
        *args: Any,
        substeps: int = 2,
        segments_per_substep: int = 2,
        is_random: bool = True,
        longest_segment: int = 2**20,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self.substeps, self.segments_per_substep, self.is_random = substeps, segments_per_substep, is_random
        self.longest_segment = longest_segment

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return a batch; tensors are `(batch_size, num_tokens)`, `segment_lengths` has a list for each substep."""
        rows = [[*self.context_start_ids, *example["token_ids"]] for example in examples]
        ids = torch.tensor(rows)
        length = ids.shape[1]
        places = [length * step // self.substeps for step in range(self.substeps + 1)]
        labels = ids.clone()
        labels[:, places[:-1]] = -100
        rng = random.Random(f"{self.seed}/{examples[0].get('index', 0)}")
        batch: dict[str, Any] = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "labels": labels,
            "segment_lengths": [self._segment_lengths(end - start, rng) for start, end in pairwise(places)],
        }
        return batch | self._metadata(examples)

    def _segment_lengths(self, num_tokens: int, rng: random.Random) -> list[int]:
        count = self.segments_per_substep
        # However the others are cut, none is then too long.
        least = max(2, -(-(num_tokens - self.longest_segment) // max(1, count - 1)))
        spare = num_tokens - count * least
        if spare < 0 or num_tokens > count * self.longest_segment:
            raise ValueError(
                f"a substep of {num_tokens} tokens cannot be cut into {count} segments of 2 to {self.longest_segment} "
                "tokens: change max_document_tokens, training_substeps or segments_per_substep"
            )
        if self.is_random:
            cuts = sorted(rng.randint(0, spare) for _ in range(count - 1))
        else:
            cuts = [spare * index // count for index in range(1, count)]
        return [least + end - start for start, end in pairwise([0, *cuts, spare])]


class SegmentTrainer(CompressionTrainer):
    r"""Trains an AutoCompressor to predict every token behind the summaries of the segments before it.

    Section 3 of the paper. The segments of a substep are read with gradient through their summaries; between substeps
    summaries are detached, and each substep has its own backward pass. The first token of a segment is predicted by
    the last one of the segment before, which has not read its summary (the authors' code).

    Args:
        model: an AutoCompressor that is one model throughout: of a shared adapter, or without adapters.
        args ([`TrainingConfig`]): `ratio_mode` is "all" or "random".
        kwargs: as for `CompressionTrainer`; batches come from [`SegmentCollator`].
    """

    def __init__(self, model: PreTrainedModel, args: TrainingConfig, **kwargs: Any):
        config = model.config
        if config.encoder_config is not None or (config.encoder_lora is not None and not config.shared_adapter):
            raise ValueError("the objective segments trains one model: give shared_adapter true, or no encoder_lora")
        super().__init__(model=model, args=args, **kwargs)
        self._soft_prompts: dict[int, SoftPrompt] = {}

    def _check_batch(self, inputs: dict[str, Any]) -> None:
        """Batches come from `SegmentCollator`."""

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        """A backward pass for each substep, behind the detached summaries of those before it; the sum of losses."""
        if self.is_deepspeed_enabled:
            # Each of its backward passes may be an optimizer step; gradients are the same, and need more memory.
            return super().training_step(model, inputs, *args, **kwargs)
        step = super().training_step
        losses = [step(model, part, *args, **kwargs) for part in self._parts(inputs)]
        self._soft_prompts = {}
        return torch.stack(losses).sum()

    def _parts(self, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield a batch of each substep; metadata of the examples goes with the first."""
        tensors = ("input_ids", "attention_mask", "labels")
        inputs = {**inputs, "num_targets": count_targets(inputs["labels"])}
        for span, lengths in _spans(inputs["segment_lengths"]):
            part = {name: inputs[name][:, span] for name in tensors} | {"segment_lengths": [lengths]}
            later = {"num_targets": inputs["num_targets"], "soft_prompts": self._soft_prompts, "documents": ()}
            yield {**inputs, **part} if span.start == 0 else {**part, **later}

    def _target(self, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None) -> Tensor:
        """Predicted tokens that the loss is divided by: those of the whole batch, also in one of its substeps."""
        if num_items_in_batch is None and "num_targets" in inputs:
            return inputs["num_targets"].clamp(min=1)
        return super()._target(inputs, num_items_in_batch)

    def _step_loss(self, batch: dict[str, Any], num_items_in_batch: Tensor | int | None) -> Tensor:
        target = self._target(batch, num_items_in_batch)
        soft_prompts, losses = batch.get("soft_prompts", {}), []
        self._soft_prompts = {}
        weight, ids, labels = self._unwrapped().get_input_embeddings().weight, batch["input_ids"], batch["labels"]
        empty = weight.new_zeros(len(ids), 0, weight.shape[1]), ids.new_zeros(len(ids), 0)
        for ratio in self.step_ratios():
            soft_prompt = soft_prompts.get(ratio) or empty
            for span, lengths in _spans(batch["segment_lengths"]):
                states, soft_prompt = self._read_substep(ids[:, span], lengths, ratio, soft_prompt)
                losses.append(self._memory_loss(states, labels[:, span], target, f"ratio_{ratio}"))
                soft_prompt = soft_prompt[0].detach(), soft_prompt[1]
            self._soft_prompts[ratio] = soft_prompt
        self._metrics["train" if self.model.training else "eval"]["num_ratios_summed"].append(len(self._soft_prompts))
        return torch.stack(losses).sum()

    def _read_substep(
        self, input_ids: Tensor, lengths: Sequence[int], ratio: int, soft_prompt: SoftPrompt
    ) -> tuple[Tensor, SoftPrompt]:
        """The states of a substep's tokens, `(batch_size, num_tokens, hidden_size)`, and what the next one reads."""
        backbone, states = self._unwrapped().base_model, []
        for segment in input_ids.split(list(lengths), dim=1):
            counts = [backbone.config.chunk_slots(segment.shape[1], ratio)] * len(segment)
            tokens, summary = backbone.read_segment(segment, torch.ones_like(segment), *soft_prompt, counts)
            states.append(tokens)
            soft_prompt = backbone.next_soft_prompt(*soft_prompt, summary, counts)
        return torch.cat(states, dim=1), soft_prompt


def _spans(segment_lengths: Sequence[Sequence[int]]) -> Iterator[tuple[slice, Sequence[int]]]:
    """Yield the place of each substep in its batch, and the lengths of its segments."""
    places = accumulate(map(sum, segment_lengths), initial=0)
    for (start, end), lengths in zip(pairwise(places), segment_lengths, strict=True):
        yield slice(start, end), lengths


def build(model_args: ModelArguments, data_args: DataArguments, args: TrainingConfig) -> SegmentTrainer:
    """Return the trainer of a recipe."""
    model, tokenizer = load(model_args, args)
    config, longest = model.config, 2**20
    # A segment has its summary tokens, and positions behind all earlier summaries.
    num_slots = args.training_substeps * args.segments_per_substep * config.num_memory_tokens
    if config.encoder_limit is not None:
        longest = config.encoder_limit - num_slots
    if config.memory_tokens == "by_ratio":
        longest = min(longest, config.num_memory_tokens * min(config.compression_ratios))
    cutting: dict[str, Any] = {
        "substeps": args.training_substeps,
        "segments_per_substep": args.segments_per_substep,
        "is_random": args.random_segments,
        "longest_segment": longest,
    }
    recipe = (model, tokenizer, data_args, args, "compressed", SegmentDataset, SegmentCollator)
    return SegmentTrainer(**trainer_arguments(*recipe, **cutting))
