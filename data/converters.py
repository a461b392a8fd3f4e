# SPDX-License-Identifier: Apache-2.0
"""Files in our columns of data sets as they are published, on the Hub or in files of theirs."""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from ..configuration.nearest_names import check_choice, nearest
from .columns import complete_rows, has_column, is_list, with_our_columns
from .published_files import file_type, published_paths, read_records
from .published_sets import PUBLISHED_SETS, RETRIEVAL, TASK_COLUMNS, PublishedSet
from .retrieval_sources import BEIR_COLUMNS, RetrievalTable, as_grade
from .rows import in_known_columns, with_answer_lists
from .sources import COLUMNS, DataSource

_BATCH_ROWS = 256
_TEXT = pyarrow.string()
# Of columns that are no texts.
_KINDS: Mapping[str, pyarrow.DataType] = {
    **dict.fromkeys(("answers", "all_classes"), pyarrow.list_(_TEXT)),
    **dict.fromkeys(("max_new_tokens", "length"), pyarrow.int64()),
}
_UNREADABLE = (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, pyarrow.ArrowNotImplementedError)
# Table of a collection -> its columns, the file that it becomes, and its files in the folders of BEIR and MS MARCO.
_RETRIEVAL_TABLES: Mapping[str, tuple[dict[str, pyarrow.DataType], str, tuple[str, ...]]] = {
    "corpus": ({"id": _TEXT, "title": _TEXT, "text": _TEXT}, "corpus.parquet", ("corpus.jsonl*", "collection.tsv*")),
    "queries": ({"id": _TEXT, "query": _TEXT}, "queries.parquet", ("queries.jsonl*", "queries.{split}*.tsv*")),
    "qrels": (
        {"query_id": _TEXT, "doc_id": _TEXT, "score": pyarrow.int64()},
        "qrels/{split}.parquet",
        ("qrels/{split}.tsv*", "qrels.{split}*.tsv*"),
    ),
}
# MS MARCO's files have no line of names, and its relevance is TREC's.
_MS_MARCO_NAMES = {
    "corpus": ("_id", "text"),
    "queries": ("_id", "text"),
    "qrels": ("query-id", "iteration", "corpus-id", "score"),
}


@dataclass
class Conversion:
    """What a conversion wrote.

    Args:
        path: the file, or of a retrieval collection the folder.
        rows: rows written, by file.
        skipped: rows left out, by reason.
    """

    path: Path
    rows: dict[str, int] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        written = ", ".join(f"{count:,} row{'s' * (count != 1)} to {path}" for path, count in self.rows.items())
        reasons = ", ".join(f"{count:,} without {name}" for name, count in self.skipped.items() if count)
        return f"wrote {written}" + (f"; left out {reasons}" if reasons else "")


def convert(
    name: str,
    output: str | os.PathLike[str],
    *,
    split: str = "train",
    source: str | None = None,
    config: str | None = None,
    where: Mapping[str, Any] | None = None,
    supporting_passages: bool = False,
    separate_passages: bool = False,
    max_rows: int | None = None,
    overwrite: bool = False,
    on_rows: Callable[[int], Any] = lambda count: None,
) -> Conversion:
    """Write a published data set as Parquet in our columns, row by row: it is never in memory whole.

    Files of questions have `id`, `context`, `question` and `answers` (a list), those of summaries `id`, `context` and
    `summary`. A retrieval collection becomes a folder with `corpus.parquet` (`id`, `title`, `text`),
    `queries.parquet` (`id`, `query`) and `qrels/SPLIT.parquet` (`query_id`, `doc_id`, `score`). The files' metadata
    names title, licence, origin and what was left out. A file stands whole or not at all; a run that was stopped is
    started again.

    Args:
        name: of the register, `PUBLISHED_SETS`.
        output: the Parquet file, or of a retrieval collection the folder.
        split: "train", "validation" or "test", or as the data set calls it.
        source: a file, a pattern or a folder with what was published; `None` reads the Hub, as a stream.
        config: the Hub data set's configuration, in place of the register's.
        where: only rows with one of these values, as in a [`DataSource`].
        supporting_passages: of HotpotQA, 2WikiMultihopQA and NaturalQuestions, without the distractors.
        separate_passages: of the same, write contexts as lists of passages, which are compressed apart.
        max_rows: write no more; of a retrieval collection everything is written.
        overwrite: replace files that are there.
        on_rows: called with the number of rows that have just been read.

    Raises:
        ValueError: an unknown name or split, a file that is not in the published form, two files with the same rows,
            no row, passages of a set that has none, or an output that is there.
        OSError: the Hub cannot be reached, or does not have it.
    """
    check_choice("data set", name, PUBLISHED_SETS)
    entry = PUBLISHED_SETS[name]
    if source is None and entry.hub is None:
        raise ValueError(
            f"{entry.title} is not on the Hub in a form that can be read: get it from {entry.home}, and "
            "name the file or folder as source (--source)"
        )
    if config is None:
        check_choice(f"split of {entry.title}:", split, entry.splits)
    done = Conversion(Path(output))
    if entry.task == RETRIEVAL:
        for unused, value in (("where", where), ("max_rows", max_rows)):
            if value is not None:
                raise ValueError(f"{entry.title} is a retrieval collection, which {unused} would tear apart")
        _convert_collection(entry, done, split, source, overwrite, on_rows)
        return done
    _check_parquet(done.path)
    row_source = DataSource(
        name=entry.place, where=where, supporting_passages=supporting_passages, separate_passages=separate_passages
    )
    schema = _schema(entry, separate_passages)
    tables = _tables(entry, split, source, config, row_source, on_rows)
    with _parquet(done, done.path, schema, _origin(entry, split, source), overwrite) as write:
        for table in tables:
            rows = _complete(_ours(table, entry, row_source), entry, row_source, done.skipped)
            left = None if max_rows is None else max_rows - done.rows.get(str(done.path), 0)
            write(_cast(rows.slice(0, left), schema))
            if left is not None and rows.num_rows >= left:
                break
    return done


