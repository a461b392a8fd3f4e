# SPDX-License-Identifier: Apache-2.0
"""Soft context compressors: read a long context once, keep a few vectors, answer from those.

Public names are those of `__init__.pyi`, each imported at first use: `import context_compressors` loads no torch.
"""

import importlib
import re
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

_STUB = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_MODULE_OF = {
    name: module for module, name in re.findall(r"^from (\.[\w.]+) import \(?\s*(\w+) as", _STUB, re.MULTILINE)
}

__all__ = ["__version__", *sorted(_MODULE_OF)]


def __getattr__(name: str) -> Any:
    """Import a public name from its module at first use."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; public names: {', '.join(__all__)}")
    globals()[name] = vars(importlib.import_module(_MODULE_OF[name], __name__))[name]
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
