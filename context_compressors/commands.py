# SPDX-License-Identifier: Apache-2.0
"""The commands `compress` (documents in, memory files out) and `ask` (questions in, answers out)."""

from __future__ import annotations

import argparse
import importlib
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import NearestNameParser, check_device, device_name, positive_int
from .documents import Document, read_documents

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from .modeling.compressor.context_compression_qa import ContextCompressionQAPipeline
    from .modeling.memory.compressed_context import CompressedContext

_MEMORY_SUFFIX = ".safetensors"

_COMPRESS_EXAMPLES = """\
examples:
  context-compressors compress my-compressor report.txt minutes.txt --output memories
  context-compressors compress my-compressor articles.parquet --column text --ratio 4 --ratio 16
  cat report.txt | context-compressors compress my-compressor --output memories"""

_ASK_EXAMPLES = """\
examples:
  context-compressors ask my-compressor memories/report.safetensors --question "Who wrote it?"
  context-compressors ask my-compressor report.txt minutes.txt --ratio 8
  context-compressors ask my-compressor memories/*.safetensors < questions.txt"""


def compress_main(argv: Sequence[str] | None = None) -> int:
    """Run `context-compressors compress`.

    Args:
        argv: the arguments after the command's name; `sys.argv[1:]` when None.

    Returns:
        the exit code, 0; wrong options exit with 2.

    Raises:
        ValueError: a document, model, ratio or memory file that cannot be used, or files that would be overwritten.
    """
    parser = _parser("compress", "Read documents once, and keep each as a memory file.", _COMPRESS_EXAMPLES)
    parser.add_argument("model", help="Hub id or folder of a compressor")
    parser.add_argument(
        "documents",
        nargs="*",
        help="text files, .jsonl or .parquet files (one document a row), or - for standard input, the default",
    )
    parser.add_argument("--output", default="memories", help="folder of the memory files (default: %(default)s)")
    parser.add_argument(
        "--ratio",
        type=positive_int,
        action="append",
        help="context tokens per slot; give it again for several ratios from one reading (default: the model's first)",
    )
    parser.add_argument("--batch-size", type=positive_int, default=8, help="documents at once (default: %(default)s)")
    parser.add_argument("--force", action="store_true", help="overwrite memory files")
    _add_document_options(parser)
    _add_model_options(parser)
    _compress(parser.parse_args(argv))
    return 0


def ask_main(argv: Sequence[str] | None = None) -> int:
    """Run `context-compressors ask`.

    Args:
        argv: the arguments after the command's name; `sys.argv[1:]` when None.

    Returns:
        the exit code, 0; wrong options exit with 2.

    Raises:
        ValueError: a document, model, ratio or memory file that cannot be used.
    """
    parser = _parser("ask", "Answer questions from memory files or documents.", _ASK_EXAMPLES)
    parser.add_argument("model", help="Hub id or folder of a compressor")
    parser.add_argument(
        "sources",
        nargs="+",
        help="memory files (.safetensors), and documents, which are compressed first; read together, in this order",
    )
    parser.add_argument(
        "--question",
        action="append",
        help="a question; give it again for several. Without it, questions are read line by line from standard input",
    )
    parser.add_argument("--prompts", help="packaged prompts or a file of prompts (default: the method's own)")
    parser.add_argument("--ratio", type=positive_int, help="for documents: context tokens per slot")
    parser.add_argument(
        "--max-new-tokens", type=positive_int, default=64, help="longest answer in tokens (default: %(default)s)"
    )
    _add_document_options(parser)
    _add_model_options(parser)
    _ask(parser.parse_args(argv))
    return 0


