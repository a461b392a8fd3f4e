# SPDX-License-Identifier: Apache-2.0
"""A collection into a store: rows read, compressed by one process or many, and appended version by version."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing.connection import wait as wait_for_end
from typing import Any

import pyarrow
import pyarrow.compute

from .corpus_compressor import CorpusCompressor
from .corpus_rows import CorpusColumns, CorpusPart, Row, batches, corpus_parts, read_part
from .memory_columns import MemoryForm
from .memory_store import MemoryStore, memory_table

# Rows whose ids are looked up at once in a store that is there.
_ROWS_AT_ONCE = 10_000


@dataclass(frozen=True)
class CorpusJob:
    """What is compressed, how, and where to.

    Args:
        inputs: see [`corpus_parts`].
        store: the store's place.
        model: Hub id or folder of a compressor.
        ratio: context tokens per slot, or "auto".
        dtype: what slots are kept in, see [`MemoryStore.create`].
        columns: names of the inputs' columns.
        keep_texts: whether the texts are kept beside the memories.
        resume: go on with a store that is there, and leave out the rows that it has.
        batch_size: rows that a worker takes at once.
        commit_seconds: how long what is done waits until it is written, at the most, on one machine.
        commit_bytes: bytes that are written as one version; the last one of a run has fewer.
        options: further arguments of [`CorpusCompressor`].
    """

    inputs: tuple[str, ...]
    store: str
    model: str
    ratio: int | str
    dtype: str = "int8"
    columns: CorpusColumns = field(default_factory=CorpusColumns)
    keep_texts: bool = True
    resume: bool = False
    batch_size: int = 256
    commit_seconds: float = 30.0
    commit_bytes: int = 256 << 20
    options: dict[str, Any] = field(default_factory=dict)

    def parts(self) -> list[CorpusPart]:
        """The parts to read, after a look at the store."""
        parts = corpus_parts(self.inputs, self.columns)
        store = MemoryStore.find(self.store)
        if store is None:
            return parts
        if not self.resume:
            raise ValueError(f"there is a store {self.store} already: go on with --resume, or take another name")
        if store.form.dtype != self.dtype:
            raise ValueError(f"the store {self.store} is in {store.form.dtype!r}, not in {self.dtype!r}")
        # Texts that selected their ratios may have any.
        others = [ratio for ratio in store.ratios() if self.ratio not in ("auto", ratio)]
        if others:
            raise ValueError(f"the store {self.store} has memories at ratio {min(others)}, not at {self.ratio}")
        return parts

    def rows(self, part: CorpusPart, report: CorpusReport | None = None) -> Iterator[Row]:
        """The rows of a part that the store lacks; those that it has with another text have an error."""
        rows = read_part(part, self.columns)
        store = MemoryStore.find(self.store) if self.resume else None
        if store is None:
            yield from rows
            return
        while block := list(itertools.islice(rows, _ROWS_AT_ONCE)):
            known = store.known_texts([row["id"] for row in block])
            for row in block:
                if row["id"] not in known or row["error"]:
                    yield row
                elif known[row["id"]] not in (None, row["text"]):
                    error = "the store has another text with this id: delete it there, or give the rows other ids"
                    yield {**row, "text": None, "error": error}
                elif report is not None:
                    report.num_there += 1

    def compressor(self, device: str = "auto") -> RowCompressor:
        """What a worker runs, with the model on a device; on an accelerator, if there is one, with "auto"."""
        compressor = CorpusCompressor(self.model, self.ratio, memory_dtype=self.dtype, device=device, **self.options)
        store = MemoryStore.find(self.store)
        return RowCompressor(compressor, self.keep_texts, None if store is None else store.form)


class RowCompressor:
    """Makes rows of a store of a collection's rows: what a worker of either engine runs."""

    def __init__(self, compressor: CorpusCompressor, keep_texts: bool, store_form: MemoryForm | None = None):
        self._compressor, self._keep_texts, self._store_form = compressor, keep_texts, store_form

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> pyarrow.Table:
        """Compress some rows."""
        form = self._compressor.form
        if self._store_form is not None:
            self._store_form.check(form)
        good = [row for row, error in enumerate(batch["error"]) if error is None]
        errors = {row: error for row, error in enumerate(batch["error"]) if error is not None}
        tables = []
        for places, result in self._compressor.compress([batch["text"][row] for row in good]):
            rows = [good[place] for place in places]
            if isinstance(result, Exception):
                errors |= dict.fromkeys(rows, f"{type(result).__name__}: {result}")
                continue
            ids, texts, metadata = ([batch[name][row] for row in rows] for name in ("id", "text", "metadata"))
            table = memory_table(form, ids, result, texts if self._keep_texts else None, metadata)
            tables.append(table.append_column("error", pyarrow.nulls(len(rows), pyarrow.string())))
        failed = {"id": [batch["id"][row] for row in errors], "error": list(errors.values())}
        schema = form.schema.append(pyarrow.field("error", pyarrow.string()))
        nothing = {name: pyarrow.nulls(len(errors), schema.field(name).type) for name in schema.names}
        return pyarrow.concat_tables([*tables, pyarrow.table(nothing | failed, schema=schema)])


