# SPDX-License-Identifier: Apache-2.0
"""Flat code beside the weights, so that a checkpoint loads without this package.

Code from the Hub can only import its siblings. The package's files import across folders
(`from ..configuration.x import`); in a saved folder the same files stand side by side (`from .x import`).
"""

from __future__ import annotations

import ast
import functools
import inspect
import os
import re
from pathlib import Path


# A file is read once: a training run saves often, and goes on with the code that it has loaded.
@functools.cache
def _local_imports(path: Path) -> list[tuple[ast.ImportFrom, Path]]:
    """Relative imports of a file, each with the file that it names."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            if node.module is None:
                raise ValueError(
                    f"{path.name}, line {node.lineno}: `from . import` cannot be made flat; name the module"
                )
            folder = path.parents[node.level - 1]
            found.append((node, folder.joinpath(*node.module.split(".")).with_suffix(".py")))
    return found


def collect(*files: Path) -> dict[str, Path]:
    """All files that `files` reach by relative imports, by name.

    Raises:
        ValueError: two different files of one name, or an import that cannot be made flat.
        FileNotFoundError: an import names a file that is not there.
    """
    collected: dict[str, Path] = {}
    waiting = list(files)
    while waiting:
        path = waiting.pop()
        known = collected.setdefault(path.name, path)
        if known != path:
            raise ValueError(f"two files are called {path.name}: {known} and {path}; flat code needs different names")
        waiting += [target for _, target in _local_imports(path) if target.name not in collected]
    return dict(sorted(collected.items()))


@functools.cache
def flatten(path: Path) -> str:
    """The source of a file with `from ..folder.x import` turned into `from .x import`."""
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines(keepends=True)
    for node, target in _local_imports(path):
        line = lines[node.lineno - 1]
        lines[node.lineno - 1] = re.sub(r"from\s+\.+[\w.]*\s+import", f"from .{target.stem} import", line, count=1)
    return "".join(lines)


def refuse_links_out(folder: str | os.PathLike, subfolder: str | None = None) -> None:
    """Refuse a folder with a link to a file outside of it, which saving would write through.

    A snapshot in the cache of the Hub is made of such links: its files are shared by all revisions.

    Args:
        folder: where a checkpoint is to be saved; it need not exist.
        subfolder: one in it that is written, too.

    Raises:
        ValueError: with the first such link.
    """
    folder = Path(folder)
    files = [path for path in folder.glob("*") if not path.is_dir()]
    files += [] if subfolder is None else [folder / subfolder, *(folder / subfolder).glob("*")]
    for path in sorted(files):
        # `Path.resolve` raises where a link leads to itself.
        target = Path(os.path.realpath(path))
        if not target.is_relative_to(os.path.realpath(folder)):
            raise ValueError(f"{path} is a link out of the folder, and saving would write to {target}")


def write_code(model_class: type, config_class: type, folder: str | os.PathLike) -> None:
    """Write the flat code of a model and its configuration into `folder`.

    Args:
        model_class: the model's class, from this package or itself loaded as remote code.
        config_class: the configuration's class, likewise.
        folder: where the weights are.
    """
    sources = [Path(inspect.getfile(cls)).resolve() for cls in (model_class, config_class)]
    for name, path in collect(*sources).items():
        target = Path(folder) / name
        text = flatten(path)
        if not target.exists() or target.read_text(encoding="utf-8") != text:
            target.write_text(text, encoding="utf-8")
