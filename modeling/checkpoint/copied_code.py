# SPDX-License-Identifier: Apache-2.0
"""The code of a model that was loaded from a checkpoint's code: its files are copied. See `remote_code`, too."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

from transformers.dynamic_module_utils import get_relative_import_files


def write_code(model_class: type, config_class: type, folder: str | os.PathLike) -> None:
    """Copy the files of two classes, and of what they import from their folder, into another folder."""
    sources = [inspect.getfile(cls) for cls in (model_class, config_class)]
    for file in {file for source in sources for file in (source, *get_relative_import_files(source))}:
        text = Path(file).read_text(encoding="utf-8")
        target = Path(folder) / Path(file).name
        if not target.exists() or target.read_text(encoding="utf-8") != text:
            target.write_text(text, encoding="utf-8")


def write_code_and_card(model_class: type, config: Any, folder: str | os.PathLike) -> None:
    """Write what stands beside the weights: the code. Only the package writes a card."""
    write_code(model_class, type(config), folder)
