# SPDX-License-Identifier: Apache-2.0
"""Versions of code and configuration that a checkpoint records."""

from __future__ import annotations

from typing import Any

# That of the package; a checkpoint's own code cannot ask the package.
CODE_VERSION = "0.1.0"
# Grows when a field changes its name or its meaning, not when one with a default value joins.
CONFIG_SCHEMA = 2


def check_schema(fields: dict[str, Any]) -> None:
    """Raise a `ValueError` unless this code reads a stored configuration."""
    schema, written_by = fields.get("config_schema", 0), fields.get("code_version", "an unknown version")
    if schema != CONFIG_SCHEMA:
        other = "a newer" if schema > CONFIG_SCHEMA else "an older"
        raise ValueError(
            f"this configuration has schema {schema} (context-compressors {written_by}), and {CODE_VERSION} reads "
            f"{CONFIG_SCHEMA}: install {other} context-compressors, or load the checkpoint with the code beside "
            "it, by trust_remote_code=True in a process that does not import this package"
        )
