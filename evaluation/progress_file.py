# SPDX-License-Identifier: Apache-2.0
"""A file with what an evaluation has scored so far, batch by batch, from which it goes on inside a data set."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class ProgressFile:
    """Lines of JSON: first what is evaluated, then the samples of each batch under all conditions.

    Args:
        path: the file; folders are made. One that is there is gone on with.
        evaluation: what is evaluated and how.

    Raises:
        ValueError: the file is of another evaluation, or no such file.
    """

    def __init__(self, path: str | os.PathLike[str], evaluation: Mapping[str, Any]):
        self.path = Path(path)
        digest = hashlib.sha256(json.dumps(evaluation, sort_keys=True, default=str).encode()).hexdigest()
        text = self.path.read_text(encoding="utf-8") if self.path.is_file() else ""
        # A kill leaves an unfinished last line.
        lines = text.split("\n")[:-1]
        try:
            content = [json.loads(line) for line in lines]
            if content and content[0]["evaluation"] != digest:
                raise ValueError("it is of another evaluation")
            self._batches: list[dict[str, Any]] = [{"of": line["of"], "rows": line["rows"]} for line in content[1:]]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} cannot be gone on with: {error}; delete it to start anew") from error
        self.path.parent.mkdir(parents=True, exist_ok=True)
        header = json.dumps({"evaluation": digest})
        self.path.write_text("".join(f"{line}\n" for line in lines or [header]), encoding="utf-8")

    def rows(self, samples_digest: str) -> dict[int, Any]:
        """What is known of samples: their rows, and what each got by condition."""
        batches = (batch["rows"] for batch in self._batches if batch["of"] == samples_digest)
        return {int(row): found for batch in batches for row, found in batch.items()}

    def add(self, samples_digest: str, rows: Mapping[int, Any]) -> None:
        """Append a batch: its rows, and what each got by condition."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"of": samples_digest, "rows": rows}) + "\n")
