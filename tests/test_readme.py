# SPDX-License-Identifier: Apache-2.0
"""The README's code prints what the README says, its scores are the measured ones, and its links lead somewhere."""

import re
from pathlib import Path

import pages
import pytest

TEXT = pages.README.read_text(encoding="utf-8")


def test_it_has_at_most_200_lines():
    assert len(TEXT.splitlines()) <= 200


def test_the_first_code_asks_the_checkpoint_and_shows_what_it_prints():
    first, output, *_ = [block for block in pages.blocks_of(TEXT) if block.language in ("python", "text")]
    assert "pipeline(" in first.content
    assert f"checkpoints/{pages.CHECKPOINTS[0]}" in first.content
    assert output.is_output


@pytest.mark.slow
def test_its_code_prints_what_it_says(smollm2_base: Path, tmp_path: Path):
    outputs = pages.run_on_the_checkpoint(pages.README, tmp_path)
    assert [printed for _, printed in outputs] == [block.content for block, _ in outputs], "run tests/pages.py"


@pytest.mark.slow
def test_the_tables_of_scores_are_those_of_the_result_files():
    for path in (pages.README, pages.SCORES / "README.md"):
        text = path.read_text(encoding="utf-8")
        assert pages.with_scores(text) == text, "run tests/pages.py --scores"


def test_what_code_prints_goes_into_the_text_block_right_behind_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    fences = [
        "```jsonl\n# rows.jsonl\n{}\n```",
        "```python\nprint(open('rows.jsonl').read())\n```",
        "```text\nold\n```",
    ]
    page = tmp_path / "page.md"
    page.write_text("\n\n".join([*fences, "Words.", "```text\nkept\n```"]), encoding="utf-8")
    _, outputs = pages.run_page(page)
    text = page.read_text(encoding="utf-8")
    assert pages.filled(text, outputs) == text.replace("old", "{}")


def test_links_lead_to_files():
    targets = set(re.findall(r"\]\((?!https?://)([^)]+)\)", TEXT))
    assert len(targets) > 20
    for target in targets:
        name, _, place = target.partition("#")
        file = pages.ROOT / name
        assert file.is_file(), target
        headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE) if place else []
        assert place in ["", *(heading.lower().replace(" ", "-") for heading in headings)], target


def test_make_targets_exist():
    makefile = (pages.ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"`make ([a-z-]+)`", TEXT))
    assert named
    assert named <= set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))


def test_every_method_of_the_register_has_its_row():
    assert pages.with_method_rows(TEXT) == TEXT, "run tests/pages.py --methods"
