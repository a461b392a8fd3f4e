# SPDX-License-Identifier: Apache-2.0
"""`context-compressors compress-corpus IN ... --store STORE`: collections in, one store of memories out."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from .command import argument, command, config_argument, config_fields, positive_int

if TYPE_CHECKING:
    from ..corpus.compress_corpus import CorpusReport

# Fields of a job, of its columns and of `CorpusCompressor`, and where failed rows are listed.
_OF_JOB = ("batch_size", "commit_seconds", "commit_bytes")
_LOADING = ("device", "dtype", "revision", "base_model")
_OF_COMPRESSOR = ("batch_tokens", "keep_texts", "memory_dtype", *_LOADING)
_CONFIG = (*_OF_JOB, *_OF_COMPRESSOR, "metadata", "failures")

_EXAMPLES = """
context-compressors compress-corpus pages.parquet --model my-compressor --store pages.lance --ratio 4
context-compressors compress-corpus rajpurkar/squad:validation --column context --id-column id \\
    --model my-compressor --store squad.lance --ratio 8 --config '{memory_dtype: int4, metadata: [title]}'
"""


@command(
    "compress-corpus",
    "Compress a collection into a store of memories (pip install -e '.[corpus]' in the clone). A store that is there "
    "is gone on with: rows whose ids it has are left out.",
    argument(
        "inputs",
        nargs="+",
        metavar="IN",
        help=".parquet and .jsonl files (a row is a document), text files, folders of these, or data sets of the Hub, "
        "OWNER/NAME or OWNER/NAME:SPLIT",
    ),
    argument("--model", required=True, help="Hub id or folder of a compressor"),
    argument("--store", required=True, help="the store, a folder or an address such as s3://bucket/pages.lance"),
    argument("--ratio", type=positive_int, required=True, metavar="R", help="context tokens per slot"),
    argument("--column", default="text", help="with the text, of files of rows (default: %(default)s)"),
    argument("--id-column", metavar="COLUMN", help="with the rows' ids (default: file name and row number)"),
    argument("--engine", choices=("local", "ray"), default="local", help="(default: local; Ray's at $RAY_ADDRESS)"),
    argument("--workers", type=positive_int, metavar="N", help="processes with a model (default: one for each GPU)"),
    config_argument(
        f"rare settings: {', '.join(_CONFIG)} (failed rows; default: STORE.failed.jsonl)", "{memory_dtype: int4}"
    ),
    examples=_EXAMPLES,
)
def compress_corpus(arguments: argparse.Namespace) -> None:
    """Run `context-compressors compress-corpus`."""
    from ..corpus.compress_corpus import CorpusJob, compress_locally, compress_with_ray
    from ..corpus.corpus_rows import CorpusColumns
    from ..corpus.memory_store import import_lance
    from .loading import check_ratios

    fields = config_fields(arguments.config, _CONFIG)
    import_lance()
    check_ratios(arguments.model, [arguments.ratio])
    job = CorpusJob(
        tuple(arguments.inputs),
        arguments.store,
        arguments.model,
        arguments.ratio,
        CorpusColumns(arguments.column, arguments.id_column, tuple(fields.get("metadata", ()))),
        options={name: fields[name] for name in _OF_COMPRESSOR if name in fields},
        **{name: fields[name] for name in _OF_JOB if name in fields},
    )
    # A store with an address has its file in the working folder.
    place = arguments.store.rstrip("/")
    path = fields.get("failures", f"{place.rpartition('/')[2] if '://' in place else place}.failed.jsonl")
    if arguments.engine == "ray":
        # Asked for when the file of failures can be written.
        reports: Iterable[CorpusReport] = (compress_with_ray(job, arguments.workers) for _ in range(1))
    else:
        reports = compress_locally(job, _devices(fields.get("device"), arguments.workers))
    total = _follow(reports, path)
    speed = f"{total.num_tokens / max(total.seconds, 1e-9):,.0f} tokens/s"
    print(
        f"{total.num_rows:,} rows with {total.num_tokens:,} tokens in {total.seconds:,.1f} s, {speed}; "
        f"{len(total.failures):,} rows failed{f', see {path}' if total.failures else ''}"
        f"{f'; {total.num_there:,} rows left out: the store has their ids' if total.num_there else ''}",
        file=sys.stderr,
    )
    num_read = len(total.failures) + total.num_rows + total.num_there
    if 2 * len(total.failures) > num_read:
        name, reason = total.failures[0]
        raise ValueError(f"{len(total.failures):,} of {num_read:,} rows failed; the first, {name!r}: {reason}")


def _devices(device: str | None, workers: int | None) -> list[str]:
    """Return the device of each worker."""
    import torch

    if device is not None or not torch.accelerator.is_available():
        return [device or "cpu"] * (workers or 1)
    kind = torch.accelerator.current_accelerator().type  # type: ignore[union-attr]  # there is one
    count = torch.accelerator.device_count()
    return [f"{kind}:{worker % count}" for worker in range(workers or count)]


def _follow(reports: Iterable[CorpusReport], path: str) -> CorpusReport:
    """Show each report as it comes, write down its failed rows, and return the sum of all."""
    from tqdm.auto import tqdm

    from ..corpus.compress_corpus import CorpusReport

    total = CorpusReport()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8") as file, tqdm(unit="row", disable=None) as progress:
        for report in reports:
            total += report
            for name, error in report.failures:
                file.write(json.dumps({"id": name, "error": error}, ensure_ascii=False) + "\n")
            file.flush()
            progress.update(report.num_rows)
            if progress.disable:
                print(f"{total.num_rows:,} rows, {len(total.failures):,} failed", file=sys.stderr)
    return total
