# SPDX-License-Identifier: Apache-2.0
"""Write a checkpoint's code: the definitions that its method reaches, joined into a few files.

A checkpoint has `configuration_<method>.py`, `modeling_<method>.py` and `compressor_base.py`, so that it loads without
this package. Sources must use one name for one thing: a file of a checkpoint has all names of its modules together.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import os
import re
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from . import copied_code
from .checkpoint_card import write_first_card

_BASE_FILE = "compressor_base"
_HEADER = """\
# SPDX-License-Identifier: Apache-2.0
# Written by context-compressors from its modules, whose names stand above their parts.

from __future__ import annotations
"""
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
# Methods of this package alone: to start from a base, to fit without training, to count operations and tokens that
# fit, to upload a card with the rest, and for analyses, cards and servers.
_LEFT_OUT = {
    *("from_base", "link_base", "load_base_weights", "take_base", "fit_scorers", "kept_tokens", "auto_classes"),
    *("chunk_flops", "compression_flops", "max_context_tokens", "_fits", "push_to_hub", "card_rows", "card_text"),
    *("decoder_language_model", "prompt_embeds", "to_prompt_embeds", "served_slots", "auto_class", "default_ratio"),
    *("usual_prompts", "chunk_memory_tokens", "_transport_flops", "_segment_places", "allocation", "method"),
}
# A checkpoint's code copies itself.
_THIS_FILE = Path(__file__).resolve()
_INSTEAD = {_THIS_FILE: _THIS_FILE.with_name("copied_code.py")}


def write_code(model_class: type, config_class: type, folder: str | os.PathLike) -> None:
    """Write the code of a model and its configuration into a folder; nothing for a model of `transformers` itself."""
    if model_class.__module__.startswith("transformers.models."):
        return
    if model_class.__module__.partition(".")[0] != __name__.partition(".")[0]:
        copied_code.write_code(model_class, config_class, folder)
        return
    for name, text in joined_code(model_class, config_class).items():
        target = Path(folder) / f"{name}.py"
        if not target.exists() or target.read_text(encoding="utf-8") != text:
            target.write_text(text, encoding="utf-8")


def write_code_and_card(model_class: type, config: Any, folder: str | os.PathLike) -> None:
    """Write what stands beside the weights: the code, and a first card if there is none."""
    write_code(model_class, type(config), folder)
    write_first_card(config, folder)


@dataclass(eq=False)
class _Statement:
    """A statement at the top of a module, with the comments above it, the names that it binds and those that it
    reads."""

    node: ast.stmt
    text: str
    names: set[str]
    reads: set[str]


@dataclass(eq=False)
class _Module:
    """A module of the package: its statements without imports, where each imported name comes from (a file or a
    library, and the name there or `None`), and the files imported at its top (`first`) and elsewhere (`later`)."""

    path: Path
    statements: list[_Statement] = field(default_factory=list)
    imported: dict[str, tuple[Path | str, str | None]] = field(default_factory=dict)
    first: set[Path] = field(default_factory=set)
    later: set[Path] = field(default_factory=set)

    def note_import(self, node: ast.AST, is_first: bool) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                self.imported[alias.asname or alias.name.partition(".")[0]] = (alias.name, None)
        elif isinstance(node, ast.ImportFrom) and node.module != "__future__":
            source: Path | str = node.module or ""
            if node.level:
                folder = self.path.parents[node.level - 1]
                source = folder.joinpath(*(node.module or "").split(".")).with_suffix(".py")
                source = _INSTEAD.get(source, source)
                (self.first if is_first else self.later).add(source)
            for alias in node.names:
                if isinstance(source, Path) and alias.asname is not None:
                    raise ValueError(f"{self.path}: import {alias.name} under its own name")
                self.imported[alias.asname or alias.name] = (source, alias.name)

    def defining(self, name: str) -> list[_Statement]:
        return [statement for statement in self.statements if name in statement.names]


@functools.cache
def _read(path: Path) -> _Module:
    source = path.read_text(encoding="utf-8")
    module, lines, end = _Module(path), source.splitlines(), 0
    for node in ast.parse(source).body:
        start, end = end, node.end_lineno or 0
        is_typing = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if isinstance(node, ast.Import | ast.ImportFrom) or is_typing:
            for inner in ast.walk(node):
                module.note_import(inner, is_first=not is_typing)
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            for inner in ast.walk(node):
                if isinstance(inner, ast.ImportFrom) and inner.level:
                    module.note_import(inner, is_first=False)
            module.statements.append(_statement(node, lines[start:end], start))
    return module


def _statement(node: ast.stmt, lines: list[str], offset: int) -> _Statement:
    """Read a statement, without the methods that only the package calls."""
    gone: set[int] = set()
    if isinstance(node, ast.ClassDef):
        for method in [m for m in node.body if isinstance(m, ast.FunctionDef) and m.name in _LEFT_OUT]:
            node.body.remove(method)
            start = min([method.lineno, *(decorator.lineno for decorator in method.decorator_list)])
            # And the empty line behind it.
            gone |= set(range(start, (method.end_lineno or 0) + 2))
    kept = [line for row, line in enumerate(lines, offset + 1) if row not in gone]
    reads = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    if isinstance(node, _DEFINITIONS):
        names = {node.name}
    else:
        loops = [inner for inner in ast.walk(node) if isinstance(inner, ast.comprehension)]
        counted = {id(name) for loop in loops for name in ast.walk(loop)}
        stored = (n for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
        names = {name.id for name in stored if id(name) not in counted}
        names |= {inner.name for inner in ast.walk(node) if isinstance(inner, _DEFINITIONS)}
    return _Statement(node, "\n".join(kept).strip("\n"), names, reads)


def _modules_in_order(sources: Iterable[Path]) -> dict[Path, _Module]:
    """Return the modules that `sources` reach, each after those that it imports at its top."""
    modules: dict[Path, _Module] = {}
    waiting = list(sources)
    while waiting:
        path = waiting.pop()
        if path not in modules:
            modules[path] = _read(path)
            waiting += modules[path].first | modules[path].later
    graph = {path: sorted(modules[path].first) for path in sorted(modules)}
    return {path: modules[path] for path in TopologicalSorter(graph).static_order()}


# A training run saves often, and goes on with the code that it has loaded.
@functools.cache
def joined_code(model_class: Any, config_class: Any) -> dict[str, str]:
    """Return the code of a checkpoint: the text of each file, by its name without ending."""
    sources = [Path(inspect.getfile(cls)).resolve() for cls in (config_class, model_class)]
    modules = _modules_in_order([*sources, Path(inspect.getfile(model_class.pipeline_class)).resolve()])
    places = [*model_class.auto_map().values()]
    places += [pipeline["impl"] for pipeline in config_class.default_custom_pipelines().values()]
    kept = _reached(modules, {place.split(".")[1] for place in places})
    named = {place.split(".")[0] for place in places}
    methods_file = sources[0].stem.replace("configuration_", "modeling_", 1)

    def file_of(path: Path) -> str:
        if path.parent == sources[0].parent:
            return sources[0].stem
        if path.parent == sources[1].parent:
            return path.stem if path.stem in named else methods_file
        return _BASE_FILE

    texts = _texts(modules, kept, {path: file_of(path) for path in modules}, {path.stem for path in sources})
    return dict(sorted(texts.items()))


def _source(modules: dict[Path, _Module], path: Path, name: str) -> Any:
    """Return where a name in a module comes from; `None` for builtins and variables."""
    if modules[path].defining(name):
        return path, name
    source = modules[path].imported.get(name)
    if source is None or not isinstance(source[0], Path):
        return source
    return _source(modules, source[0], source[1] or "")


def _reached(modules: dict[Path, _Module], wanted: set[str]) -> set[_Statement]:
    """Return the statements that define some names, and all that these reach."""
    kept: set[_Statement] = set()
    waiting = [(path, name) for path in modules for name in sorted(wanted) if modules[path].defining(name)]
    while waiting:
        path, name = waiting.pop()
        for statement in modules[path].statements:
            # What binds no name, such as a registration, belongs to all of its module.
            if (name in statement.names or not statement.names) and statement not in kept:
                kept.add(statement)
                sources = (_source(modules, path, read) for read in statement.reads | statement.names)
                waiting += [source for source in sources if source is not None and isinstance(source[0], Path)]
    return kept


def _texts(
    modules: dict[Path, _Module], kept: set[_Statement], files: dict[Path, str], uncut: set[str]
) -> dict[str, str]:
    """Return the text of each file by its name."""
    parts: dict[str, list[str]] = {}
    imports: dict[str, set[tuple[str | None, str]]] = {}
    bound: dict[str, dict[str, str]] = {}
    needed: dict[str, set[str]] = {}
    for path, module in modules.items():
        file = files[path]
        names, written = bound.setdefault(file, {}), []
        for statement in (statement for statement in module.statements if statement in kept):
            tree = ast.dump(statement.node)
            if any(names.get(name, tree) != tree for name in statement.names):
                raise ValueError(f"{path}: rename {sorted(statement.names)}, which another module of {file} defines")
            # The same constant as an earlier module's, such as its `logger`, stands once.
            if not statement.names or not statement.names <= names.keys():
                written.append(statement)
            names.update(dict.fromkeys(statement.names, tree))
        if written:
            cuts = path.stem not in uncut
            texts = [_text(statement, cuts) for statement in written]
            title = f"# {path.parent.name}/{path.name}\n\n"
            parts.setdefault(file, []).append(title + _spaced(written, texts))
        for name in sorted({read for statement in written for read in statement.reads}):
            source = _source(modules, path, name)
            if source is None or source == (path, name):
                continue
            if not isinstance(source[0], Path):
                own = None if source[1] is None else source[0]
                known = source[1] or source[0]
                is_plain = name in (known, known.partition(".")[0])
                imports.setdefault(file, set()).add((own, known if is_plain else f"{known} as {name}"))
            elif files[source[0]] != file:
                imports.setdefault(file, set()).add((f".{files[source[0]]}", name))
                needed.setdefault(file, set()).add(files[source[0]])
    # Raises where files would import each other.
    list(TopologicalSorter(needed).static_order())
    for file, entries in imports.items():
        for own, entry in entries:
            name = entry.rpartition(" ")[2].partition(".")[0]
            if name in bound.get(file, {}):
                raise ValueError(f"{file}: rename {name}, which the file also imports from {own or entry}")
    return {
        file: "\n\n".join([_HEADER + "\n" + _import_lines(imports.get(file, set())), *texts])
        for file, texts in parts.items()
    }


def _text(statement: _Statement, cuts: bool) -> str:
    """Return a statement without imports of modules that stand in the same file, and with short docstrings."""
    lines = statement.text.splitlines()
    gone: set[int] = set()
    for node in ast.walk(ast.parse(statement.text)):
        if isinstance(node, ast.ImportFrom) and node.level:
            gone |= set(range(node.lineno - 1, node.end_lineno or 0))
        elif cuts and isinstance(node, _DEFINITIONS):
            rows = range(node.body[0].lineno - 1, node.body[0].end_lineno or 0)
            has_docstring = ast.get_docstring(node, clean=False) is not None
            empty = next((row for row in rows if has_docstring and not lines[row].strip()), None)
            if re.match("_[a-z]", node.name):
                # Whoever reads on reads the package.
                inside = range(node.lineno - 1, node.end_lineno or 0)
                gone |= {row for row in inside if lines[row].lstrip().startswith("#")}
                gone |= set(rows) if has_docstring and len(node.body) > 1 else set()
            elif empty is not None:
                lines[empty - 1] += '"""'
                gone |= set(range(empty, rows.stop))
    return "\n".join(line for row, line in enumerate(lines) if row not in gone)