def _schema(entry: PublishedSet, separate_passages: bool) -> pyarrow.Schema:
    kinds = {**_KINDS, **({"context": _KINDS["answers"]} if separate_passages else {})}
    return pyarrow.schema([(name, kinds.get(name, _TEXT)) for name in (*entry.keeps, *TASK_COLUMNS[entry.task])])


def _origin(entry: PublishedSet, split: str, source: str | None) -> dict[str, str]:
    origin = entry.place if source is None else f"files of {entry.hub or entry.home}"
    return {"title": entry.title, "licence": entry.licence, "source": origin, "split": split}


def _ours(table: pyarrow.Table, entry: PublishedSet, source: DataSource) -> pyarrow.Table:
    """Published columns under our names; `ValueError` unless all that the task needs are there."""
    if entry.columns and all(has_column(table, theirs) for theirs in entry.columns.values()):
        # Where the set has a column of our name that is something else, as BookSum has.
        named = DataSource(name=entry.place, columns=entry.columns)
        table = with_our_columns(table, named)
    table = in_known_columns(table, source)
    missing = [name for name in TASK_COLUMNS[entry.task] if name != "id" and name not in table.column_names]
    if missing:
        raise ValueError(
            f"this is not the form that {entry.title} is published in: there is no {' and no '.join(missing)} among "
            f"the columns {', '.join(table.column_names)}"
        )
    if source.separate_passages and not is_list(table["context"].type):
        raise ValueError(f"the contexts of {entry.title} are texts: it has no passages that could stay apart")
    return table


def _complete(table: pyarrow.Table, entry: PublishedSet, source: DataSource, skipped: Counter[str]) -> pyarrow.Table:
    """The rows that lack nothing; the others are counted by what they lack first."""
    for name in TASK_COLUMNS[entry.task]:
        if name != "id" and table.num_rows:
            kept = complete_rows(table, [name])
            skipped[name] += table.num_rows - kept.num_rows
            table = kept
    return with_answer_lists(table, source) if "answers" in table.column_names and table.num_rows else table


def _cast(table: pyarrow.Table, schema: pyarrow.Schema) -> pyarrow.Table:
    columns = []
    for entry in schema:
        if entry.name in table.column_names and table.num_rows:
            columns.append(table[entry.name].cast(entry.type))
        else:
            columns.append(pyarrow.nulls(table.num_rows, entry.type))
    return pyarrow.table(columns, schema=schema)


