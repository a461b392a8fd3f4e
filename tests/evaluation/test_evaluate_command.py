# SPDX-License-Identifier: Apache-2.0
"""The command of the evaluation: what it writes, draws and refuses."""

import json

import pytest
from naive_twin import CONTINUATION, QA

from context_compressors.evaluation.evaluate import model_label
from context_compressors.evaluation.evaluate_command import main


def test_names_of_models_are_ids_or_the_last_part_of_a_folder(tmp_path):
    (tmp_path / "my-model").mkdir()
    assert model_label(str(tmp_path / "my-model")) == "my-model"
    assert model_label(f"{tmp_path}/my-model/") == "my-model"
    assert model_label("organisation/some-model") == "organisation/some-model"


def test_command_writes_report_table_and_plots(folders, qa_file, tmp_path, capsys):
    output, plots = tmp_path / "out" / "results.json", tmp_path / "plots"
    argv = [str(folders / "tiny-compressor"), "--data", "generated", "--out-of-domain", "qa_rows.parquet"]
    argv += ["--data-dir", str(tmp_path), "--tasks", QA, CONTINUATION, "--ratios", "2", "4", "--max-samples", "2"]
    argv += ["--documents", "2", "--document-tokens", "150", "--max-new-tokens", "3", "--batch-size", "2"]
    argv += ["--context-tokens", "8", "--continuation-tokens", "4", "--device", "cpu"]
    argv += ["--teacher", str(folders / "teacher"), "--output", str(output), "--plots", str(plots), "--seed", "5"]
    assert main(argv) == 0
    content = json.loads(output.read_text())
    assert content["model"] == "tiny-compressor"
    assert content["bounds"] == "teacher"
    assert content["settings"]["seed"] == 5
    assert content["settings"]["document_tokens"] == 150
    rows = {(row["dataset"], row["domain"], row["task"], row["condition"]) for row in content["rows"]}
    assert len(rows) == 2 * 2 * 4
    assert ("qa_rows", "out", QA, "ratio=4") in rows
    assert str(tmp_path) not in output.read_text()
    names = {f"{task}_{kind}.png" for task in (QA, CONTINUATION) for kind in ("by_ratio", "domain_gap")}
    assert {path.name for path in plots.iterdir()} == names
    printed = capsys.readouterr().out
    assert "| qa_rows" in printed
    assert f"wrote {output}" in printed

    # A second run draws the first one's report beside its own.
    more = [*argv[: argv.index("--output")], "--compare-with", str(output), "--plots", str(tmp_path / "more")]
    assert main(more) == 0
    assert (tmp_path / "more" / f"{QA}_by_model_size.png").exists()


def test_command_refuses_wrong_options_with_the_nearest_right_one(capsys):
    for argv, message in (
        (["m", "--data", "generated", "--ratio", "4"], "unknown option --ratio; did you mean '--ratios'?"),
        (["m"], "give at least one data set with --data or --out-of-domain"),
    ):
        with pytest.raises(SystemExit) as exit_info:
            main(argv)
        assert exit_info.value.code == 2
        assert message in capsys.readouterr().err


def test_command_reports_wrong_values_without_a_traceback(folders, tmp_path, capsys):
    model = str(folders / "tiny-compressor")
    assert main([model, "--data", "none.parquet", "--data-dir", str(tmp_path)]) == 1
    assert "error: source 'none.parquet'" in capsys.readouterr().err
    assert main([model, "--data", "generated", "--tasks", "qa"]) == 1
    assert "unknown task 'qa'" in capsys.readouterr().err
    assert main([model, "--data", "generated", "--ratios", "3"]) == 1
    assert "not trained for the ratios [3]" in capsys.readouterr().err
    assert main([model, "--data", "generated", "--bounds-only", "--plots", str(tmp_path)]) == 1
    assert "--plots draws quality by ratio, of which --bounds-only leaves none" in capsys.readouterr().err


def test_command_scores_a_plain_language_model(folders, tmp_path, capsys):
    output = tmp_path / "results.json"
    argv = [str(folders / "teacher"), "--data", "generated", "--documents", "2", "--document-tokens", "150"]
    argv += ["--tasks", CONTINUATION, "--context-tokens", "8", "--continuation-tokens", "4", "--device", "cpu"]
    assert main([*argv, "--output", str(output)]) == 0
    assert {row["condition"] for row in json.loads(output.read_text())["rows"]} == {"no_context", "full_context"}
    assert main([*argv, "--ratios", "4"]) == 1
    assert "plain language model, scored without context and with full context only" in capsys.readouterr().err
    assert main([*argv, "--plots", str(tmp_path)]) == 1
    assert "--plots draws quality by ratio, and teacher is a plain language model" in capsys.readouterr().err


def test_command_help_has_examples(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["--help"])
    assert exit_info.value.code == 0
    assert "examples:\n" in capsys.readouterr().out
