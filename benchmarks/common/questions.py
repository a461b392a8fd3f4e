# SPDX-License-Identifier: Apache-2.0
"""Questions of a Parquet file, by the context that they are about."""

from typing import Any

import pyarrow.parquet


def questions_by_context(path: str, first_row: int = 0, at_least: int = 1) -> dict[str, list[dict[str, Any]]]:
    """Each context with its rows, which have `context`, `question` and `answers`, in the file's order.

    Args:
        path: a Parquet file.
        first_row: where to begin.
        at_least: contexts that are needed.

    Raises:
        OSError: there is no such file.
        ValueError: a column is missing, or there are fewer contexts.
    """
    rows = pyarrow.parquet.read_table(path, columns=["context", "question", "answers"]).to_pylist()[first_row:]
    if missing := {"context", "question", "answers"} - set(rows[0] if rows else ()):
        raise ValueError(f"{path} has no rows from {first_row} on, or not the columns {', '.join(sorted(missing))}")
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["context"], []).append(row)
    if len(found) < at_least:
        raise ValueError(f"{path} has {len(found)} contexts from row {first_row} on, and {at_least} are needed")
    return found
