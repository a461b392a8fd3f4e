# SPDX-License-Identifier: Apache-2.0
"""The ids of the documents that trained a checkpoint and chose it, which it carries beside its weights."""

import json
import shutil

import pytest
from small_recipes import write_recipe

from context_compressors import cli
from context_compressors.data.document_ids import TrainingDocuments, document_id
from context_compressors.training.train import main

TEXTS = [
    f"Report {n}. " + " ".join(f"The mill of town {n} ground {n + k} sacks in year {k}." for k in range(6))
    for n in range(12)
]


def write_texts(path, first, last):
    # Two questions share each context, and one of them writes it with other spaces.
    rows = []
    for number in range(first, last):
        for context in (TEXTS[number], TEXTS[number].replace(" ", "  ")):
            rows.append({"context": context, "question": f"Which report, {number}?", "answers": [str(number)]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path.name


@pytest.mark.slow
def test_a_checkpoint_knows_what_trained_it_and_what_chose_in_all_of_its_stages(tmp_path, base_folder, capsys):
    tasks = ["question_answering", "continuation"]
    fields = {
        "sources": [{"path": write_texts(tmp_path / "train.jsonl", 0, 6), "tasks": tasks, "rows": [0, 8]}],
        "eval_sources": [{"path": write_texts(tmp_path / "choose.jsonl", 6, 9), "tasks": tasks}],
        "data_dir": str(tmp_path),
        "num_eval_examples": 40,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "method_config": {"compression_ratios": [2]},
        "max_steps": 16,
        "save_strategy": "steps",
        "save_steps": 2,
        "save_total_limit": 8,
    }
    main([write_recipe(tmp_path, base=str(base_folder), **fields)])
    expected = {"trained": set(map(document_id, TEXTS[:4])), "chose": set(map(document_id, TEXTS[6:9]))}
    found = TrainingDocuments.of(tmp_path / "out")
    assert found == TrainingDocuments(**expected)
    # A run that goes on from its first steps has read the same as one that was never stopped.
    early = TrainingDocuments.of(tmp_path / "out" / "checkpoint-2")
    assert early.trained < found.trained
    for step in range(4, 18, 2):
        shutil.rmtree(tmp_path / "out" / f"checkpoint-{step}")
    main([str(tmp_path / "recipe.yaml"), "--resume_from_checkpoint", "latest"])
    assert TrainingDocuments.of(tmp_path / "out") == found

    # What is reported is neither.
    write_texts(tmp_path / "report.jsonl", 9, 12)

    def evaluate(name):
        data = ["--data", str(tmp_path / f"{name}.jsonl"), "--tasks", "reconstruction", "--device", "cpu"]
        return cli.main(["evaluate", str(tmp_path / "out"), *data, "--config", "{context_tokens: 8}"])

    assert [evaluate(name) for name in ("train", "choose", "report")] == [1, 1, 0]
    shown = capsys.readouterr()
    assert "4 of 6 documents of 'train' trained out (samples 0, 2, 4, ...)" in shown.err
    assert "3 of 3 documents of 'choose' chose out" in shown.err
    assert "Held out: no document here is among the 4 that trained out and the 3 that chose it." in shown.out

    # A second stage has read what the first one had; one that starts from a checkpoint without a record says so.
    first = tmp_path / "first"
    (tmp_path / "out").rename(first)
    second = {
        "sources": [{"path": write_texts(tmp_path / "more.jsonl", 9, 12), "tasks": tasks}],
        "data_dir": str(tmp_path),
        "checkpoint": str(first),
        "max_steps": 12,
    }
    for is_whole in (True, False):
        main([write_recipe(tmp_path, **second), "--overwrite", "true"])
        trained = set(map(document_id, TEXTS[9:] + TEXTS[:4] * is_whole))
        chose = expected["chose"] if is_whole else set()
        assert TrainingDocuments.of(tmp_path / "out") == TrainingDocuments(trained, chose, is_whole)
        (first / "training_documents.json").unlink(missing_ok=True)
