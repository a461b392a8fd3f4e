# SPDX-License-Identifier: Apache-2.0
"""Questions that choose between variants of ranked key/values: rows of SQuAD train that trained nothing."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoTokenizer

from benchmarks.common.questions import questions_by_context
from benchmarks.common.tools import add_output_argument, positive_int
from context_compressors import RankedKeyValuesForCausalLM
from context_compressors.demo import fetch_base
from context_compressors.evaluation.bootstrap import mean_statistic, percentile_interval, resampled_scores
from context_compressors.modeling.compressor.backbone import Chunks
from context_compressors.modeling.compressor.context_compression_qa import padded
from context_compressors.modeling.memory.compressed_context import CompressedContext
from context_compressors.modeling.parts.text_ids import question_ids

CHECKPOINT = "checkpoints/smollm2-135m-instruct-ranked-key-values"
FIRST_ROW = 85_000


def add_choosing_arguments(parser: argparse.ArgumentParser, questions: int) -> None:
    """Add the data, the number of questions, which has a default, the checkpoint and the output."""
    add = parser.add_argument
    add("--data", required=True, metavar="FILE", help="SQuAD train as Parquet")
    add("--questions", type=positive_int, default=questions, metavar="N", help=f"default: {questions}")
    add("--checkpoint", default=CHECKPOINT, metavar="FOLDER", help=f"default: {CHECKPOINT}")
    add_output_argument(parser)


def load(folder: str, dtype: torch.dtype = torch.float32) -> tuple[RankedKeyValuesForCausalLM, Any]:
    """Return a checkpoint with its adapter merged, and its tokenizer."""
    fetch_base(folder)
    model = RankedKeyValuesForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    model.merge_adapters()
    return model, AutoTokenizer.from_pretrained(folder)


def choosing_questions(path: str, number: int) -> list[dict[str, Any]]:
    """Return questions about different contexts."""
    by_context, draw = questions_by_context(path, FIRST_ROW, number), random.Random(0)
    return [draw.choice(by_context[context]) for context in draw.sample(list(by_context), number)]


def once(read: Callable[[Chunks], Any]) -> Callable[[Chunks], Any]:
    """Return a function that reads the first chunks that it is given, and returns the same for all others."""
    found: list[Any] = []

    def reading(chunks: Chunks) -> Any:
        if not found:
            found.append(read(chunks))
        return found[0]

    return reading


def answer_losses(
    model: RankedKeyValuesForCausalLM, tokenizer: Any, memory: CompressedContext, questions: Sequence[dict[str, Any]]
) -> Tensor:
    """Return the mean loss of the tokens of the right answer, for each row of a memory."""
    prompts = [question_ids(model.config, tokenizer, row["question"]) for row in questions]
    answers = [[*tokenizer(row["answers"][0]).input_ids, tokenizer.eos_token_id] for row in questions]
    text = padded([[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)], model.device)
    states = model.model(**text, memory=memory).last_hidden_state
    losses = []
    for row, prompt, answer in zip(states, prompts, answers, strict=True):
        logits = model.lm_head(row[len(prompt) - 1 : len(prompt) + len(answer) - 1])
        losses.append(functional.cross_entropy(logits, torch.tensor(answer, device=logits.device)))
    return torch.stack(losses)


def paired_scores(
    found: Mapping[str, Sequence[Mapping[str, float]]], baseline: str, contexts: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Return each variant's mean scores and their differences to the baseline, with 95 % intervals over contexts.

    Args:
        found: of each variant the scores of each question, in the same order.
        baseline: one of the variants.
        contexts: of the questions.
    """
    statistics = {}
    for name, rows in found.items():
        for score in rows[0]:
            values, others = ([row[score] for row in of_variant] for of_variant in (rows, found[baseline]))
            pairs = zip(values, others, strict=True)
            statistics[name, score] = mean_statistic(values)
            statistics[name, f"{score}_difference"] = mean_statistic([one - other for one, other in pairs])
    resampled = resampled_scores(statistics, contexts, num_resamples=10_000)
    results: dict[str, dict[str, Any]] = {name: {} for name in found}
    for (name, score), statistic in statistics.items():
        results[name][score] = statistic.score()
        results[name][f"{score}_interval"] = list(percentile_interval(resampled[name, score]))
    return results
