# SPDX-License-Identifier: Apache-2.0
"""The command of the evaluation: what it writes, draws and refuses."""

import json

import pytest
import torch
from naive_twin import CONTINUATION, QA, ROWS, naive_scores
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM

from context_compressors import cli
from context_compressors.evaluation.report import EvaluationReport


def main(argv):
    return cli.main(["evaluate", *argv])


@pytest.mark.slow
def test_command_writes_report_table_and_plots(folders, qa_file, tmp_path, capsys):
    output, plots = tmp_path / "out" / "results.json", tmp_path / "plots"
    generated = "{generated: true, document_tokens: 150}"
    argv = [str(folders / "tiny-compressor"), "--data", generated, "--out-of-domain", "qa_rows.parquet"]
    argv += ["--data-dir", str(tmp_path), "--tasks", QA, CONTINUATION, "--ratios", "2", "4", "--max-samples", "2"]
    argv += ["--max-new-tokens", "3", "--batch-size", "2", "--device", "cpu"]
    argv += ["--config", "{context_tokens: 8, continuation_tokens: 4, memory_dtype: int8, seed: 5}"]
    argv += ["--teacher", str(folders / "teacher"), "--output", str(output), "--plots", str(plots)]
    assert main(argv) == 0
    content = json.loads(output.read_text())
    assert content["model"] == "tiny-compressor"
    assert content["bounds"] == "teacher"
    assert (content["settings"]["seed"], content["settings"]["memory_dtype"]) == (5, "int8")
    assert content["settings"]["sources"]["generated"]["document_tokens"] == 150
    rows = {(row["dataset"], row["domain"], row["task"], row["condition"]) for row in content["rows"]}
    assert len(rows) == 2 * 2 * 4
    assert ("qa_rows", "out", QA, "ratio=4") in rows
    assert str(tmp_path) not in output.read_text()
    assert {path.name for path in plots.iterdir()} == {f"{task}_by_ratio.png" for task in (QA, CONTINUATION)}
    printed = capsys.readouterr().out
    assert "| qa_rows" in printed
    assert f"wrote {output}" in printed


def test_command_reports_wrong_values_without_a_traceback(folders, tmp_path, capsys):
    model = str(folders / "tiny-compressor")
    assert main([model]) == 1
    assert "give at least one data set with --data or --out-of-domain" in capsys.readouterr().err
    assert main([model, "--data", "none.parquet", "--data-dir", str(tmp_path)]) == 1
    assert "error: source 'none.parquet'" in capsys.readouterr().err
    assert main([model, "--data", "generated", "--tasks", "qa"]) == 1
    assert "unknown task 'qa'" in capsys.readouterr().err
    assert main([model, "--data", "generated", "--ratios", "3"]) == 1
    assert "not trained for the ratios [3]" in capsys.readouterr().err
    assert main([model, "--data", "generated", "--config", "{bounds_only: true}", "--plots", str(tmp_path)]) == 1
    assert "--plots draws quality by ratio, and nothing is compressed here" in capsys.readouterr().err


@pytest.mark.slow
def test_merged_adapters_answer_as_those_beside_the_weights(folders, qa_file, tmp_path, capsys):
    argv = [str(folders / "tiny-compressor"), "--data-dir", str(tmp_path), "--data", "qa_rows.parquet", "--tasks", QA]
    argv += ["--max-new-tokens", "3", "--device", "cpu", "--alternatives", "cut"]
    answers, sizes = [], set()
    for given in ([], ["--merge-adapters"]):
        files = ["--keep-answers", str(tmp_path / "answers.jsonl"), "--output", str(tmp_path / "report.json")]
        assert main([*argv, *given, *files, "--overwrite"]) == 0
        sizes.add(json.loads((tmp_path / "report.json").read_text())["num_parameters"])
        answers.append([json.loads(line)["answers"] for line in (tmp_path / "answers.jsonl").read_text().splitlines()])
    assert answers[0] == answers[1]
    assert len(answers[0]) == len(ROWS)
    # A card of the checkpoint takes either report.
    assert len(sizes) == 1
    assert main([*argv, "--merge-adapters", "--config", "{zero_shot: true}"]) == 1
    assert "zero_shot and self_information read the base with the adapters off" in capsys.readouterr().err
    argv[0] = str(folders / "teacher")
    assert main([*argv, "--merge-adapters"]) == 1
    assert "--merge-adapters is for a compressor, not for a LlamaForCausalLM" in capsys.readouterr().err


