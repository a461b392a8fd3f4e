# SPDX-License-Identifier: Apache-2.0
"""Write a checkpoint's code: the package's modules that its method needs, joined into a few files.

A checkpoint has `configuration_<method>.py`, `modeling_<method>.py` and `compressor_base.py`, so that it loads without
this package. Each file holds the definitions that the method reaches, in the order in which modules import each other.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import itertools
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any, NamedTuple

from transformers.dynamic_module_utils import get_relative_import_files

_BASE_FILE = "compressor_base"
_HEADER = """\
# SPDX-License-Identifier: Apache-2.0
# Written by context-compressors from its modules, whose names stand above their parts.

from __future__ import annotations
"""
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
# Methods that make a compressor of a base, which a checkpoint is already.
_LEFT_OUT = {"from_base", "link_base"}
_THIS_FILE = Path(__file__).resolve()
# Stands for a line that is left out.
_GONE = b"\0"


class _Origin(NamedTuple):
    """Where a name comes from: a module of the package, one of a library, or `None` for a library itself."""

    source: Path | str | None
    name: str
    # What its user calls it, where it comes from a library.
    alias: str


def write_code(model_class: type, config_class: type, folder: str | os.PathLike) -> None:
    """Write the code of a model and its configuration into a folder.

    Args:
        model_class: A model class of this package, or one that imports only from its own folder.
        config_class: Its configuration class.
        folder: Where the weights are.

    Raises:
        ValueError: A name that two modules define cannot be made unique, or files would import each other.
    """
    if model_class.__module__.partition(".")[0] == __name__.partition(".")[0]:
        _write(joined_code(model_class, config_class), folder)
    else:
        copy_code(model_class, config_class, folder)


def copy_code(model_class: type, config_class: type, folder: str | os.PathLike) -> None:
    """Copy the files of two classes and of what they import from their folder: the `write_code` of a checkpoint."""
    sources = [inspect.getfile(cls) for cls in (model_class, config_class)]
    files = {file for source in sources for file in (source, *get_relative_import_files(source))}
    _write({Path(file).stem: Path(file).read_text(encoding="utf-8") for file in files}, folder)


def _write(texts: dict[str, str], folder: str | os.PathLike) -> None:
    for name, text in texts.items():
        target = Path(folder) / f"{name}.py"
        if not target.exists() or target.read_text(encoding="utf-8") != text:
            target.write_text(text, encoding="utf-8")


# A training run saves often, and goes on with the code that it has loaded.
@functools.cache
def joined_code(model_class: Any, config_class: Any) -> dict[str, str]:
    """Return the code of a checkpoint: the text of each file, by its name without ending."""
    sources = [Path(inspect.getfile(cls)).resolve() for cls in (config_class, model_class)]
    modules = _modules_in_order(sources)
    places = dict(place.split(".") for place in model_class.auto_map().values())
    named = {path for path in modules if path.stem in places}
    wanted = {name for place in model_class.auto_map().values() for name in place.split(".")[1:]}
    wanted |= {pipeline["impl"].split(".")[1] for pipeline in config_class.default_custom_pipelines().values()}
    code = _JoinedCode(modules, _files(modules, sources[0], named))
    for module in modules.values():
        for name in sorted(wanted & module.defined.keys()):
            code.keep(_Origin(module.path, name, name))
    return code.texts()


@dataclass(eq=False)
class _Statement:
    """A statement at the top of a module, from the comments above it to its last line."""

    node: ast.stmt
    first_line: int
    # Names that it binds in the module, and all that it reads.
    names: set[str] = field(default_factory=set)
    reads: set[str] = field(default_factory=set)
    # Names that it binds for itself: arguments, variables of functions, attributes of classes.
    own: set[str] = field(default_factory=set)
    # Names, imports and definitions in it.
    nodes: list[ast.AST] = field(default_factory=list)

    def __post_init__(self) -> None:
        for node in ast.walk(self.node):
            if isinstance(node, (ast.Name, ast.ImportFrom, *_DEFINITIONS)):
                self.nodes.append(node)
            if isinstance(node, ast.Name):
                self.reads.add(node.id)
                if isinstance(node.ctx, ast.Store):
                    self.own.add(node.id)
            elif isinstance(node, ast.arg):
                self.own.add(node.arg)
            elif isinstance(node, _DEFINITIONS) and node is not self.node:
                self.own.add(node.name)
        if isinstance(self.node, _DEFINITIONS):
            self.names = {self.node.name}
        else:
            self.names, self.own = self.own, set()


@dataclass(eq=False)
class _Module:
    path: Path
    lines: list[bytes]
    statements: list[_Statement] = field(default_factory=list)
    # Names that it defines, with the last statement that does.
    defined: dict[str, _Statement] = field(default_factory=dict)
    imported: dict[str, _Origin] = field(default_factory=dict)
    # Modules of the package that it imports at its top, and those that its functions and annotations do.
    needed_first: set[Path] = field(default_factory=set)
    needed_later: set[Path] = field(default_factory=set)
    # Whether it needs a library that may be missing: functions import it, and it stays a file of its own.
    is_optional: bool = False

    def note_import(self, node: ast.stmt, is_first: bool) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                self.imported[name] = _Origin(None, alias.name, name)
        elif isinstance(node, ast.ImportFrom):
            source: Path | str | None = node.module
            if node.level:
                if node.module is None:
                    raise ValueError(f"{self.path}, line {node.lineno}: `from . import` must name the module")
                folder = self.path.parents[node.level - 1]
                source = folder.joinpath(*node.module.split(".")).with_suffix(".py")
                (self.needed_first if is_first else self.needed_later).add(source)
            for alias in node.names:
                name = alias.asname or alias.name
                self.imported[name] = _Origin(source, alias.name, name)

    def leave_out_methods(self, node: ast.ClassDef) -> None:
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and method.name in _LEFT_OUT:
                start = min([method.lineno, *(decorator.lineno for decorator in method.decorator_list)]) - 1
                # And the empty line behind it.
                end = (method.end_lineno or start) + 1
                self.lines[start:end] = [_GONE] * (end - start)
        node.body = [m for m in node.body if not (isinstance(m, ast.FunctionDef) and m.name in _LEFT_OUT)]


@functools.cache
def _read(path: Path) -> _Module:
    source = path.read_text(encoding="utf-8")
    module = _Module(path, source.encode().splitlines())
    end = 0
    for node in ast.parse(source).body:
        start, end = end, node.end_lineno or node.lineno
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            if getattr(node, "module", None) != "__future__":
                module.note_import(node, is_first=True)
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            if not all(isinstance(inner, ast.Import | ast.ImportFrom) for inner in node.body):
                raise ValueError(f"{path}: `if TYPE_CHECKING` must hold imports only")
            for inner in node.body:
                module.note_import(inner, is_first=False)
            continue
        if isinstance(node, ast.ClassDef):
            module.leave_out_methods(node)
        module.is_optional |= isinstance(node, ast.Try)
        while not module.lines[start].strip():
            start += 1
        statement = _Statement(node, start)
        for local in statement.nodes:
            if isinstance(local, ast.ImportFrom) and local.level:
                module.note_import(local, is_first=False)
        module.statements.append(statement)
        module.defined.update(dict.fromkeys(statement.names, statement))
    return module


def _modules_in_order(sources: Iterable[Path]) -> dict[Path, _Module]:
    """Return the modules that `sources` reach, each after those that it imports at its top."""
    modules: dict[Path, _Module] = {}
    waiting = list(sources)
    while waiting:
        path = waiting.pop()
        if path not in modules:
            modules[path] = _read(path)
            waiting += modules[path].needed_first | modules[path].needed_later
    graph = {path: sorted(modules[path].needed_first) for path in sorted(modules)}
    return {path: modules[path] for path in TopologicalSorter(graph).static_order()}


def _files(modules: dict[Path, _Module], config_path: Path, named: set[Path]) -> dict[Path, str]:
    """Return the name of the file that each module goes into."""
    # What only methods import belongs to them.
    of_methods = {path for path in modules if path.stem.startswith("modeling_")}
    while True:
        others = [module for path, module in modules.items() if path not in of_methods]
        shared = of_methods.intersection(*[set().union(*(m.needed_first | m.needed_later for m in others))])
        if not shared:
            break
        of_methods -= shared
    own_file = config_path.stem.replace("configuration_", "modeling_", 1)
    files = {}
    for path, module in modules.items():
        if path.parent == config_path.parent:
            files[path] = config_path.stem
        elif path in of_methods:
            files[path] = path.stem if path in named else own_file
        else:
            files[path] = path.stem if module.is_optional else _BASE_FILE
    return files


class _JoinedCode:
    """The statements that a checkpoint keeps, and one name for each definition and import in all of its files."""

    def __init__(self, modules: dict[Path, _Module], files: dict[Path, str]):
        self.modules, self.files = modules, files
        self.kept: set[_Statement] = set()
        self.names: dict[_Origin, str] = {}
        self.holders: dict[str, _Origin | None] = dict.fromkeys(dir(builtins))

    def keep(self, origin: _Origin) -> None:
        """Keep a definition and all that it reaches."""
        if origin in self.names:
            return
        source, name = origin.source, origin.alias
        if self.holders.get(name, origin) != origin:
            name += "_of_" + (source.stem if isinstance(source, Path) else str(source).replace(".", "_"))
        if self.holders.setdefault(name, origin) != origin:
            raise ValueError(f"{origin} and {self.holders[name]} share a name: rename one of them")
        self.names[origin] = name
        if isinstance(source, Path):
            module = self.modules[source]
            # What binds no name, such as a registration, belongs to all of its module.
            for statement in module.statements:
                if origin.name in statement.names or not statement.names or module.is_optional:
                    self._keep_statement(module, statement)

    def _keep_statement(self, module: _Module, statement: _Statement) -> None:
        if statement not in self.kept:
            self.kept.add(statement)
            for origin in self._origins(module, statement).values():
                self.keep(origin)

    def _origins(self, module: _Module, statement: _Statement) -> dict[str, _Origin]:
        """Return where the names in a statement come from, but for builtins and variables of functions."""
        found = {name: self._origin(module, name) for name in sorted(statement.names | statement.reads)}
        return {name: origin for name, origin in found.items() if origin is not None}

    def _origin(self, module: _Module, name: str) -> _Origin | None:
        if name in module.defined:
            return self._shared_constant(module, name) or _Origin(module.path, name, name)
        origin = module.imported.get(name)
        if origin is None or not isinstance(origin.source, Path):
            return origin
        original, source = origin.name, self.modules[origin.source]
        if source.path == _THIS_FILE and original == write_code.__name__:
            original = copy_code.__name__
        if original not in source.defined and original not in source.imported:
            raise ValueError(f"{module.path} imports {original!r}, which {source.path} does not define")
        return self._origin(source, original)

    def _shared_constant(self, module: _Module, name: str) -> _Origin | None:
        """Return the same constant of an earlier module of the file, such as its `logger`."""
        statement = module.defined[name]
        if not isinstance(statement.node, ast.Assign):
            return None
        for path, other in self.modules.items():
            if path == module.path:
                return None
            if self.files[path] != self.files[module.path] or name not in other.defined:
                continue
            reads = statement.reads - {name}
            if ast.dump(other.defined[name].node) == ast.dump(statement.node) and all(
                self._origin(other, read) == self._origin(module, read) for read in reads
            ):
                return self._origin(other, name)
        return None

    def texts(self) -> dict[str, str]:
        """Return the text of each file by its name."""
        parts: dict[str, list[str]] = {}
        imports: dict[str, set[tuple[str | None, str]]] = {}
        needed: dict[str, set[str]] = {}
        for module in self.modules.values():
            file = self.files[module.path]
            kept = [s for s in module.statements if s in self.kept and self._is_own(module, s)]
            if not kept:
                continue
            texts = [self._text(module, statement) for statement in kept]
            parts.setdefault(file, []).append(
                f"# {module.path.parent.name}/{module.path.name}\n\n" + _spaced(kept, texts)
            )
            for statement in kept:
                for origin in self._origins(module, statement).values():
                    new = self.names[origin]
                    if not isinstance(origin.source, Path):
                        imports.setdefault(file, set()).add((origin.source, _as(origin.name, new)))
                    elif (other := self.files[origin.source]) != file and not self.modules[origin.source].is_optional:
                        imports.setdefault(file, set()).add((f".{other}", new))
                        needed.setdefault(file, set()).add(other)
        list(TopologicalSorter(needed).static_order())
        return {
            file: "\n\n".join([_HEADER + "\n" + _import_lines(imports.get(file, set())), *texts])
            for file, texts in sorted(parts.items())
        }

    def _is_own(self, module: _Module, statement: _Statement) -> bool:
        """Whether no earlier module of the file holds the same constant."""
        return all(self._origin(module, name) == _Origin(module.path, name, name) for name in statement.names)

    def _text(self, module: _Module, statement: _Statement) -> str:
        """Return a statement with the names of the file, without imports of modules that are in the file, too."""
        origins = self._origins(module, statement)
        renamed = {name: self.names[origin] for name, origin in origins.items() if self.names[origin] != name}
        clashes = statement.own & {*renamed, *renamed.values()}
        if clashes:
            raise ValueError(f"{module.path}: {sorted(clashes)} must be renamed in one of the modules that define it")
        lines = list(module.lines)
        edits = []
        for node in statement.nodes:
            if isinstance(node, ast.ImportFrom) and node.level:
                self._edit_import(module, node, lines)
            elif isinstance(node, ast.Name) and node.id in renamed:
                edits.append((node.lineno - 1, node.col_offset, node.id))
            elif isinstance(node, _DEFINITIONS) and node is statement.node and node.name in renamed:
                column = lines[node.lineno - 1].index(b" " + node.name.encode()) + 1
                edits.append((node.lineno - 1, column, node.name))
            if isinstance(node, _DEFINITIONS) and self.files[module.path] == _BASE_FILE:
                _cut_to_summary(node, lines)
        for row, column, name in sorted(edits, reverse=True):
            line, end = lines[row], column + len(name.encode())
            if line[column:end].decode() != name:
                raise ValueError(f"{module.path}, line {row + 1}: {name!r} is not where Python says")
            lines[row] = line[:column] + renamed[name].encode() + line[end:]
        kept = lines[statement.first_line : statement.node.end_lineno]
        return "\n".join(line.decode() for line in kept if line != _GONE)

    def _edit_import(self, module: _Module, node: ast.ImportFrom, lines: list[bytes]) -> None:
        """Take an import out of a function, unless its module is a file of its own."""
        origin = self._origin(module, node.names[0].asname or node.names[0].name)
        for row in range(node.lineno - 1, node.end_lineno or node.lineno):
            lines[row] = _GONE
        if origin is not None and isinstance(origin.source, Path) and self.modules[origin.source].is_optional:
            names = ", ".join(ast.unparse(alias) for alias in node.names)
            line = f"{' ' * node.col_offset}from .{self.files[origin.source]} import {names}"
            lines[node.lineno - 1] = line.encode()


def _cut_to_summary(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, lines: list[bytes]) -> None:
    """Leave of a docstring its first paragraph: the whole of it stands in the package and its reference."""
    if ast.get_docstring(node, clean=False):
        rows = range(node.body[0].lineno - 1, node.body[0].end_lineno or 0)
        empty = next((row for row in rows if not lines[row].strip()), None)
        if empty is not None:
            lines[empty - 1] += b'"""'
            lines[empty : rows.stop] = [_GONE] * (rows.stop - empty)


