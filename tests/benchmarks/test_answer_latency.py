# SPDX-License-Identifier: Apache-2.0
"""The latency benchmark in a setting of GMSA's tables."""

import json
from pathlib import Path

import pytest

TOY = ["--hidden-size", "32", "--head-dim", "16", "--layers", "1", "--vocab-size", "64", "--device", "cpu"]


@pytest.mark.slow
def test_the_papers_setting_runs_small_on_a_cpu(script, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    latency, output = script("answer_latency.measure"), tmp_path / "latency.json"
    sizes = [*TOY, "--layers", "4"]
    arguments = ["--setting", "table7", *sizes, "--lengths", "40", "--new-tokens", "3", "--repeats", "2"]
    arguments += ["--batch-sizes", "1", "2", "--output", str(output)]
    assert latency.main(arguments) == 0
    content = json.loads(output.read_text(encoding="utf-8"))
    assert (content["benchmark"], content["settings"]["setting"]) == ("answer_latency", "table7")
    rows = content["rows"]
    assert [(row["batch_size"], row["ratio"], row["slots"]) for row in rows] == [
        (1, 4, 10),
        (1, 8, 5),
        (2, 4, 10),
        (2, 8, 5),
    ]
    for row in rows:
        assert len(row["samples"]["memory"]) == 2
    full, memory, compression = latency.medians(rows[0], "last_token")
    printed = capsys.readouterr().out
    assert "break-even reads" in printed
    # The file's times are rounded, the table's ratios come from the times before.
    assert any(f" {full / (memory + compression) + error:.2f} " in printed for error in (-1e-3, 0, 1e-3))
