# SPDX-License-Identifier: Apache-2.0
"""Versions of code and configuration that a checkpoint records, and what happens when they are not today's."""

from __future__ import annotations

import re
from typing import Any

from transformers.utils import logging

logger = logging.get_logger(__name__)

# That of the package; a checkpoint's own code cannot ask the package.
CODE_VERSION = "0.1.0"
# Grows when a field changes its name or its meaning, not when one with a default value joins.
CONFIG_SCHEMA = 2


def as_numbers(version: str) -> tuple[int, ...]:
    """The first three numbers of a version, for comparing: "0.10.1.dev2" gives (0, 10, 1)."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def check_versions(fields: dict[str, Any]) -> None:
    """Check that this code reads a stored configuration.

    A warning is given when newer code wrote it: fields of the same schema mean the same, but a field that has joined
    since is not known here.

    Args:
        fields: the content of `config.json`.

    Raises:
        ValueError: the schema is not this code's.
    """
    schema = fields.get("config_schema", 0)
    written_by = fields.get("code_version", "an unknown version")
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < 0:
        raise ValueError(f"`config_schema` must be an int of at least 0, got {schema!r}")
    if schema != CONFIG_SCHEMA:
        other = "a newer" if schema > CONFIG_SCHEMA else "an older"
        raise ValueError(
            f"this configuration has schema {schema} (context-compressors {written_by}), and {CODE_VERSION} reads "
            f"{CONFIG_SCHEMA}: install {other} context-compressors, or load the checkpoint with the code beside "
            "it, by trust_remote_code=True in a process that does not import this package"
        )
    if as_numbers(fields.get("code_version", "")) > as_numbers(CODE_VERSION):
        logger.warning(
            f"the checkpoint was written by context-compressors {written_by}, and this is {CODE_VERSION}, which may "
            "not know all of its fields: install a newer context-compressors"
        )
