# SPDX-License-Identifier: Apache-2.0
"""Accuracy from several retrieved memories: joined, or each asked alone and the likeliest answer taken.

    python -m benchmarks.joined_memories.measure --source qa_squad_train.parquet

The passages are those of SQuAD's training rows from 85,000 on, which trained no checkpoint here. BM25 ranks them for
each question; the first 1, 2 or 5 are read. Both ways read the same memories.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from typing import Any

import bm25s
import torch
from transformers import AutoTokenizer

from benchmarks.common.questions import questions_by_context
from benchmarks.common.tools import add_output_argument, positive_int, save_and_report, script_parser, tells_errors
from context_compressors import RankedKeyValuesForCausalLM
from context_compressors.demo import fastest_dtype, fetch_base
from context_compressors.evaluation.bootstrap import mean_statistic, percentile_interval, resampled_scores
from context_compressors.evaluation.metrics import substring_accuracy
from context_compressors.reporting.tables import markdown_table

WAYS: dict[str, bool | str] = {"joined": True, "likeliest": "likeliest"}


def ask(pipe: Any, memories: Sequence[Any], question: str, answers: Sequence[str]) -> dict[str, float]:
    """Return each way's substring accuracy in a question that is asked about some memories."""
    if len(memories) == 1:
        # Both ways are one.
        answer = pipe(question, memory=memories[0], max_new_tokens=16)["answer"]
        return dict.fromkeys(WAYS, substring_accuracy([answer], [answers]))
    scores = {}
    for way, join in WAYS.items():
        answer = pipe(question, memory=list(memories), join=join, max_new_tokens=16)["answer"]
        scores[way] = substring_accuracy([answer], [answers])
    return scores


def row_of(k: int, scores: Sequence[dict[str, float]], documents: Sequence[str]) -> dict[str, Any]:
    """Return the accuracies at `k` passages and their paired difference with its 95 % interval over documents."""
    row: dict[str, Any] = {"passages": k, "questions": len(scores)}
    row |= {way: sum(score[way] for score in scores) / len(scores) for way in WAYS}
    differences = mean_statistic([score["likeliest"] - score["joined"] for score in scores])
    resampled = resampled_scores({"difference": differences}, documents, num_resamples=10_000)["difference"]
    row["difference"] = row["likeliest"] - row["joined"]
    row["difference_interval"] = list(percentile_interval(resampled))
    return row


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = script_parser(__doc__)
    parser.add_argument("--model", default="checkpoints/smollm2-135m-instruct-ranked-key-values", metavar="FOLDER")
    parser.add_argument("--source", required=True, metavar="FILE", help="SQuAD train as Parquet")
    parser.add_argument("--first-row", type=int, default=85_000, metavar="N")
    parser.add_argument("--questions", type=positive_int, default=60, metavar="N")
    parser.add_argument("--passages", type=positive_int, nargs="+", default=[1, 2, 5], metavar="K")
    parser.add_argument("--ratio", type=positive_int, default=4)
    add_output_argument(parser)
    return parser


@tells_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Ask all questions in both ways; returns the exit status."""
    arguments = build_parser().parse_args(argv)

    rows = questions_by_context(arguments.source, arguments.first_row, arguments.questions)
    passages = list(rows)
    draw = random.Random(0)
    asked = [draw.choice(rows[passage]) for passage in draw.sample(passages, arguments.questions)]
    index = bm25s.BM25()
    index.index(bm25s.tokenize(passages, show_progress=False), show_progress=False)
    fetch_base(arguments.model)
    model = RankedKeyValuesForCausalLM.from_pretrained(arguments.model, dtype=fastest_dtype(torch.device("cpu")))
    pipe = model.eval().question_answering(AutoTokenizer.from_pretrained(arguments.model))

    memories: dict[int, Any] = {}
    scores: dict[int, list[dict[str, float]]] = {k: [] for k in arguments.passages}
    for number, row in enumerate(asked, 1):
        words = bm25s.tokenize([row["question"]], show_progress=False)
        best = index.retrieve(words, k=max(arguments.passages), show_progress=False).documents[0].tolist()
        for place in set(best) - memories.keys():
            memories[place] = pipe.compress(passages[place], ratio=arguments.ratio)
        for k in arguments.passages:
            scores[k].append(ask(pipe, [memories[place] for place in best[:k]], row["question"], row["answers"]))
        print(f"{number} of {len(asked)}", {k: of_k[-1] for k, of_k in scores.items()}, flush=True)

    documents = [row["context"] for row in asked]
    results = [row_of(k, of_k, documents) for k, of_k in scores.items()]
    table = markdown_table(list(results[0]), [[str(value) for value in row.values()] for row in results])
    save_and_report(__file__, arguments, results, table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
