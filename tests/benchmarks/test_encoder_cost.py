# SPDX-License-Identifier: Apache-2.0
"""The benchmark of encoders' time at toy size."""

import json


def test_encoder_cost_has_a_row_for_each_model_and_ratio(script, tmp_path, capsys):
    encoder_cost = script("encoder_cost.measure")
    output = tmp_path / "cost.json"
    toy = ["--length", "16", "--d-model", "64", "--layers", "1", "--repeats", "1", "--device", "cpu"]
    assert encoder_cost.main([*toy, "--ratios", "2", "5", "--output", str(output)]) == 0
    rows = json.loads(output.read_text())["rows"]
    printed = [line.split("|")[1:4] for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [[cell.strip() for cell in cells] for cells in printed[2:]] == [
        ["T5", "1", "16"],
        ["DeCAL", "2", "24"],
        ["DeCAL", "5", "20"],
        ["AttnPool", "2", "16"],
        ["AttnPool", "5", "16"],
    ]
    assert [(row["model"], row["ratio"]) for row in rows] == [
        (cells[0].strip(), int(cells[1])) for cells in printed[2:]
    ]
    assert all(row["seconds"] > 0 for row in rows)
    assert output.with_suffix(".png").stat().st_size > 1000
    for wrong, message in (
        (["--d-model", "60"], "must be a multiple of 64, got 60"),
        (["--device", "abacus"], "device must be one of auto, cpu"),
    ):
        assert encoder_cost.main([*toy, *wrong]) == 1
        assert message in capsys.readouterr().err