def _spaced(statements: list[_Statement], texts: list[str]) -> str:
    """Join statements as the formatter does: definitions with two empty lines around them."""
    joined = texts[0]
    for (before, statement), text in zip(itertools.pairwise(statements), texts[1:], strict=True):
        is_near = not isinstance(before.node, _DEFINITIONS) and not isinstance(statement.node, _DEFINITIONS)
        joined += ("\n" if is_near else "\n\n\n") + text
    return joined + "\n"


def _import_lines(imports: set[tuple[str | None, str]]) -> str:
    """Return import statements: of the standard library, of other libraries, of the checkpoint's other files."""
    groups: tuple[list[str], ...] = ([], [], [])
    for name in sorted(name for source, name in imports if source is None):
        groups[_group_of(name)].append(f"import {name}")
    for source in sorted({source for source, _ in imports if source is not None}):
        names = sorted(name for other, name in imports if other == source)
        line = f"from {source} import {', '.join(names)}"
        if len(line) > 119:
            line = f"from {source} import (\n{textwrap.indent(textwrap.fill(', '.join(names), 115), '    ')}\n)"
        groups[_group_of(source)].append(line)
    return "\n\n".join("\n".join(group) for group in groups if group) + "\n"


def _group_of(name: str) -> int:
    top = re.split(r"[. ]", name)[0]
    return 2 if not top else int(top not in sys.stdlib_module_names)