def _spaced(statements: list[_Statement], texts: list[str]) -> str:
    """Join statements as the formatter does: definitions with two empty lines around them."""
    joined = texts[0]
    for (before, statement), text in zip(itertools.pairwise(statements), texts[1:], strict=True):
        is_near = not isinstance(before.node, _DEFINITIONS) and not isinstance(statement.node, _DEFINITIONS)
        joined += ("\n" if is_near else "\n\n\n") + text
    return joined + "\n"


def _as(name: str, new: str) -> str:
    return name if new in (name, name.partition(".")[0]) else f"{name} as {new}"


def _import_lines(imports: set[tuple[str | None, str]]) -> str:
    """Return import statements: of the standard library, of other libraries, of the checkpoint's other files."""
    groups: tuple[list[str], ...] = ([], [], [])
    for source, name in sorted(imports, key=lambda entry: (entry[0] is not None, entry)):
        if source is None:
            groups[_group(name)].append(f"import {name}")
    for source in sorted({source for source, _ in imports if source is not None}):
        names = sorted(name for other, name in imports if other == source)
        line = f"from {source} import {', '.join(names)}"
        if len(line) > 119:
            line = f"from {source} import (\n    " + ",\n    ".join(names) + ",\n)"
        groups[_group(source)].append(line)
    return "\n\n".join("\n".join(group) for group in groups if group) + "\n"


def _group(name: str) -> int:
    top = re.split(r"[. ]", name)[0]
    return 2 if not top else int(top not in sys.stdlib_module_names)
