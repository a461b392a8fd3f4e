# SPDX-License-Identifier: Apache-2.0
"""docs/papers.md: each table and figure of the papers has its row, every recipe exists, every command can be read."""

import argparse
import importlib
import re
import shlex

import pages
import pytest

from context_compressors import cli
from context_compressors.cli import command
from context_compressors.configuration.methods import config_class
from context_compressors.data.sources import parse_sources
from context_compressors.training.arguments import parse_recipe, read_recipe
from context_compressors.training.loading import check_start

PAGE = (pages.DOCS / "papers.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))
# Tables and figures of each paper.
COUNTS = {"Mean pooling": (16, 3), "ComprExIT": (9, 8), "DeCAL": (6, 1), "EPL": (19, 10), "GMSA": (11, 7)}
RECIPES = pages.ROOT / "training" / "recipes"


class Parsed(BaseException):
    """What stands in for running a command whose arguments were read."""


def commands(section: str) -> list[list[str]]:
    """The command lines that a section shows, in words."""
    shown = "".join(block.content for block in pages.blocks_of(section) if block.language == "console")
    lines = [line for line in shown.replace("\\\n", " ").splitlines() if line.startswith("$ ")]
    assert lines
    return [shlex.split(line[2:]) for line in lines]


def test_every_table_and_figure_has_a_row():
    assert SECTIONS.keys() == COUNTS.keys()
    for paper, counts in COUNTS.items():
        for kind, count in zip(("Table", "Figure"), counts, strict=True):
            found = []
            for names in re.findall(rf"^\| {kind}s? (\d+(?:(?:, | and | to )\d+)*)", SECTIONS[paper], re.MULTILINE):
                for first, last in re.findall(r"(\d+)(?: to (\d+))?", names):
                    found += range(int(first), int(last or first) + 1)
            assert sorted(found) == list(range(1, count + 1)), f"{paper}: {kind}"


@pytest.mark.slow
def test_every_recipe_on_the_page_exists():
    named = set(re.findall(r"[\w.]+(?:/[\w.]+)+\.yaml", PAGE))
    assert len(named) > 40
    for name in named:
        assert read_recipe(name), name
    folders = re.findall(r"`([\w.]+(?:/[\w.]+)*)/`", PAGE)
    assert [name for name in folders if not list((RECIPES / name).glob("*.yaml"))] == []
    # A file named without its folder is in one that the page names.
    alone = set(re.findall(r"(?<![\w/.])\w[\w.]*\.yaml", PAGE))
    assert alone <= {path.name for path in RECIPES.rglob("*.yaml")}


def lettered(section: str) -> dict[str, list[list[str]]]:
    """Letter of a section's comments -> the commands below it, in words."""
    found: dict[str, list[list[str]]] = {}
    letter = ""
    for block in pages.blocks_of(section):
        for line in block.content.replace("\\\n", " ").splitlines() if block.language == "console" else ():
            letter = heading[1] if (heading := re.match(r"# ([A-Z])\. ", line)) else letter
            if line.startswith("$ "):
                found.setdefault(letter, []).append(shlex.split(line[2:]))
    return found


def with_files(commands: list[list[str]], files: list[str], is_first: bool) -> list[list[str]]:
    """A letter's trainings with other files, as the page says where they stand."""
    found = []
    for number, words in enumerate(line for line in commands if line[1] == "train"):
        words = list(words)
        for folder in dict.fromkeys(file.rpartition("/")[0] for file in files):
            of_folder = [file for file in files if file.rpartition("/")[0] == folder]
            places = [2] if is_first else [n for n, word in enumerate(words) if word.rpartition("/")[0] == folder]
            if places:
                words[places[0]] = of_folder[min(number, len(of_folder) - 1)]
            else:
                words[3:3] = of_folder
        found.append(words)
    return found


def in_tables(section: str) -> list[list[str]]:
    """The commands of a section's tables: whole ones, and those of a letter with other files."""
    rows = "\n".join(line for line in section.splitlines() if line.startswith("| "))
    found = [shlex.split(line) for line in re.findall(r"`((?:context-compressors|python -m) [^`]+)`", rows)]
    files = r"`[\w./]+/[\w.]+\.yaml`"
    for letters, named, is_first in re.findall(
        rf"\b([A-Z](?: and [A-Z])*) with ({files}(?:, {files})*)( as its first file)?", rows
    ):
        for letter in letters.split(" and "):
            found += with_files(lettered(section)[letter], named.strip("`").split("`, `"), bool(is_first))
    return found


def check_training(words: list[str]) -> None:
    """What a training checks before it reads anything."""
    model, _, args = parse_recipe([*words, "--use_cpu", "true"])
    if args.objective != "teacher":
        check_start(model)
        if model.checkpoint is None:
            config = config_class(model.method)
            config(**(model.method_config or {}))


def test_what_a_training_refuses_is_found_without_running_it():
    refused = ["decal/decal.yaml", "decal/fine_tuning.yaml", "decal/question_answering.yaml"]
    refused += ["decal/models/fine_tune_only.yaml", "--checkpoint", "PRETRAINED", "--output_dir", "ANSWERS"]
    with pytest.raises(ValueError, match="method_config is fixed by the checkpoint"):
        check_training(refused)


@pytest.mark.slow
@pytest.mark.parametrize("paper", COUNTS)
def test_every_command_on_the_page_can_be_read(paper, tmp_path, monkeypatch):
    parse = command.NearestNameParser.parse_args

    def read(self, args=None, namespace=None):
        found = parse(self, args, namespace)
        if self.prog.endswith(" evaluate"):
            assert parse_sources([*found.data, *found.out_of_domain])
        raise Parsed

    monkeypatch.setattr(command.NearestNameParser, "parse_args", read)
    for words in commands(SECTIONS[paper]) + in_tables(SECTIONS[paper]):
        if words[:2] == ["context-compressors", "train"]:
            check_training(words[2:])
        elif words[0] == "context-compressors":
            with pytest.raises(Parsed):
                cli.main(words[1:])
        else:
            assert words[:2] == ["python", "-m"]
            monkeypatch.syspath_prepend(str(pages.ROOT))
            parser = importlib.import_module(words[2]).build_parser()
            assert isinstance(parser.parse_args(words[3:]), argparse.Namespace)
