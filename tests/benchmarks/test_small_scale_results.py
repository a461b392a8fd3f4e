# SPDX-License-Identifier: Apache-2.0
"""The results of the small-scale benchmark: summaries over seeds, and their tables."""

import json
import math
import re

import pytest


def scores(task: str = "continuation", **conditions: dict) -> dict:
    """Scores of one data set, by condition."""
    return {"d": {task: {name.replace("ratio_", "ratio="): metrics for name, metrics in conditions.items()}}}


def run(name: str, seed: int, found: dict, ratios: tuple[int, ...] = (4,), prompts: str | None = None) -> dict:
    return {"name": name, "prompts": prompts, "ratios": list(ratios), "seed": seed, "scores": found}


def test_summaries_are_means_and_standard_deviations_over_seeds(script):
    summarize = script("small_scale.results").summarize

    def row(*by_seed: tuple[int, float | None]) -> dict:
        runs = [run("m", seed, scores(ratio_4={"perplexity": score})) for seed, score in by_seed]
        (found,) = summarize({"bounds": {}, "runs": runs})
        return found

    three = row((0, 1.0), (2, 2.0), (1, 6.0))
    assert three["seeds"] == [0, 1, 2]
    assert three["scores"]["continuation/perplexity"] == {"mean": 3.0, "std": pytest.approx(7**0.5)}
    assert three["scores"]["continuation/loss"]["mean"] == pytest.approx(math.log(12) / 3)
    assert row((5, 1.5))["scores"]["continuation/perplexity"] == {"mean": 1.5, "std": None}
    # A score that is not finite is stored as null, and has no mean.
    assert row((5, None))["scores"] == {}


def test_a_run_is_named_by_its_method_and_settings(script):
    run_name = script("small_scale.results").run_name
    assert run_name("icae", {}) == "icae"
    fields = {"position_layout": "uniform", "chunk_size": 64, "decoder_lora": None}
    assert run_name("icae", fields) == "icae, chunk_size=64, decoder_lora=null, position_layout=uniform"


def cells_of(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_bounds_stand_once_for_each_kind_of_prompts(script):
    def bleu(score: float, condition: str = "ratio_4") -> dict:
        return scores("reconstruction", **{condition: {"bleu": score}})

    bounds = {"default": bleu(1.0, "full_context"), "embedded": bleu(2.0, "full_context")}
    runs = [run("a", 0, bleu(3.0)), run("b", 0, bleu(4.0), (2, 4)), run("c", 0, bleu(5.0), prompts="embedded")]
    table = script("small_scale.results").table({"bounds": bounds, "runs": runs})
    assert [[*row[1:5], row[6]] for row in cells_of(table)] == [
        ["full context", "-", "full_context", "-", "1.00"],
        ["full context, embedded prompts", "-", "full_context", "-", "2.00"],
        ["a", "4", "ratio=4", "1", "3.00"],
        ["b", "2 4", "ratio=4", "1", "4.00"],
        ["c", "4", "ratio=4", "1", "5.00"],
    ]


def test_the_table_of_one_ratio_has_the_best_restoration_first(script, tmp_path, capsys):
    def loss(**values: float) -> dict:
        return scores("reconstruction", **{name: {"perplexity": math.exp(value)} for name, value in values.items()})

    runs = [run("a", 0, loss(ratio_4=3.0)), run("a", 1, loss(ratio_4=4.0)), run("b", 0, loss(ratio_4=2.0), (2, 4))]
    results, file = script("small_scale.results"), tmp_path / "small.json"
    bounds = {"default": loss(no_context=9.0, full_context=0.5)}
    file.write_text(json.dumps({"bounds": bounds, "runs": runs}), encoding="utf-8")
    assert results.main(["--results", str(file)]) == 0
    assert [[*row[:3], row[5]] for row in cells_of(capsys.readouterr().out)] == [
        ["no context", "-", "-", "9.00"],
        ["full context", "-", "-", "0.50"],
        ["b", "2 4", "1", "2.00"],
        ["a", "4", "2", "3.50 ± 0.71"],
    ]
    with pytest.raises(ValueError, match="no run has scores on 'd' at ratio 5"):
        results.main(["--results", str(file), "--ratio", "5"])


def test_what_a_context_saves_has_a_column_where_it_was_measured(script):
    results = script("small_scale.results")

    def content(**metrics: float) -> dict:
        found = {"d": {**scores(ratio_4=metrics)["d"], **scores("reconstruction", ratio_4={"perplexity": 2.0})["d"]}}
        return {"bounds": {}, "runs": [run("m", 0, found)]}

    for render in (results.table, lambda found: results.ratio_table(results.summarize(found), "d", 4)):
        assert "saved by context" not in render(content(perplexity=2.0))
        assert "saved by context" in render(content(perplexity=2.0, saved_by_context=0.25))
        assert "0.250" in render(content(perplexity=2.0, saved_by_context=0.25))


def test_the_pages_have_the_tables_of_the_result_files(script):
    results = script("small_scale.results")
    folder = results.RESULTS.parent
    for page in ("README", "2000_steps", "gmsa", "gmsa_128", "restore_first"):
        file = folder / ("methods.json" if page == "README" else f"{page}.json")
        summary = results.summarize(json.loads(file.read_text(encoding="utf-8")))
        text = (folder / f"{page}.md").read_text(encoding="utf-8")
        shown = re.findall(r"^### ([^\n]+), ratio (\d+)\n\n(\|.*?)\n\n", text + "\n", re.MULTILINE | re.DOTALL)
        assert len(shown) >= 2
        for dataset, ratio, table in shown:
            assert table == results.ratio_table(summary, dataset, int(ratio)), (page, dataset, ratio)
