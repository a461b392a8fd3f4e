# SPDX-License-Identifier: Apache-2.0
"""`context-compressors compress` and `ask`: documents in, memory files out; questions in, answers out."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..configuration.nearest_names import nearest
from .command import COLUMN, LOADING, MODEL, OVERWRITE, argument, command, positive_int
from .loading import load_pipeline

if TYPE_CHECKING:
    from ..modeling.compressor.context_compression_qa import ContextCompressionQAPipeline
    from ..modeling.memory.compressed_context import CompressedContext

MEMORY_SUFFIX = ".safetensors"
# Documents that are read at once.
_BATCH_SIZE = 8

_EXAMPLES = """
context-compressors compress my-compressor report.txt minutes.txt --output memories
context-compressors compress my-compressor articles.parquet --column text --ratio 4 --ratio 16
cat report.txt | context-compressors compress my-compressor --output memories
"""


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
    argument("--ratio", type=positive_int, action="append", metavar="R", help="tokens per slot; may be repeated"),
    argument("--by-document", action="store_true", help="name files by ids, for the field `memories` of a training"),
    OVERWRITE,
    COLUMN,
    *LOADING,
    examples=_EXAMPLES,
)
def compress(arguments: argparse.Namespace) -> None:
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
    for index, memories in compress_all(pipe, documents, ratios):
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


@dataclass(frozen=True)
class Document:
    """A document's text, and its file's name without the suffix, with the row's number where it holds several."""

    name: str
    text: str


def read_documents(paths: Sequence[str], column: str = "context") -> list[Document]:
    """Read documents in the order given."""
    documents = [document for path in paths for document in _read(path, column)]
    for document in documents:
        if not document.text.strip():
            raise ValueError(f"document {document.name!r} is empty")
    return documents


def _read(path: str, column: str) -> Iterator[Document]:
    if path == "-":
        yield Document("stdin", sys.stdin.read())
        return
    file = Path(path).expanduser()
    if not file.is_file():
        what = "a folder, not a file" if file.is_dir() else "not there"
        raise ValueError(f"{path} is {what}: give text files, .jsonl or .parquet files, or - for standard input")
    if file.suffix.lower() in (".jsonl", ".parquet"):
        from ..data.files import read_records

        for number, row in enumerate(read_records(file), start=1):
            if not isinstance(row.get(column), str):
                raise ValueError(f"{path}, row {number} has no text in column {column!r}{nearest(column, row)}")
            yield Document(f"{file.stem}-{number:06d}", row[column])
        return
    try:
        yield Document(file.stem, file.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text file in UTF-8: {error}") from error


def _memory_paths(documents: list[Document], ratios: list[int], folder: Path, overwrite: bool) -> list[list[Path]]:
    """The memory files of each document, one for each ratio."""
    names = [document.name for document in documents]
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(f"two documents have the name {name!r}: rename one, or compress them apart")
    endings = [f".x{ratio}{MEMORY_SUFFIX}" for ratio in ratios] if len(ratios) > 1 else [MEMORY_SUFFIX]
    paths = [[folder / f"{name}{ending}" for ending in endings] for name in names]
    existing = [str(path) for of_document in paths for path in of_document if path.exists()]
    if existing and not overwrite:
        raise ValueError(f"{existing[0]} and {len(existing) - 1} more exist: pass --overwrite to replace them")
    return paths


def compress_all(
    pipe: ContextCompressionQAPipeline, documents: list[Document], ratios: list[int]
) -> Iterator[tuple[int, list[CompressedContext]]]:
    """Compress documents in batches of similar length, with a progress bar that moves within a long document, too."""
    from tqdm.auto import tqdm

    from ..modeling.parts.packing import length_batches

    rows, end = pipe.document_ids([document.text for document in documents]), 0
    with tqdm(total=sum(map(len, rows)), unit="token", unit_scale=True, disable=None) as progress:

        def count(module: Any, inputs: Any, output: Any) -> None:
            # Chunks that are read together; their pads are no tokens of the documents.
            progress.update(min(output[0].shape[:2].numel(), end - progress.n))

        hook = pipe.model.base_model.encoder_backbone.register_forward_hook(count)
        for batch in length_batches([len(row) for row in rows], _BATCH_SIZE):
            end += sum(len(rows[index]) for index in batch)
            memories: Any = pipe.compress_ids([rows[index] for index in batch], ratios)
            for row, index in enumerate(batch):
                yield index, [memory.rows(row) for memory in memories]
            progress.update(end - progress.n)
        hook.remove()


_ASK_EXAMPLES = """
context-compressors ask my-compressor memories/report.safetensors --question "Who wrote it?"
context-compressors ask my-compressor report.txt minutes.txt --ratio 8
context-compressors ask my-compressor report.txt minutes.txt --full-text
context-compressors ask my-compressor memories/*.safetensors < questions.txt
"""


@command(
    "ask",
    "Answer questions from memory files or documents.",
    MODEL,
    argument("sources", nargs="+", help="memory files and documents; each is asked, and the likeliest answer printed"),
    argument("--question", action="append", help="may be repeated (default: line by line from standard input)"),
    argument("--ratio", type=positive_int, metavar="R", help="context tokens per slot"),
    argument("--full-text", action="store_true", help="compress nothing: answer from the documents' own tokens"),
    argument("--max-new-tokens", type=positive_int, default=64, help="of an answer (default: %(default)s)"),
    COLUMN,
    *LOADING,
    examples=_ASK_EXAMPLES,
)
def ask(arguments: argparse.Namespace) -> None:
    """Run `context-compressors ask`."""
    if "-" in arguments.sources and not arguments.question:
        raise ValueError("standard input is a document here, so that questions must be given with --question")
    is_memory = [source.endswith(MEMORY_SUFFIX) for source in arguments.sources]
    if arguments.full_text and (arguments.ratio or any(is_memory)):
        raise ValueError("--full-text reads documents, not memory files, and at no --ratio")
    documents = {
        source: read_documents([source], arguments.column)
        for source, memory in zip(arguments.sources, is_memory, strict=True)
        if not memory
    }
    pipe = load_pipeline(arguments, [arguments.ratio] if documents else [])
    if pipe.model.config.compresses_questions or arguments.full_text:
        if any(is_memory):
            pipe.check_serves_memories("so that memory files are not asked: give a document")
        texts = [document.text for source in arguments.sources for document in documents[source]]
        read = {"context": texts, "full_text": arguments.full_text, "ratio": arguments.ratio}
    else:
        read = {"memory": _gather_memories(pipe, documents, arguments)}
    for question in arguments.question or _questions():
        answer = pipe(question, **read, join="likeliest", max_new_tokens=arguments.max_new_tokens)
        print(answer["answer"], flush=True)


def _gather_memories(
    pipe: ContextCompressionQAPipeline, documents: dict[str, list[Document]], arguments: argparse.Namespace
) -> list[CompressedContext]:
    """Return the memories of all sources, in the order given."""
    ratios = [arguments.ratio or pipe.model.config.default_ratio]
    memories: list[CompressedContext] = []
    for source in arguments.sources:
        if source in documents:
            compressed = dict(compress_all(pipe, documents[source], ratios))
            memories.extend(compressed[index][0] for index in range(len(compressed)))
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
