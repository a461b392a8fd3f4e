# SPDX-License-Identifier: Apache-2.0
"""The small-scale benchmark at toy size: what it trains, and what it refuses."""

import hashlib
import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from context_compressors.training.objectives.compression_dataset import CompressionDataset


def small_scale_arguments(base: Path, output: Path, *more: str) -> list[str]:
    return [
        *("--base", str(base), "--output", str(output), "--device", "cpu"),
        *("--steps", "2", "--batch-size", "2", "--eval-samples", "4", "--bleu-samples", "2"),
        *more,
    ]


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@pytest.mark.slow
def test_small_scale_scores_every_data_set_beside_the_bounds(
    script, base: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    before, output = digests(base), tmp_path / "small.json"
    arguments = small_scale_arguments(base, output, "--data", str(data), "--seeds", "0", "1", "--ratios", "2", "4")
    assert script("small_scale.measure").main(arguments) == 0
    results = json.loads(output.read_text(encoding="utf-8"))
    assert digests(base) == before
    assert [(run["method"], run["ratios"], run["seed"]) for run in results["runs"]] == [
        ("mean_pooling", [2, 4], 0),
        ("mean_pooling", [2, 4], 1),
    ]
    for run in results["runs"]:
        assert (run["name"], run["config"], run["prompts"]) == ("mean_pooling", {}, None)
        assert [entry["step"] for entry in run["log"]] == [1, 2]
        losses = ("loss", "reconstruction_loss", "continuation_loss")
        assert all(math.isfinite(entry[name]) for entry in run["log"] for name in losses)
        assert run["training"]["steps"] == 2
        assert run["training"]["context_tokens"] > 0
        assert run["training"]["target_tokens"] > 0
    expected = {"reconstruction/bleu", "reconstruction/token_accuracy", "continuation/perplexity"}
    questions = {"question_answering/exact_match", "question_answering/f1"}
    summary = {(row["dataset"], row["condition"]): row for row in script("small_scale.results").summarize(results)}
    for dataset in ("generated", "squad", "narrativeqa_summaries", "openstax"):
        for condition in ("no_context", "full_context", "ratio=2", "ratio=4"):
            scores = summary[dataset, condition]["scores"]
            assert expected | (questions if dataset != "openstax" else set()) <= set(scores)
            # The bounds are the base's own: training changes nothing about them.
            assert summary[dataset, condition]["seeds"] == ([] if condition.endswith("context") else [0, 1])
    assert summary["squad", "ratio=2"]["scores"]["continuation/perplexity"]["std"] > 0
    assert "| openstax" in capsys.readouterr().out


@pytest.mark.slow
def test_small_scale_restores_texts_of_several_lengths(script, base: Path, tmp_path: Path, capsys):
    output = tmp_path / "small.json"
    more = ["--tasks", "reconstruction", "--restoration-lengths", "24", "40", "--context-tokens", "32", "--seeds", "0"]
    more += ["--save", str(tmp_path / "kept")]
    assert script("small_scale.measure").main(small_scale_arguments(base, output, *more)) == 0
    kept = tmp_path / "kept" / "seed_0" / "mean_pooling_ratios_4"
    assert AutoModelForCausalLM.from_pretrained(kept).config.compression_ratios == (4,)
    assert len(AutoTokenizer.from_pretrained(kept)) == len(AutoTokenizer.from_pretrained(base))
    results = json.loads(output.read_text(encoding="utf-8"))
    assert (results["budget"]["tasks"], results["budget"]["restoration_lengths"]) == (["reconstruction"], [24, 40])
    (run,) = results["runs"]
    assert {name: list(tasks) for name, tasks in run["scores"].items()} == {
        "generated, 24 tokens": ["reconstruction"],
        "generated, 40 tokens": ["reconstruction"],
    }
    assert set(run["log"][0]) == {"step", "loss", "reconstruction_loss"}
    # No row of another set of tasks may come beside it.
    same = ["--context-tokens", "32", "--seeds", "1"]
    assert script("small_scale.measure").main(small_scale_arguments(base, output, *same)) == 1
    assert "another budget" in capsys.readouterr().err
    # What is finished is not trained again to be kept.
    more[-1] = str(tmp_path / "elsewhere")
    assert script("small_scale.measure").main(small_scale_arguments(base, output, *more)) == 1
    assert "was not kept" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--restoration-lengths", "24"], "give --tasks reconstruction"),
        (["--tasks", "reconstruction", "--restoration-lengths", "24", "24"], "different numbers"),
        (["--tasks", "reconstruction", "--restoration-lengths", "5000"], "must be at most"),
    ],
)
def test_small_scale_refuses_lengths_that_cannot_be_tested(
    script, base: Path, tmp_path: Path, capsys, options, message
):
    assert script("small_scale.measure").main(small_scale_arguments(base, tmp_path / "small.json", *options)) == 1
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_small_scale_gives_task_tokens_their_prompts_and_all_methods_the_same_tokens(
    script, base: Path, tmp_path: Path
):
    output = tmp_path / "small.json"
    fields = {"task_token_ids": {"[AE]": 258, "[LM]": 259}, "position_layout": "enhanced"}
    for more in ([], ["--config", json.dumps(fields)]):
        assert script("small_scale.measure").main(small_scale_arguments(base, output, "--seeds", "0", *more)) == 0
    plain, tokens = json.loads(output.read_text(encoding="utf-8"))["runs"]
    assert tokens["name"] == 'mean_pooling, position_layout=enhanced, task_token_ids={"[AE]": 258, "[LM]": 259}'
    assert tokens["config"] == fields
    assert (plain["prompts"], tokens["prompts"]) == (None, "embedded")
    for count in ("context_tokens", "target_tokens"):
        assert plain["training"][count] == tokens["training"][count] > 0
    # The two task tokens have an embedding each.
    assert tokens["training"]["trainable_parameters"] - plain["training"]["trainable_parameters"] == 2 * 16
    for tasks in tokens["scores"].values():
        assert 3.5 < tasks["reconstruction"]["ratio=4"]["tokens_per_slot"] <= 4