@pytest.mark.slow
def test_command_keeps_answers_and_goes_on_with_its_report(folders, qa_file, tmp_path, capsys):
    output, answers = tmp_path / "results.json", tmp_path / "kept" / "answers.jsonl"
    argv = [str(folders / "tiny-compressor"), "--data-dir", str(tmp_path), "--tasks", QA, "--ratios", "4"]
    argv += ["--alternatives", "cut", "bm25", "--max-new-tokens", "3", "--device", "cpu", "--resume"]
    argv += ["--output", str(output), "--keep-answers", str(answers)]
    assert main([*argv, "--data", "a=qa_rows.parquet#2"]) == 0
    first = answers.read_text()
    lines = [json.loads(line) for line in first.splitlines()]
    assert [line["dataset"] for line in lines] == ["a", "a"]
    assert [ROWS[int(line["id"])]["question"] for line in lines] == [line["question"] for line in lines]
    conditions = ["no_context", "full_context", "ratio=4", "cut=4", "bm25=4"]
    for line in lines:
        assert list(line["answers"]) == list(line["scores"]) == conditions
        assert line["references"]
        assert line["question"].endswith("?")
        assert set(line["scores"]["cut=4"]) >= {"f1", "exact_match", "substring_accuracy"}
    rows = json.loads(output.read_text())["rows"]
    assert [row["condition"] for row in rows] == conditions
    assert {row["num_samples"] for row in rows} == {2}

    # Another data set is added; what is there is not scored again.
    before = output.read_text()
    more = [*argv, "--data", "a=qa_rows.parquet#2", "b=qa_rows.parquet"]
    assert main(more) == 0
    assert answers.read_text().startswith(first)
    assert [json.loads(line)["dataset"] for line in answers.read_text().splitlines()] == ["a", "a", "b", "b", "b"]
    content = json.loads(output.read_text())
    assert content["rows"][:5] == json.loads(before)["rows"]
    assert len(content["rows"]) == 10
    assert "is done" not in capsys.readouterr().out
    before = output.read_text()
    assert main(more) == 0
    assert f"{output} is done: nothing was left to score" in capsys.readouterr().out
    assert output.read_text() == before

    assert main([*argv, "--data", "a=qa_rows.parquet#2", "--config", "{seed: 9}"]) == 1
    assert "error: the report to resume from is of another evaluation; it differs in seed" in capsys.readouterr().err
    answers.write_text("")
    assert main(more) == 1
    assert "does not have the answers of [('a', 'question_answering'), ('b'" in capsys.readouterr().err
    # What was scored here chose the checkpoint, say: it is not scored again.
    fresh = [*argv[:-5], "--data", "a=qa_rows.parquet#2"]
    assert main([*fresh, "--chosen-by", str(output)]) == 1
    assert "2 of 2 documents of 'a' chose tiny-compressor, by results.json (samples" in capsys.readouterr().err
    assert main([argv[0], "--data", "generated", "--resume"]) == 1
    assert "--resume goes on with what is in --output: name it" in capsys.readouterr().err


@pytest.mark.slow
def test_command_reads_the_full_text_with_an_adapter_of_peft(folders, qa_file, tmp_path, tokenizer, capsys):
    base = LlamaForCausalLM.from_pretrained(folders / "base")
    torch.manual_seed(0)
    adapted = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "reader")
    output = tmp_path / "named.json"
    argv = [str(folders / "tiny-compressor"), "--data", str(qa_file), "--tasks", QA, "--max-new-tokens", "4"]
    (tmp_path / "rare.yaml").write_text("answer_perplexity: true\nratios: [4]\n")
    argv += ["--device", "cpu", "--teacher", str(tmp_path / "reader"), "--config", str(tmp_path / "rare.yaml")]
    assert main([*argv, "--output", str(output)]) == 0
    triples = [(row["context"], f"\nQuestion: {row['question']}\nAnswer:", f" {row['answers'][0]}") for row in ROWS]
    expected = naive_scores(adapted.eval(), tokenizer, "full_context", triples, ends=True)["perplexity"]
    report = EvaluationReport.load(output)
    assert report.settings["ratios"] == [4]
    assert (report.bounds, report.settings["teacher"]) == ("teacher", "reader")
    # A file has four digits.
    assert report.score("qa_rows", QA, "full_context", "answer_perplexity") == pytest.approx(expected, rel=5e-4)
    (tmp_path / "rare.yaml").write_text("answer_perplexities: true")
    assert main(argv) == 1
    assert "did you mean 'answer_perplexity'" in capsys.readouterr().err
