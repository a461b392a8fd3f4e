# SPDX-License-Identifier: Apache-2.0
"""A table's columns under our names, and those of its rows that a source keeps."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow
import pyarrow.compute

from ..configuration.nearest_names import nearest
from .published_sets import KNOWN_COLUMNS

_WRONG_PART = (pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError, KeyError, TypeError)


def with_our_columns(table: pyarrow.Table, source: Any) -> pyarrow.Table:
    """Rename what a source's `columns` map; a column or part that is not there raises `ValueError`."""
    taken = {ours: column_of(table, theirs, source) for ours, theirs in (source.columns or {}).items()}
    return with_columns(table, taken)


def with_known_columns(table: pyarrow.Table, source: Any) -> pyarrow.Table:
    """Give known columns of published data sets our names; of options, the right one is the answer."""
    mapped = source.columns or {}
    table = _with_right_options(table, mapped)
    for known in KNOWN_COLUMNS:
        renamed = {ours: theirs for ours, theirs in known.items() if ours != theirs}
        # NarrativeQA's question has our name and is a struct.
        is_new = all(ours not in table.column_names or "." in theirs for ours, theirs in renamed.items())
        if is_new and all(has_column(table, theirs) for theirs in known.values()):
            # What the source maps may be a struct itself.
            free = [ours for ours, theirs in renamed.items() if ours not in mapped or theirs.startswith(f"{ours}.")]
            table = with_columns(table, {ours: _part(table, renamed[ours]) for ours in free})
    return table


def _with_right_options(table: pyarrow.Table, mapped: Mapping[str, str]) -> pyarrow.Table:
    """Answers from options and the letter (RACE) or number (QuALITY, QuAIL) of the right one."""
    names = set(table.column_names)
    if {"article", "options", "answer"} <= names and "answers" not in names:
        options, marks = "options", "answer"
    elif {"answers", "correct_answer_id"} <= names and "answers" not in mapped:
        options, marks = "answers", "correct_answer_id"
    else:
        return table
    if not is_list(table[options].type):
        return table
    if options == "options" and "context" not in mapped:
        table = with_columns(table, {"context": table["article"]})
    answers: list[Any] = []
    for texts, mark in zip(table[options].to_pylist(), table[marks].to_pylist(), strict=True):
        place = string.ascii_uppercase.find(mark) if isinstance(mark, str) and len(mark) == 1 else mark
        is_option = texts is not None and isinstance(place, int) and 0 <= place < len(texts)
        answers.append([texts[place]] if is_option else None)
    kind = pyarrow.list_(pyarrow.string())
    return with_columns(table, {"answers": pyarrow.chunked_array([pyarrow.array(answers, kind)])})


def with_joined_passages(table: pyarrow.Table, source: Any) -> pyarrow.Table:
    """Make texts, or with `separate_passages` lists, of contexts with `title` and `sentences`, or with `contexts`.

    `supporting_passages` takes those alone that `supporting_facts` names by number or title (mean-pooling paper, A.1).
    """
    if not all(has_column(table, f"context.{name}") for name in ("title", "sentences")):
        if source.supporting_passages:
            raise ValueError(f"source {source.label!r} has no passages with `title` and `sentences` as its contexts")
        if has_column(table, "context.contexts"):
            parts = _part(table, "context.contexts")
            kind = parts.type.value_type
            # There is no kernel for lists with room for more.
            joined = pyarrow.compute.binary_join(parts.cast(pyarrow.list_(kind)), pyarrow.scalar("\n", kind))
            return with_columns(table, {"context": joined})
        return table
    named: list[Any] = [None] * table.num_rows
    by_number = has_column(table, "supporting_facts.passage")
    if source.supporting_passages:
        facts = column_of(table, f"supporting_facts.{'passage' if by_number else 'title'}", source)
        named = [names or () for names in facts.to_pylist()]
    texts: list[Any] = []
    for context, wanted in zip(table["context"].to_pylist(), named, strict=True):
        if context is None or context["title"] is None or context["sentences"] is None:
            texts.append(None)
            continue
        pairs = enumerate(zip(context["title"], context["sentences"], strict=True))
        kept = [pair for number, pair in pairs if wanted is None or (number if by_number else pair[0]) in wanted]
        if any(title is None or sentences is None or None in sentences for title, sentences in kept):
            texts.append(None)
            continue
        passages = [f"{title}\n{' '.join(' '.join(sentences).split())}" for title, sentences in kept]
        texts.append(passages if source.separate_passages else "\n\n".join(passages))
    kind = pyarrow.list_(pyarrow.string()) if source.separate_passages else pyarrow.large_string()
    return with_columns(table, {"context": pyarrow.chunked_array([pyarrow.array(texts, kind)])})


def column_of(table: pyarrow.Table, name: str, source: Any) -> pyarrow.ChunkedArray:
    """A column, or with dots the part of one, of structs or lists of structs; `ValueError` where it is not there."""
    head = name if name in table.column_names else name.partition(".")[0]
    if head not in table.column_names:
        raise ValueError(f"source {source.label!r} has no column {head!r}{nearest(head, table.column_names)}")
    try:
        return table[head] if head == name else _part(table, name)
    except _WRONG_PART as error:
        raise ValueError(f"source {source.label!r}: column {head!r} has no part {name!r}: {error}") from error


