# SPDX-License-Identifier: Apache-2.0
"""docs/add_a_method.md makes a method that works: its files and lines are put into a copy of the project and used."""

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

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "add_a_method.md").read_text(encoding="utf-8")
FOLDERS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["package-dir"]
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
FILES = re.compile(r"# ([\w./]+)(?:, under `(.*)`)?\n")


def place_of(package: Path, name: str) -> Path:
    """Where a file of the clone is in the copy, whose sub-packages stand inside the package."""
    top = name.split("/")[0]
    return package / name if top in ("tests", "context_compressors") else package / "context_compressors" / name


@pytest.fixture(scope="module")
def copied(small_checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project as an importable folder, with what the page adds to it."""
    folder = tmp_path_factory.mktemp("project")
    ignore = shutil.ignore_patterns("__pycache__")
    for package, source in FOLDERS.items():
        shutil.copytree(ROOT / source, folder / package.replace(".", "/"), ignore=ignore, dirs_exist_ok=True)
    shutil.copytree(ROOT / "tests" / "modeling", folder / "tests" / "modeling", ignore=ignore)
    pages.stand_in_checkpoints(small_checkpoints, folder)
    shutil.copy(ROOT / "pyproject.toml", folder)
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
    names = ("errors", "generation", "padding", "question_answering", "saving", "training", "window_end")
    files = [f"tests/modeling/test_{name}.py" for name in names]
    options = ("-q", "-n0", "-p", "no:cacheprovider", "-k", "window_end", "-m", "not slow")
    output = run(copied, "-m", "pytest", *options, *files)
    passed = int(re.search(r"(\d+) passed", output)[1])
    assert passed > 40, output


@pytest.mark.slow
def test_the_method_trains_answers_and_gets_its_card(copied: Path):
    (copied / "report.txt").write_text("Nora Lind wrote this report on bees.", encoding="utf-8")
    torch.manual_seed(0)
    assert [command[0] for command in commands()] == ["train", "evaluate", "ask", "card"]
    for command in commands():
        run(copied, "-m", "context_compressors.cli", *[part.strip('"') for part in command])
    folder = copied / "outputs" / "window_end"
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "Window ends. A causal language model" in card
    assert "It was trained for three steps." in card
    assert (folder / "modeling_window_end.py").is_file()
