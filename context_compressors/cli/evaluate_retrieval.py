# SPDX-License-Identifier: Apache-2.0
"""`context-compressors evaluate-retrieval MODEL FOLDER`."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..evaluation.rows import plain_json, ratio_condition
from .command import (
    ALLOW_TRAINED_DOCUMENTS,
    CHOSEN_BY,
    DEVICE,
    DTYPE,
    KEEP_ANSWERS,
    OVERWRITE,
    argument,
    command,
    positive_int,
)
from .records import add_model_records, records_of_reports
from .resuming import earlier_results, say_if_done

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..data.retrieval_sources import JudgedQueries

_LENGTHS = ("max_query_tokens", "max_document_tokens", "batch_size")
_EXAMPLES = """
# nDCG@10 on the test queries of a folder from BEIR, at every ratio of the checkpoint, beside BM25:
context-compressors evaluate-retrieval my-retriever scifact --bm25 --output scifact.json

# The dev queries at one ratio, with longer documents:
context-compressors evaluate-retrieval my-retriever msmarco --split dev --ratios 4 --max-document-tokens 1024

# Ratios and BM25 on the very same queries:
context-compressors evaluate-retrieval my-retriever scifact --bm25 --keep-answers queries.jsonl
context-compressors compare queries.jsonl
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
    ALLOW_TRAINED_DOCUMENTS,
    CHOSEN_BY,
    argument("--output", metavar="FILE", help="write the rows as JSON, anew after each"),
    argument(
        "--resume",
        action="store_true",
        help="go on where a command with this --output stopped, with the ratios that are left",
    ),
    KEEP_ANSWERS,
    OVERWRITE,
    DEVICE,
    DTYPE,
    examples=_EXAMPLES,
)
def main(arguments: argparse.Namespace) -> None:
    """Run `context-compressors evaluate-retrieval`.

    Raises:
        ValueError, OSError: a ratio that stands twice, a folder that is none of BEIR's form, a checkpoint of no
            retriever, documents that trained it or chose it, or an `--output` to resume from that is of another
            evaluation.
    """
    if arguments.ratios and len(set(arguments.ratios)) < len(arguments.ratios):
        raise ValueError(f"ratios must be one or more different numbers of at least 1, got {arguments.ratios}")

    from ..data.retrieval_sources import JudgedQueries, RetrievalSource
    from ..evaluation.answers_file import write_answers
    from ..evaluation.report_tables import held_out_lines
    from ..evaluation.retrieval import (
        evaluate_bm25,
        evaluate_retrieval,
        query_answers,
        read_query_scores,
        read_retrieval,
        retrieval_table,
    )
    from ..modeling.checkpoint.pretrained_bases import tokenizer_from_place
    from ..reporting.result_files import write_results
    from .loading import load_retriever

    earlier = earlier_results(arguments, read_retrieval)
    judged = JudgedQueries(RetrievalSource.from_folder(arguments.data, arguments.split))
    model = load_retriever(arguments.model, arguments.dtype, arguments.device)
    tokenizer = tokenizer_from_place(arguments.model)
    content = _content(arguments, judged, model, earlier)
    rows: list[dict[str, Any]] = content["rows"]
    done = [row["document_ratio"] for row in rows]
    # BM25 stands first, and has no ratio.
    wanted = [*([None] if arguments.bm25 else []), *(arguments.ratios or sorted(model.config.compression_ratios))]
    left = [ratio for ratio in wanted if ratio not in done]
    path, collection = arguments.keep_answers, content["settings"]["collection"]
    scores = read_query_scores(path, [_condition(ratio) for ratio in done], judged) if path else {}
    for ratio in left:
        note = partial(scores.__setitem__, _condition(ratio))
        if ratio is None:
            rows.insert(0, evaluate_bm25(judged, note))
        else:
            lengths = {key: getattr(arguments, key) for key in _LENGTHS}
            row = evaluate_retrieval(model, tokenizer, judged, ratio, **lengths, progress=True, on_scores=note)
            rows.append({"model": content["model"], **row})
        # Queries first: what the results have, they have scores for.
        if path:
            write_answers(query_answers(collection, judged, scores), path)
        if arguments.output:
            write_results(plain_json(content), arguments.output)
    print("\n".join([*held_out_lines(content["held_out"]), "", retrieval_table(rows)]))
    say_if_done(arguments, not left)
    for written in filter(None, [arguments.output, path]):
        print(f"wrote {written}")


def _condition(ratio: int | None) -> str:
    return "bm25" if ratio is None else ratio_condition(ratio)


def _content(
    arguments: argparse.Namespace, judged: JudgedQueries, model: PreTrainedModel, earlier: dict[str, Any] | None
) -> dict[str, Any]:
    """A result file with the rows of an earlier one.

    Raises:
        ValueError: documents that trained the model or chose it, or the earlier file is of another evaluation.
    """
    from ..evaluation.evaluate import check_is_same, model_label, weights_and_configuration
    from ..evaluation.held_out import check_sources
    from ..evaluation.retrieval import judged_documents
    from ..reporting.environment import environment

    records = records_of_reports(arguments)
    add_model_records(records, arguments, on_hub=True)
    collection = f"{Path(arguments.data).resolve().name}, {arguments.split}"
    queries, digest = judged_documents(judged)
    name = model_label(arguments.model)
    content = {
        "format_version": 2,
        "model": name,
        "settings": {
            "collection": collection,
            **{key: getattr(arguments, key) for key in (*_LENGTHS, "allow_trained_documents")},
            "dtype": str(model.dtype),
            **weights_and_configuration(model),
            "samples": digest,
        },
        "device": model.device.type,
        "environment": environment(),
        "held_out": check_sources({collection: queries}, records, arguments.allow_trained_documents),
        "documents": {collection: " ".join(sorted({id_ for query in queries for id_ in query.source_ids}))},
        "rows": [],
    }
    if earlier is not None:
        differing = [key for key in ("model", "device") if content[key] != earlier.get(key)]
        differing += [key for key, value in content["settings"].items() if value != earlier["settings"].get(key)]
        check_is_same(differing)
        content["rows"] = earlier["rows"]
    return content
