# SPDX-License-Identifier: Apache-2.0
"""Hardware and library versions of a run."""

from __future__ import annotations

import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "transformers", "trl", "peft", "datasets", "torchmetrics", "context-compressors")


def environment() -> dict[str, Any]:
    """Hardware and library versions that a result was measured with; never a host name, a user or a path."""
    import torch

    return {
        "cpu": _cpu_name(),
        "cpu_cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "system": platform.system(),
        "python": platform.python_version(),
        "versions": {package: metadata.version(package) for package in _PACKAGES},
    }


def _cpu_name() -> str:
    file = Path("/proc/cpuinfo")
    name = re.search(r"^model name\s*:\s*(.+)$", file.read_text(encoding="utf-8"), re.M) if file.exists() else None
    return name[1] if name else platform.processor() or platform.machine()
