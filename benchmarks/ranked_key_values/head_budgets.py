# SPDX-License-Identifier: Apache-2.0
"""Loss of right answers where a head keeps at most so many times the mean number of pairs, at equal caches.

    python -m benchmarks.ranked_key_values.head_budgets --data qa_squad_train.parquet

A memory with ratio r keeps ceil(n / r) pairs for each head on average, and reading it costs these pairs and no pads.
So variants at one ratio have equal memories and equal caches. They differ in how unlike the heads are.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.common.tools import positive_int, save_and_report, script_parser, tells_errors
from benchmarks.ranked_key_values.choosing import (
    add_choosing_arguments,
    answer_losses,
    choosing_questions,
    load,
    once,
    paired_scores,
)
from context_compressors.modeling import modeling_ranked_key_values
from context_compressors.modeling.compressor.context_compression_qa import padded
from context_compressors.modeling.memory.compressed_context import CompressedContext, KeyValues
from context_compressors.modeling.memory.headwise_pairs import HeadwisePairs, kept_pairs
from context_compressors.modeling.parts.text_ids import document_ids
from context_compressors.reporting.tables import markdown_table

UNBOUNDED = "unbounded"


def kept_within(budget: str) -> Any:
    """Return `kept_pairs` with at most `budget` times the mean number of pairs in each head."""

    def kept(key_values: KeyValues, scores: Tensor, mask: Tensor, counts: Sequence[int]) -> HeadwisePairs:
        if budget != UNBOUNDED:
            scores = scores.masked_fill(mask[:, None] == 0, -torch.inf)
            ranks = scores.argsort(dim=2, descending=True, stable=True).argsort(dim=2)
            most = (float(budget) * torch.tensor(counts)).int()
            # Below every other pair, and above pads.
            scores = scores.where(ranks < most[:, None, None], scores - 1e6)
        return kept_pairs(key_values, scores, mask, counts)

    return kept


def fullest_heads(memory: CompressedContext) -> list[float]:
    """Return the largest number of pairs of a head in each row, in mean numbers of pairs."""
    heads, shares = memory.head_ids.long(), []
    for row, mask in zip(heads, memory.attention_mask.bool(), strict=True):
        counts = row[mask].flatten().bincount(minlength=heads.shape[2])
        shares.append(float(counts.max() / counts.float().mean()))
    return shares


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = script_parser(__doc__)
    add_choosing_arguments(parser, questions=80)
    parser.add_argument("--budgets", nargs="+", default=[UNBOUNDED, "3", "2", "1.5", "1"], metavar="C")
    parser.add_argument("--ratios", type=positive_int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--batch-size", type=positive_int, default=20)
    return parser


@tells_errors
@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> int:
    """Answer all questions within each budget; returns the exit status."""
    arguments = build_parser().parse_args(argv)
    model, tokenizer = load(arguments.checkpoint)
    # Each batch is one pass, which `once` remembers.
    model.model.tokens_at_once = sys.maxsize
    questions = choosing_questions(arguments.data, arguments.questions)
    losses: dict[int, dict[str, list[dict[str, float]]]] = {
        ratio: {budget: [] for budget in arguments.budgets} for ratio in arguments.ratios
    }
    fullest: dict[tuple[int, str], list[float]] = {}
    for start in range(0, len(questions), arguments.batch_size):
        batch = questions[start : start + arguments.batch_size]
        rows = padded([document_ids(model.config, tokenizer, row["context"]) for row in batch], model.device)
        # The contexts are read once for all budgets.
        read = once(model.model._scored)
        for budget in arguments.budgets:
            with (
                patch.object(model.model, "_scored", read),
                patch.object(modeling_ranked_key_values, "kept_pairs", kept_within(budget)),
            ):
                memories = model.compress(**rows, ratio=arguments.ratios)
            for ratio, memory in zip(arguments.ratios, memories, strict=True):
                of_answers = answer_losses(model, tokenizer, memory, batch).tolist()
                losses[ratio][budget] += [{"loss": loss} for loss in of_answers]
                fullest.setdefault((ratio, budget), []).extend(fullest_heads(memory))
        print(f"{start + len(batch)} of {len(questions)}", flush=True)
    results = [
        {"ratio": ratio, "budget": budget, **found, "fullest_head": fmean(fullest[ratio, budget])}
        for ratio, of_ratio in losses.items()
        for budget, found in paired_scores(of_ratio, UNBOUNDED, [row["context"] for row in questions]).items()
    ]
    table = markdown_table(list(results[0]), [[str(value) for value in row.values()] for row in results])
    arguments.data = Path(arguments.data).name
    save_and_report(__file__, arguments, results, table, "head_budgets")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
