# SPDX-License-Identifier: Apache-2.0
"""The wheel and the editable install hold everything, and the root package stays light."""

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import pytest

import context_compressors

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FOLDERS = SETTINGS["tool"]["setuptools"]["package-dir"]

# Runs isolated, so that neither the working directory nor PYTHONPATH can lend it a module.
IMPORT_ALL = """
import importlib, pathlib, sys
import context_compressors as package

root = pathlib.Path(sys.argv[1]).resolve()
for name in package.__all__:
    getattr(package, name)
without = 0
for name in sys.argv[2:]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        # The package does without it, and says where it comes from; kvpress has an environment of its own.
        wanted = "pip install kvpress" if name.endswith(".kvpress") else "pip install -e '.["
        assert wanted in str(error), error
        without += 1
names = [name for name in sys.modules if name.split(".")[0] == "context_compressors"]
strangers = [name for name in names if not pathlib.Path(sys.modules[name].__file__).resolve().is_relative_to(root)]
assert not strangers, f"not from {root}: {strangers}"
print(len(names) + without, package.__version__)
"""


def product_files(pattern: str = "*") -> set[str]:
    """Every file of the packages, by its path in the wheel."""
    return {
        (Path(package.replace(".", "/")) / path.relative_to(ROOT / folder)).as_posix()
        for package, folder in FOLDERS.items()
        for path in (ROOT / folder).rglob(pattern)
        if path.is_file() and "__pycache__" not in path.parts
    }


