# SPDX-License-Identifier: Apache-2.0
"""Memory and time of Activation Beacon: a run of a toy, and what the page says of the result file."""

import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "activation_beacon"


@pytest.mark.slow
def test_each_reader_has_a_row_for_each_length(script, tmp_path):
    sizes = ["--hidden-size", "32", "--head-dim", "16", "--layers", "1", "--vocab-size", "64", "--device", "cpu"]
    output, lengths = tmp_path / "result.json", ["--lengths", "64", "128", "--window", "8", "--max-slots", "4"]
    measure = script("activation_beacon.measure")
    assert measure.main([*sizes, *lengths, "--ratio", "4", "--output", str(output)]) == 0
    rows = json.loads(output.read_text())["rows"]
    readers = ["sliding memory", "one document", "plain model"]
    assert [(row["reader"], row["tokens"]) for row in rows] == [(name, n) for n in (64, 128) for name in readers]
    assert all(row["tokens_per_second"] > 0 for row in rows)
    peaks = {(row["reader"], row["tokens"]): row["peak_bytes"] for row in rows}
    assert peaks["sliding memory", 128] < 1.05 * peaks["sliding memory", 64]
    assert peaks["plain model", 128] > 1.3 * peaks["plain model", 64]


def test_the_page_shows_its_result_file_whose_memory_is_flat(script):
    rows = json.loads((FOLDER / "cpu.json").read_text())["rows"]
    assert script("activation_beacon.measure").table_of(rows) in (FOLDER / "README.md").read_text()
    peaks = [row["peak_bytes"] for row in rows if row["reader"] == "sliding memory"]
    assert max(peaks) < 1.01 * min(peaks)
