# SPDX-License-Identifier: Apache-2.0
"""docs/add_a_method.md makes a method that works: its files and lines are put into a copy of the project and used.

And it says where: nothing else in the package knows a method's name.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pages
import pytest
import torch

from context_compressors.configuration.methods import METHODS

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "add_a_method.md").read_text(encoding="utf-8")
FOLDERS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["package-dir"]
CHECKLIST = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Checklist for a new method")[2]
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
FILES = re.compile(r"# ([\w./]+)(?:, under `(.*)`)?\n")


def place_of(package: Path, name: str) -> Path:
    """Return the place of a clone's file in the copy, whose sub-packages lie inside the package."""
    is_packaged = (ROOT / name.split("/")[0]).is_dir() and not name.startswith(("tests/", "context_compressors/"))
    return package / "context_compressors" / name if is_packaged else package / name


@pytest.fixture(scope="module")
def copied(small_checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project as an importable folder, with what the page adds to it."""
    folder = tmp_path_factory.mktemp("project")
    ignore = shutil.ignore_patterns("__pycache__")
    for package, source in FOLDERS.items():
        shutil.copytree(ROOT / source, folder / package.replace(".", "/"), ignore=ignore, dirs_exist_ok=True)
    shutil.copytree(ROOT / "tests" / "modeling", folder / "tests" / "modeling", ignore=ignore)
    pages.stand_in_checkpoints(small_checkpoints, folder)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder)
    for language, content in BLOCKS:
        if language == "console":
            continue
        name, anchor = FILES.match(content).groups()
        content, path = content.partition("\n")[2], place_of(folder, name)
        if anchor is None:
            assert not path.exists(), f"{name} is there already"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
            continue
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        places = [number for number, line in enumerate(lines, start=1) if line.startswith(anchor)]
        assert places, f"{name} has no line {anchor!r}"
        lines[places[0] : places[0]] = [content]
        path.write_text("".join(lines), encoding="utf-8")
    return folder


def test_a_method_touches_few_places_and_the_checklist_names_the_same():
    blocks = [content for language, content in BLOCKS if language != "console"]
    touched = [FILES.match(content)[1].replace("window_end", "<method>") for content in blocks]
    assert len(touched) == len(set(touched)), "one block for each place"
    # Its tests are an entry in the shared ones, and a file of its own.
    own_tests = "tests/modeling/test_<method>.py"
    assert sorted(touched) == sorted(
        [
            "configuration/configuration_<method>.py",
            "modeling/modeling_<method>.py",
            *("configuration/methods.py", "context_compressors/__init__.pyi"),
            *("tests/modeling/tiny_models.py", own_tests),
        ]
    )
    places = CHECKLIST.partition("\n\nAnd what goes with")[0]
    named = re.findall(r"^- \[ \] `([^`]+)`:", places, re.MULTILINE)
    assert sorted(named) == sorted(name for name in touched)
    added = [len(content.splitlines()) - 1 for content in blocks if FILES.match(content)[2] is not None]
    assert min(added) == 1, "its line in the register"


def names_in(source: str) -> set[str]:
    """Identifiers, parts of imported modules, and whole strings of a Python file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name):
                found.add(name)
            case ast.ImportFrom(module=str(module)):
                found.update(module.split("."))
            case ast.Constant(value=str(text)):
                found.add(text)
    return found


@pytest.mark.slow
def test_nothing_but_the_register_knows_the_names_of_methods():
    own = re.compile(rf"(configuration|modeling)_({'|'.join(METHODS)})")
    names = {name for method, classes in METHODS.items() for name in (method, f"{method}_compressor", *classes)}
    files = {
        str(path.relative_to(ROOT)): names_in(path.read_text(encoding="utf-8"))
        for folder in FOLDERS.values()
        for path in (ROOT / folder).rglob("*.py")
        if not own.match(path.stem)
    }
    assert len(files) > 100
    modules = {name for found in files.values() for name in found if own.fullmatch(name)}
    assert modules == set()
    # Others' published checkpoints each become those of one method.
    others = {"modeling/checkpoint/published_formats.py"}
    assert {name for name, found in files.items() if names & found} - others == {"configuration/methods.py"}
    # Texts may give examples; what lists most methods would have to grow with them.
    lists = re.compile(rf"\b({'|'.join(METHODS)})\b")
    most = {name for name, found in files.items() for part in found if len(set(lists.findall(part))) > 4}
    assert most == set()


def run(folder: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, f"{arguments}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def commands() -> list[list[str]]:
    """The page's `context-compressors` commands."""
    console = "".join(content for language, content in BLOCKS if language == "console")
    return [re.findall(r'"[^"]*"|\S+', line) for line in re.findall(r"^\$ context-compressors (.*)$", console, re.M)]


@pytest.mark.slow
def test_the_method_passes_the_shared_tests_and_its_own(copied: Path):
    # The page runs them all; these are of every kind.
    names = ("errors", "generation", "padding", "positions_and_chunks", "question_answering", "saving", "training")
    files = [f"tests/modeling/test_{name}.py" for name in (*names, "window_end")]
    options = ("-q", "-n0", "-p", "no:cacheprovider", "-k", "window_end", "-m", "not slow or costly")
    output = run(copied, "-m", "pytest", *options, *files)
    passed = int(re.search(r"(\d+) passed", output)[1])
    assert passed > 20, output


@pytest.mark.release
@pytest.mark.slow
def test_the_method_trains_answers_and_gets_its_card(copied: Path):
    (copied / "report.txt").write_text("Nora Lind wrote this report on bees.", encoding="utf-8")
    torch.manual_seed(0)
    assert [command[0] for command in commands()] == ["train", "evaluate", "ask", "publish"]
    train, *later = [[part.strip('"') for part in command] for command in commands()]
    run(copied, "-m", "context_compressors.cli", *train)
    # In one process, which does not know the method from its training.
    lines = ["from context_compressors.cli import main", f"for command in {later}:", "    assert not main(command)"]
    run(copied, "-c", "\n".join(lines))
    folder = copied / "outputs" / "window_end"
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "The state of each window's last token" in card
    assert "It was trained for three steps." in card
    assert (folder / "modeling_window_end.py").is_file()
