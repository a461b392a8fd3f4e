# SPDX-License-Identifier: Apache-2.0
"""`context-compressors evaluate-retrieval MODEL FOLDER`."""

from __future__ import annotations

import argparse
from pathlib import Path

from .command import DEVICE, DTYPE, argument, command, positive_int

_EXAMPLES = """
# nDCG@10 on the test queries of a folder from BEIR, at every ratio of the checkpoint, beside BM25:
context-compressors evaluate-retrieval my-retriever scifact --bm25 --output scifact.json

# The dev queries at one ratio, with longer documents:
context-compressors evaluate-retrieval my-retriever msmarco --split dev --ratios 4 --max-document-tokens 1024
"""


@command(
    "evaluate-retrieval",
    "Rank the corpus of a folder of BEIR's form with a retrieval checkpoint: nDCG@10 from graded relevance, and what "
    "the vectors take and save.",
    argument("model", help="Hub id or folder of the retrieval checkpoint"),
    argument("data", help="folder with corpus.jsonl, queries.jsonl and qrels/*.tsv, or of `context-compressors data`"),
    argument("--split", default="test", metavar="NAME", help="of qrels: NAME.tsv (default: test)"),
    argument("--ratios", nargs="+", type=positive_int, metavar="R", help="ratios (default: the checkpoint's own)"),
    argument("--bm25", action="store_true", help="also rank with BM25, whose index holds the corpus in memory"),
    argument("--max-query-tokens", type=positive_int, default=64, metavar="N", help="(default: 64)"),
    argument("--max-document-tokens", type=positive_int, default=512, metavar="N", help="(default: 512)"),
    argument("--batch-size", type=positive_int, default=32, metavar="B", help="texts in one pass (default: 32)"),
    argument("--output", metavar="FILE", help="write the rows as JSON"),
    DEVICE,
    DTYPE,
    examples=_EXAMPLES,
)
def main(arguments: argparse.Namespace) -> None:
    """Run `context-compressors evaluate-retrieval`.

    Raises:
        ValueError, OSError: a folder that is none of BEIR's form, or a checkpoint of no retriever.
    """
    from transformers import AutoTokenizer

    from ..data.retrieval_sources import JudgedQueries, RetrievalSource
    from ..evaluation.evaluate import model_label
    from ..evaluation.retrieval import evaluate_bm25, evaluate_retrieval, retrieval_table
    from ..reporting.environment import environment
    from ..reporting.result_files import write_results
    from .loading import load_retriever

    judged = JudgedQueries(RetrievalSource.from_folder(arguments.data, arguments.split))
    model = load_retriever(arguments.model, arguments.dtype, arguments.device)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    names = ("max_query_tokens", "max_document_tokens", "batch_size")
    settings = {name: getattr(arguments, name) for name in names}
    rows = [evaluate_bm25(judged)] if arguments.bm25 else []
    for ratio in arguments.ratios or model.config.compression_ratios:
        row = evaluate_retrieval(model, tokenizer, judged, ratio, **settings, progress=True)
        rows.append({"model": model_label(arguments.model), **row})
    print(retrieval_table(rows))
    if arguments.output:
        collection = f"{Path(arguments.data).resolve().name}, {arguments.split}"
        content = {
            "format_version": 2,
            "settings": {"collection": collection, **settings, "dtype": str(model.dtype)},
            "device": model.device.type,
            "environment": environment(),
            "rows": rows,
        }
        print(f"wrote {write_results(content, arguments.output)}")
