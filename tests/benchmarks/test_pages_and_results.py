# SPDX-License-Identifier: Apache-2.0
"""Pages and result files of all benchmarks: commands parse, links lead somewhere, files are small and rounded."""

import json
import math
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from context_compressors.reporting.result_files import write_results

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
PAGES = [*sorted(BENCHMARKS.rglob("*.md")), *sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
SCRIPTS = sorted(path for path in BENCHMARKS.rglob("*.py") if "__main__" in path.read_text(encoding="utf-8"))
RESULTS = [path for path in BENCHMARKS.rglob("*.json") if not path.stem.endswith("jobs")]
RESULTS += (ROOT / "checkpoints").glob("*/training_summary.json")


_NUMBER = r"[-+]?\d[\d,]*(?:\.\d+)?"
# `3.0 [1.4, 4.7]` and `3.0 (1.4 to 4.7)`.
_INTERVAL = re.compile(
    rf"(?<![\w.])({_NUMBER})(?: %| points?)?\s(?:\[({_NUMBER}),\s({_NUMBER})\]|\(({_NUMBER}) to ({_NUMBER})\))"
)
# What tests/pages.py writes from result files, which a test of README.md compares.
_WRITTEN = re.compile(r"<!-- (scores|sets|needles)\b.*?<!-- /\1 -->", re.DOTALL)
Triple = tuple[float, ...]


def is_interval(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(end, int | float) for end in value)


def triples(node: Any) -> Iterator[Triple]:
    """Values with an interval in a result file: as one list, in one mapping, or under the same name in two of them."""
    if isinstance(node, list) and len(node) == 3 and all(isinstance(part, int | float) for part in node):
        yield tuple(node)
    parts = node if isinstance(node, list) else [*node.values()] if isinstance(node, dict) else []
    for part in parts:
        yield from triples(part)
    if isinstance(node, dict):
        mappings = [node, *(part for part in parts if isinstance(part, dict))]
        beside = [(value, part) for part in parts if is_interval(part) for value in parts]
        of_a_name = [
            (values.get(name), interval)
            for part in mappings
            for name, interval in part.items()
            if is_interval(interval)
            for values in mappings
        ]
        for value, interval in beside + of_a_name:
            if isinstance(value, int | float):
                yield (value, *interval)


def printed(match: re.Match[str]) -> Triple:
    return tuple(float(number.replace(",", "")) for number in filter(None, match.groups()))


def is_rounded(match: re.Match[str], found: Triple) -> bool:
    """Return whether a printed value and its interval are the rounded ones of a file."""
    for text, shown, number in zip(filter(None, match.groups()), printed(match), found, strict=True):
        digit = 10.0 ** (math.floor(math.log10(abs(number))) - 3) if number else 0
        if abs(shown - number) > 0.5 * 10.0 ** -len(text.partition(".")[2]) + 0.51 * digit + 1e-9:
            return False
    return True


def unbacked(page: Path) -> list[str]:
    """The intervals of a page that no result file has, beside it or in a benchmark that it links to."""
    text = page.read_text(encoding="utf-8")
    linked = [(page.parent / target).resolve() for target in re.findall(r"\]\((?!https?://)([^)#]+)", text)]
    folders = {path.parent for path in (page, *linked) if path.is_relative_to(BENCHMARKS)}
    if page.is_relative_to(ROOT / "checkpoints"):
        folders = {BENCHMARKS / ("comparison" if page.parent.name == "minilm-keep-drop" else "smollm2")}
    known = {triple for folder in folders for path in folder.glob("*.json") for triple in triples(read_json(path))}
    for written in (block[0] for folder in folders for path in folder.glob("*.md") for block in blocks(path)):
        known |= {printed(match) for match in _INTERVAL.finditer(written)}
    # A page may turn a difference round, and give a share in percent.
    by_value: dict[int, list[Triple]] = {}
    for value, low, high in known:
        for triple in ((value, low, high), (-value, -high, -low), (100 * value, 100 * low, 100 * high)):
            by_value.setdefault(round(triple[0]), []).append(triple)
    return [
        match[0]
        for match in _INTERVAL.finditer(_WRITTEN.sub("", text))
        if not any(
            is_rounded(match, triple)
            for value in range(round(printed(match)[0]) - 1, round(printed(match)[0]) + 2)
            for triple in by_value.get(value, [])
        )
    ]


def blocks(page: Path) -> Iterator[re.Match[str]]:
    return _WRITTEN.finditer(page.read_text(encoding="utf-8"))


@cache
def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_every_interval_on_a_page_is_in_a_result_file():
    pages = [*PAGES, *(ROOT / "docs" / "methods").glob("*.md"), *(ROOT / "checkpoints").glob("*/README.md")]
    assert {str(page.relative_to(ROOT)): missing for page in pages if (missing := unbacked(page))} == {}


def commands() -> set[str]:
    """Return the commands of benchmarks on the pages and in the scripts' docstrings."""
    found = set()
    for path in (*PAGES, *SCRIPTS):
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        found |= {" ".join(command.split()) for command in re.findall(r"`(python -m benchmarks\.[^`]+)`", text)}
        found |= set(re.findall(r"^ *(python -m benchmarks\.[^`#\n]+)", text, re.MULTILINE))
    return found


def test_every_script_has_a_page_and_commands_that_it_takes(script):
    named = set()
    for command in commands():
        _, _, module, *arguments = shlex.split(command)
        named.add(module)
        if "--help" not in arguments:
            script(module.removeprefix("benchmarks.")).build_parser().parse_args(arguments)
    assert named == {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in SCRIPTS}
    folders = {path.parent for path in BENCHMARKS.rglob("*.json")} | {path.parent for path in SCRIPTS}
    index = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    assert [folder.name for folder in folders if f"({folder.name}/README.md)" not in index] == []


def test_result_files_are_small_rounded_and_not_indented(tmp_path: Path):
    assert len(RESULTS) > 20
    for path in RESULTS:
        assert path.stat().st_size <= 300_000, path
        text = path.read_text(encoding="utf-8")
        again = write_results(json.loads(text), tmp_path / "again.json").read_text(encoding="utf-8")
        assert text.rstrip() == again.rstrip(), f"{path}: write it with write_results"


def test_the_scripts_print_tables_of_their_result_files(script):
    for name in ("answer_latency", "compression_overhead", "sinkhorn"):
        for path in (BENCHMARKS / name).glob("*.json"):
            content = json.loads(path.read_text(encoding="utf-8"))
            assert script(f"{name}.measure").table(content["rows"]).count("\n") > len(content["rows"]), path
