# SPDX-License-Identifier: Apache-2.0
"""Versions of code and configuration that a checkpoint records, and what happens when they are not today's."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from transformers.utils import logging

logger = logging.get_logger(__name__)

# That of the package; a checkpoint's own code cannot ask the package.
CODE_VERSION = "0.1.0"
# Grows when a field changes its name or its meaning, not when one with a default value joins.
CONFIG_SCHEMA = 2
# What schema 1 asked behind a task token.
BEHIND_TASK_TOKEN = "### Question: {question}\n### Answer:"


def _from_schema_0(fields: dict[str, Any]) -> dict[str, Any]:
    # Schema 0 recorded no versions, and its checkpoints were whole.
    return {**fields, "code_version": "0.0.0", "external_weights": None}


def _from_schema_1(fields: dict[str, Any]) -> dict[str, Any]:
    # Its reconstructions did not repeat BOS, and all of its texts started with a token.
    fields = {**fields, "restores_context_start": False, "bos_before_text": True}
    return with_question_prompt(fields, BEHIND_TASK_TOKEN) if fields.get("task_token_ids") else fields


def with_question_prompt(fields: dict[str, Any], prompt: str) -> dict[str, Any]:
    """Fields of a checkpoint that recorded no prompts, with what was asked then."""
    if fields.get("prompts") is not None or fields.get("prompt_format", "plain") != "plain":
        return fields
    return {**fields, "prompts": {"question_answering": prompt}}


Steps = Mapping[int, Callable[[dict[str, Any]], dict[str, Any]]]
# Schema -> what turns its fields into those of the next one.
MIGRATIONS: Steps = {0: _from_schema_0, 1: _from_schema_1}


def as_numbers(version: str) -> tuple[int, ...]:
    """The first three numbers of a version, for comparing: "0.10.1.dev2" gives (0, 10, 1)."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def bring_up_to_date(fields: dict[str, Any], method_steps: Steps = MappingProxyType({})) -> dict[str, Any]:
    """Turn a stored configuration of an older schema into one of today's.

    A warning is given when newer code wrote it: fields of the same schema mean the same, but a field that has joined
    since is not known here.

    Args:
        fields: the content of `config.json`; it is not changed.
        method_steps: what the method's own fields need in addition, by schema.

    Raises:
        ValueError: the schema is newer than this code, or so old that nothing turns it into today's.
    """
    schema = fields.get("config_schema", 0)
    written_by = fields.get("code_version", "an unknown version")
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < 0:
        raise ValueError(f"`config_schema` must be an int of at least 0, got {schema!r}")
    if schema > CONFIG_SCHEMA:
        raise ValueError(
            f"this configuration has schema {schema} (context-compressors {written_by}), and {CODE_VERSION} reads up "
            f"to {CONFIG_SCHEMA}: install a newer context-compressors, or load the checkpoint with the code beside "
            "it, by trust_remote_code=True in a process that does not import this package"
        )
    while schema < CONFIG_SCHEMA:
        if schema not in MIGRATIONS:
            raise ValueError(
                f"this configuration has schema {schema} (context-compressors {written_by}), which {CODE_VERSION} "
                f"cannot turn into {CONFIG_SCHEMA}: load and save the checkpoint with a version between the two first"
            )
        fields = MIGRATIONS[schema](fields)
        if schema in method_steps:
            fields = method_steps[schema](fields)
        schema += 1
        fields["config_schema"] = schema
    if as_numbers(fields.get("code_version", "")) > as_numbers(CODE_VERSION):
        logger.warning(
            f"the checkpoint was written by context-compressors {written_by}, and this is {CODE_VERSION}, which may "
            "not know all of its fields: install a newer context-compressors"
        )
    return fields
