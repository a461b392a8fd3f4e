# SPDX-License-Identifier: Apache-2.0
"""Comparisons on the very same samples: their difference, its interval, and what it tells."""

import json
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from naive_twin import answers_of

from context_compressors.cli import main
from context_compressors.evaluation.bootstrap import paired_difference, verdict
from context_compressors.evaluation.rows import read_answers, write_answers


def test_a_paired_difference_is_that_of_the_same_samples_and_resamples_documents():
    rng = random.Random(1)
    first, second = ([rng.uniform(0, 100) for _ in range(12)] for _ in range(2))
    shuffled = answers_of(second)
    rng.shuffle(shuffled)
    found = paired_difference(answers_of(first), shuffled, "f1", "ratio=4", seed=5)
    by_row = np.subtract(first, second)
    assert found.difference == pytest.approx(by_row.mean())
    assert (found.first, found.second) == (pytest.approx(np.mean(first)), pytest.approx(np.mean(second)))
    assert (found.num_samples, found.num_documents, found.num_seeds) == (12, 6, (1, 1))
    drawn = np.random.default_rng(5).multinomial(6, [1 / 6] * 6, 10_000)
    means = [np.average(by_row, weights=np.repeat(counts, 2)) for counts in drawn]
    assert found.interval == pytest.approx(tuple(np.quantile(means, [0.025, 0.975], method="nearest")))
    for scores, interval in ((first, found.first_interval), (second, found.second_interval)):
        means = [np.average(scores, weights=np.repeat(counts, 2)) for counts in drawn]
        assert interval == pytest.approx(tuple(np.quantile(means, [0.025, 0.975], method="nearest")))
    cut = answers_of(second, condition="cut=4")
    assert paired_difference(answers_of(first), cut, "f1", "ratio=4", "cut=4", seed=5) == found
    # What makes a question hard is the same for both.
    shifted = paired_difference(answers_of([score + 10 for score in first]), answers_of(first), "f1", "ratio=4")
    assert (shifted.difference, shifted.interval) == (pytest.approx(10.0), pytest.approx((10.0, 10.0)))
    assert shifted.verdict == "better"


def test_nothing_is_called_better_whose_interval_holds_zero():
    assert verdict((0.1, 2.0)) == "better"
    assert verdict((-2.0, -0.1)) == "worse"
    assert {verdict(ends) for ends in ((-0.1, 2.0), (0.0, 2.0), (-2.0, 0.0), (0.0, 0.0))} == {"inconclusive"}
    assert verdict((float("nan"), float("nan"))) == "inconclusive"
    assert [verdict(ends, "perplexity") for ends in ((0.1, 2.0), (-2.0, -0.1))] == ["worse", "better"]


def test_seeds_widen_the_interval_to_the_lowest_and_the_highest_of_them():
    rng = random.Random(2)
    questions = [rng.uniform(0, 60) for _ in range(400)]
    runs = [answers_of([score + effect for score in questions]) for effect in (-6.0, 1.0, 8.0)]
    other = [answers_of([score + rng.uniform(-1, 1) for score in questions])]
    one = paired_difference(runs[1], other, "f1", "ratio=4")
    several = paired_difference(runs, other, "f1", "ratio=4")
    assert one.interval[0] > 0.8
    assert several.difference == pytest.approx(one.difference)
    assert several.num_seeds == (3, 1)
    assert several.interval == pytest.approx((-6.0, 8.0), abs=0.3)
    assert (one.verdict, several.verdict) == ("better", "inconclusive")
    # Of two conditions of the same runs, what a seed adds cancels.
    for run in runs:
        for sample in run:
            sample.scores["cut=4"] = {"f1": sample.scores["ratio=4"]["f1"] - 2.0}
    same = paired_difference(runs, runs, "f1", "ratio=4", "cut=4")
    assert same.interval == pytest.approx((2.0, 2.0))
    apart = paired_difference(runs, list(runs), "f1", "ratio=4", "cut=4")
    assert apart.interval[0] < -5
    assert same.first == pytest.approx(np.mean(questions) + 1.0)
    wide, narrow = several.first_interval, one.first_interval
    assert wide[0] + 3 < narrow[0] < narrow[1] < wide[1] - 3


