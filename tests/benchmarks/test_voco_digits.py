# SPDX-License-Identifier: Apache-2.0
"""VoCo on digits: parts that never meet, intervals, and a run of a few steps."""

import json
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).resolve().parents[2] / "benchmarks" / "voco_digits"


@pytest.fixture
def voco_digits(script):
    return script("voco_digits.measure")


def test_no_picture_is_in_two_parts_and_the_parts_are_always_the_same(voco_digits):
    data, again = (voco_digits.digits(torch.device("cpu")) for _ in range(2))
    pictures = {part: [picture.numpy().tobytes() for picture in rows] for part, (rows, _) in data.items()}
    assert {part: len(rows) for part, rows in pictures.items()} == voco_digits.PARTS
    for part, others in (("train", ("choose", "report")), ("choose", ("report",))):
        for other in others:
            assert not set(pictures[part]) & set(pictures[other]), (part, other)
        assert data[part][0].equal(again[part][0])
    assert all(len(set(labels.tolist())) == 10 for _, labels in data.values())


@pytest.mark.slow
def test_it_runs_and_the_page_shows_what_its_results_say(voco_digits, tmp_path):
    sizes = ["--image-tokens", "4", "--voco-tokens", "1", "--base-steps", "2", "--steps", "2"]
    output = tmp_path / "result.json"
    voco_digits.main([*sizes, "--seeds", "0", "1", "--device", "cpu", "--output", str(output)])
    rows = json.loads(output.read_text(encoding="utf-8"))["rows"]
    readers = ["image", "no image", "1 VoCo, default, untrained", "1 VoCo, default"]
    readers += ["1 VoCo, enhanced, untrained", "1 VoCo, enhanced", "1 VoCo, enhanced less default"]
    assert [row["reader"] for row in rows] == readers
    assert all(len(row["right"]) == 2 and len(row["right"][0]) == 300 for row in rows[:-1])


@pytest.mark.slow
def test_the_page_has_the_accuracies_of_its_result_files(voco_digits):
    page = (PAGE / "README.md").read_text(encoding="utf-8")
    found = sorted(PAGE.glob("*.json"))
    assert found
    for path in found:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        for row in rows:
            if "right" in row:
                assert row["accuracy"] == pytest.approx(voco_digits.interval(row["right"]), rel=1e-3)
            mean, low, high = row["accuracy"]
            if f"| {row['reader']} |" in page:
                assert f"{mean:.1f} [{low:.1f}, {high:.1f}]" in page, (path.name, row["reader"])
