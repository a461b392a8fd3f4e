# SPDX-License-Identifier: Apache-2.0
"""nDCG@10 of DeCAL's vectors on SciFact, beside BM25, with what a ratio saves in storage and scoring (Table 4).

    context-compressors train embedded/decal.yaml decal/small/retrieval.yaml --checkpoint PRETRAINED_2X \\
        --data_dir DATA --output_dir RETRIEVAL_2X                              # and so for every other ratio
    python -m benchmarks.decal.retrieval --data DATA --checkpoints RETRIEVAL_1X RETRIEVAL_2X RETRIEVAL_4X RETRIEVAL_8X

Queries and documents are encoded at the same ratio, for each ratio of each checkpoint, and every query is scored with
every document. Savings are counted, not timed: tokens for each stored vector (C), and products of token pairs for each
product of vector pairs (C squared, but for last windows that are partial). BM25 needs `pip install bm25s`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from transformers import AutoModelForTextEncoding, AutoTokenizer

from benchmarks.common.tools import add_place_arguments, device_of, positive_int, save_and_report
from context_compressors import DeCALForRetrieval
from context_compressors.data.retrieval_sources import RetrievalCollection, TextEncoder
from context_compressors.evaluation.retrieval import encode_texts, ndcg, score_texts
from context_compressors.modeling.parts.prompting import text_tokenizer
from context_compressors.reporting.tables import markdown_table

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


class Task:
    """A collection's queries that have an answer, its documents, and which answer which.

    Args:
        collection: the collection.
    """

    def __init__(self, collection: RetrievalCollection):
        answers: dict[int, set[int]] = {}
        for query, document in collection.pairs:
            answers.setdefault(query, set()).add(document)
        self.queries = [collection.query(query) for query in answers]
        self.documents = [collection.document(row) for row in range(len(collection.document_ids))]
        self.relevant = list(answers.values())

    def result(self, scores: torch.Tensor) -> dict[str, Any]:
        """nDCG@10 in percent, with its standard error over queries."""
        values = [100 * value for value in ndcg(scores, self.relevant)]
        error = stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
        return {"ndcg_at_10": mean(values), "standard_error": error, "queries": len(values)}


def bm25_row(task: Task) -> dict[str, Any]:
    """BM25 with bm25s' defaults and English stop words."""
    import bm25s

    index = bm25s.BM25()
    index.index(bm25s.tokenize(task.documents, stopwords="en", show_progress=False), show_progress=False)
    queries = bm25s.tokenize(task.queries, stopwords="en", show_progress=False, return_ids=False)
    scores = torch.stack([torch.from_numpy(index.get_scores(query)) for query in queries])
    return {"model": "BM25", "query_ratio": None, "document_ratio": None, **task.result(scores)}


def model_rows(task: Task, folder: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each ratio of a checkpoint.

    Raises:
        ValueError: the checkpoint is not one of DeCAL.
    """
    device = device_of(arguments)
    model = AutoModelForTextEncoding.from_pretrained(folder).to(device).eval()
    if not isinstance(model, DeCALForRetrieval):
        raise ValueError(f"{folder} must hold a DeCAL checkpoint, not a {type(model).__name__}")
    tokenizer = text_tokenizer(AutoTokenizer.from_pretrained(folder))
    sides = {
        "query": (task.queries, TextEncoder(tokenizer, arguments.max_query_tokens)),
        "document": (task.documents, TextEncoder(tokenizer, arguments.max_document_tokens)),
    }
    encoded = {side: [encode(text) for text in texts] for side, (texts, encode) in sides.items()}
    tokens = {side: sum(len(ids) for ids, _ in texts) for side, texts in encoded.items()}
    summary = Path(folder) / "training_summary.json"
    seed = json.loads(summary.read_text(encoding="utf-8"))["seed"] if summary.is_file() else None
    rows = []
    for ratio in model.config.compression_ratios:
        vectors = {
            side: encode_texts(model, texts, encode, ratio, arguments.batch_size)
            for side, (texts, encode) in sides.items()
        }
        counts = {side: sum(map(len, texts)) for side, texts in vectors.items()}
        size = model.config.hidden_size
        storage = tokens["document"] / counts["document"]
        rows.append(
            {
                "model": Path(folder).name,
                "compression": model.config.compression,
                "seed": seed,
                "query_ratio": ratio,
                "document_ratio": ratio,
                **task.result(score_texts(vectors["query"], vectors["document"], device)),
                "queries_cut": sum(cut > 0 for _, cut in encoded["query"]),
                "documents_cut": sum(cut > 0 for _, cut in encoded["document"]),
                "vector_size": size,
                "vectors_per_query": counts["query"] / len(task.queries),
                "vectors_per_document": counts["document"] / len(task.documents),
                "index_bytes_float32": 4 * size * counts["document"],
                "scoring_flops_per_query": 2 * size * counts["document"] * counts["query"] / len(task.queries),
                "storage_saving": storage,
                "scoring_saving": storage * tokens["query"] / counts["query"],
            }
        )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as they are printed."""
    header = ["model", "ratio", "nDCG@10", "vectors of a document", "index, MB", "storage", "scoring"]
    cells = []
    for row in rows:
        own = ["-", "-", "-", "-"]
        if row["document_ratio"] is not None:
            own = [f"{row['vectors_per_document']:.0f}", f"{row['index_bytes_float32'] / 1e6:.1f}"]
            own += [f"{row['storage_saving']:.1f}x", f"{row['scoring_saving']:.1f}x"]
        cells.append([row["model"], row["document_ratio"] or "-", f"{row['ndcg_at_10']:.1f}", *own])
    return markdown_table(header, cells)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    arguments = build_parser().parse_args(argv)
    try:
        task = Task(RetrievalCollection(SCIFACT, arguments.data))
        rows = [bm25_row(task)]
        for folder in arguments.checkpoints:
            rows += model_rows(task, folder, arguments)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    # Where this machine keeps its files is nobody else's business.
    arguments.data = Path(arguments.data).name
    arguments.checkpoints = [Path(folder).name for folder in arguments.checkpoints]
    save_and_report(__file__, arguments, rows, table(rows), "retrieval")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
