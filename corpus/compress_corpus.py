# SPDX-License-Identifier: Apache-2.0
"""A collection into a store: rows read, compressed by processes of one machine or of many, appended as versions."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import wait as wait_for_end
from typing import Any

import pyarrow
import pyarrow.compute

from .corpus_compressor import CorpusCompressor
from .corpus_rows import CorpusColumns, CorpusPart, Row, batches, corpus_parts, read_part
from .memory_columns import MemoryForm
from .memory_store import MemoryStore

# Rows whose ids are looked up at once in a store that is there.
_ROWS_AT_ONCE = 10_000


@dataclass(frozen=True)
class CorpusJob:
    """A collection to compress into a store; rows that the store has are left out.

    `batch_size` rows are compressed at once, and written after `commit_seconds` or `commit_bytes`; `options` are for
    [`CorpusCompressor`].
    """

    inputs: tuple[str, ...]
    store: str
    model: str
    ratio: int
    columns: CorpusColumns = field(default_factory=CorpusColumns)
    batch_size: int = 256
    commit_seconds: float = 30.0
    commit_bytes: int = 256 << 20
    options: dict[str, Any] = field(default_factory=dict)

    def parts(self) -> list[CorpusPart]:
        """The parts to read; `ValueError` for a store whose memories have another ratio."""
        store = MemoryStore.find(self.store)
        # Texts that selected their ratios may have any.
        others = {self.ratio} if store is None else store.ratios()
        if others - {self.ratio}:
            raise ValueError(f"the store {self.store} has memories at ratio {min(others)}, not at {self.ratio}")
        return corpus_parts(self.inputs, self.columns)

    def rows(self, part: CorpusPart, report: CorpusReport | None = None) -> Iterator[Row]:
        """The rows of a part that the store lacks; the report counts the others."""
        rows, store = read_part(part, self.columns), MemoryStore.find(self.store)
        while block := list(itertools.islice(rows, _ROWS_AT_ONCE)):
            stored = [False] * len(block) if store is None else store.contains([row["id"] for row in block])
            if report is not None:
                report.num_there += sum(stored)
            yield from (row for row, is_there in zip(block, stored, strict=True) if not is_there)

    def compressor(self, device: str = "auto") -> CorpusCompressor:
        """Return a worker's compressor; `ValueError` where the store has memories of another form."""
        compressor = CorpusCompressor(self.model, self.ratio, **{"device": device, **self.options})
        store = MemoryStore.find(self.store)
        if store is not None:
            store.form.check(compressor.form)
        return compressor


@dataclass
class CorpusReport:
    """Rows and tokens that were stored, ids and reasons of rows that failed, and rows that the store had already."""

    num_rows: int = 0
    num_tokens: int = 0
    failures: list[tuple[str, str]] = field(default_factory=list)
    seconds: float = 0.0
    num_there: int = 0

    def __add__(self, other: CorpusReport) -> CorpusReport:
        return CorpusReport(*(vars(self)[name] + vars(other)[name] for name in vars(self)))


def write_rows(place: str, table: pyarrow.Table) -> CorpusReport:
    """Append what a [`CorpusCompressor`] returned to a store as one version; the store is made if it is not there."""
    failed = table.filter(pyarrow.compute.is_valid(table["error"])).select(["id", "error"]).to_pydict()
    report = CorpusReport(failures=list(zip(failed["id"], failed["error"], strict=True)))
    done = table.filter(pyarrow.compute.is_null(table["error"])).drop_columns(["error"])
    if len(done):
        form = MemoryForm.from_json(table.schema.metadata[b"context_compressors"])
        report.num_rows = MemoryStore.find_or_create(place, form).append(done)
        report.num_there = len(done) - report.num_rows
        report.num_tokens = pyarrow.compute.sum(done["num_tokens"]).as_py()
    return report


