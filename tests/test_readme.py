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


def test_sets_of_questions_have_a_line_each_and_their_means():
    counts = {"task": "question_answering", "domain": "out", "num_samples": 9, "num_documents": 8}

    def row(dataset: str, condition: str, f1: float, width: float, **more) -> dict:
        scores = {"metrics": {"f1": f1}, "intervals": {"f1": [f1 - width, f1 + width]}}
        return {"dataset": dataset, "condition": condition, **scores, **counts, **more}

    rows = []
    costs = {"slots": 20, "memory_bytes": 3000}
    for name, f1, width in (("nq", 40, 3), ("qed", 60, 4)):
        less = {"cut=4": {"difference": f1 / 10, "interval": [f1 / 10 - width, f1 / 10 + width]}}
        rows += [row(name, "no_context", 8, 2), row(name, "full_context", 80, 5)]
        rows += [row(name, "ratio=4", f1, width, differences=less, costs=costs), row(name, "cut=4", f1 - f1 / 10, 5)]
    lines = [" ".join(line.split()) for line in pages.tables_by_set({"rows": rows}).splitlines()]
    assert [line for line in lines if not line.startswith("|-")] == [
        "| F1 | no context | full text | 4x |",
        "| nq, out of domain (9 about 8) | 8.0 [6.0, 10.0] | 80.0 [75.0, 85.0] | 40.0 [37.0, 43.0] |",
        "| qed, out of domain (9 about 8) | 8.0 [6.0, 10.0] | 80.0 [75.0, 85.0] | 60.0 [56.0, 64.0] |",
        "| mean | 8.0 [6.6, 9.4] | 80.0 [76.5, 83.5] | 50.0 [47.5, 52.5] |",
        "| compressed minus truncated text, mean | | | 5.0 [2.5, 7.5] |",
        "| stored: kB, mean | | | 3 |",
        "| read: positions, mean | | | 20 |",
    ]


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
