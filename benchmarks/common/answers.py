# SPDX-License-Identifier: Apache-2.0
"""JSON lines that a benchmark writes while it runs, and resumes from."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class AnswerLines:
    """The answers so far; the first line of the file has the settings.

    Args:
        path: the file, which is gone on with where it is there.
        settings: what the answers depend on.

    Raises:
        ValueError: the file is of other settings.
    """

    def __init__(self, path: str | os.PathLike[str], settings: Mapping[str, Any]):
        self._path = Path(path)
        header = {"settings": dict(settings)}
        text = self._path.read_text(encoding="utf-8") if self._path.is_file() else ""
        # A kill leaves an unfinished last line.
        known = [json.loads(line) for line in text.split("\n")[:-1]]
        if known and known[0] != json.loads(json.dumps(header)):
            raise ValueError(f"{path} has answers to {known[0]}, not to {header}: take another file, or delete it")
        self.lines: list[dict[str, Any]] = known[1:]
        self._path.write_text("".join(json.dumps(line) + "\n" for line in known or [header]), encoding="utf-8")

    def add(self, line: Mapping[str, Any]) -> None:
        """Append an answer."""
        self.lines.append(dict(line))
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
