# SPDX-License-Identifier: Apache-2.0
"""Ids of documents, by which what trains, what chooses and what is reported are kept apart."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from transformers.utils import cached_file

from ..reporting.result_files import write_json

if TYPE_CHECKING:
    import pyarrow

FILE_NAME = "training_documents.json"
_WHAT = "first 12 hexadecimal digits of the SHA-256 of each text, in lower case and with single spaces"


def document_id(text: str) -> str:
    """Return twelve hexadecimal digits of a text, whatever its spaces and capitals."""
    return hashlib.sha256(" ".join(text.lower().split()).encode()).hexdigest()[:12]


def source_ids(source_texts: Sequence[str] | None) -> list[str]:
    """Return the ids of the documents that a row is cut from, see `document_id`."""
    if isinstance(source_texts, str):
        raise ValueError(f"source_texts must be a list of whole texts, got {source_texts!r:.40}")
    return list(dict.fromkeys(map(document_id, source_texts or ())))


def ends_as_source(text: str, source_texts: Sequence[str] | None) -> bool:
    """Return True if a row's text reaches the end of a document; False if it is cut from a longer text."""
    return not source_texts or any(source.rstrip().endswith(text.rstrip()) for source in source_texts)


def source_ids_of(table: pyarrow.Table) -> set[str]:
    """Return the ids of the documents that rows are cut from, as far as they have `source_texts`."""
    named = table["source_texts"].to_pylist() if "source_texts" in table.column_names else []
    return {name for source_texts in named for name in source_ids(source_texts)}


def record_file(place: str | os.PathLike[str], name: str, on_hub: bool = False) -> Path | None:
    """Return the path of a file in a checkpoint, or `None` where there is none."""
    path: str | Path | None = Path(place) / name
    if str(place) and not Path(place).is_dir() and on_hub:
        quiet = {f"_raise_exceptions_for_{what}": False for what in ("missing_entries", "connection_errors")}
        try:
            path = cached_file(str(place), name, **quiet)
        except OSError:
            path = None
    return Path(path) if path is not None and Path(path).is_file() else None


@dataclass
class TrainingDocuments:
    """Ids of the documents that trained and chose a checkpoint in all stages; `is_whole` unless one left no record."""

    trained: set[str] = field(default_factory=set)
    chose: set[str] = field(default_factory=set)
    is_whole: bool = True

    def add(self, other: TrainingDocuments | None) -> None:
        """Take over an earlier stage's documents; `None` is a stage without a record."""
        if other is None:
            self.is_whole = False
            return
        self.trained |= other.trained
        self.chose |= other.chose
        self.is_whole &= other.is_whole

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write `training_documents.json` into a checkpoint's folder, and return its path."""
        content = {
            "ids": _WHAT,
            "is_whole": self.is_whole,
            "trained": " ".join(sorted(self.trained)),
            "chose": " ".join(sorted(self.chose)),
        }
        return write_json(content, Path(folder) / FILE_NAME)

    @classmethod
    def of(cls, place: str | os.PathLike[str], on_hub: bool = False) -> TrainingDocuments | None:
        """Read the record of a checkpoint."""
        path = record_file(place, FILE_NAME, on_hub)
        if path is None:
            return None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            ids = {name: set(content[name].split()) for name in ("trained", "chose")}
            return cls(**ids, is_whole=bool(content["is_whole"]))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is no record of training documents: {error!r}") from error
