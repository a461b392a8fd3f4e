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
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{what} is not valid YAML: {' '.join(str(error).split())}") from error


def read_yaml(file: Path) -> Any:
    """Return the value that a YAML file describes; `ValueError` names a file that is no YAML in UTF-8."""
    try:
        return parse_yaml(file.read_text(encoding="utf-8"), str(file))
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not in UTF-8: {error}") from error
