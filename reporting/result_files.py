# SPDX-License-Identifier: Apache-2.0
"""Result files: JSON that stays small and tells no more digits than were measured."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SIGNIFICANT_DIGITS = 4


def rounded(value: Any) -> Any:
    """Plain JSON values with every float at four significant digits; whole numbers are counts and stay exact."""
    if isinstance(value, float):
        return float(f"{value:.{SIGNIFICANT_DIGITS}g}")
    if isinstance(value, Mapping):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return value


def write_json(content: Mapping[str, Any], path: str | os.PathLike[str], indent: int | None = 2) -> Path:
    """Write plain JSON values to a file at once, in one line without `indent`, and return its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.part")
    separators = (",", ":") if indent is None else None
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, indent=indent, separators=separators)
    draft.write_text(text + "\n", encoding="utf-8")
    draft.replace(path)
    return path


def write_results(content: Mapping[str, Any], path: str | os.PathLike[str]) -> Path:
    """Write a result file as `write_json`, without indentation and with floats at four significant digits."""
    return write_json(rounded(content), path, indent=None)