def load_compressor(
    name: str,
    revision: str | None = None,
    trust_remote_code: bool = False,
    device: str = "auto",
    dtype: str = "auto",
    base_model: str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a compressor and its tokenizer for inference; where texts say "[LM]" or such, these are characters.

    Args:
        name: Hub id or folder.
        revision: branch, tag or commit on the Hub.
        trust_remote_code: allow a checkpoint of a method that this package does not have to run its own code.
        device: where to put it; "auto" takes an accelerator if there is one.
        dtype: "auto" (as saved), "float32", "bfloat16" or "float16".
        base_model: where the base of a light checkpoint is, Hub id or folder, if not where the checkpoint says.

    Raises:
        ValueError: no such device or checkpoint, no compressor, or one whose code is not trusted.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from .modeling.checkpoint.pretrained_bases import base_place, fetch_bases
    from .training.task_tokens import text_tokenizer

    check_device(device)
    importlib.import_module(".modeling", __package__)  # makes the Auto classes know this package's methods
    try:
        fields, _ = PreTrainedConfig.get_config_dict(name, revision=revision)
    except OSError as error:
        raise ValueError(f"there is no model {name!r}: {error}") from error
    method = fields.get("model_type")
    if "compression_ratios" not in fields:
        raise ValueError(f"{name} is a model of type {method!r}, not a context compressor")
    # This package's own methods run this package's code, whatever the checkpoint brings along.
    is_ours = method in CONFIG_MAPPING
    if not is_ours and not trust_remote_code:
        raise ValueError(f"{name} has a method of its own, {method!r}: read its code, then pass --trust-remote-code")
    options = {"revision": revision, "trust_remote_code": not is_ours}
    auto_class = AutoModelForSeq2SeqLM if fields.get("is_encoder_decoder") else AutoModelForCausalLM
    base = {} if base_model is None else {"base_model": base_place(base_model)}
    if base_model is None:
        fetch_bases(fields.get("external_weights"))
    model = auto_class.from_pretrained(name, dtype=dtype, **options, **base)
    if device == "auto":
        device = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(name, **options)
    return model.to(device).eval(), text_tokenizer(tokenizer) if model.config.task_token_ids else tokenizer


def _parser(command: str, description: str, examples: str) -> NearestNameParser:
    return NearestNameParser(prog=f"context-compressors {command}", description=description, epilog=examples)


def _add_document_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--column", default="context", help="column of .jsonl and .parquet files with the text (default: %(default)s)"
    )
    parser.add_argument(
        "--max-tokens", type=positive_int, help="keep only so many tokens of each document (default: all of them)"
    )
    parser.add_argument(
        "--allow-untrained-ratio", action="store_true", help="go on with a ratio that the model was not trained for"
    )


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--revision", help="branch, tag or commit on the Hub")
    parser.add_argument(
        "--base-model", help="Hub id or folder of a light checkpoint's base (default: as the checkpoint says)"
    )
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="allow a checkpoint of a method that this package does not have to run its own code",
    )
    parser.add_argument(
        "--device",
        type=device_name,
        default="auto",
        help="such as cpu or cuda:0 (default: an accelerator if there is one)",
    )
    parser.add_argument(
        "--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"), help="(default: as saved)"
    )


def _load(arguments: argparse.Namespace) -> ContextCompressionQAPipeline:
    model, tokenizer = load_compressor(
        arguments.model,
        arguments.revision,
        arguments.trust_remote_code,
        arguments.device,
        arguments.dtype,
        arguments.base_model,
    )
    return model.question_answering(tokenizer)


def _compress(arguments: argparse.Namespace) -> None:
    if not arguments.documents and sys.stdin.isatty():
        raise ValueError("give documents: files, or text on standard input")
    documents = read_documents(arguments.documents or ["-"], arguments.column)
    # Wrong names are found before the model is loaded; the default ratio alone needs no part in the names.
    ratios = list(dict.fromkeys(arguments.ratio or []))
    paths = _memory_paths(documents, ratios, Path(arguments.output), arguments.force)
    pipe = _load(arguments)
    pipe.check_serves_memories("a memory file without one answers nothing: `ask` about the document itself")
    ratios = ratios or [pipe.model.config.default_ratio]
    num_tokens = num_slots = num_bytes = 0
    for index, memories in _compress_all(pipe, documents, ratios, arguments.batch_size, arguments):
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


def _memory_paths(documents: list[Document], ratios: list[int], folder: Path, force: bool) -> list[list[Path]]:
    """The memory files of each document, one for each ratio."""
    endings = [f".x{ratio}{_MEMORY_SUFFIX}" for ratio in ratios] if len(ratios) > 1 else [_MEMORY_SUFFIX]
    paths = [[folder / f"{document.name}{ending}" for ending in endings] for document in documents]
    seen: set[Path] = set()
    for document, (first, *_) in zip(documents, paths, strict=True):
        if first in seen:
            raise ValueError(f"two documents have the name {document.name!r}: rename one, or compress them apart")
        seen.add(first)
    existing = [str(path) for of_document in paths for path in of_document if path.exists()]
    if existing and not force:
        raise ValueError(f"{existing[0]} and {len(existing) - 1} more exist: pass --force to overwrite memory files")
    return paths