@dataclass
class CorpusReport:
    """What has been done.

    Args:
        num_rows: rows that are in the store now, and were not before.
        num_tokens: their context tokens.
        failures: rows that are not: their ids, and why.
        seconds: time it took.
        num_there: rows that were left out, since the store has their ids, and no other texts with these.
    """

    num_rows: int = 0
    num_tokens: int = 0
    failures: list[tuple[str, str]] = field(default_factory=list)
    seconds: float = 0.0
    num_there: int = 0

    def __add__(self, other: CorpusReport) -> CorpusReport:
        return CorpusReport(
            self.num_rows + other.num_rows,
            self.num_tokens + other.num_tokens,
            self.failures + other.failures,
            self.seconds + other.seconds,
            self.num_there + other.num_there,
        )


def write_rows(place: str, table: pyarrow.Table) -> CorpusReport:
    """Append what a [`RowCompressor`] returned to a store as one version; the store is made if it is not there."""
    failed = pyarrow.compute.is_valid(table["error"])
    errors = table.filter(failed).select(["id", "error"]).to_pydict()
    report = CorpusReport(failures=list(zip(errors["id"], errors["error"], strict=True)))
    done = table.filter(pyarrow.compute.invert(failed)).drop_columns(["error"])
    if not len(done):
        return report
    form = MemoryForm.from_json(table.schema.metadata[b"context_compressors"])
    store = MemoryStore.find_or_create(place, form)
    # Another process may have made it meanwhile.
    store.form.check(form)
    if store.form.dtype != form.dtype:
        raise ValueError(f"the store {place} is in {store.form.dtype!r}, not in {form.dtype!r}")
    ids = done["id"].to_pylist()
    known, chosen = store.known_texts(ids), []
    for index, (name, text) in enumerate(zip(ids, done["text"].to_pylist(), strict=True)):
        if name not in known:
            known[name] = text
            chosen.append(index)
        elif text is not None and text == known[name]:
            # As where a task is run again that had written them.
            report.num_there += 1
        else:
            report.failures.append((name, "another row has this id"))
    done = done.take(pyarrow.array(chosen, pyarrow.int64()))
    # Where another process is adding the same ids right now, each is added once.
    report.num_rows = store.append(done)
    if report.num_rows < len(done):
        ids, texts = done["id"].to_pylist(), done["text"].to_pylist()
        there = store.known_texts(ids)
        is_own = [there[name] == text for name, text in zip(ids, texts, strict=True)]
        others = [name for name, own in zip(ids, is_own, strict=True) if not own]
        report.failures += [(name, "another row has this id") for name in others]
        report.num_there += len(done) - report.num_rows - len(others)
        done = done.filter(pyarrow.array(is_own))
    report.num_tokens = pyarrow.compute.sum(done["num_tokens"]).as_py() or 0
    return report


def compress_locally(job: CorpusJob, devices: Sequence[str]) -> Iterator[CorpusReport]:
    """Compress a collection on this machine."""
    return _reports(job, job.parts(), devices)


def _reports(job: CorpusJob, parts: Sequence[CorpusPart], devices: Sequence[str]) -> Iterator[CorpusReport]:
    left_out = CorpusReport()
    rows = (row for part in parts for row in job.rows(part, left_out))
    waiting: list[pyarrow.Table] = []
    last = time.monotonic()
    for table in _compressed(job, batches(rows, job.batch_size), devices):
        waiting.append(table)
        is_time = time.monotonic() - last >= job.commit_seconds
        if is_time or sum(table.nbytes for table in waiting) >= job.commit_bytes:
            yield _written(job, waiting, last)
            waiting, last = [], time.monotonic()
    if waiting:
        yield _written(job, waiting, last)
    if left_out.num_there:
        yield left_out


def _written(job: CorpusJob, tables: list[pyarrow.Table], start: float) -> CorpusReport:
    report = write_rows(job.store, pyarrow.concat_tables(tables))
    report.seconds = time.monotonic() - start
    return report


def _compressed(
    job: CorpusJob, all_batches: Iterable[dict[str, list[Any]]], devices: Sequence[str]
) -> Iterator[pyarrow.Table]:
    """Tables of a store's rows, as workers finish them."""
    if len(devices) == 1:
        # Nothing is loaded where nothing is left to do.
        compressor = None
        for batch in all_batches:
            compressor = compressor or job.compressor(devices[0])
            yield compressor(batch)
        return
    context = multiprocessing.get_context("spawn")
    names = context.SimpleQueue()
    for device in devices:
        names.put(device)
    threads = max(1, (os.cpu_count() or 1) // len(devices))
    with ProcessPoolExecutor(len(devices), context, _start_worker, (job, names, threads)) as pool:
        running: set[Future[pyarrow.Table]] = set()
        try:
            for batch in all_batches:
                running.add(pool.submit(_run_worker, batch))
                # One batch more for each worker, so that none waits for the next.
                if len(running) >= 2 * len(devices):
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    yield from (future.result() for future in done)
            yield from (future.result() for future in running)
        except BrokenProcessPool as error:
            raise OSError(
                "a worker died: its model could not be loaded, see above, or the machine had no memory left for it "
                "(fewer --workers, a smaller --batch-size). What was written stays: go on with --resume"
            ) from error


_worker: RowCompressor | None = None


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
    return _worker(batch)  # type: ignore[misc]  # set before the first batch
