# SPDX-License-Identifier: Apache-2.0
"""Cards that are filled from a real, tiny run: training, evaluation, card."""

import json
import math
import re
import shutil
from dataclasses import replace

import pytest
import small_recipes
import yaml
from byte_tokenizers import tiny_llama
from tiny_tokenizer import train_tokenizer
from transformers import LlamaForCausalLM

from context_compressors import cli
from context_compressors.evaluation.report import EvaluationReport
from context_compressors.hub_cards.cards import write_card
from context_compressors.training.train import main as train

QA, RECONSTRUCTION, CONTINUATION = "question_answering", "reconstruction", "continuation"
LIMITS = ["It has seen two steps.", "It has read generated English only."]
SIZES = {"max_context_tokens": 60, "max_target_tokens": 64}
RUN = {**small_recipes.RUN, **SIZES, "seed": 7, "include_num_input_tokens_seen": True}
COMPRESSOR = {"objective": "compression", "method_config": {"compression_ratios": [2, 4]}}


def write_recipe(path, **fields):
    path.write_text(yaml.safe_dump({**RUN, **fields}), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with a language model, a compressor on it, and a report of each."""
    root = tmp_path_factory.mktemp("run")
    (root / "tales.jsonl").write_text(
        "".join(json.dumps({"text": f"The mill number {n} stands by the river. " * 9}) + "\n" for n in range(20))
    )
    files = {"path": "tales.jsonl", "tasks": [CONTINUATION, RECONSTRUCTION], "weight": 1}
    tales = {**files, "license": "CC0 1.0", "title": "Tales", "hub_id": "org/tales"}
    generated = {"generated": True, "tasks": [QA, QA, RECONSTRUCTION], "weight": 2}
    places = ["--data_dir", str(root), "--output_dir"]
    tokenizer = train_tokenizer(vocab_size=300, num_texts=20)
    tokenizer.save_pretrained(root / "new")
    LlamaForCausalLM(tiny_llama(tokenizer, hidden_size=32)).save_pretrained(root / "new")
    # Batches that all of the tales are in.
    teacher = {"objective": "teacher", "base": str(root / "new"), "per_device_train_batch_size": 60}
    recipe = write_recipe(root / "base.yaml", **teacher, sources=[tales, generated])
    assert train([recipe, *places, str(root / "base")]) == 0
    recipe = write_recipe(root / "compressor.yaml", **COMPRESSOR, base=str(root / "base"), sources=[files, generated])
    assert train([recipe, *places, str(root / "compressor")]) == 0
    common = ["--data", "{generated: true, document_tokens: 120}", "--out-of-domain", "tales.jsonl"]
    common += ["--data-dir", str(root), "--max-samples", "2"]
    # The tales have trained both.
    settings = "{context_tokens: 16, continuation_tokens: 4, allow_trained_documents: true}"
    common += ["--tasks", QA, RECONSTRUCTION, CONTINUATION, "--config", settings]
    common += ["--max-new-tokens", "3", "--device", "cpu"]
    for name in ("base", "compressor"):
        assert cli.main(["evaluate", str(root / name), *common, "--output", str(root / f"{name}.json")]) == 0
    return root


@pytest.fixture
def report(root):
    return EvaluationReport.load(root / "compressor.json")


def card(*arguments, **options):
    """The text of a card, tables without the spaces that align them."""
    return re.sub("(?<=[^ \n]) +", " ", write_card(*arguments, **options).read_text())


def table_rows(text):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:2] == "| "]


@pytest.mark.slow
def test_a_compressors_card_holds_every_score_beside_its_bounds(root, report):
    path = write_card(root / "compressor", [root / "compressor.json"], LIMITS)
    assert path == root / "compressor" / "README.md"
    assert f"({QA}_by_ratio_2.png)" in card(root / "compressor", [report, report], LIMITS)
    rows = {tuple(row[:4]): row[4:] for row in table_rows(path.read_text())}
    metrics = [(QA, "generated", "exact match", "exact_match"), (QA, "generated", "F1", "f1")]
    metrics += [(QA, "generated", "contained", "substring_accuracy")]
    metrics += [(RECONSTRUCTION, "tales", "token accuracy", "token_accuracy")]
    metrics += [(CONTINUATION, "generated", "perplexity", "perplexity")]
    for task, dataset, shown, metric in metrics:
        for ratio in (2, 4):
            conditions = ("no_context", f"ratio={ratio}", "full_context")
            expected = [report.score(dataset, task, name, metric) for name in conditions]
            task_name = task.replace("_", " ").capitalize()
            *found, retention, slots, kilobytes, cache = rows[task_name, dataset, shown, str(ratio)]
            assert [cell.partition(" [")[0] for cell in found] == [f"{value:.2f}" for value in expected]
            place = (dataset, task, conditions[1])
            [row] = [row for row in report.rows if (row.dataset, row.task, row.condition) == place]
            is_main = metric == report.main_metric(task) and row.retention is not None
            assert retention == (f"{row.retention:.0f}" if is_main else "–")
            # The run was in float32, whose positions take twice the bytes of bfloat16.
            position = row.costs["cache_bytes"] / row.costs["decoder_positions"] / 2
            assert cache == f"{row.costs['slots'] * position / 1000:,.0f}"
            assert (slots, kilobytes) == (f"{row.costs['slots']:.0f}", f"{row.costs['memory_bytes'] / 1000:.0f}")
            low, high = row.intervals[metric]
            assert found[1].endswith(f" [{low:.2f}, {high:.2f}]") or math.isnan(low)
    # Questions on one data set, both others on two; questions have three metrics, and there are two ratios.
    assert sum(key[3:] in (("2",), ("4",)) for key in rows) == 2 * (3 + 2 + 2)


@pytest.mark.slow
def test_a_compressors_card_holds_its_training(root):
    text = card(root / "compressor", [root / "compressor.json"], LIMITS)
    summary = json.loads((root / "compressor" / "training_summary.json").read_text())
    for part in (
        "Steps: 2",
        "Seeds: 7",
        f"Tokens: {summary['input_tokens']:,} of text, {summary['context_tokens']:,} of compressed contexts",
        f"Hardware: {summary['device']}, {summary['hours']:g} hours",
        "| generated documents | Apache-2.0 | question answering, reconstruction |",
        "| tales | not stated | continuation, reconstruction |",
        "Out of domain (no part of the data set was trained on): tales.",
        "| Base model | base |",
        *(f"- {limit}" for limit in LIMITS),
    ):
        assert part in text, part


@pytest.mark.slow
def test_a_card_names_the_data_of_earlier_stages(root, tmp_path):
    sources = [{"generated": True, "tasks": [RECONSTRUCTION], "weight": 1, "title": "last"}]
    recipe = write_recipe(tmp_path / "last.yaml", checkpoint=str(root / "compressor"), sources=sources)
    assert train([recipe, "--output_dir", str(tmp_path / "second")]) == 0
    sources = [{"generated": True, "tasks": [QA], "weight": 1, "title": "third"}]
    recipe = write_recipe(tmp_path / "third.yaml", checkpoint=str(tmp_path / "second"), sources=sources)
    assert train([recipe, "--output_dir", str(tmp_path / "third")]) == 0
    text = card(tmp_path / "third", [], LIMITS)
    expected = [
        ["third", "Apache-2.0", "question answering"],
        # The base's, which both others stand on.
        ["[Tales](https://huggingface.co/datasets/org/tales)", "CC0 1.0", "earlier: continuation, reconstruction"],
        ["generated documents", "Apache-2.0", "earlier: question answering, reconstruction"],
        ["tales", "not stated", "earlier: continuation, reconstruction"],
        ["last", "Apache-2.0", "earlier: reconstruction"],
    ]
    assert [row for row in table_rows(text) if row in expected] == expected
    assert str(root) not in (tmp_path / "third" / "training_summary.json").read_text()


@pytest.mark.slow
def test_a_card_says_what_its_scores_must_not_be_read_without(root, report):
    rows = [replace(row, num_truncated=1) for row in report.rows if row.condition.startswith("ratio")]
    settings = {**report.settings, "memory_dtype": "int2", "max_context_tokens": 40}
    left_out = {"tales, reconstruction": 3, "more, reconstruction": 5}
    own = replace(report, rows=rows, settings={**settings, "left_out": left_out})
    own.held_out = {**report.held_out, "reader": {"record": "none"}}
    text = card(root / "compressor", [own], LIMITS)
    assert "Memories are rounded to int2." in text
    assert "**Not held out**: among the 20 that trained compressor" in text
    assert "Whether reader was trained on these documents is unknown" in text
    assert "more than 40 tokens: 3 of tales, reconstruction; 5 of more, reconstruction." in text
    assert f"Contexts that were cut to fit: {len({(row.dataset, row.task) for row in rows})}." in text
    assert "The reader without compression" not in text


def test_a_wrong_file_is_refused(root, tmp_path):
    for name, content, message in (
        ("training_summary.json", "{}", "not the summary of a training run: KeyError"),
        ("recipe.yaml", "sources: [{path: a.parquet, task: [reconstruction]}]", "did you mean 'tasks'"),
    ):
        for file in ("config.json", "recipe.yaml", "training_summary.json"):
            shutil.copy(root / "compressor" / file, tmp_path)
        (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match=message):
            write_card(tmp_path, [], LIMITS)


def test_wrong_arguments_are_refused(root, report):
    compressor = root / "compressor"
    without = [row for row in report.rows if not row.condition.startswith("ratio")]
    for folder, reports, message in (
        (compressor, [compressor / "recipe.yaml"], "is not an evaluation report"),
        (compressor, [report, replace(report, model="other", rows=[])], r"same model, got \['compressor', 'other'\]"),
        (compressor, [replace(report, rows=without)], "no compression ratio, but the checkpoint is a compressor"),
    ):
        with pytest.raises(ValueError, match=message):
            write_card(folder, reports, LIMITS)
    with pytest.raises(ValueError, match="at least one limit"):
        write_card(compressor, [], [])
