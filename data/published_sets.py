# SPDX-License-Identifier: Apache-2.0
"""The register of published data sets, `published_sets.yaml`: places, licenses, and names of columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .yaml_text import read_yaml

# What a converted file has; a row without one of these, the id apart, is left out.
TASK_COLUMNS = {
    "question_answering": ("id", "context", "question", "answers"),
    "summarization": ("id", "context", "summary"),
}


@dataclass(frozen=True)
class PublishedSet:
    """A data set as it is published.

    Args:
        hub, home: its repository on the Hub, or where its files are published.
        columns: our column -> its own, with dots into structs.
        rows: function of `convert_published` that makes rows of its records, where these are not rows.
        keeps: further columns of a converted file.
        tables: the tables of the papers that need it.
    """

    title: str
    license: str
    hub: str | None = None
    config: str | None = None
    splits: tuple[str, ...] = ("train", "validation", "test")
    task: str = "question_answering"
    columns: Mapping[str, str] = field(default_factory=dict)
    rows: str | None = None
    keeps: tuple[str, ...] = ()
    home: str | None = None
    tables: str = ""

    @property
    def place(self) -> str:
        """Return its repository on the Hub with its configuration, or its home."""
        return ":".join(filter(None, (self.hub, self.config))) or str(self.home)


PUBLISHED_SETS: Mapping[str, PublishedSet] = {
    name: PublishedSet(**fields) for name, fields in read_yaml(Path(__file__).with_suffix(".yaml")).items()
}

# Our column -> its name in the published form of some data sets: taken where the first are not there and the last are.
KNOWN_COLUMNS = tuple(dict(known) for known in {tuple(entry.columns.items()): 0 for entry in PUBLISHED_SETS.values()})