def kept_rows(table: pyarrow.Table, source: Any) -> pyarrow.Table:
    """The rows that a source's `where` keeps; `ValueError` for a missing column, or a value of another type."""
    for name, wanted in (source.where or {}).items():
        column = column_of(table, name, source)
        try:
            table = table.filter(_mask(column, wanted))
        # The last two are of a number that is larger than any of the column's.
        except (ValueError, pyarrow.ArrowNotImplementedError, TypeError, OverflowError) as error:
            what = f"source {source.label!r}: where asks {name}, of {column.type}, for {wanted!r}"
            raise ValueError(f"{what}: {error}") from error
    return table


def complete_rows(table: pyarrow.Table, names: Sequence[str]) -> pyarrow.Table:
    """The rows that have a value in each of these columns, see `has_value`; lists without nulls and blank texts."""
    for name in names:
        table = with_columns(table, {name: without_blanks(table[name])})
        # What is null in a mask is left out.
        table = table.filter(has_value(table[name]))
    return table


def without_blanks(column: pyarrow.ChunkedArray) -> pyarrow.ChunkedArray:
    """A column whose lists have no null and no blank text; any other column as it is."""
    if not is_list(column.type):
        return column
    parts = pyarrow.compute.list_flatten(column)
    wrong = parts.is_null().combine_chunks()
    if is_text(parts.type):
        wrong = pyarrow.compute.or_kleene(wrong, is_blank(parts).combine_chunks())
    if not pyarrow.compute.any(wrong).as_py():
        return column
    # Chunk by chunk: one of all may be more than its type can count.
    rows = ([rows and list(filter(_has_value, rows)) for rows in chunk.to_pylist()] for chunk in column.chunks)
    return pyarrow.chunked_array([pyarrow.array(values, column.type) for values in rows], column.type)


def has_value(column: pyarrow.ChunkedArray) -> pyarrow.ChunkedArray:
    """Return which rows of a column have a value: no null or NaN, no blank text, no empty list."""
    if is_list(column.type):
        filled = pyarrow.compute.greater(pyarrow.compute.list_value_length(column), 0)
    elif is_text(column.type):
        filled = pyarrow.compute.invert(is_blank(column))
    else:
        return pyarrow.compute.invert(column.is_null(nan_is_null=True))
    return pyarrow.compute.fill_null(filled, False)


def is_list(kind: pyarrow.DataType) -> bool:
    """Return True if a column holds lists, such as answers, or contexts of passages."""
    return pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind)


def is_text(kind: pyarrow.DataType) -> bool:
    """Return True if a column holds texts."""
    return pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)


def is_blank(texts: pyarrow.ChunkedArray) -> pyarrow.ChunkedArray:
    """Return a mask of the texts that are empty or white space, null where a text is."""
    return pyarrow.compute.equal(pyarrow.compute.utf8_trim_whitespace(texts), "")


def _has_value(item: Any) -> bool:
    return bool(item.strip()) if isinstance(item, str) else item is not None


def _mask(column: pyarrow.ChunkedArray, wanted: Any) -> pyarrow.ChunkedArray:
    if not isinstance(wanted, Mapping):
        values = list(wanted) if isinstance(wanted, Sequence) and not isinstance(wanted, str) else [wanted]
        if pyarrow.types.is_null(column.type):
            values = [value for value in values if value is None]
        return pyarrow.compute.is_in(column, pyarrow.array(values, column.type))
    mask = column.is_valid()
    if "from" in wanted:
        mask = pyarrow.compute.and_(mask, pyarrow.compute.greater_equal(column, wanted["from"]))
    if "below" in wanted:
        mask = pyarrow.compute.and_(mask, pyarrow.compute.less(column, wanted["below"]))
    return mask


def with_columns(table: pyarrow.Table, columns: Mapping[str, pyarrow.ChunkedArray]) -> pyarrow.Table:
    """A table with further columns, which take the place of those with their names."""
    for name, column in columns.items():
        if name in table.column_names:
            table = table.set_column(table.column_names.index(name), name, column)
        else:
            table = table.append_column(name, column)
    return table


def has_column(table: pyarrow.Table, name: str) -> bool:
    """Return whether a table has a column, or with dots the part of one, of structs or lists of structs."""
    if name not in table.column_names and name.partition(".")[0] not in table.column_names:
        return False
    try:
        _part(table.slice(0, 0), name)
    except _WRONG_PART:
        return False
    return True


def _part(table: pyarrow.Table, name: str) -> pyarrow.ChunkedArray:
    if name in table.column_names:
        return table[name]
    head, *parts = name.split(".")
    column = table[head]
    for place, part in enumerate(parts):
        if is_list(column.type):
            return _parts_of_items(column, parts[place:])
        column = pyarrow.compute.struct_field(column, [part])
    return column


def _parts_of_items(column: pyarrow.ChunkedArray, parts: Sequence[str]) -> pyarrow.ChunkedArray:
    """A part of each struct in lists, as lists."""
    kind = column.type.value_type
    for part in parts:
        if not pyarrow.types.is_struct(kind):
            raise KeyError(f"{kind} has no part {part!r}")
        kind = kind.field(part).type
    values = []
    for row in column.to_pylist():
        items = row
        for part in parts:
            items = items and [item and item[part] for item in items]
        values.append(items)
    return pyarrow.chunked_array([pyarrow.array(values, pyarrow.list_(kind))])
