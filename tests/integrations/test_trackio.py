# SPDX-License-Identifier: Apache-2.0
"""trackio, on this machine alone, gets the loss curve and the sample answers: `make test-integrations`."""

import json

import pytest
import yaml
from small_recipes import RUN

pytest.importorskip("trackio", reason="trackio has an environment of its own: make test-integrations")

from trackio.sqlite_storage import SQLiteStorage

from context_compressors.training.train import main


def test_trackio_has_the_loss_of_every_step_and_the_answers(small_checkpoints, tmp_path, monkeypatch, no_network):
    monkeypatch.chdir(tmp_path)
    asked = {"question": "Whose?", "answers": ["Nora's"]}
    rows = [{"context": f"Berth {number} is Nora's, for {number + 20} crowns.", **asked} for number in range(24)]
    (tmp_path / "berths.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    berths = {"path": "berths.jsonl", "tasks": ["question_answering"]}
    recipe = {
        "objective": "compression",
        "checkpoint": str(small_checkpoints / "mean_pooling"),
        "sources": [{**berths, "rows": [0, 20]}],
        "eval_sources": [{**berths, "rows": [20, 22]}],
        "sample_answers_steps": 2,
        "max_context_tokens": 60,
        "max_target_tokens": 16,
        **RUN,
        "max_steps": 4,
        "report_to": "trackio",
        "project": "berths",
        "run_name": "first",
        "output_dir": "out",
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["recipe.yaml"]) == 0
    assert SQLiteStorage.get_runs("berths") == ["first"]
    logged = SQLiteStorage.get_logs("berths", "first")
    losses = [entry["train/loss"] for entry in logged if "train/loss" in entry]
    summary = json.loads((tmp_path / "out" / "training_summary.json").read_text())
    assert losses == [pytest.approx(entry["loss"]) for entry in summary["log"] if "loss" in entry]
    assert len(losses) == 4
    tables = [entry["sample_answers"]["_value"] for entry in logged if "sample_answers" in entry]
    assert [[row["step"] for row in table] for table in tables] == [[step] * 2 for step in (0, 2, 4)]
    assert all((row["question"], row["expected"]) == ("Whose?", "Nora's") for table in tables for row in table)
