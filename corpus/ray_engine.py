# SPDX-License-Identifier: Apache-2.0
"""A collection into a store with Ray Data: tasks read parts, a pool of actors compresses rows, Lance is the sink."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow

from .compress_corpus import CorpusJob, CorpusReport, write_rows
from .corpus_rows import CorpusPart


def compress_with_ray(job: CorpusJob, address: str | None = None, workers: int | None = None) -> CorpusReport:
    """Compress a collection on a Ray cluster, whose machines all see the inputs, the model and the store."""
    try:
        import ray
    except ImportError as error:
        raise ImportError("--engine ray needs Ray: pip install -e '.[ray]' in the clone") from error
    parts = [json.dumps(dataclasses.asdict(part)) for part in job.parts()]
    if not parts:
        return CorpusReport()
    if not ray.is_initialized():
        # Without a word Ray would look for a cluster of an earlier run, which may have been killed.
        ray.init(address=address or os.environ.get("RAY_ADDRESS", "local"))
    num_gpus = int(ray.cluster_resources().get("GPU", 0))
    sink, start = _store_sink(job), time.monotonic()
    rows = ray.data.from_items([{"part": part} for part in parts], override_num_blocks=min(len(parts), 1000))
    # A file's rows would be one block, and one actor's.
    rows = rows.flat_map(_read, fn_args=(job,)).repartition(target_num_rows_per_block=job.batch_size)
    rows.map_batches(
        _Actor,
        fn_constructor_args=(job,),
        batch_size=job.batch_size,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=workers or max(1, num_gpus)),
        num_gpus=min(1, num_gpus),
    ).write_datasink(sink)
    sink.report.seconds = time.monotonic() - start
    return sink.report


def _read(item: dict[str, str], job: CorpusJob) -> Iterator[dict[str, Any]]:
    return job.rows(CorpusPart(**json.loads(item["part"])))


class _Actor:
    def __init__(self, job: CorpusJob):
        self._compressor = job.compressor()

    def __call__(self, batch: pyarrow.Table) -> pyarrow.Table:
        return self._compressor(batch.to_pydict())


def _store_sink(job: CorpusJob) -> Any:
    """The store as a sink of Ray Data.

    Ray's own for Lance commits when all is done: a job that is killed would have done nothing.
    """
    from ray.data import Datasink

    class StoreSink(Datasink):
        report = CorpusReport()

        def write(self, blocks: Iterable[pyarrow.Table], ctx: Any) -> CorpusReport:
            tables = [block for block in blocks if len(block)]
            return write_rows(job.store, pyarrow.concat_tables(tables)) if tables else CorpusReport()

        def on_write_complete(self, write_result: Any) -> None:
            self.report = sum(write_result.write_returns, CorpusReport())

        @property
        def min_bytes_per_write(self) -> int:
            return job.commit_bytes

    return StoreSink()