def _tables(
    entry: PublishedSet,
    split: str,
    source: str | None,
    config: str | None,
    row_source: DataSource,
    on_rows: Callable[[int], Any],
) -> Iterator[pyarrow.Table]:
    """What was published, in tables of some rows with one row for each of ours."""
    if source is None:
        yield from _with_rows(entry, _hub_tables(entry, config or entry.config, split, on_rows), None, split)
        return
    first_rows: dict[str, Path] = {}
    asked = [name for name in row_source.where or () if "." not in name and name not in COLUMNS]
    seen: set[str] = set()
    for path in published_paths(source, split, entry.files, entry.unnamed):
        if file_type(path) == ".parquet":
            batches = _counted(_parquet_tables(path), on_rows)
            tables = _with_rows(entry, batches, path.parent, split)
        else:
            make, records = entry.rows_of(is_table=False), _noted(read_records(path), on_rows)
            rows = records if make is None else _made(make(records, path.parent, split), entry, path)
            form = [name for name in entry.columns.values() if "." not in name]
            tables = _tables_of(rows, form, asked, seen)
        yield from _of_other_rows(tables, entry.columns.get("id", "id"), path, first_rows)
    for name in asked:
        if seen and name not in seen:
            raise ValueError(f"where asks for {name!r}, which no record has{nearest(name, sorted(seen))}")


def _of_other_rows(
    tables: Iterable[pyarrow.Table], name: str, path: Path, first_rows: dict[str, Path]
) -> Iterator[pyarrow.Table]:
    """A file's tables; `ValueError` if its first row is that of another file, which then has the same rows."""
    for number, table in enumerate(tables):
        if number == 0 and name in table.column_names and table.num_rows and table[name][0].is_valid:
            first = str(table[name][0].as_py())
            # Ids of two files may both count from 0.
            key = json.dumps(table.slice(0, 1).to_pylist(), sort_keys=True, default=str) if first.isdigit() else first
            if key in first_rows:
                raise ValueError(
                    f"{first_rows[key]} and {path} both begin with the row {first!r}: name one of them as source "
                    "(--source)"
                )
            first_rows[key] = path
        yield table


def _with_rows(
    entry: PublishedSet, tables: Iterable[pyarrow.Table], folder: Path | None, split: str
) -> Iterator[pyarrow.Table]:
    make = entry.rows_of(is_table=True)
    if make is None:
        yield from tables
        return
    records = (record for table in tables for record in table.to_pylist())
    yield from _tables_of(_made(make(records, folder, split), entry, entry.place))


def _made(rows: Iterator[Mapping[str, Any]], entry: PublishedSet, place: object) -> Iterator[Mapping[str, Any]]:
    """Rows of records; a record of another form raises `ValueError`."""
    try:
        yield from rows
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(
            f"{place} is not in the form that {entry.title} is published in: {type(error).__name__}: {error}"
        ) from error


def _tables_of(
    records: Iterable[Mapping[str, Any]],
    form: Sequence[str] = (),
    asked: Sequence[str] = (),
    seen: set[str] | None = None,
) -> Iterator[pyarrow.Table]:
    """Tables of records; a column that makes none, which nothing reads, is left out.

    Args:
        records: mappings from columns to values.
        form: columns that are null in a table whose records have some of them only.
        asked: those that are null in a table whose records do not have them.
        seen: gets the names of all columns that there are.
    """
    remaining, seen = iter(records), set() if seen is None else seen
    while batch := list(itertools.islice(remaining, _BATCH_ROWS)):
        names = dict.fromkeys(name for record in batch for name in record)
        seen.update(names)
        names.update(dict.fromkeys([*(form if seen.intersection(form) else ()), *asked]))
        columns = {}
        for name in names:
            values = [record.get(name) for record in batch]
            if {str, int} == {type(value) for value in values if value is not None}:
                # Ids may be numbers in one record and texts in another.
                values = [value if value is None else str(value) for value in values]
            try:
                columns[name] = pyarrow.chunked_array([pyarrow.array(values)])
            except _UNREADABLE:
                continue
        yield pyarrow.table(columns)


def _noted(records: Iterable[Any], on_rows: Callable[[int], Any]) -> Iterator[Any]:
    for record in records:
        on_rows(1)
        yield record


def _counted(tables: Iterable[pyarrow.Table], on_rows: Callable[[int], Any]) -> Iterator[pyarrow.Table]:
    for table in tables:
        on_rows(table.num_rows)
        yield table


def _parquet_tables(path: Path) -> Iterator[pyarrow.Table]:
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                yield pyarrow.Table.from_batches([batch])
    except _UNREADABLE as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _hub_tables(
    entry: PublishedSet, config: str | None, split: str, on_rows: Callable[[int], Any]
) -> Iterator[pyarrow.Table]:
    from datasets import load_dataset

    try:
        stream = load_dataset(entry.hub, config, split=split, streaming=True).with_format("arrow")
        yield from _counted(stream.iter(batch_size=_BATCH_ROWS), on_rows)
    except (OSError, RuntimeError) as error:
        elsewhere = f", from {entry.home}" if entry.home else ""
        raise OSError(
            f"{entry.hub} cannot be read from the Hub ({type(error).__name__}: {error}); with a copy of its "
            f"files{elsewhere}, name them as source (--source)"
        ) from error


