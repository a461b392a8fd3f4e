# SPDX-License-Identifier: Apache-2.0
"""How the small-scale benchmark scores a model: its curves while it trains, and its rows in the end."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from context_compressors.data.task_tokens import task_start_ids
from context_compressors.evaluation.evaluate import evaluate_model
from context_compressors.evaluation.rows import FULL_CONTEXT, NO_CONTEXT, ratio_condition
from context_compressors.evaluation.samples import EvaluationDataset, Sample, SampleBuilder
from context_compressors.evaluation.scoring import Condition, Scorer
from context_compressors.evaluation.settings import EvaluationSettings
from context_compressors.modeling.parts.text_ids import context_start_ids, start_token_id

# Held-out documents of each data set behind a point of the curves.
_CURVE_SAMPLES = 8
_CONTINUATION_TOKENS = 64
_EVALUATION_BATCH = 32
# With task tokens: no words for a reconstruction, and questions in the one form that the small base knows.
_TASK_TOKEN_PROMPTS = "embedded"


class HeldOutCurves(TrainerCallback):
    """At every entry of the training log, the losses of held-out documents at the model's first ratio.

    Args:
        model: in training.
        tokenizer: the tokenizer of the texts.
        samples: task -> what its loss is taken over.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, samples: Mapping[str, Sequence[Sample]]
    ):
        condition = Condition("compressed", model, ratio=model.config.default_ratio)
        starts = task_start_ids(model.config)
        self.scorer = Scorer(model, tokenizer, [condition], start_token_id(tokenizer), starts)
        self.samples = samples
        self.seconds = 0.0

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], model: Any, **kwargs: Any) -> None:
        """Add the losses to the entry that the Trainer has just made."""
        if "loss" not in logs:
            return
        start = time.perf_counter()
        model.eval()
        for task, samples in self.samples.items():
            scores = self.scorer.score(task, samples, _EVALUATION_BATCH)["compressed"]
            state.log_history[-1][f"{task}_loss"] = math.log(scores["perplexity"])
        model.train()
        self.seconds += time.perf_counter() - start


def held_out(
    tokenizer: PreTrainedTokenizerBase,
    test: EvaluationDataset,
    context_tokens: int,
    prompts: str | None,
    task: str = "reconstruction",
    count: int = _CURVE_SAMPLES,
) -> list[Sample]:
    """Some reconstructions or continuations of a test set."""
    builder = SampleBuilder(tokenizer, None, {}, context_tokens, _CONTINUATION_TOKENS, prompts=prompts)
    return builder.build(test, task, count)


def prompts_of(arguments: argparse.Namespace, model: PreTrainedModel) -> str | None:
    """Name of the prompts that a model is trained and tested with; `None` for the packaged ones."""
    return arguments.prompts or (_TASK_TOKEN_PROMPTS if task_start_ids(model.config) else None)


@torch.inference_mode()
def tokens_per_slot(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, samples: Sequence[Sample]
) -> dict[str, float]:
    """By condition, the ratio that the samples' contexts come to: less than the model's where chunks are not full."""
    ratios, start = list(model.config.compression_ratios), context_start_ids(tokenizer)
    tokens, slots = [0] * len(ratios), [0] * len(ratios)
    for sample in samples:
        input_ids = torch.tensor([[*start, *sample.context_ids]], device=model.device)
        for index, memory in enumerate(model.compress(input_ids, ratio=ratios)):
            tokens[index] += int(memory.num_context_tokens)
            slots[index] += int(memory.num_slots)
    return {ratio_condition(r): tokens[i] / slots[i] for i, r in enumerate(ratios)}


def saved_by_context(
    model: PreTrainedModel,
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    samples: Sequence[Sample],
) -> dict[str, float]:
    """By condition, the nats per token that a continuation's own context saves over the context of another text.

    Adapters that have learned what kind of text comes lower a perplexity whatever stands in the slots; what the slots
    are worth is the difference that the right ones make. The full context is read by the base.
    """
    conditions = [Condition(ratio_condition(r), model, ratio=r) for r in model.config.compression_ratios]
    conditions.append(Condition(FULL_CONTEXT, base, with_context=True))
    scorer = Scorer(model, tokenizer, conditions, start_token_id(tokenizer), task_start_ids(model.config))
    if len(samples) < 2:
        raise ValueError(f"what a context saves is told beside another one: it takes two texts, got {len(samples)}")
    # Neighbours may be of one document, and go on from each other.
    half = len(samples) // 2
    others = [*samples[half:], *samples[:half]]
    strange = [replace(sample, context_ids=other.context_ids) for sample, other in zip(samples, others, strict=True)]
    own, other = (scorer.score("continuation", part, _EVALUATION_BATCH) for part in (samples, strange))
    return {name: math.log(other[name]["perplexity"]) - math.log(own[name]["perplexity"]) for name in own}


def evaluate(
    arguments: argparse.Namespace,
    model: PreTrainedModel,
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tests: Sequence[EvaluationDataset],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Score the base without context and with all of it, and a model: data set -> task -> condition -> metrics."""
    bounds: dict[str, Any] = {}
    compressed: dict[str, Any] = {}
    prompts = prompts_of(arguments, model)
    model.eval()
    densities = {
        test.name: tokens_per_slot(model, tokenizer, held_out(tokenizer, test, arguments.context_tokens, prompts))
        for test in tests
    }
    for task, samples in (
        ("question_answering", arguments.eval_samples),
        ("reconstruction", arguments.bleu_samples),
        ("continuation", arguments.eval_samples),
    ):
        if task not in arguments.tasks:
            continue
        settings = EvaluationSettings(
            tasks=(task,),
            max_samples=samples,
            batch_size=_EVALUATION_BATCH,
            max_new_tokens={"question_answering": 16, "summarisation": 1},
            context_tokens=arguments.context_tokens,
            continuation_tokens=_CONTINUATION_TOKENS,
            reconstruction_bleu=task == "reconstruction",
            restoration_lengths=arguments.restoration_lengths and tuple(arguments.restoration_lengths),
            prompts=prompts,
        )
        report = evaluate_model(model, tokenizer, tests, settings, teacher=base)
        saved: dict[str, dict[str, float]] = {}
        if task == "continuation":
            for test in tests:
                texts = held_out(tokenizer, test, arguments.context_tokens, prompts, task, samples)
                saved[test.name] = saved_by_context(model, base, tokenizer, texts)
        for row in report.rows:
            metrics = dict(row.metrics)
            if task == "reconstruction" and row.condition in densities.get(row.dataset, {}):
                metrics["tokens_per_slot"] = densities[row.dataset][row.condition]
            if row.condition in saved.get(row.dataset, {}):
                metrics["saved_by_context"] = saved[row.dataset][row.condition]
            metrics = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
            side = bounds if row.condition in (NO_CONTEXT, FULL_CONTEXT) else compressed
            side.setdefault(row.dataset, {}).setdefault(task, {})[row.condition] = metrics
    return bounds, compressed