@pytest.mark.slow
def test_small_scale_tells_runs_with_prompts_of_their_own_apart(script, base: Path, tmp_path: Path):
    output = tmp_path / "small.json"
    assert (
        script("small_scale.measure").main(
            small_scale_arguments(base, output, "--seeds", "0", "--prompts", "embedded")
        )
        == 0
    )
    (run,) = json.loads(output.read_text(encoding="utf-8"))["runs"]
    assert (run["name"], run["prompts"]) == ("mean_pooling, prompts=embedded", "embedded")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{layout}", "is not JSON"),
        ("[4]", "must be a mapping of fields"),
        ('{"compression_ratios": [4]}', "without the ratios"),
    ],
)
def test_small_scale_refuses_configurations_that_are_none(
    script, text: str, message: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit):
        script("small_scale.measure").main(["--config", text])
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_small_scale_goes_through_a_list_of_jobs_for_each_seed(
    script, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    jobs, output = tmp_path / "jobs.json", tmp_path / "small.json"
    one = {"method": "comprexit", "config": {"gate_size": 8, "metric_size": 8}, "ratios": [2]}
    jobs.write_text(json.dumps([one, {"method": "mean_pooling"}]), encoding="utf-8")
    more = ("--jobs", str(jobs), "--ratios", "4", "2", "--ratio-mode", "random", "--lowest-first", "0.5")
    more += ("--restore-first", "0.5")
    small_scale, schedules = script("small_scale.measure"), []

    def dataset(*arguments, **fields):
        schedules.append(arguments[0].task_schedule)
        return CompressionDataset(*arguments, **fields)

    monkeypatch.setattr(small_scale, "CompressionDataset", dataset)
    assert small_scale.main(small_scale_arguments(base, output, "--seeds", "0", "1", *more)) == 0
    assert (
        schedules == [[[0.0, ["reconstruction"]], [0.5, ["question_answering", "reconstruction", "continuation"]]]] * 4
    )
    results = json.loads(output.read_text(encoding="utf-8"))
    assert [(run["name"], run["ratios"], run["seed"]) for run in results["runs"]] == [
        ("comprexit, gate_size=8, metric_size=8", [2], 0),
        ("mean_pooling", [4, 2], 0),
        ("comprexit, gate_size=8, metric_size=8", [2], 1),
        ("mean_pooling", [4, 2], 1),
    ]
    assert (results["budget"]["ratio_mode"], results["budget"]["lowest_first"]) == ("random", 0.5)
    scored = [results["bounds"]["default"], *(run["scores"] for run in results["runs"])]
    continued = [tasks["continuation"] for scores in scored for tasks in scores.values()]
    saved = {name for scores in continued for name, metrics in scores.items() if "saved_by_context" in metrics}
    assert saved == {"full_context", "ratio=2", "ratio=4"}


@pytest.mark.parametrize(
    ("jobs", "message"),
    [
        ("[", "cannot be read"),
        ("[]", "a list of mappings"),
        ('{"method": "icae"}', "a list of mappings"),
        ('[{"ratio": [4]}]', "did you mean 'ratios'?"),
        ('[{"method": "icea"}]', "unknown --method 'icea'"),
    ],
)
def test_small_scale_refuses_jobs_that_are_none(
    script, base: Path, tmp_path: Path, jobs: str, message: str, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "jobs.json").write_text(jobs, encoding="utf-8")
    arguments = small_scale_arguments(base, tmp_path / "small.json", "--jobs", str(tmp_path / "jobs.json"))
    assert script("small_scale.measure").main(arguments) == 1
    assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        script("small_scale.measure").main(["--lowest-first", "1"])


def test_the_lowest_ratio_comes_first(script, tmp_path: Path):
    small_scale = script("small_scale.measure")

    def schedule(*more: str) -> list | None:
        arguments = small_scale.build_parser().parse_args(["--ratios", "8", "2", "4", *more])
        return small_scale.training_config(arguments, 0, tmp_path, torch.device("cpu")).ratio_schedule

    assert schedule() is None
    assert schedule("--lowest-first", "0.4") == [[0.0, [2]], [0.4, [2, 4, 8]]]
    assert schedule("--ratio-schedule", "[[0, [2]], [0.5, [4, 8]]]") == [[0.0, [2]], [0.5, [4, 8]]]


def test_restoring_comes_first(script, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    small_scale = script("small_scale.measure")
    arguments = small_scale.build_parser().parse_args(["--base", str(base)])
    assert small_scale._task_schedule(arguments) is None
    assert not {"restore_first", "ratio_schedule"} & set(small_scale.budget_of(arguments))
    more = ["--base", str(base), "--restore-first", "0.5", "--ratio-schedule", "[[0, [4]]]"]
    arguments = small_scale.build_parser().parse_args(more)
    assert small_scale._task_schedule(arguments) == [[0.0, ["reconstruction"]], [0.5, arguments.tasks]]
    budget = small_scale.budget_of(arguments)
    assert (budget["restore_first"], budget["ratio_schedule"]) == (0.5, [[0.0, [4]]])
    output = tmp_path / "small.json"
    refused = [
        (["--tasks", "continuation", "--restore-first", "0.5"], "needs reconstruction among the --tasks"),
        (["--tasks", "reconstruction", "--restore-first", "0.5"], "when the other --tasks begin, and there are none"),
        (["--lowest-first", "0.5", "--ratio-schedule", "[[0, [4]]]"], "give either it or --ratio-schedule"),
        (["--ratios", "2", "4", "--ratio-schedule", "[[0, [4]]]"], "has the ratios [4], and mean_pooling [2, 4]"),
    ]
    for wrong, message in refused:
        assert small_scale.main(small_scale_arguments(base, output, *wrong)) == 1
        assert message in capsys.readouterr().err
    for wrong, message in (("[[0.5, [4]]]", "the first fraction 0"), ("[[0, [4]", "'[[0, [4]' is not JSON")):
        with pytest.raises(SystemExit):
            small_scale.main(["--ratio-schedule", wrong])
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["methods", "gmsa", "restore_first"])
def test_the_jobs_of_this_repository_can_be_read(script, name: str):
    small_scale = script("small_scale.measure")
    path = Path(small_scale.__file__).parent / f"{name}_jobs.json"
    jobs = small_scale.read_jobs(small_scale.build_parser().parse_args(["--jobs", str(path)]))
    names = [(small_scale._name(job), tuple(job.ratios)) for job in jobs]
    assert len(set(names)) == len(names)
    assert "mean_pooling" in {method for method, _ in names}


@pytest.mark.slow
def test_small_scale_goes_on_where_it_stopped_and_keeps_to_one_budget(
    script, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    main, output = script("small_scale.measure").main, tmp_path / "small.json"
    assert main(small_scale_arguments(base, output, "--seeds", "0")) == 0
    first = json.loads(output.read_text(encoding="utf-8"))["runs"]
    assert main(small_scale_arguments(base, output, "--seeds", "0", "1")) == 0
    both = json.loads(output.read_text(encoding="utf-8"))["runs"]
    assert both[:1] == first
    assert [run["seed"] for run in both] == [0, 1]
    finished = output.read_bytes()
    assert main(small_scale_arguments(base, output, "--seeds", "2", "--context-tokens", "100")) == 1
    assert "'context_tokens': (144, 100)" in capsys.readouterr().err
    assert output.read_bytes() == finished


def test_small_scale_refuses_what_it_cannot_use(
    script, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    main, output = script("small_scale.measure").main, tmp_path / "small.json"
    assert main(small_scale_arguments(tmp_path / "nowhere", output)) == 1
    assert "there is no base language model in" in capsys.readouterr().err
    assert main(small_scale_arguments(base, output, "--method", "median_pooling")) == 1
    assert "unknown --method 'median_pooling'; did you mean 'mean_pooling'?" in capsys.readouterr().err
    output.write_text('{"runs": 3}', encoding="utf-8")
    assert main(small_scale_arguments(base, output)) == 1
    assert "is not a result file of this benchmark" in capsys.readouterr().err
