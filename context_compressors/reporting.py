# SPDX-License-Identifier: Apache-2.0
"""What every report needs: the machine that it was made on, a JSON file, a Markdown table."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "transformers", "trl", "peft", "datasets", "torchmetrics", "context-compressors")


def environment() -> dict[str, Any]:
    """Hardware and library versions that a result was measured with; never a host name, a user or a path."""
    import torch

    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "cpu": _cpu_name(),
        "cpu_cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "system": platform.system(),
        "python": platform.python_version(),
        "versions": versions,
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def write_json(content: Mapping[str, Any], path: str | os.PathLike[str]) -> Path:
    """Write plain JSON values to a file, folders included, at once or not at all, and return its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # A long evaluation writes its results again and again, and may be stopped at any time.
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    unfinished.replace(path)
    return path


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table that is aligned, so that it reads well as plain text, too."""
    cells = [[str(cell).replace("|", "\\|") for cell in row] for row in [header, *rows]]
    widths = [max(3, *(len(row[column]) for row in cells)) for column in range(len(header))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])
