# SPDX-License-Identifier: Apache-2.0
"""`context-compressors compress-corpus IN ... --store STORE`: collections in, one store of memories out."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from .command import (
    LOADING,
    MAX_TOKENS,
    MEMORY_DTYPE,
    argument,
    command,
    positive_int,
    positive_int_or_auto,
)

if TYPE_CHECKING:
    from ..corpus.compress_corpus import CorpusJob, CorpusReport

_EXAMPLES = """
context-compressors compress-corpus pages.parquet --model my-compressor --store pages.lance --ratio 4
context-compressors compress-corpus texts/ more.jsonl --model my-compressor --store pages.lance --ratio 4 --resume
context-compressors compress-corpus rajpurkar/squad:validation --column context --id-column id \\
    --model my-compressor --store squad.lance --ratio 8 --engine ray --address auto
"""


@command(
    "compress-corpus",
    "Compress a collection into a store of memories (pip install -e '.[corpus]' in the clone).",
    argument(
        "inputs",
        nargs="+",
        metavar="IN",
        help=".parquet and .jsonl files (a row is a document), text files, folders of these, or data sets of the Hub, "
        "OWNER/NAME or OWNER/NAME:SPLIT",
    ),
    argument("--model", required=True, help="Hub id or folder of a compressor"),
    argument("--store", required=True, help="the store, a folder or an address such as s3://bucket/pages.lance"),
    argument(
        "--ratio",
        type=positive_int_or_auto,
        required=True,
        metavar="R",
        help="context tokens per slot, or auto for a model that selects them",
    ),
    MEMORY_DTYPE,
    argument("--column", default="text", help="with the text, of files of rows (default: %(default)s)"),
    argument(
        "--id-column", metavar="COLUMN", help="with the rows' ids (default: the file's name and the row's number)"
    ),
    argument(
        "--metadata-column",
        metavar="COLUMN",
        action="append",
        help="kept beside the memory; give it again for several",
    ),
    argument("--no-texts", action="store_true", help="do not keep the texts in the store"),
    argument("--resume", action="store_true", help="go on with a store that is there: its rows are left out"),
    argument("--engine", choices=("local", "ray"), default="local", help="(default: %(default)s)"),
    argument(
        "--workers",
        type=positive_int,
        metavar="N",
        help="processes with a model each (default: one for each GPU, or a single one, with all cores)",
    ),
    argument("--batch-size", type=positive_int, default=256, help="rows that a worker takes (default: %(default)s)"),
    argument(
        "--batch-tokens",
        type=positive_int,
        help="tokens that a model reads at once, pads included (default: 512 on a CPU, 16384 on a GPU)",
    ),
    argument(
        "--commit-seconds",
        type=float,
        default=30.0,
        help="longest time that what is done waits until it is written, with --engine local (default: %(default)s)",
    ),
    argument(
        "--commit-megabytes",
        type=float,
        default=256.0,
        help="written as one version at the most (default: %(default)s)",
    ),
    argument("--address", help="with --engine ray: of the cluster, such as auto (default: a new one on this machine)"),
    argument("--failures", metavar="FILE", help="where failed rows are listed (default: STORE.failed.jsonl)"),
    MAX_TOKENS,
    *LOADING,
    examples=_EXAMPLES,
)
def main(arguments: argparse.Namespace) -> None:
    """Run `context-compressors compress-corpus`."""
    from ..corpus.memory_store import import_lance
    from .loading import check_ratios

    if arguments.engine == "local" and arguments.address:
        raise ValueError("--address goes with --engine ray")
    import_lance()
    check_ratios(arguments.model, [arguments.ratio], arguments)
    job = _job(arguments)
    path = arguments.failures or _failures_beside(arguments.store)
    if arguments.engine == "ray":
        from ..corpus.ray_engine import compress_with_ray

        # Asked for when the file of failures can be written.
        reports: Iterable[CorpusReport] = (
            compress_with_ray(job, arguments.address, arguments.workers) for _ in range(1)
        )
    else:
        from ..corpus.compress_corpus import compress_locally

        reports = compress_locally(job, _devices(arguments))
    total = _follow(reports, path)
    speed = f"{total.num_tokens / max(total.seconds, 1e-9):,.0f} tokens/s"
    print(
        f"{total.num_rows:,} rows with {total.num_tokens:,} tokens in {total.seconds:,.1f} s, {speed}; "
        f"{len(total.failures):,} rows failed{f', see {path}' if total.failures else ''}"
        f"{f'; {total.num_there:,} rows were there already' if total.num_there else ''}",
        file=sys.stderr,
    )
    num_read = len(total.failures) + total.num_rows + total.num_there
    if 2 * len(total.failures) > num_read:
        raise ValueError(
            f"{len(total.failures):,} of {num_read:,} rows failed; the first, {total.failures[0][0]!r}: "
            f"{total.failures[0][1]}"
        )


def _failures_beside(store: str) -> str:
    """The file beside a store; in the working folder for one that has an address."""
    place = store.rstrip("/")
    return f"{place.rpartition('/')[2] if '://' in place else place}.failed.jsonl"


def _job(arguments: argparse.Namespace) -> CorpusJob:
    from ..corpus.compress_corpus import CorpusJob
    from ..corpus.corpus_rows import CorpusColumns

    names = ("batch_tokens", "max_tokens", "dtype", "base_model", "trust_remote_code")
    return CorpusJob(
        tuple(arguments.inputs),
        arguments.store,
        arguments.model,
        arguments.ratio,
        arguments.memory_dtype,
        CorpusColumns(arguments.column, arguments.id_column, tuple(arguments.metadata_column or ())),
        keep_texts=not arguments.no_texts,
        resume=arguments.resume,
        batch_size=arguments.batch_size,
        commit_seconds=arguments.commit_seconds,
        commit_bytes=int(arguments.commit_megabytes * 2**20),
        options={name: getattr(arguments, name) for name in names},
    )


def _devices(arguments: argparse.Namespace) -> list[str]:
    """Where each worker computes."""
    import torch

    if arguments.device != "auto" or not torch.accelerator.is_available():
        return ["cpu" if arguments.device == "auto" else arguments.device] * (arguments.workers or 1)
    kind = torch.accelerator.current_accelerator().type  # type: ignore[union-attr]  # there is one
    count = torch.accelerator.device_count()
    return [f"{kind}:{worker % count}" for worker in range(arguments.workers or count)]


def _follow(reports: Iterable[CorpusReport], path: str) -> CorpusReport:
    """The sum of all reports; each is shown as it comes, and its failed rows are written down."""
    from tqdm.auto import tqdm

    from ..corpus.compress_corpus import CorpusReport

    total, reports = CorpusReport(), iter(reports)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    # It can be written, and what an earlier run wrote there stays until this one has begun.
    open(path, "a", encoding="utf-8").close()
    first = next(reports, CorpusReport())
    with open(path, "w", encoding="utf-8") as file, tqdm(unit="row", disable=not sys.stderr.isatty()) as progress:
        for report in chain([first], reports):
            total += report
            for name, error in report.failures:
                file.write(json.dumps({"id": name, "error": error}, ensure_ascii=False) + "\n")
            file.flush()
            progress.update(report.num_rows)
            speed = total.num_tokens / max(total.seconds, 1e-9)
            progress.set_postfix_str(f"{speed:,.0f} tokens/s, {len(total.failures)} failed")
            if progress.disable:
                print(f"{total.num_rows:,} rows, {progress.postfix or ''}".rstrip(", "), file=sys.stderr)
    return total
