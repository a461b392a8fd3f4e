# SPDX-License-Identifier: Apache-2.0
"""Span corruption and fine-tuning of encoder-decoders at toy size, and the page on them."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from context_compressors.data.sources import DataSource
from context_compressors.training.tokenizer import train_tokenizer

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
GENERATED = DataSource(generated=True, tasks=("reconstruction",))


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> str:
    train_tokenizer([GENERATED], vocab_size=300, num_texts=10).save_pretrained(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


@pytest.mark.slow
def test_span_corruption_trains_every_model_once(script, tokenizer_folder, tmp_path, capsys):
    span_corruption = script("decal.span_corruption")
    output = tmp_path / "results.json"
    toy = ["--tokenizer", tokenizer_folder, "--steps", "2", "--batch-size", "2", "--inputs-length", "24"]
    toy += ["--hidden-size", "32", "--layers", "1", "--test-texts", "3", "--output", str(output)]
    assert span_corruption.main([*toy, "--seeds", "0"]) == 0
    assert span_corruption.main([*toy, "--seeds", "0", "1", "--models", "t5", "decal_2x"]) == 0
    results = json.loads(output.read_text())
    runs = [(run["model"], run["seed"]) for run in results["runs"]]
    assert runs == [*((name, 0) for name in span_corruption.MODELS), ("t5", 1), ("decal_2x", 1)]
    for run in results["runs"]:
        assert 0 <= run["accuracy"] <= 100
        assert run["loss"] > 0
        assert abs(run["context_gain"]) < 1
    summary = {row["model"]: row for row in span_corruption.summarize(results["runs"])}
    mine = [run["accuracy"] for run in results["runs"] if run["model"] == "t5"]
    assert summary["t5"]["seeds"] == [0, 1]
    assert summary["t5"]["accuracy"]["mean"] == pytest.approx(sum(mine) / 2)
    assert summary["decal_8x"]["accuracy"]["std"] is None
    printed = capsys.readouterr().out
    assert re.search(r"\| decal_2x_no_pooling +\| 1 ", printed)
    assert re.search(r"\| loss +\| context gain +\|", printed)
    for other in (["--steps", "3"], ["--muon-learning-rate", "0.02"]):
        assert span_corruption.main([*toy, *other]) == 1
        assert "another budget" in capsys.readouterr().err
    assert span_corruption.main([*toy, "--save", str(tmp_path / "kept"), "--seeds", "0"]) == 1
    assert "was not kept" in capsys.readouterr().err
    assert span_corruption.main([*toy, "--models", "decal"]) == 1
    assert "did you mean" in capsys.readouterr().err


def test_the_context_gain_is_what_another_text_s_context_costs(script):
    targets = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])

    class Model:
        device = "cpu"

        def __init__(self, reads):
            self.reads = reads

        def eval(self):
            pass

        def __call__(self, input_ids, attention_mask, labels):
            likely = input_ids if self.reads else torch.zeros_like(input_ids)
            return SimpleNamespace(logits=4.0 * torch.nn.functional.one_hot(likely, 10))

    def collator(rows):
        rows = torch.tensor(rows)
        start = torch.full_like(rows[:, :1], -100)
        mask = torch.ones_like(rows)
        return {"labels": torch.cat((start, rows), 1), "context_input_ids": rows, "context_attention_mask": mask}

    test = script("decal.span_corruption").test
    for reads, accuracy, gain in ((True, 100, 4.0), (False, 0, 0.0)):
        # The third text is alone in its batch.
        scores = test(Model(reads), targets.tolist(), collator, batch_size=2)
        assert scores["accuracy"] == accuracy
        assert scores["context_gain"] == pytest.approx(gain)
    assert test(Model(True), targets.tolist(), collator, batch_size=1)["context_gain"] is None


def test_results_without_a_context_gain_are_read_and_printed(script):
    span_corruption = script("decal.span_corruption")
    path = span_corruption.RESULTS
    budget = json.loads(path.read_text())["budget"]
    results = span_corruption.read_runs(path, "span_corruption", budget)
    for run in results["runs"]:
        run.pop("context_gain", None)
    printed = span_corruption.table(results)
    assert re.search(r"\| t5 +\| \d +\| [\d.]+( ± [\d.]+)? +\| [\d.]+( ± [\d.]+)? +\| +\|", printed)


@pytest.mark.slow
def test_fine_tuning_goes_on_from_what_span_corruption_has_kept(script, tokenizer_folder, tmp_path, capsys):
    pretrained, output = tmp_path / "pretrained", tmp_path / "results.json"
    toy = ["--tokenizer", tokenizer_folder, "--steps", "2", "--batch-size", "2", "--inputs-length", "24"]
    toy += ["--hidden-size", "32", "--layers", "1", "--test-texts", "3", "--seeds", "0"]
    toy += ["--output", str(tmp_path / "spans.json")]
    script("decal.span_corruption").main([*toy, "--models", "t5", "decal_4x", "--save", str(pretrained)])
    decal_fine_tuning = script("decal.fine_tuning")
    names = ["t5", "decal_4x", *decal_fine_tuning.FROM_BASELINE]
    toy = [str(pretrained), "--steps", "2", "--text-steps", "1", "--batch-size", "2", "--context-tokens", "120"]
    toy += ["--test-questions", "3", "--seeds", "0", "--output", str(output)]
    assert decal_fine_tuning.main([*toy, "--models", *names]) == 0
    results = json.loads(output.read_text())
    runs = {run["model"]: run for run in results["runs"]}
    assert list(runs) == names
    assert [name for name in names if "text" in runs[name]["training"]] == ["ccproxy_2x", "autoencoding_2x"]
    weights = {name: run["pretrained"] for name, run in runs.items()}
    assert weights["t5"] == weights["ccproxy_2x"] != weights["decal_4x"]
    conditions = [row["condition"] for row in runs["decal_4x"]["rows"]]
    assert conditions == ["no_context", "ratio=4"]
    summary = decal_fine_tuning.summarize(results["runs"])
    found = {(row["model"], row["context"]) for row in summary}
    assert found == {(name, context) for name in names for context in ("none", "given")}
    assert all(row["answer_perplexity"]["mean"] > 1 for row in summary)
    assert decal_fine_tuning.main([*toy, "--models", "decal_2x"]) == 1
    assert "span_corruption.py --save" in capsys.readouterr().err


def test_the_page_has_the_tables_of_the_result_files(script):
    page = (BENCHMARKS / "decal" / "README.md").read_text(encoding="utf-8")
    for name in ("span_corruption", "fine_tuning"):
        results = json.loads((BENCHMARKS / "decal" / f"{name}.json").read_text(encoding="utf-8"))
        assert script(f"decal.{name}").table(results) in page