def compress_locally(job: CorpusJob, devices: Sequence[str]) -> Iterator[CorpusReport]:
    """Compress a collection on this machine, with a worker on each device."""
    left_out = CorpusReport()
    rows = batches((row for part in job.parts() for row in job.rows(part, left_out)), job.batch_size)
    waiting: list[pyarrow.Table] = []
    last = time.monotonic()
    for table in itertools.chain(_compressed(job, rows, devices), [None]):
        waiting += [] if table is None else [table]
        is_time = table is None or time.monotonic() - last >= job.commit_seconds
        if waiting and (is_time or sum(table.nbytes for table in waiting) >= job.commit_bytes):
            report = write_rows(job.store, pyarrow.concat_tables(waiting))
            report.seconds = time.monotonic() - last
            yield report
            waiting, last = [], time.monotonic()
    yield left_out


def _compressed(
    job: CorpusJob, rows: Iterable[dict[str, list[Any]]], devices: Sequence[str]
) -> Iterator[pyarrow.Table]:
    """Rows of a store, as workers finish them."""
    if len(devices) == 1:
        # Nothing is loaded where nothing is left to do.
        compressor = None
        for batch in rows:
            compressor = compressor or job.compressor(devices[0])
            yield _compress(compressor, batch)
        return
    context = multiprocessing.get_context("spawn")
    names = context.SimpleQueue()
    for device in devices:
        names.put(device)
    threads = max(1, (os.cpu_count() or 1) // len(devices))
    with ProcessPoolExecutor(len(devices), context, _start_worker, (job, names, threads)) as pool:
        running: set[Future[pyarrow.Table]] = set()
        try:
            for batch in rows:
                running.add(pool.submit(_run_worker, batch))
                # One batch more for each worker, so that none waits for the next.
                if len(running) >= 2 * len(devices):
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    yield from (future.result() for future in done)
            yield from (future.result() for future in running)
        except BrokenProcessPool as error:
            raise OSError(
                "a worker died, for lack of memory or as said above: take fewer --workers, and run it again to go on"
            ) from error


def _compress(compressor: CorpusCompressor, batch: dict[str, list[Any]]) -> pyarrow.Table:
    """Rows of a store of a collection's rows; what could not be read has its own error."""
    table = compressor(batch)
    reasons = pyarrow.array(batch["error"], pyarrow.string())
    errors = pyarrow.compute.coalesce(reasons, table["error"])
    return table.set_column(table.column_names.index("error"), "error", errors)


_worker: CorpusCompressor | None = None


def _start_worker(job: CorpusJob, devices: Any, threads: int) -> None:
    global _worker
    import torch

    # A parent that is killed cannot end its workers.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    _worker = job.compressor(devices.get())


def _end_with_parent() -> None:
    wait_for_end([multiprocessing.parent_process().sentinel])  # type: ignore[union-attr]  # a worker has one
    os._exit(1)


def _run_worker(batch: dict[str, list[Any]]) -> pyarrow.Table:
    return _compress(_worker, batch)  # type: ignore[arg-type]  # set before the first batch


# --- with Ray Data: tasks read parts, a pool of actors compresses rows, the store is the sink ---


def compress_with_ray(job: CorpusJob, workers: int | None = None) -> CorpusReport:
    """Compress a collection on the Ray cluster of `$RAY_ADDRESS`, whose machines all see inputs, model and store."""
    try:
        import ray
    except ImportError as error:
        raise ImportError("--engine ray needs Ray: pip install -e '.[ray]' in the clone") from error
    parts = [json.dumps(asdict(part)) for part in job.parts()]
    if not parts:
        return CorpusReport()
    if not ray.is_initialized():
        # Without a word Ray would look for a cluster of an earlier run, which may have been killed.
        ray.init(address=os.environ.get("RAY_ADDRESS", "local"))
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


def _read(item: dict[str, str], job: CorpusJob) -> Iterator[Row]:
    return job.rows(CorpusPart(**json.loads(item["part"])))


class _Actor:
    def __init__(self, job: CorpusJob):
        self._compressor = job.compressor()

    def __call__(self, batch: pyarrow.Table) -> pyarrow.Table:
        return _compress(self._compressor, batch.to_pydict())


def _store_sink(job: CorpusJob) -> Any:
    """The store as a sink of Ray Data, whose own for Lance commits when all is done: a killed job would have done
    nothing."""
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
