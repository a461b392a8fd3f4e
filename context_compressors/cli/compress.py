# SPDX-License-Identifier: Apache-2.0
"""`context-compressors compress MODEL DOCUMENT ...`: documents in, memory files out."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .command import (
    ALLOW_UNTRAINED_RATIO,
    COLUMN,
    LOADING,
    MAX_TOKENS,
    OVERWRITE,
    REVISION,
    argument,
    command,
    positive_int,
    positive_int_or_auto,
)
from .documents import Document, read_documents
from .loading import check_ratios, load_compressor

if TYPE_CHECKING:
    from ..modeling.compressor.context_compression_qa import ContextCompressionQAPipeline
    from ..modeling.memory.compressed_context import CompressedContext

MEMORY_SUFFIX = ".safetensors"

# Of both commands that read documents with a compressor.
MODEL = argument("model", help="Hub id or folder of a compressor")
READING = (COLUMN, MAX_TOKENS, ALLOW_UNTRAINED_RATIO, REVISION, *LOADING)

_EXAMPLES = """
context-compressors compress my-compressor report.txt minutes.txt --output memories
context-compressors compress my-compressor articles.parquet --column text --ratio 4 --ratio 16
cat report.txt | context-compressors compress my-compressor --output memories
"""


def load_pipeline(
    arguments: argparse.Namespace, ratios: Sequence[int | str | None] = ()
) -> ContextCompressionQAPipeline:
    check_ratios(arguments.model, ratios, arguments)
    model, tokenizer = load_compressor(
        arguments.model,
        arguments.revision,
        trust_remote_code=arguments.trust_remote_code,
        device=arguments.device,
        dtype=arguments.dtype,
        base_model=arguments.base_model,
    )
    return model.question_answering(tokenizer)


@command(
    "compress",
    "Read documents once, and keep each as a memory file.",
    MODEL,
    argument(
        "documents",
        nargs="*",
        help="text files, .jsonl or .parquet files (one document a row), or - for standard input, the default",
    ),
    argument("--output", default="memories", help="folder of the memory files (default: %(default)s)"),
    argument(
        "--ratio",
        type=positive_int_or_auto,
        action="append",
        metavar="R",
        help="context tokens per slot, or auto for a model that selects them; give it again for several ratios from "
        "one reading (default: the model's default)",
    ),
    argument("--batch-size", type=positive_int, default=8, help="documents at once (default: %(default)s)"),
    argument(
        "--by-document",
        action="store_true",
        help="name files by the document's id, which the field `memories` of a training finds, and compress each once",
    ),
    OVERWRITE,
    *READING,
    examples=_EXAMPLES,
)
def main(arguments: argparse.Namespace) -> None:
    """Run `context-compressors compress`."""
    if not arguments.documents and sys.stdin.isatty():
        raise ValueError("give documents: files, or text on standard input")
    documents = read_documents(arguments.documents or ["-"], arguments.column)
    if arguments.by_document:
        from ..data.document_ids import document_id

        named = {document_id(document.text): document.text for document in documents}
        documents = [Document(name, text) for name, text in named.items()]
    # Wrong names are found before the model is loaded; the default ratio alone needs no part in the names.
    ratios = list(dict.fromkeys(arguments.ratio or []))
    paths = _memory_paths(documents, ratios, Path(arguments.output), arguments.overwrite)
    pipe = load_pipeline(arguments, ratios)
    pipe.check_serves_memories("a memory file without one answers nothing: `ask` about the document itself")
    ratios = ratios or [pipe.model.config.default_ratio]
    num_tokens = num_slots = num_bytes = 0
    for index, memories in compress_all(pipe, documents, ratios, arguments.batch_size, arguments):
        num_tokens += int(memories[0].num_context_tokens)
        for path, memory in zip(paths[index], memories, strict=True):
            memory.save(path)
            num_slots += int(memory.num_slots)
            num_bytes += memory.nbytes
            print(path)
    print(
        f"{len(documents)} documents with {num_tokens:,} tokens: {num_slots:,} slots in {num_bytes:,} bytes, "
        f"ratio {', '.join(map(str, ratios))}",
        file=sys.stderr,
    )


def _memory_paths(
    documents: list[Document], ratios: list[int | str], folder: Path, overwrite: bool
) -> list[list[Path]]:
    """The memory files of each document, one for each ratio."""
    endings = [f".x{ratio}{MEMORY_SUFFIX}" for ratio in ratios] if len(ratios) > 1 else [MEMORY_SUFFIX]
    paths = [[folder / f"{document.name}{ending}" for ending in endings] for document in documents]
    seen: set[Path] = set()
    for document, (first, *_) in zip(documents, paths, strict=True):
        if first in seen:
            raise ValueError(f"two documents have the name {document.name!r}: rename one, or compress them apart")
        seen.add(first)
    existing = [str(path) for of_document in paths for path in of_document if path.exists()]
    if existing and not overwrite:
        raise ValueError(f"{existing[0]} and {len(existing) - 1} more exist: pass --overwrite to replace them")
    return paths


def compress_all(
    pipe: ContextCompressionQAPipeline,
    documents: list[Document],
    ratios: list[int | str],
    batch_size: int,
    arguments: argparse.Namespace,
) -> Iterator[tuple[int, list[CompressedContext]]]:
    """Compress documents in batches of similar length, with a progress bar that also moves within a long document."""
    from tqdm.auto import tqdm

    from ..modeling.parts.length_batches import length_batches

    pipe.check_max_tokens(arguments.max_tokens)
    rows = pipe.document_ids([document.text for document in documents], arguments.max_tokens)
    report_cut([len(row) for row in rows], arguments.max_tokens)
    rows = [row[: arguments.max_tokens] for row in rows]
    encoder, end = pipe.model.base_model.encoder_backbone, 0
    layers = list(getattr(encoder, "layers", [encoder]))
    options = {"total": sum(map(len, rows)), "desc": "compressing", "unit": "token", "unit_scale": True}
    with tqdm(**options, disable=not sys.stderr.isatty()) as progress:
        for batch in length_batches([len(row) for row in rows], batch_size):
            end += sum(len(rows[index]) for index in batch)

            def note(module: Any, inputs: Any, output: Any, end: int = end) -> None:
                states = output if hasattr(output, "shape") else output[0]
                # Pads and second readings count no more than the documents have tokens.
                progress.update(min(states.shape[:2].numel() / len(layers), end - progress.n))

            hooks = [layer.register_forward_hook(note) for layer in layers]
            try:
                memories = pipe.compress_ids([rows[index] for index in batch], ratios, arguments.allow_untrained_ratio)
            except ValueError as error:
                longest = max(batch, key=lambda index: len(rows[index]))
                name, length = documents[longest].name, len(rows[longest])
                raise ValueError(f"document {name!r} ({length} tokens): {error}") from error
            finally:
                for hook in hooks:
                    hook.remove()
            for row, index in enumerate(batch):
                yield index, [memory.rows(row) for memory in memories]  # type: ignore[union-attr]  # of a list of ratios
            progress.update(end - progress.n)


def report_cut(lengths: Sequence[int], limit: int | None) -> None:
    num_cut = sum(length > limit for length in lengths) if limit else 0
    if num_cut:
        print(f"cut {num_cut} of {len(lengths)} documents to their first {limit} tokens", file=sys.stderr)
