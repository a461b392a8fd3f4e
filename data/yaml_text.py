# SPDX-License-Identifier: Apache-2.0
"""Reading YAML, with a refusal that names the file or field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


def parse_yaml(text: str, what: str) -> Any:
    """Return the value that a YAML text describes."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
        place = f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}" if mark else error
        raise ValueError(f"{what} is not valid YAML: {place}") from error
    except RecursionError as error:
        raise ValueError(f"{what} is not valid YAML: it is nested too deeply") from error


def read_yaml(file: Path) -> Any:
    """Return the value that a YAML file describes; `ValueError` names a file that is no YAML in UTF-8."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not in UTF-8: {error}") from error
    return parse_yaml(text, str(file))
