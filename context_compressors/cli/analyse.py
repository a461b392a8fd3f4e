# SPDX-License-Identifier: Apache-2.0
"""`context-compressors analyse MODEL [MODEL ...] --document FILE --output FOLDER`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .command import (
    COLUMN,
    DEVICE,
    MAX_TOKENS,
    OVERWRITE,
    TRUST_REMOTE_CODE,
    argument,
    check_outputs,
    command,
    positive_int,
)
from .documents import read_documents

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..evaluation.analysis.slots import SlotAnalysis

_RESULT = "slot_analysis.json"

_EXAMPLES = """
# Two methods on one document, drawn side by side, with their numbers in a table:
context-compressors analyse icae=my-icae comprexit=my-comprexit --document report.txt --output analysis

# Numbers as means over all rows of a file, of the first 512 tokens each; the pictures show the first row:
context-compressors analyse my-comprexit --document articles.parquet --max-tokens 512 --output analysis
"""


def _analyse_all(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], arguments: argparse.Namespace
) -> list[SlotAnalysis]:
    from ..evaluation.analysis.attention import context_tokenizer
    from ..evaluation.analysis.slots import analyse_ids
    from ..modeling.parts.prompting import check_max_tokens, document_ids

    own, limit = context_tokenizer(model, tokenizer), arguments.max_tokens
    check_max_tokens(model.config, own, limit)
    ids = [document_ids(model.config, own, text) for text in texts]
    if limit and (num_cut := sum(len(row) > limit for row in ids)):
        print(f"cut {num_cut} of {len(ids)} documents to their first {limit} tokens", file=sys.stderr)
    return [analyse_ids(model, own, row[:limit], arguments.ratio) for row in ids]


@command(
    "analyse",
    "Measure and draw what slots are made of, how alike they are, and how many dimensions they fill.",
    argument("models", nargs="+", metavar="MODEL", help="Hub ids or folders of compressors; NAME=MODEL names one"),
    argument("--document", required=True, metavar="FILE", help="text file, or .jsonl or .parquet file with several"),
    argument("--output", required=True, metavar="FOLDER", help=f"where the pictures and {_RESULT} go"),
    OVERWRITE,
    argument(
        "--ratio", type=positive_int, metavar="R", help="context tokens per slot (default: each model's default)"
    ),
    MAX_TOKENS,
    COLUMN,
    TRUST_REMOTE_CODE,
    DEVICE,
    examples=_EXAMPLES,
)
def main(arguments: argparse.Namespace) -> None:
    """Run `context-compressors analyse`.

    Raises:
        ValueError: a document, model or ratio that cannot be used, or two models of one name.
    """
    from ..evaluation.analysis.slots import draw, summary, table
    from ..evaluation.evaluate import model_label
    from ..reporting.environment import environment
    from ..reporting.result_files import write_json
    from .loading import check_ratios, load_compressor

    check_outputs((str(Path(arguments.output, _RESULT)),), arguments.overwrite)
    models = {}
    for source in arguments.models:
        name, _, place = source.rpartition("=")
        name = name or model_label(place)
        if name in models:
            raise ValueError(f"two models have the name {name!r}: give names as NAME=MODEL")
        models[name] = place
        check_ratios(place, [arguments.ratio], arguments)
    texts = [document.text for document in read_documents([arguments.document], arguments.column)]
    summaries, first = {}, {}
    for name, place in models.items():
        model, tokenizer = load_compressor(place, None, arguments.trust_remote_code, arguments.device)
        analyses = _analyse_all(model, tokenizer, texts, arguments)
        ratio = arguments.ratio or model.config.default_ratio
        summaries[name], first[name] = {"ratio": ratio, **summary(analyses)}, analyses[0]
    folder = Path(arguments.output)
    paths = draw(first, folder)
    content = {"format_version": 1, "max_tokens": arguments.max_tokens, "models": summaries}
    result = write_json({**content, "environment": environment()}, folder / _RESULT)
    print(table(summaries), "", *[f"wrote {path}" for path in (*paths, result)], sep="\n")
