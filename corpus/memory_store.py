# SPDX-License-Identifier: Apache-2.0
"""A store of memories: one Lance data set, appended to by many processes, read by id."""

from __future__ import annotations

import datetime
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow
import pyarrow.compute

from ..modeling.memory.compressed_context import CompressedContext
from .memory_columns import MemoryForm, checksums, memory_of_columns, memory_table

if TYPE_CHECKING:
    from lance import LanceDataset

# So many ids stand in one filter.
_IDS_AT_ONCE = 5_000
# Memories that are verified at once.
_ROWS_AT_ONCE = 64


def import_lance() -> Any:
    """The module `lance`."""
    try:
        import lance
    except ImportError as error:
        raise ImportError("a store needs `pylance`: pip install -e '.[corpus]' in the clone") from error
    return lance


class MemoryStore:
    """Memories of one compressor by id, with their texts and metadata, in a Lance data set.

    Each change is a new version, made whole or not at all. A store reads the version that it was opened at until it
    changes something or `refresh` is called.

    ```python
    store = MemoryStore.create("pages.lance", memory, dtype="int8")
    store.add(["page-1", "page-2"], memory, texts=texts)
    memory = store.get(["page-2", "page-1"])
    ```
    """

    def __init__(self, dataset: LanceDataset):
        self._dataset = dataset
        described = (dataset.schema.metadata or {}).get(b"context_compressors")
        if described is None:
            raise ValueError(f"{dataset.uri} is a Lance data set, but no store of memories")
        self.form = MemoryForm.from_json(described)

    @classmethod
    def create(cls, path: str | os.PathLike, memory: CompressedContext, dtype: str = "int8") -> MemoryStore:
        """Make an empty store for memories like one that is given; `ValueError` where there is a store already.

        Args:
            path: its folder, or an address that Lance knows, such as `s3://bucket/pages.lance`.
            memory: any memory of the compressor; it is not added.
            dtype: "int8", "int4", "int2" or "float16".
        """
        if (store := cls._create(path, MemoryForm.of(memory, dtype))) is None:
            raise ValueError(f"there is a store {path} already: open it, or take another name")
        return store

    @classmethod
    def _create(cls, path: str | os.PathLike, form: MemoryForm) -> MemoryStore | None:
        """Make an empty store; return nothing where there is one."""
        try:
            return cls(import_lance().write_dataset(form.schema.empty_table(), os.fspath(path), mode="create"))
        except OSError as error:
            if "already exists" not in str(error):
                raise
            return None

    @classmethod
    def open(cls, path: str | os.PathLike, model_id: str | None = None) -> MemoryStore:
        """Open a store at its last version; `ValueError` where there is none, or one of another model."""
        if (store := cls.find(path)) is None:
            raise ValueError(f"there is no store {path}")
        if model_id is not None and store.model_id != model_id:
            raise ValueError(f"{path} is a store of the model {store.model_id!r}, not of {model_id!r}")
        return store

    @classmethod
    def find(cls, path: str | os.PathLike) -> MemoryStore | None:
        """Return the store, or nothing where there is none."""
        try:
            return cls(import_lance().dataset(os.fspath(path)))
        except ValueError as error:
            if "not found" not in str(error):
                raise
            return None

    @classmethod
    def find_or_create(cls, path: str | os.PathLike, form: MemoryForm) -> MemoryStore:
        """Return the store, made by one of all who try at once where there is none; `ValueError` for another form."""
        while (store := cls.find(path)) is None and (store := cls._create(path, form)) is None:
            pass
        store.form.check(form)
        return store

    @property
    def model_id(self) -> str:
        """Name of the compressor whose memories these are."""
        return self.form.model_id

    @property
    def version(self) -> int:
        """Number of the version that is read."""
        return self._dataset.version

    def __len__(self) -> int:
        return self._dataset.count_rows()

    def refresh(self) -> None:
        """Read the last version from now on."""
        self._dataset.checkout_latest()

    def add(
        self,
        ids: Sequence[str],
        memory: CompressedContext,
        texts: Sequence[str | None] | None = None,
        metadata: Sequence[Mapping[str, Any] | None] | None = None,
    ) -> None:
        """Append memories as one new version in the store's type, each row with an id, a text and metadata (as JSON).

        `ValueError` for an id that is there or stands twice, another model's memory, or one that is not finite.
        """
        counts = Counter(ids)
        if len(counts) < len(ids):
            twice = [name for name, count in counts.items() if count > 1]
            raise ValueError(f"{_named(twice, [True] * len(twice))} stand several times")
        table = self.table_of(ids, memory, texts, metadata)
        self.refresh()
        # All or none, even where another process adds some of them at the same time.
        merge = self._dataset.merge_insert("id").when_matched_fail().when_not_matched_insert_all()
        try:
            merge.conflict_retries(50).execute(table)
        except OSError as error:
            if "found matching row" not in str(error):
                raise
            self.refresh()
            named = _named(ids, self.contains(ids))
            raise ValueError(f"the store has {named} already: delete them first, or take other ids") from error
        self.refresh()

    def table_of(
        self,
        ids: Sequence[str],
        memory: CompressedContext,
        texts: Sequence[str | None] | None = None,
        metadata: Sequence[Mapping[str, Any] | None] | None = None,
    ) -> pyarrow.Table:
        """Return the rows that `add` would append; arguments as there."""
        described = None
        if metadata is not None:
            described = [None if one is None else json.dumps(one, ensure_ascii=False) for one in metadata]
        return memory_table(self.form, ids, memory, texts, described)

    def append(self, table: pyarrow.Table) -> int:
        """Append rows of `table_of` whose ids are new, and return their number; many processes may do so at once."""
        if not len(table):
            return 0
        first = {name: row for row, name in reversed(list(enumerate(table["id"].to_pylist())))}
        table = table.take(sorted(first.values()))
        self.refresh()
        merge = self._dataset.merge_insert("id").when_not_matched_insert_all().conflict_retries(50)
        result = merge.execute(table)
        self.refresh()
        return result["num_inserted_rows"]

    def contains(self, ids: Sequence[str]) -> list[bool]:
        """Return for each id True if the store has it."""
        stored = {name for table in self._tables_with(ids, ["id"]) for name in table["id"].to_pylist()}
        return [name in stored for name in ids]

    def ratios(self) -> set[int]:
        """The ratios of all memories."""
        return set(self._dataset.to_table(columns=["ratio"])["ratio"].unique().to_pylist())

    def ids(self) -> Iterator[str]:
        """All ids, in the order of the store."""
        for batch in self._dataset.to_batches(columns=["id"]):
            yield from batch.column("id").to_pylist()

    def get(self, ids: Sequence[str]) -> CompressedContext:
        """Return a memory with one row for each id, in the store's type; `ValueError` names unknown ids."""
        return memory_of_columns(self.read(ids), self.form)

    def read(self, ids: Sequence[str], columns: Sequence[str] | None = None) -> pyarrow.Table:
        """Read columns of some rows, in the order of the ids; all of them if none are named. Errors as `get`."""
        distinct = list(dict.fromkeys(ids))
        names = None if columns is None else list(dict.fromkeys(["id", *columns]))
        table = pyarrow.concat_tables(self._tables_with(distinct, names))
        places = {name: place for place, name in enumerate(table["id"].to_pylist())}
        if len(places) < len(distinct):
            missing = [name not in places for name in distinct]
            raise ValueError(f"the store has no {_named(distinct, missing)}")
        return table.take(pyarrow.array([places[name] for name in ids], pyarrow.int64()))

    def verify(self) -> None:
        """Compare all rows with their checksums."""
        for batch in self._dataset.to_batches(batch_size=_ROWS_AT_ONCE):
            table = pyarrow.Table.from_batches([batch])
            is_other = pyarrow.compute.not_equal(checksums(table), table["checksum"]).to_pylist()
            if any(is_other):
                names = _named(table["id"].to_pylist(), is_other)
                raise ValueError(f"the store's {names} are damaged: compress them anew")

    def _tables_with(self, ids: Sequence[str], columns: list[str] | None) -> Iterator[pyarrow.Table]:
        for start in range(0, max(1, len(ids)), _IDS_AT_ONCE):
            chosen = _filter(ids[start : start + _IDS_AT_ONCE])
            # The wide columns are read for the rows alone that the ids choose.
            yield self._dataset.to_table(columns=columns, filter=chosen, late_materialization=True)

    def texts(self, ids: Sequence[str] | None = None) -> dict[str, str | None]:
        """The texts of some ids, or of all."""
        if ids is not None:
            return dict(_pairs(self.read(ids, ["text"])))
        return dict(pair for batch in self._dataset.to_batches(columns=["id", "text"]) for pair in _pairs(batch))

    def delete(self, ids: Sequence[str]) -> None:
        """Delete memories, as new versions; `compact` frees their bytes. `ValueError` names unknown ids."""
        self.refresh()
        distinct = list(dict.fromkeys(self.read(ids, ["id"])["id"].to_pylist()))
        for start in range(0, len(distinct), _IDS_AT_ONCE):
            self._dataset.delete(_filter(distinct[start : start + _IDS_AT_ONCE]))
        self.refresh()

    def compact(
        self, keep_versions: datetime.timedelta = datetime.timedelta(days=14), rows_per_file: int = 2**20
    ) -> None:
        """Join files below `rows_per_file` rows, index the ids, and remove versions older than `keep_versions`."""
        self.refresh()
        self._dataset.optimize.compact_files(target_rows_per_fragment=rows_per_file)
        self.refresh()
        # An index is written anew: deltas of it would have to be merged.
        self._dataset.create_scalar_index("id", "BTREE", replace=True)
        self.refresh()
        self._dataset.cleanup_old_versions(older_than=keep_versions)
        self.refresh()


def _pairs(table: pyarrow.Table | pyarrow.RecordBatch) -> Iterator[tuple[str, str | None]]:
    return zip(table["id"].to_pylist(), table["text"].to_pylist(), strict=True)


def _named(ids: Sequence[str], chosen: Sequence[bool]) -> str:
    names = [name for name, is_chosen in zip(ids, chosen, strict=True) if is_chosen]
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"ids {', '.join(map(repr, names[:5]))}{more}"


def _filter(ids: Sequence[str]) -> str:
    quoted = ("'" + name.replace("'", "''") + "'" for name in ids)
    return f"id IN ({', '.join(quoted)})" if ids else "false"
