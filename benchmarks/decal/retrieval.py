# SPDX-License-Identifier: Apache-2.0
"""nDCG@10 of DeCAL's vectors on SciFact, beside BM25, with what a ratio saves in storage and scoring (Table 4).

    context-compressors train embedded/decal.yaml decal/small/retrieval.yaml --checkpoint PRETRAINED_2X \\
        --data_dir DATA --output_dir RETRIEVAL_2X                              # and so for every other ratio
    python -m benchmarks.decal.retrieval --data DATA --checkpoints RETRIEVAL_1X RETRIEVAL_2X RETRIEVAL_4X RETRIEVAL_8X

Queries and documents are encoded at the same ratio, for each ratio of each checkpoint, and every query is scored with
every document. Savings are counted, not timed: tokens for each stored vector (C), and products of token pairs for each
product of vector pairs (C squared, but for last windows that are partial).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoModelForTextEncoding, AutoTokenizer

from benchmarks.common.tools import add_place_arguments, device_of, positive_int, save_and_report, tells_errors
from context_compressors import DeCALForRetrieval
from context_compressors.data.retrieval_sources import JudgedQueries
from context_compressors.evaluation.retrieval import evaluate_bm25, evaluate_retrieval, retrieval_table

table = retrieval_table
SCIFACT = {
    "corpus": {"path": "retrieval_scifact_corpus.parquet"},
    "queries": {"path": "retrieval_scifact_queries_test.parquet"},
    "relevance": {"path": "retrieval_scifact_qrels_test.parquet"},
}


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", required=True, metavar="PATH", help="folder with the SciFact tables")
    add("--checkpoints", nargs="*", default=[], metavar="FOLDER", help="retrieval checkpoints; BM25 alone without any")
    add("--max-query-tokens", type=positive_int, default=64, metavar="N", help="default: 64")
    add("--max-document-tokens", type=positive_int, default=512, metavar="N", help="default: 512")
    add("--batch-size", type=positive_int, default=32, metavar="B", help="default: 32")
    add_place_arguments(parser)
    return parser


def model_rows(judged: JudgedQueries, folder: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each ratio of a checkpoint.

    Raises:
        ValueError: the checkpoint is not one of DeCAL.
    """
    model = AutoModelForTextEncoding.from_pretrained(folder).to(device_of(arguments)).eval()
    if not isinstance(model, DeCALForRetrieval):
        raise ValueError(f"{folder} must hold a DeCAL checkpoint, not a {type(model).__name__}")
    summary = Path(folder) / "training_summary.json"
    seed = json.loads(summary.read_text(encoding="utf-8"))["seed"] if summary.is_file() else None
    settings = {name: getattr(arguments, name) for name in ("max_query_tokens", "max_document_tokens", "batch_size")}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [
        {
            "model": Path(folder).name,
            "seed": seed,
            **evaluate_retrieval(model, tokenizer, judged, ratio, **settings),
        }
        for ratio in model.config.compression_ratios
    ]


@tells_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    arguments = build_parser().parse_args(argv)
    judged = JudgedQueries(SCIFACT, arguments.data)
    rows = [evaluate_bm25(judged)]
    for folder in arguments.checkpoints:
        rows += model_rows(judged, folder, arguments)
    # Where this machine keeps its files is nobody else's business.
    arguments.data = Path(arguments.data).name
    arguments.checkpoints = [Path(folder).name for folder in arguments.checkpoints]
    save_and_report(__file__, arguments, rows, table(rows), "retrieval")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