def run(*command: object, cwd: Path | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    result = subprocess.run(list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, f"{command} failed:\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture
def source_copy(tmp_path: Path) -> Path:
    """The files that make the distribution, so that a build leaves nothing in the checkout."""
    copy = tmp_path / "source"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for folder in FOLDERS.values():
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    return copy


def install(environment: Callable, *arguments: object) -> None:
    pip = [sys.executable, "-m", "pip", "--python", environment("python"), "install", "--quiet", "--no-index"]
    run(*pip, "--no-deps", "--no-build-isolation", *arguments)


def check_install(environment: Callable, root: Path, elsewhere: Path) -> None:
    """Import everything, and run the command, from a directory that is not the checkout."""
    elsewhere.mkdir()
    python = environment("python")
    modules = {file.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for file in product_files("*.py")}
    count, version = (
        run(python, "-I", "-c", IMPORT_ALL, root, *sorted(modules), cwd=elsewhere).splitlines()[-1].split()
    )
    assert int(count) == len(modules)
    assert version == context_compressors.__version__
    command = environment("context-compressors")
    assert "compress" in run(command, "--help", cwd=elsewhere)
    assert version in run(command, "--version", cwd=elsewhere)


def test_every_folder_with_code_is_a_listed_package():
    packages = set(SETTINGS["tool"]["setuptools"]["packages"])
    for package, folder in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            name = ".".join([package, *path.parent.relative_to(ROOT / folder).parts])
            assert name in packages, f"{path} is in no listed package"
    for name in packages:
        top = max((package for package in FOLDERS if f"{name}.".startswith(f"{package}.")), key=len)
        folder = ROOT.joinpath(FOLDERS[top], *name[len(top) :].split(".")[1:])
        assert (folder / "__init__.py").is_file(), f"{name} is listed, and is no package"


# A folder imports from itself and from the rows before its own: `training` and `evaluation` not from each other.
FLOORS = (
    ("__init__", "reporting", "configuration"),
    ("modeling",),
    ("data",),
    ("training", "evaluation"),
    ("hub_cards", "corpus"),
    ("demo", "serving", "integrations"),
    ("cli",),
)


def imports_of_the_package() -> dict[str, set[str]]:
    """Each module of the package and those of it that it imports, inside functions, too."""
    paths = {
        ".".join([package, *path.relative_to(ROOT / folder).with_suffix("").parts]).removesuffix(".__init__"): path
        for package, folder in FOLDERS.items()
        for path in (ROOT / folder).rglob("*.py")
    }
    found: dict[str, set[str]] = {}
    for module, path in paths.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        statements = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        found[module] = set()
        for node in (node for node in statements if node.level):
            source = resolve_name("." * node.level + (node.module or ""), package)
            names = {f"{source}.{alias.name}" for alias in node.names}
            found[module] |= names & paths.keys() or {source}
    return found


@pytest.mark.slow
def test_files_and_folders_import_downwards_without_circles():
    imports = imports_of_the_package()
    assert len(list(TopologicalSorter(imports).static_order())) == len(imports)
    floor = {folder: number for number, folders in enumerate(FLOORS) for folder in folders}
    for module, sources in imports.items():
        for source in sources if "." in module else ():
            above, below = ([*name.split("."), "__init__"][1] for name in (module, source))
            assert above == below or floor[below] < floor[above], f"{module} imports {source}"


def test_version_is_the_same_everywhere():
    assert re.fullmatch(r"\d+\.\d+\.\d+", context_compressors.__version__)
    assert importlib.metadata.version("context-compressors") == context_compressors.__version__
    assert "version" in SETTINGS["project"]["dynamic"]


def test_type_checkers_see_every_public_name_and_every_folder():
    source = (ROOT / "context_compressors" / "__init__.pyi").read_text(encoding="utf-8")
    imports = [node for node in ast.parse(source).body if isinstance(node, ast.ImportFrom)]
    modules = {alias.asname: node.module for node in imports for alias in node.names}
    assert sorted(modules) == context_compressors.__all__[1:]
    for name, module in modules.items():
        folder, *rest = module.split(".")
        path = ROOT.joinpath(FOLDERS[f"context_compressors.{folder}"], *rest or ["__init__"]).with_suffix(".py")
        assert re.search(rf"^(class|def) {name}\b", path.read_text(encoding="utf-8"), re.MULTILINE), (name, module)
    for package, folder in FOLDERS.items():
        if "." in package:
            assert (ROOT / package.replace(".", "/")).resolve() == ROOT / folder, "ln -s ../FOLDER context_compressors"


def test_public_names_are_listed_and_an_unknown_one_is_refused():
    assert set(context_compressors.__all__) <= set(dir(context_compressors))
    with pytest.raises(AttributeError, match="CompresorConfig"):
        context_compressors.CompresorConfig  # noqa: B018


# Each takes tenths of a second or more to import, and none is needed to show help.
HEAVY = "torch transformers trl datasets matplotlib numpy pyarrow huggingface_hub torchmetrics peft"

SHOW_HELP = """
import contextlib, io, sys
import context_compressors
dir(context_compressors)
from context_compressors import cli

for command in (None, *cli._COMMANDS):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        cli.main(["--help"] if command is None else [*command.split(), "--help"])
    assert printed.getvalue().startswith("usage: context-compressors"), command
    heavy = set(sys.argv[1:]) & set(sys.modules)
    assert not heavy, f"{command} --help imports {heavy}"
"""


def test_the_root_package_and_help_import_nothing_heavy(tmp_path: Path):
    run(sys.executable, "-I", "-c", SHOW_HELP, *HEAVY.split(), cwd=tmp_path)


@pytest.mark.slow
def test_wheel_holds_every_file_and_works_in_a_clean_environment(
    source_copy: Path, clean_environment: Callable, tmp_path: Path
):
    wheels = tmp_path / "wheels"
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    run(*pip, "--wheel-dir", wheels, source_copy)
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert product_files() <= names, f"missing in the wheel: {sorted(product_files() - names)}"
    assert "context_compressors/data/prompts.yaml" in names
    assert any(re.fullmatch(r"context_compressors/training/recipes/mean_pooling/.*\.yaml", name) for name in names)
    environment = clean_environment(tmp_path / "environment")
    install(environment, wheel)
    check_install(environment, tmp_path / "environment", tmp_path / "elsewhere")


@pytest.mark.release
@pytest.mark.slow
def test_editable_install_works_in_a_clean_environment(source_copy: Path, clean_environment: Callable, tmp_path: Path):
    environment = clean_environment(tmp_path / "environment")
    install(environment, "--editable", source_copy)
    check_install(environment, source_copy, tmp_path / "elsewhere")


def test_every_python_file_names_its_license():
    line = "# SPDX-License-Identifier: Apache-2.0\n"
    files = [
        path
        for folder in (*FOLDERS.values(), "benchmarks", "examples", "tests")
        for path in (ROOT / folder).rglob("*.py")
    ]
    assert len(files) > 100
    assert [path.name for path in files if not path.read_text(encoding="utf-8").startswith(line)] == []
