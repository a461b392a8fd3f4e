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
    first, output, *_ = pages.blocks_of(TEXT)
    assert "pipeline(" in first.content
    assert f"checkpoints/{pages.CHECKPOINT}" in first.content
    assert output.is_output


@pytest.mark.slow
def test_its_code_prints_what_it_says(smollm2_base: Path, tmp_path: Path):
    outputs = pages.run_on_the_checkpoint(pages.README, tmp_path)
    assert [printed for _, printed in outputs] == [block.content for block, _ in outputs], "run tests/pages.py"


def test_the_table_of_checkpoints_has_the_scores_that_were_measured():
    # Unless there is a result file, the table holds dots.
    assert pages.with_scores(TEXT) == TEXT, "run tests/pages.py"


def test_a_table_of_checkpoints_is_filled_from_a_report():
    conditions = ["no_context", "full_context", "ratio=2", "ratio=4", "ratio=8", "ratio=16"]
    row = {"dataset": "squad", "task": "question_answering"}
    rows = [
        {**row, "condition": name, "metrics": {"f1": 10.04 * place, "exact_match": place}}
        for place, name in enumerate(conditions)
    ]
    rows.append({**row, "dataset": "nq", "condition": "ratio=2", "metrics": {"f1": 99.0, "exact_match": 99.0}})
    cells = pages.score_table({"rows": rows}).splitlines()[2].split(" | ")
    assert [cell.strip(" |") for cell in cells[1:]] == [f"{10.04 * n:.1f} / {n:.1f}" for n in range(6)]


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
    assert [target for target in sorted(targets) if not (pages.ROOT / target).is_file()] == []


def test_make_targets_exist():
    makefile = (pages.ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"^make ([a-z-]+)", TEXT, re.MULTILINE)) | set(re.findall(r"`make ([a-z-]+)`", TEXT))
    assert named
    assert named <= set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
