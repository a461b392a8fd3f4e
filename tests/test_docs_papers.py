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
    """Raised in place of running a command whose arguments were read."""


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


def in_tables(section: str) -> list[list[str]]:
    """Return the whole commands of a section's tables."""
    rows = "\n".join(line for line in section.splitlines() if line.startswith("| "))
    return [shlex.split(line) for line in re.findall(r"`((?:context-compressors|python -m) [^`]+)`", rows)]


def check_training(words: list[str]) -> None:
    """Check a training as it is checked before it reads anything."""
    model, _, args = parse_recipe([*words, "--use_cpu", "true"])
    if args.objective != "teacher":
        check_start(model)
        if model.checkpoint is None:
            config = config_class(model.method)
            config(**(model.method_config or {}))


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