def _compress_all(
    pipe: ContextCompressionQAPipeline,
    documents: list[Document],
    ratios: list[int],
    batch_size: int,
    arguments: argparse.Namespace,
) -> Iterator[tuple[int, list[CompressedContext]]]:
    """Compress documents in batches of similar length, with a progress bar.

    Yields:
        a document's index, and its memories, one for each ratio.
    """
    from tqdm.auto import tqdm

    texts = [document.text for document in documents]
    lengths = [len(row) for row in pipe.document_ids(texts)]
    limit = arguments.max_tokens
    _report_cut(lengths, limit)
    # Longest first: whatever does not fit is found at once.
    order = sorted(range(len(texts)), key=lambda index: -lengths[index])
    with tqdm(total=len(texts), desc="compressing", unit="document", disable=not sys.stderr.isatty()) as progress:
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            try:
                memories = pipe.compress(
                    [texts[index] for index in batch], ratios, limit, arguments.allow_untrained_ratio
                )
            except ValueError as error:
                longest = documents[batch[0]]
                length = min(lengths[batch[0]], limit or lengths[batch[0]])
                raise ValueError(f"document {longest.name!r} ({length} tokens): {error}") from error
            for row, index in enumerate(batch):
                yield index, [memory.rows(row) for memory in memories]
            progress.update(len(batch))


def _report_cut(lengths: Sequence[int], limit: int | None) -> None:
    num_cut = sum(length > limit for length in lengths) if limit else 0
    if num_cut:
        print(f"cut {num_cut} of {len(lengths)} documents to their first {limit} tokens", file=sys.stderr)


def _ask(arguments: argparse.Namespace) -> None:
    if "-" in arguments.sources and not arguments.question:
        raise ValueError("standard input is a document here, so that questions must be given with --question")
    is_memory = [source.endswith(_MEMORY_SUFFIX) for source in arguments.sources]
    if arguments.ratio and all(is_memory):
        raise ValueError("--ratio is for documents: a memory file has its ratio already")
    for source in itertools.compress(arguments.sources, is_memory):
        if not Path(source).is_file():
            raise ValueError(f"there is no memory file {source}")
    documents = {
        source: read_documents([source], arguments.column)
        for source, memory in zip(arguments.sources, is_memory, strict=True)
        if not memory
    }
    prompt = _prompt(arguments.prompts)
    pipe = _load(arguments)
    if pipe.model.config.compresses_questions:
        read = _documents_alone(pipe, documents, arguments)
    else:
        read = {"memory": _gather_memories(pipe, documents, arguments), "join": True}
    for question in arguments.question or _questions():
        answer = pipe(question, **read, prompt=prompt, max_new_tokens=arguments.max_new_tokens)
        print(answer["answer"], flush=True)


def _prompt(prompts: str | None) -> str | None:
    """The question's template in the prompts that the option names."""
    if prompts is None:
        return None
    from .training.prompts import load_prompts

    return load_prompts(prompts)["question_answering"][0]


def _documents_alone(
    pipe: ContextCompressionQAPipeline, documents: dict[str, list[Document]], arguments: argparse.Namespace
) -> dict[str, Any]:
    """What the pipeline reads where a document is compressed together with its question: one document."""
    if any(source not in documents for source in arguments.sources):
        pipe.check_serves_memories("so that memory files are not asked: give a document")
    texts = [document.text for source in arguments.sources for document in documents[source]]
    if len(texts) > 1:
        pipe.check_serves_memories("so that several are not read together: ask about one of them")
    _report_cut([len(ids) for ids in pipe.document_ids(texts)], arguments.max_tokens)
    return {
        "context": texts[0],
        "ratio": arguments.ratio,
        "max_tokens": arguments.max_tokens,
        "allow_untrained_ratio": arguments.allow_untrained_ratio,
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
            compressed = dict(_compress_all(pipe, texts, ratios, 1, arguments))
            memories.extend(compressed[index][0] for index in range(len(texts)))
        else:
            memories.append(pipe.load_memory(source))
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
