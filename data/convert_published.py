# SPDX-License-Identifier: Apache-2.0
"""Files in our columns of data sets as they are published, on the Hub or in files of theirs."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from ..configuration.nearest_names import check_choice
from . import published_rows
from .columns import complete_rows, has_column, is_list, with_our_columns
from .files import file_type, read_records, record_tables
from .published_sets import PUBLISHED_SETS, RETRIEVAL, TASK_COLUMNS, PublishedSet
from .retrieval_sources import BEIR_COLUMNS, RetrievalTable, as_grade
from .rows import in_known_columns, with_answer_lists
from .sources import COLUMNS, DataSource

_BATCH_ROWS = 256
# QuALITY's lines of JSON have the split as their suffix.
_FILE_TYPES = (".json", ".jsonl", ".txt", ".csv", ".tsv", ".parquet", ".train", ".dev", ".test")
# How files and folders call the splits.
_SPLIT_WORDS = {"validation": {"validation", "valid", "val", "dev"}, "dev": {"dev", "validation", "valid", "val"}}
_ALL_SPLIT_WORDS = {"train", "test", *_SPLIT_WORDS["validation"]}
_TEXT = pyarrow.string()
# Of columns that are no texts.
_KINDS: Mapping[str, pyarrow.DataType] = {
    **dict.fromkeys(("answers", "all_classes"), pyarrow.list_(_TEXT)),
    **dict.fromkeys(("max_new_tokens", "length"), pyarrow.int64()),
}
# Table of a collection -> its columns, the file that it becomes, its files in the folders of BEIR and MS MARCO, and
# the columns of MS MARCO's, which have no line of names and TREC's relevance.
_RETRIEVAL_TABLES: Mapping[str, tuple[dict[str, pyarrow.DataType], str, tuple[str, ...], tuple[str, ...]]] = {
    "corpus": (
        {"id": _TEXT, "title": _TEXT, "text": _TEXT},
        "corpus.parquet",
        ("corpus.jsonl*", "collection.tsv*"),
        ("_id", "text"),
    ),
    "queries": (
        {"id": _TEXT, "query": _TEXT},
        "queries.parquet",
        ("queries.jsonl*", "queries.{split}*.tsv*"),
        ("_id", "text"),
    ),
    "qrels": (
        {"query_id": _TEXT, "doc_id": _TEXT, "score": pyarrow.int64()},
        "qrels/{split}.parquet",
        ("qrels/{split}.tsv*", "qrels.{split}*.tsv*"),
        ("query-id", "iteration", "corpus-id", "score"),
    ),
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
        return f"wrote {written}" + (f"; left out {self.reasons}" if self.reasons else "")

    @property
    def reasons(self) -> str:
        """Return the number of rows that were left out, by reason."""
        return ", ".join(f"{count:,} without {name}" for name, count in self.skipped.items() if count)


def convert(
    name: str,
    output: str | os.PathLike[str],
    *,
    split: str = "train",
    source: str | None = None,
    where: Mapping[str, Any] | None = None,
    supporting_passages: bool = False,
    separate_passages: bool = False,
    overwrite: bool = False,
    on_rows: Callable[[int], Any] = lambda count: None,
) -> Conversion:
    """Write a published data set as Parquet in our columns.

    Files of questions have `id`, `context`, `question` and `answers` (a list), those of summaries `id`, `context` and
    `summary`. A retrieval collection becomes a folder with `corpus.parquet` (`id`, `title`, `text`),
    `queries.parquet` (`id`, `query`) and `qrels/SPLIT.parquet` (`query_id`, `doc_id`, `score`). The files' metadata
    names title, licence, origin and what was left out. A file stands whole or not at all.

    Args:
        name: of the register, `PUBLISHED_SETS`.
        output: the Parquet file, or of a retrieval collection the folder.
        split: "train", "validation" or "test", or as the data set calls it.
        source: a file, a pattern or a folder with what was published; `None` reads the Hub, as a stream.
        where: only rows with one of these values, as in a [`DataSource`].
        supporting_passages: of HotpotQA, 2WikiMultihopQA and NaturalQuestions, without the distractors.
        separate_passages: of the same, write contexts as lists of passages, which are compressed apart.
        overwrite: replace files that are there.
        on_rows: called with the number of rows that have just been read.

    Raises:
        ValueError: an unknown name or split, a file that is not in the published form, no row, passages of a set that
            has none, or an output that is there.
        OSError: the Hub cannot be reached, or does not have it.
    """
    check_choice("data set", name, PUBLISHED_SETS)
    entry = PUBLISHED_SETS[name]
    if source is None and entry.hub is None:
        raise ValueError(
            f"{entry.title} is not on the Hub in a form that can be read: get it from {entry.home}, and "
            "name the file or folder as source (--source)"
        )
    check_choice(f"split of {entry.title}:", split, entry.splits)
    done = Conversion(Path(output))
    if entry.task == RETRIEVAL:
        if where is not None:
            raise ValueError(f"{entry.title} is a retrieval collection, which where would tear apart")
        _convert_collection(entry, done, split, source, overwrite, on_rows)
        return done
    if done.path.suffix != ".parquet":
        raise ValueError(f"the output must be a .parquet file, got {done.path}")
    rows = DataSource(
        name=entry.place, where=where, supporting_passages=supporting_passages, separate_passages=separate_passages
    )
    kinds = {**_KINDS, **({"context": _KINDS["answers"]} if separate_passages else {})}
    schema = pyarrow.schema([(name, kinds.get(name, _TEXT)) for name in (*entry.keeps, *TASK_COLUMNS[entry.task])])
    # A record may lack these: then they are null, and not of another form.
    optional = {name for name in where or () if "." not in name and name not in COLUMNS}
    with _parquet(done, done.path, schema, _origin(entry, split, source), overwrite) as write:
        for batch in record_tables(_rows(entry, split, source, on_rows), _BATCH_ROWS, source or entry.place):
            form = {name for name in entry.columns.values() if "." not in name}
            names = [*optional, *(form if form & set(batch.column_names) else ())]
            for column in names:
                if column not in batch.column_names:
                    batch = batch.append_column(column, pyarrow.nulls(batch.num_rows))
            write(_cast(_complete(_ours(batch, entry, rows), entry, rows, done.skipped), schema))
    return done


def _origin(entry: PublishedSet, split: str, source: str | None) -> dict[str, str]:
    origin = entry.place if source is None else f"files of {entry.hub or entry.home}"
    return {"title": entry.title, "licence": entry.licence, "source": origin, "split": split}


def _ours(table: pyarrow.Table, entry: PublishedSet, source: DataSource) -> pyarrow.Table:
    """Published columns under our names; `ValueError` unless all that the task needs are there."""
    if entry.columns and all(has_column(table, theirs) for theirs in entry.columns.values()):
        # Where the set has a column of our name that is something else, as BookSum has.
        table = with_our_columns(table, DataSource(name=entry.place, columns=entry.columns))
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


def _rows(
    entry: PublishedSet, split: str, source: str | None, on_rows: Callable[[int], Any]
) -> Iterator[Mapping[str, Any]]:
    """Yield the published data as one record for each of our rows."""
    if source is None:
        files: list[tuple[Iterable[Mapping[str, Any]], Path | None, str | None]] = [
            (_hub_records(entry, entry.config, split), None, entry.table_rows)
        ]
    else:
        files = [
            (read_records(path), path.parent, entry.table_rows if file_type(path) == ".parquet" else entry.file_rows)
            for path in published_paths(source, split, entry)
        ]
    for records, folder, form in files:
        records = _counted(records, on_rows)
        try:
            yield from records if form is None else getattr(published_rows, form)(records, folder, split)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(
                f"{source or entry.place} is not in the form that {entry.title} is published in: "
                f"{type(error).__name__}: {error}"
            ) from error


def _counted(records: Iterable[Mapping[str, Any]], on_rows: Callable[[int], Any]) -> Iterator[Mapping[str, Any]]:
    for record in records:
        on_rows(1)
        yield record


def _hub_records(entry: PublishedSet, config: str | None, split: str) -> Iterator[Mapping[str, Any]]:
    from datasets import load_dataset

    try:
        stream = load_dataset(entry.hub, config, split=split, streaming=True).with_format("arrow")
        for table in stream.iter(batch_size=_BATCH_ROWS):
            yield from table.to_pylist()
    except (OSError, RuntimeError) as error:
        elsewhere = f", from {entry.home}" if entry.home else ""
        raise OSError(
            f"{entry.hub} cannot be read from the Hub ({type(error).__name__}: {error}); with a copy of its "
            f"files{elsewhere}, name them as source (--source)"
        ) from error


def published_paths(source: str, split: str, entry: PublishedSet) -> list[Path]:
    """Find the files of a split."""
    place = Path(source).expanduser()
    if not place.is_dir():
        paths = [place] if place.is_file() else sorted(place.parent.glob(place.name))
        if not paths:
            raise ValueError(f"there is no file {place}")
        return paths
    files = sorted(path for path in place.rglob("*") if file_type(path) in _FILE_TYPES)
    if entry.files is not None:
        chosen = [path for path in files if path.name.removesuffix(".gz") == entry.files]
    else:
        words = {path: _words(path.relative_to(place)) for path in files}
        chosen = [path for path in files if words[path] & _SPLIT_WORDS.get(split, {split})]
        if not chosen and split == entry.unnamed:
            chosen = [path for path in files if not words[path] & _ALL_SPLIT_WORDS]
    if not chosen:
        wanted = entry.files or f"the split {split!r} in its name"
        there = ", ".join(str(path.relative_to(place)) for path in files[:8]) or "none that can be read"
        raise ValueError(f"{place} has no file with {wanted}; files there: {there}")
    return chosen


def _words(path: Path) -> set[str]:
    return set("".join(letter if letter.isalnum() else " " for letter in path.as_posix().lower()).split())


def _convert_collection(
    entry: PublishedSet,
    done: Conversion,
    split: str,
    source: str | None,
    overwrite: bool,
    on_rows: Callable[[int], Any],
) -> None:
    """Write corpus, queries and relevance, each to a file of its own."""
    for _, file, _, _ in _RETRIEVAL_TABLES.values():
        _check_new(done.path / file.format(split=split), overwrite)
    for table, (kinds, file, _, _) in _RETRIEVAL_TABLES.items():
        schema, path = pyarrow.schema(list(kinds.items())), done.path / file.format(split=split)
        if source is None:
            records = _hub_records(entry, None if table == "qrels" else table, split if table == "qrels" else table)
        else:
            records = _collection_records(Path(source).expanduser(), table, split)
        label, num_read = f"{table} of {source or entry.place}", 0
        with _parquet(done, path, schema, _origin(entry, split, source), overwrite) as write:
            for batch in record_tables(_counted(records, on_rows), _BATCH_ROWS, label):
                batch = with_our_columns(batch, RetrievalTable(name=entry.place, columns=BEIR_COLUMNS[table]))
                if table == "qrels":
                    batch = _with_grades(batch, label, num_read)
                    num_read += batch.num_rows
                # A document may be a title alone.
                for name in kinds.keys() - {"title", "score"}:
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
    _, _, files, names = _RETRIEVAL_TABLES[table]
    patterns = [pattern.format(split=split) for pattern in files]
    paths = [path for pattern in patterns for path in sorted(folder.glob(pattern))]
    if not paths:
        raise ValueError(f"{folder} has no {table}: there is no {' and no '.join(patterns)}")
    is_ms_marco = file_type(paths[0]) == ".tsv" and paths[0].parent.name != "qrels"
    return read_records(paths[0], names if is_ms_marco else None)


def _check_new(path: Path, overwrite: bool) -> None:
    if path.exists() and not overwrite:
        raise ValueError(f"{path} is there: pass --overwrite to write it anew")


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
                raise ValueError(f"there is no row to write to {path}" + (f": {done.reasons}" if done.reasons else ""))
            skipped = {name: count for name, count in done.skipped.items() if count}
            writer.add_key_value_metadata({"skipped": json.dumps(skipped)})
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
