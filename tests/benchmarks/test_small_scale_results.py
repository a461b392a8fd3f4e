# SPDX-License-Identifier: Apache-2.0
"""The results of the small-scale benchmark: summaries over seeds, and their tables."""

import json
import re
from pathlib import Path

import pytest


def test_summaries_are_means_and_standard_deviations_over_seeds(script):
    def run(seed: int, score: float | None) -> dict:
        row = {"dataset": "d", "task": "continuation", "condition": "ratio=4", "metrics": {"perplexity": score}}
        return {"name": "m", "prompts": None, "ratios": [4], "seed": seed, "rows": [row]}

    summarize = script("small_scale_results").summarize
    (row,) = summarize([run(0, 1.0), run(1, 2.0), run(2, 6.0)])
    assert row["seeds"] == [0, 1, 2]
    assert row["scores"]["continuation/perplexity"] == {"mean": 3.0, "std": pytest.approx(7**0.5)}
    (row,) = summarize([run(5, 1.5)])
    assert row["scores"]["continuation/perplexity"] == {"mean": 1.5, "std": None}
    # A score that is not finite is stored as null, and has no mean.
    (row,) = summarize([run(5, None)])
    assert row["scores"] == {}


def test_a_run_is_named_by_its_method_and_settings(script):
    run_name = script("small_scale_results").run_name
    assert run_name("icae", {}) == "icae"
    fields = {"position_layout": "uniform", "chunk_size": 64, "decoder_lora": None}
    assert run_name("icae", fields) == "icae, chunk_size=64, decoder_lora=null, position_layout=uniform"


def test_bounds_stand_once_for_each_kind_of_prompts(script):
    def run(name: str, prompts: str | None, score: float) -> dict:
        rows = [
            {"dataset": "d", "task": "reconstruction", "condition": condition, "metrics": {"bleu": score}}
            for condition in ("full_context", "ratio=4")
        ]
        return {"name": name, "prompts": prompts, "ratios": [4], "seed": 0, "rows": rows}

    results = script("small_scale_results")
    runs = [run("a", None, 1.0), run("b", None, 2.0), run("c", "embedded", 3.0)]
    lines = results.table(results.summarize(runs)).splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [(row[1], row[2], row[5]) for row in cells] == [
        ("base", "full_context", "1.00"),
        ("base, embedded prompts", "full_context", "3.00"),
        ("a, trained at 4", "ratio=4", "1.00"),
        ("b, trained at 4", "ratio=4", "2.00"),
        ("c, trained at 4", "ratio=4", "3.00"),
    ]


def test_the_table_of_one_ratio_has_the_best_restoration_first(script, tmp_path: Path, capsys):
    def run(name: str, seed: int, loss: float, ratios: list[int]) -> dict:
        rows = [
            {"dataset": "d", "task": "reconstruction", "condition": condition, "metrics": {"loss": value}}
            for condition, value in (("no_context", 9.0), ("full_context", 0.5), ("ratio=4", loss))
        ]
        return {"name": name, "prompts": None, "ratios": ratios, "seed": seed, "rows": rows}

    results, file = script("small_scale_results"), tmp_path / "small.json"
    runs = [run("a", 0, 3.0, [4]), run("a", 1, 4.0, [4]), run("b", 0, 2.0, [2, 4])]
    file.write_text(json.dumps({"summary": results.summarize(runs)}), encoding="utf-8")
    assert results.main(["--results", str(file)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")][2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [(row[0], row[1], row[2], row[5]) for row in cells] == [
        ("no context", "-", "2", "9.00"),
        ("full context", "-", "2", "0.50"),
        ("b", "2 4", "1", "2.00"),
        ("a", "4", "2", "3.50 ± 0.71"),
    ]
    with pytest.raises(ValueError, match="no run has scores on 'd' at ratio 5"):
        results.main(["--results", str(file), "--ratio", "5"])


def test_what_a_context_saves_has_a_column_where_it_was_measured(script):
    def row(**scores: float) -> dict:
        values = {f"continuation/{name}": {"mean": value, "std": None} for name, value in scores.items()}
        values["reconstruction/loss"] = {"mean": 1.0, "std": None}
        common = {"name": "m", "prompts": None, "ratios": [4], "dataset": "d", "condition": "ratio=4", "seeds": [0]}
        return {**common, "scores": values}

    results = script("small_scale_results")
    for render in (results.table, lambda summary: results.ratio_table(summary, "d", 4)):
        assert "saved by context" not in render([row(perplexity=2.0)])
        assert "saved by context" in render([row(perplexity=2.0, saved_by_context=0.25)])
        assert "0.25" in render([row(perplexity=2.0, saved_by_context=0.25)])


@pytest.mark.parametrize(
    "name",
    [
        "small_scale",
        "small_scale_2000_steps",
        "small_scale_gmsa",
        "small_scale_gmsa_128",
        "small_scale_restore_first",
    ],
)
def test_the_page_of_results_has_the_tables_of_the_result_file(script, name):
    results, folder = script("small_scale_results"), Path(script("small_scale_results").RESULTS)
    summary = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))["summary"]
    page = (folder / f"{name}.md").read_text(encoding="utf-8")
    shown = re.findall(r"^### ([^\n]+), ratio (\d+)\n\n(\|.*?)\n\n", page + "\n", re.MULTILINE | re.DOTALL)
    assert len(shown) >= 2
    for dataset, ratio, table in shown:
        assert table == results.ratio_table(summary, dataset, int(ratio)), (dataset, ratio)
