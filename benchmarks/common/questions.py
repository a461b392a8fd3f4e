# SPDX-License-Identifier: Apache-2.0
"""Questions of a Parquet file, grouped by context."""

from typing import Any

import pyarrow.parquet

_COLUMNS = ["context", "question", "answers"]


def questions_by_context(path: str, first_row: int = 0, at_least: int = 1) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each context in file order, with `context`, `question` and `answers`.

    Args:
        path: a Parquet file.
        first_row: where to begin.
        at_least: contexts that are needed.

    Raises:
        OSError: there is no such file.
        ValueError: a column is missing, or there are fewer contexts.
    """
    if missing := [name for name in _COLUMNS if name not in pyarrow.parquet.read_schema(path).names]:
        raise ValueError(f"{path} has no column {', '.join(missing)}")
    found: dict[str, list[dict[str, Any]]] = {}
    for row in pyarrow.parquet.read_table(path, columns=_COLUMNS).to_pylist()[first_row:]:
        found.setdefault(row["context"], []).append(row)
    if len(found) < at_least:
        raise ValueError(f"{path} has {len(found)} contexts from row {first_row} on, and {at_least} are needed")
    return found