def _convert_collection(
    entry: PublishedSet,
    done: Conversion,
    split: str,
    source: str | None,
    overwrite: bool,
    on_rows: Callable[[int], Any],
) -> None:
    """A corpus, queries and relevance, each in a file of its own."""
    for _, file, _ in _RETRIEVAL_TABLES.values():
        _check_new(done.path / file.format(split=split), overwrite)
    for table, (kinds, file, _) in _RETRIEVAL_TABLES.items():
        schema, path = pyarrow.schema(list(kinds.items())), done.path / file.format(split=split)
        needed = [name for name in kinds if name not in ("title", "score")]
        batches = (
            _hub_tables(entry, None if table == "qrels" else table, split if table == "qrels" else table, on_rows)
            if source is None
            else _tables_of(_noted(_collection_records(Path(source).expanduser(), table, split), on_rows))
        )
        with _parquet(done, path, schema, _origin(entry, split, source), overwrite) as write:
            num_read = 0
            for batch in batches:
                batch = with_our_columns(batch, RetrievalTable(name=entry.place, columns=BEIR_COLUMNS[table]))
                if table == "qrels":
                    batch = _with_grades(batch, f"qrels of {source or entry.place}", num_read)
                    num_read += batch.num_rows
                for name in needed:
                    # A document may be a title alone.
                    kept = batch.filter(batch[name].is_valid())
                    done.skipped[f"{name} ({table})"] += batch.num_rows - kept.num_rows
                    batch = kept
                write(_cast(batch, schema))


def _with_grades(pairs: pyarrow.Table, label: str, first: int) -> pyarrow.Table:
    """Pairs with a whole number as their score, 1 where there is none; the first of them is row `first`."""
    scores = pairs["score"].to_pylist() if "score" in pairs.column_names else [1] * pairs.num_rows
    grades = [as_grade(score, label, row) for row, score in enumerate(scores, first)]
    for row, grade in enumerate(grades, first):
        if not isinstance(grade, int):
            raise ValueError(
                f"{label!r}: the score in row {row} (counted from 0) must be a whole number, got {grade!r}"
            )
    others = pairs.select([name for name in pairs.column_names if name != "score"])
    return others.append_column("score", pyarrow.array(grades, pyarrow.int64()))


def _collection_records(folder: Path, table: str, split: str) -> Iterator[Mapping[str, Any]]:
    patterns = [pattern.format(split=split) for pattern in _RETRIEVAL_TABLES[table][2]]
    found = [path for pattern in patterns for path in sorted(folder.glob(pattern))]
    if not found:
        raise ValueError(f"{folder} has no {table}: there is no {' and no '.join(patterns)}")
    path = found[0]
    if file_type(path) == ".tsv" and path.parent.name != "qrels":
        return read_records(path, _MS_MARCO_NAMES[table])
    return read_records(path)


def _check_new(path: Path, overwrite: bool) -> None:
    if path.exists() and not overwrite:
        raise ValueError(f"{path} is there: pass --overwrite to write it anew")


def _check_parquet(path: Path) -> None:
    if path.suffix != ".parquet":
        raise ValueError(f"the output must be a .parquet file, got {path}")


@contextmanager
def _parquet(
    done: Conversion, path: Path, schema: pyarrow.Schema, origin: Mapping[str, str], overwrite: bool
) -> Iterator[Callable[[pyarrow.Table], None]]:
    """A function that writes tables; the file is there when all of them are, and not before."""
    _check_new(path, overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft, label = path.with_name(f"{path.name}.{os.getpid()}.part"), str(path)
    try:
        with pyarrow.parquet.ParquetWriter(draft, schema.with_metadata(origin), compression="zstd") as writer:

            def write(table: pyarrow.Table) -> None:
                writer.write_table(table)
                done.rows[label] = done.rows.get(label, 0) + table.num_rows

            yield write
            if not done.rows.get(label):
                reasons = ", ".join(f"{count:,} without {name}" for name, count in done.skipped.items() if count)
                raise ValueError(f"there is no row to write to {path}" + (f": {reasons}" if reasons else ""))
            skipped = {name: count for name, count in done.skipped.items() if count}
            writer.add_key_value_metadata({"skipped": json.dumps(skipped)})
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
