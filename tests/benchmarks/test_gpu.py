# SPDX-License-Identifier: Apache-2.0
"""The run for a GPU at tiny size on the CPU: all parts that it can do, what a second start does, and the archives."""

import json
import tarfile
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from context_compressors.training.arguments import read_recipe

BASE = str(Path(__file__).parents[1] / "checkpoints" / "base")
SOURCES = "[{generated: true, tasks: [question_answering, reconstruction], weight: 1}]"
TINY = """
objective: compression
sources: {sources}
max_context_tokens: 60
max_target_tokens: 40
per_device_train_batch_size: 2
save_strategy: "no"
report_to: none
"""


@pytest.mark.release
@pytest.mark.slow
def test_training_steps_of_all_attentions_agree(script, tmp_path):
    correctness, file = script("gpu.correctness"), tmp_path / "correctness.json"
    arguments = ["--base", BASE, "--steps", "2", "--batch-size", "2", "--device", "cpu", "--output", str(file)]
    assert correctness.main([*arguments, "--methods", "mean_pooling", "five_hundred_x"]) == 0
    results = json.loads(file.read_text())["methods"]
    assert [found["method"] for found in results] == ["mean_pooling", "five_hundred_x"]
    assert all(found["passed"] and found["largest_difference"] < 0.05 for found in results)


@pytest.mark.release
@pytest.mark.slow
def test_checkpoints_are_trained_and_asked_and_a_failure_costs_its_own_part(script, tmp_path, capsys):
    run = script("gpu.run")
    recipe, questions, output = tmp_path / "tiny.yaml", tmp_path / "squad.parquet", tmp_path / "out"
    recipe.write_text(TINY.format(sources=SOURCES))
    rows = [
        {"id": str(i), "context": f"The {i}th lamp is red.", "question": "Which?", "answers": ["red"]} for i in (4, 5)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), questions)
    arguments = ["--data", str(tmp_path), "--output", str(output), "--base", BASE, "--device", "cpu", "--steps", "2"]
    arguments += ["--recipes", str(recipe), "--methods", "mean_pooling", "none", "--questions", f"squad={questions}"]
    arguments += ["--set", "use_cpu=true", "dtype=float32", "--parts", "training", "answers"]
    assert run.main(arguments) == 1
    status = json.loads((output / "status.json").read_text())
    assert status["done"] == ["training/mean_pooling", "answers/mean_pooling"]
    assert "training/none: failed with" in capsys.readouterr().out
    assert json.loads((output / "answers" / "mean_pooling.json").read_text())
    # What is done is not done again.
    (output / "runs" / "mean_pooling" / "model.safetensors").unlink()
    assert run.main(arguments) == 1
    assert not (output / "runs" / "mean_pooling" / "model.safetensors").exists()


def test_decoders_that_start_as_the_reader_have_its_size(script, tmp_path):
    run = script("gpu.run")
    arguments = ["--data", "data", "--output", str(tmp_path), "--reader", "reader"]
    trainings = [job for job in run.plan(run.build_parser().parse_args(arguments)) if job.part == "training"]
    assert len(trainings) == 6
    for job in trainings:
        configs = [read_recipe(word).get("method_config", {}) for word in job.words if word.endswith(".yaml")]
        assert [found["decoder_lora"] for found in configs if "decoder_lora" in found][-1] == {"rank": 8, "alpha": 16}


def test_archives_hold_the_tracked_files_and_data_in_pieces(script, tmp_path, monkeypatch):
    run = script("gpu.run")
    monkeypatch.setattr(run, "_MOST_BYTES", 2 * run.MIB)
    data, packed = tmp_path / "data", tmp_path / "packed"
    data.mkdir()
    content = bytes(range(256)) * 20_000
    (data / "large.parquet").write_bytes(content)
    (data / "small.parquet").write_bytes(b"small")
    (tmp_path / "r.yaml").write_text("sources: [{path: large.parquet}, {generated: true}, {path: small.parquet}]")
    assert run.main(["--pack", str(packed), "--data", str(data), "--recipes", str(tmp_path / "r.yaml")]) == 0
    found = {}
    for path in sorted(packed.iterdir()):
        assert path.stat().st_size <= 3 * run.MIB
        with tarfile.open(path) as archive:
            found |= {e.name: e.linkname if e.issym() else archive.extractfile(e).read() for e in archive}
    pieces = [found[name] for name in sorted(found) if name.startswith("data/large.parquet.")]
    assert len(pieces) == 3
    assert b"".join(pieces) == content
    assert found["data/small.parquet"] == b"small"
    assert "code/pyproject.toml" in found
    assert found["code/context_compressors/modeling"] == "../modeling"