def test_a_perplexity_is_compared_in_nats():
    first, second = answers_of([2.0, 8.0, 4.0, 4.0]), answers_of([4.0] * 4)
    for sample in (*first, *second):
        sample.scores["ratio=4"] = {"perplexity": sample.scores["ratio=4"]["f1"], "bleu": 1.0}
    found = paired_difference(first, second, "perplexity", "ratio=4")
    assert found.difference == pytest.approx(0.0)
    assert found.verdict == "inconclusive"
    # Of one document there is no interval.
    alone = [[replace(sample, document=0) for sample in samples[:1]] for samples in (first, second)]
    found = paired_difference(*alone, "perplexity", "ratio=4")
    assert found.difference == pytest.approx(math.log(2 / 4))
    assert (math.isnan(found.interval[0]), found.verdict) == (True, "inconclusive")
    with pytest.raises(ValueError, match="bleu is a score of a whole corpus"):
        paired_difference(first, second, "bleu", "ratio=4")


def test_other_samples_are_not_compared():
    one = answers_of([1.0, 2.0])
    for other in (answers_of([1.0]), answers_of([1.0, 2.0], "nq"), [one, one[:1]]):
        with pytest.raises(ValueError, match="must have the same samples of a data set and task"):
            paired_difference(one, other, "f1", "ratio=4")
    doubled = [*one, one[1]]
    for first, second in ((doubled, doubled), (one, [one, doubled])):
        with pytest.raises(ValueError, match=r"each once, got 2 and 3, and \('squad', .* not once in each"):
            paired_difference(first, second, "f1", "ratio=4")
    # Other windows of a text have its name.
    with pytest.raises(ValueError, match=r"'another window'.* not once in each"):
        paired_difference(one, [replace(one[0], references=["another window"]), one[1]], "f1", "ratio=4")
    with pytest.raises(ValueError, match=r"there is no 'f2' under the condition 'ratio=4'; there are .*'f1'"):
        paired_difference(one, one, "f2", "ratio=4")
    with pytest.raises(ValueError, match="there are no samples to compare"):
        paired_difference([], one, "f1", "ratio=4")


def test_command_compares_conditions_and_systems(tmp_path, capsys):
    rng = random.Random(3)
    questions = [rng.uniform(0, 60) for _ in range(40)]
    for name, effect in (("a0", 5.0), ("a1", 7.0), ("b", 0.0)):
        samples = answers_of([score + effect for score in questions])
        for sample, score in zip(samples, questions, strict=True):
            sample.scores["cut=4"] = {"f1": score + rng.uniform(-9, 9)}
        write_answers(samples, tmp_path / f"{name}.jsonl")
    a0, a1, b = (str(tmp_path / f"{name}.jsonl") for name in ("a0", "a1", "b"))

    def rows_of(*argv):
        assert main(["compare", *argv]) == 0
        return [[cell.strip() for cell in line.split("|")][1:] for line in capsys.readouterr().out.splitlines()[2:]]

    first, second, _ = rows_of(f"a={a0}", f"a={a1}", f"b={b}", "--output", str(tmp_path / "out.json"))
    assert first[:7] == ["squad", "f1", "a ratio=4", "b ratio=4", "40", "20", "2 and 1"]
    assert first[9:11] == ["6.00 [5.00, 7.00]", "better"]
    assert "inconclusive" in second
    found = json.loads((tmp_path / "out.json").read_text())["differences"]
    assert [(row["conditions"], row["verdict"]) for row in found] == [
        (["ratio=4", "ratio=4"], "better"),
        (["cut=4", "cut=4"], "inconclusive"),
    ]
    assert rows_of(b, "--conditions", "cut=4", "ratio=4")[0][2] == "cut=4"
    write_answers(answers_of([1.0, 2.0], "nq"), tmp_path / "nq.jsonl")
    for given, message in (
        ([b, "--conditions", "ratio=4", "cut=16"], "or not all; the files have the conditions ['cut=4', "),
        ([f"a={a0}", b, b], "two files would be 'b': give NAME=FILE"),
        (
            [b, f"n={tmp_path / 'nq.jsonl'}"],
            "left out, since not all files have it: 'squad', question_answering; 'nq'",
        ),
    ):
        assert main(["compare", *given]) == 1
        assert message in capsys.readouterr().err
    # A benchmark's own score comes first.
    for name in ("a0", "b"):
        samples = read_answers(tmp_path / f"{name}.jsonl")
        for sample in samples:
            for metrics in sample.scores.values():
                metrics["benchmark_score"] = 100 - metrics["f1"]
        write_answers(samples, tmp_path / f"{name}.jsonl")
    (row,) = rows_of(a0, b, "--conditions", "ratio=4")
    assert (row[1], row[9:11]) == ("benchmark_score", ["-5.00 [-5.00, -5.00]", "worse"])
