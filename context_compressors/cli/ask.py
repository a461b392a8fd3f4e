# SPDX-License-Identifier: Apache-2.0
"""`context-compressors ask MODEL SOURCE ...`: questions in, answers out."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .command import COLUMN, LOADING, MAX_TOKENS, MODEL, argument, command, positive_int
from .compress import MEMORY_SUFFIX, Document, compress_all, read_documents, report_cut
from .loading import load_pipeline

if TYPE_CHECKING:
    from ..modeling.compressor.context_compression_qa import ContextCompressionQAPipeline
    from ..modeling.memory.compressed_context import CompressedContext

_EXAMPLES = """
context-compressors ask my-compressor memories/report.safetensors --question "Who wrote it?"
context-compressors ask my-compressor report.txt minutes.txt --ratio 8
context-compressors ask my-compressor report.txt minutes.txt --full-text
context-compressors ask my-compressor memories/*.safetensors < questions.txt
"""


@command(
    "ask",
    "Answer questions from memory files or documents.",
    MODEL,
    argument(
        "sources",
        nargs="+",
        help="memory files (.safetensors), and documents, which are compressed first; each is asked, and the "
        "likeliest answer is printed",
    ),
    argument(
        "--question",
        action="append",
        help="a question; give it again for several. Without it, questions are read line by line from standard input",
    ),
    argument(
        "--ratio",
        type=positive_int,
        metavar="R",
        help="context tokens per slot, of documents and of memory files that hold it",
    ),
    argument("--join", action="store_true", help="read all sources together, in this order, and ask once"),
    argument(
        "--full-text",
        action="store_true",
        help="compress nothing: answer from the documents' own tokens, which is what slots are measured by",
    ),
    argument(
        "--max-new-tokens", type=positive_int, default=64, help="longest answer in tokens (default: %(default)s)"
    ),
    COLUMN,
    MAX_TOKENS,
    *LOADING,
    examples=_EXAMPLES,
)
def main(arguments: argparse.Namespace) -> None:
    """Run `context-compressors ask`."""
    if "-" in arguments.sources and not arguments.question:
        raise ValueError("standard input is a document here, so that questions must be given with --question")
    is_memory = [source.endswith(MEMORY_SUFFIX) for source in arguments.sources]
    if arguments.full_text and (arguments.ratio or any(is_memory)):
        raise ValueError("--full-text reads documents, not memory files, and at no --ratio")
    for source in itertools.compress(arguments.sources, is_memory):
        if not Path(source).is_file():
            raise ValueError(f"there is no memory file {source}")
    documents = {
        source: read_documents([source], arguments.column)
        for source, memory in zip(arguments.sources, is_memory, strict=True)
        if not memory
    }
    pipe = load_pipeline(arguments, [arguments.ratio] if documents else [])
    if pipe.model.config.compresses_questions or arguments.full_text:
        read = _documents_alone(pipe, documents, arguments)
    else:
        read = {"memory": _gather_memories(pipe, documents, arguments)}
    join = True if arguments.join else "likeliest"
    for question in arguments.question or _questions():
        answer = pipe(question, **read, join=join, max_new_tokens=arguments.max_new_tokens)
        print(answer["answer"], flush=True)


def _documents_alone(
    pipe: ContextCompressionQAPipeline, documents: dict[str, list[Document]], arguments: argparse.Namespace
) -> dict[str, Any]:
    """The pipeline's arguments for documents without memories: their full text, or one that is compressed with a
    question."""
    if any(source not in documents for source in arguments.sources):
        pipe.check_serves_memories("so that memory files are not asked: give a document")
    texts = [document.text for source in arguments.sources for document in documents[source]]
    pipe.check_max_tokens(arguments.max_tokens)
    report_cut(pipe.document_ids(texts, arguments.max_tokens), arguments.max_tokens)
    return {
        "context": texts,
        "full_text": arguments.full_text,
        "ratio": arguments.ratio,
        "max_tokens": arguments.max_tokens,
    }


def _gather_memories(
    pipe: ContextCompressionQAPipeline, documents: dict[str, list[Document]], arguments: argparse.Namespace
) -> list[CompressedContext]:
    """The memories of all sources, in the order given."""
    ratios = [arguments.ratio or pipe.model.config.default_ratio]
    memories: list[CompressedContext] = []
    for source in arguments.sources:
        if source in documents:
            texts = documents[source]
            compressed = dict(compress_all(pipe, texts, ratios, arguments.max_tokens))
            memories.extend(compressed[index][0] for index in range(len(texts)))
        else:
            memory = pipe.load_memory(source)
            memories.append(memory if arguments.ratio is None else memory.at_ratio(arguments.ratio))
    return memories


def _questions() -> Iterator[str]:
    """Questions from standard input, one a line, until it ends."""
    is_terminal = sys.stdin.isatty()
    while True:
        if is_terminal:
            print("question> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()
