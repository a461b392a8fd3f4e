# SPDX-License-Identifier: Apache-2.0
"""`context-compressors analyse MODEL [MODEL ...] --document FILE --output FOLDER`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import NearestNameParser, positive_int
from .documents import read_documents

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..evaluation.analysis.slots import SlotAnalysis

_RESULT = "slot_analysis.json"

_EXAMPLES = """\
examples:
  # Two methods on one document, drawn side by side, with their numbers in a table:
  context-compressors analyse icae=my-icae comprexit=my-comprexit --document report.txt --output analysis

  # Numbers as means over all rows of a file, of the first 512 tokens each; the pictures show the first row:
  context-compressors analyse my-comprexit --document articles.parquet --max-tokens 512 --output analysis
"""


def build_parser() -> NearestNameParser:
    """The command line of `context-compressors analyse`."""
    parser = NearestNameParser(
        prog="context-compressors analyse",
        description="Measure and draw what slots are made of, how alike they are, and how many dimensions they fill.",
        epilog=_EXAMPLES,
    )
    add = parser.add_argument
    add("models", nargs="+", metavar="MODEL", help="Hub ids or folders of compressors; NAME=MODEL names one")
    add("--document", required=True, metavar="FILE", help="text file, or .jsonl or .parquet file with several")
    add("--output", required=True, metavar="FOLDER", help=f"where the pictures and {_RESULT} go")
    add("--ratio", type=positive_int, metavar="R", help="context tokens per slot (default: each model's first)")
    add("--max-tokens", type=positive_int, metavar="N", help="keep only so many tokens of a document (default: all)")
    add("--column", default="context", help="column of a .jsonl or .parquet file with the text (default: %(default)s)")
    add("--trust-remote-code", action="store_true", help="allow checkpoints to run their own code")
    add("--device", default="auto", help="such as cpu or cuda:0 (default: an accelerator if there is one)")
    return parser


def _analyse_all(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], arguments: Any
) -> list[SlotAnalysis]:
    from ..evaluation.analysis.attention import context_tokenizer
    from ..evaluation.analysis.slots import analyse_ids
    from ..modeling.parts.prompting import document_ids

    own, limit = context_tokenizer(model, tokenizer), arguments.max_tokens
    ids = [document_ids(model.config, own, text) for text in texts]
    if limit and (num_cut := sum(len(row) > limit for row in ids)):
        print(f"cut {num_cut} of {len(ids)} documents to their first {limit} tokens", file=sys.stderr)
    return [analyse_ids(model, own, row[:limit], arguments.ratio) for row in ids]


def main(argv: Sequence[str] | None = None) -> int:
    """Run `context-compressors analyse`; returns the exit status.

    Raises:
        ValueError: a document, model or ratio that cannot be used, or two models of one name.
    """
    arguments = build_parser().parse_args(argv)

    from ..evaluation.analysis.slots import draw, summary, table
    from ..evaluation.evaluate import model_label
    from ..reporting import environment
    from .loading import load_compressor

    models = {}
    for source in arguments.models:
        name, _, place = source.rpartition("=")
        name = name or model_label(place)
        if name in models:
            raise ValueError(f"two models have the name {name!r}: give names as NAME=MODEL")
        models[name] = place
    texts = [document.text for document in read_documents([arguments.document], arguments.column)]
    summaries, first = {}, {}
    for name, place in models.items():
        model, tokenizer = load_compressor(place, None, arguments.trust_remote_code, arguments.device)
        analyses = _analyse_all(model, tokenizer, texts, arguments)
        ratio = arguments.ratio or model.config.compression_ratios[0]
        summaries[name], first[name] = {"ratio": ratio, **summary(analyses)}, analyses[0]
    folder = Path(arguments.output)
    paths = draw(first, folder)
    content = {"format_version": 1, "max_tokens": arguments.max_tokens, "models": summaries}
    result = folder / _RESULT
    folder.mkdir(parents=True, exist_ok=True)
    result.write_text(json.dumps({**content, "environment": environment()}, indent=2) + "\n", encoding="utf-8")
    print(table(summaries), "", *[f"wrote {path}" for path in (*paths, result)], sep="\n")
    return 0
