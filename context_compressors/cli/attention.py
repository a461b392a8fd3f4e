# SPDX-License-Identifier: Apache-2.0
"""`context-compressors attention MODEL --document FILE --output PNG`."""

from __future__ import annotations

import argparse
import sys

from .command import (
    COLUMN,
    DEVICE,
    MAX_TOKENS,
    OVERWRITE,
    REVISION,
    TRUST_REMOTE_CODE,
    argument,
    check_outputs,
    command,
    positive_int,
)
from .documents import read_documents

_EXAMPLES = """
# Second and last layer, as in the paper on position layouts:
context-compressors attention my-icae --document report.txt --ratio 5 --output attention.png

# Other layers, of the document's first 255 tokens:
context-compressors attention my-icae --document report.txt --max-tokens 255 --layers 1 8 16 --output attention.png
"""


@command(
    "attention",
    "Draw how much a document's memory tokens attend to its tokens, by layer.",
    argument("model", help="Hub id or folder of a compressor with memory tokens"),
    argument("--document", required=True, metavar="FILE", help="text file, or .jsonl or .parquet file with one row"),
    argument("--output", required=True, metavar="PNG", help="the picture"),
    OVERWRITE,
    argument(
        "--ratio",
        type=positive_int,
        metavar="R",
        help="context tokens per memory token (default: the model's default)",
    ),
    argument("--layers", nargs="+", type=positive_int, metavar="N", help="layers, from 1 (default: second and last)"),
    MAX_TOKENS,
    COLUMN,
    REVISION,
    TRUST_REMOTE_CODE,
    DEVICE,
    examples=_EXAMPLES,
)
def main(arguments: argparse.Namespace) -> None:
    """Run `context-compressors attention`.

    Raises:
        ValueError: a document, model, ratio or layer that cannot be used.
    """
    from ..evaluation.analysis.attention import attention_of_ids, context_tokenizer
    from ..evaluation.analysis.pictures import plot_memory_attention
    from ..modeling.parts.prompting import check_max_tokens, document_ids
    from .loading import check_ratios, load_compressor

    check_outputs((arguments.output,), arguments.overwrite)
    documents = read_documents([arguments.document], arguments.column)
    if len(documents) != 1:
        raise ValueError(f"{arguments.document} holds {len(documents)} documents: give a file with one")
    check_ratios(arguments.model, [arguments.ratio], arguments)
    model, tokenizer = load_compressor(
        arguments.model, arguments.revision, arguments.trust_remote_code, arguments.device
    )
    own = context_tokenizer(model, tokenizer)
    check_max_tokens(model.config, own, arguments.max_tokens)
    ids = document_ids(model.config, own, documents[0].text)
    if arguments.max_tokens and len(ids) > arguments.max_tokens:
        print(f"cut the document from {len(ids)} to {arguments.max_tokens} tokens", file=sys.stderr)
    attention = attention_of_ids(model, ids[: arguments.max_tokens], arguments.ratio)
    path = plot_memory_attention(attention, arguments.output, arguments.layers)
    _, num_memory_tokens, num_context_tokens = attention.shape
    print(f"{num_memory_tokens} memory tokens of {num_context_tokens} context tokens\nwrote {path}")
