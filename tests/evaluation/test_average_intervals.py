# SPDX-License-Identifier: Apache-2.0
"""Intervals of averages over data sets: resamples of each, averaged one by one, and what is left without them."""

import random

import numpy as np
import pytest
from naive_twin import QA

from context_compressors.evaluation.bootstrap import in_own_order, interval_of_mean, percentile_interval
from context_compressors.evaluation.metrics import teacher_normalized
from context_compressors.evaluation.paired import resampled_means
from context_compressors.evaluation.report import OF_DATA_SETS, RESAMPLES, EvaluationReport
from context_compressors.evaluation.report_tables import report_markdown
from context_compressors.evaluation.results import add_resamples, add_results
from context_compressors.evaluation.rows import EvaluationRow
from context_compressors.evaluation.samples import EvaluationDataset, Sample
from context_compressors.evaluation.tallies import empty_tally
from context_compressors.reporting.result_files import rounded

NUM_RESAMPLES, SEED = 600, 3
CHANCES = {"no_context": 0.1, "full_context": 0.9, "ratio=4": 0.6, "cut=4": 0.4}
# Name -> domain, questions, questions to a document.
SETS = {"a": ("in", 40, 1), "b": ("in", 60, 2), "c": ("out", 50, 1)}
NORMALIZED = "teacher_normalized_per_dataset_then_averaged"


def parts_of(name, rng=None):
    """A data set's samples, and what each condition wrote: the right letter, or another one."""
    domain, number, per_document = SETS[name]
    rng = rng or random.Random(name)
    samples = [Sample([1], [2], [3], ["x"], document=row // per_document, id=str(row)) for row in range(number)]
    tallies = {condition: empty_tally(samples, given=False, writes=True, recovers=False) for condition in CHANCES}
    for condition, tally in tallies.items():
        tally.predictions = ["x" if rng.random() < CHANCES[condition] else "y" for _ in samples]
    return EvaluationDataset(name, [{"context": "."}], domain), samples, tallies


def report_of(names=SETS):
    report = EvaluationReport("tiny", environment={})
    for name in names:
        dataset, samples, tallies = parts_of(name)
        add_results(report, dataset, QA, samples, tallies, SEED, NUM_RESAMPLES)
    return report


def resampled(name):
    """By condition, resamples of a data set as `resampled_means` draws them."""
    _, samples, tallies = parts_of(name)
    values = [np.array([[100.0 * (text == "x") for text in tally.predictions]]) for tally in tallies.values()]
    means = resampled_means(values, [sample.document for sample in samples], NUM_RESAMPLES, SEED)
    return {name_: in_own_order(scores, name, SEED) for name_, scores in zip(tallies, means, strict=True)}


@pytest.mark.slow
def test_intervals_are_those_of_resamples_that_are_averaged_one_by_one():
    report, by_set = report_of(), {name: resampled(name) for name in SETS}
    averages = report.averages(QA, "f1")
    assert averages["intervals_from"] == RESAMPLES

    def interval(weights, score):
        return pytest.approx(percentile_interval(sum(w * score(by_set[name]) for name, w in weights.items())))

    every, inside, third = dict.fromkeys(SETS, 1 / 3), {"a": 0.5, "b": 0.5}, {"c": 1.0}
    for condition in CHANCES:
        for key, weights in (("macro_average", every), ("in_domain", inside), ("out_domain", third)):
            found = averages[f"{key}_interval"][condition]
            assert found == interval(weights, lambda scores, name=condition: scores[name])
            assert found[0] < averages[key][condition] < found[1]

    def kept(scores):
        return teacher_normalized(scores["ratio=4"], scores["full_context"], scores["no_context"])

    found = averages[f"{NORMALIZED}_interval"]
    assert found["ratio=4"] == interval(every, kept)
    assert not {"no_context", "full_context"} & found.keys()
    assert averages["domain_gap_interval"] == {"ratio=4": interval({**inside, "c": -1.0}, kept)}
    (less,) = averages["differences"]["ratio=4"].values()
    differences = [row.differences["cut=4"]["difference"] for row in report.rows if row.differences]
    assert less["difference"] == pytest.approx(sum(differences) / 3)
    assert less["interval"] == interval(every, lambda scores: scores["ratio=4"] - scores["cut=4"])


def test_data_sets_draw_their_documents_apart():
    report = EvaluationReport("tiny", environment={})
    for name in ("one", "another"):
        # The same answers to the same questions, of which both would draw the same.
        dataset, samples, tallies = parts_of("a")
        dataset = EvaluationDataset(name, dataset.examples)
        add_results(report, dataset, QA, samples, tallies, SEED, 2000)
    (low, high), ends = report.macro_average_interval(QA, "f1")["ratio=4"], report.rows[2].intervals["f1"]
    assert (high - low) / (ends[1] - ends[0]) == pytest.approx(2**-0.5, rel=0.15)
    # What is drawn stays paired within a data set.
    keys = [("one", QA, name, SEED, "f1") for name in ("ratio=4", "cut=4")]
    mine, theirs = (report.resamples[key] for key in keys)
    assert percentile_interval(mine - theirs) == pytest.approx(report.rows[2].differences["cut=4"]["interval"])


def test_a_file_keeps_the_intervals_of_averages_until_a_row_comes(tmp_path):
    report = report_of()
    loaded = EvaluationReport.load(report.save(tmp_path / "report.json"))
    assert not loaded.resamples
    assert loaded.to_dict() == rounded(report.to_dict())
    assert loaded.macro_average_interval(QA, "f1", "in") == rounded_pairs(
        report.macro_average_interval(QA, "f1", "in")
    )
    assert report_markdown(loaded) == report_markdown(EvaluationReport.load(loaded.save(tmp_path / "again.json")))
    # Of another metric than the file's nothing but the rows is known.
    assert loaded.averages(QA, "rouge1")["intervals_from"] == OF_DATA_SETS
    more = EvaluationReport("tiny")
    more.take_over(loaded)
    assert more.averages(QA, "f1") == loaded.averages(QA, "f1")
    for condition in CHANCES:
        score = 100 * CHANCES[condition]
        more.add(EvaluationRow("d", "in", QA, condition, {"f1": score}, 9, SEED, intervals={"f1": (0.0, 99.0)}))
    averages = more.averages(QA, "f1")
    ends = [row.intervals["f1"] for row in more.rows if row.condition == "ratio=4"]
    mean = averages["macro_average"]["ratio=4"]
    assert averages["macro_average_interval"]["ratio=4"] == pytest.approx(interval_of_mean(mean, ends))
    assert averages["intervals_from"] == OF_DATA_SETS
    assert "made of those of the data sets" in report_markdown(more)
    # "d" has no retention and no difference.
    assert f"{NORMALIZED}_interval" not in averages
    assert not averages["differences"]


def rounded_pairs(intervals):
    return {name: tuple(rounded(ends)) for name, ends in intervals.items()}


@pytest.mark.slow
def test_resamples_come_back_from_what_was_scored(tmp_path):
    report = report_of(["a", "b"])
    again = EvaluationReport("tiny", environment={})
    again.take_over(EvaluationReport.load(report.save(tmp_path / "report.json")))
    for name in SETS:
        add = add_results if name == "c" else add_resamples
        dataset, samples, tallies = parts_of(name)
        add(again, dataset, QA, samples, tallies, SEED, NUM_RESAMPLES)
    averages, expected = again.averages(QA, "f1"), report_of().averages(QA, "f1")
    assert averages["intervals_from"] == RESAMPLES
    for name in ("macro_average_interval", f"{NORMALIZED}_interval", "domain_gap_interval"):
        assert averages[name] == expected[name]


@pytest.mark.slow
def test_tables_have_the_intervals_of_all_averages():
    lines = report_markdown(report_of()).splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("Averages of f1"))
    cells = next(line for line in lines[start:] if line.startswith("| ratio=4")).strip("|").split("|")[1:]
    assert len(cells) == 5
    assert all("[" in cell for cell in cells)
    mean = next(line for line in lines if line.startswith("| mean over data sets"))
    assert "| ratio=4 | cut=4 |" in mean
    assert mean.endswith("| better    |")


def test_one_data_set_and_several_seeds():
    report = report_of(["b"])
    row = next(row for row in report.rows if row.condition == "ratio=4")
    averages = report.averages(QA, "f1")
    assert averages["macro_average_interval"]["ratio=4"] == row.intervals["f1"]
    assert averages[f"{NORMALIZED}_interval"]["ratio=4"] == pytest.approx(
        [end / 100 for end in row.intervals["retention"]]
    )
    # What has one data set has no averages in its file.
    assert report.to_dict()["averages"] == {}
    dataset, samples, tallies = parts_of("b")
    add_results(report, dataset, QA, samples, tallies, SEED + 1, NUM_RESAMPLES)
    assert "macro_average_interval" not in report.averages(QA, "f1")


def test_one_document_tells_nothing_of_an_average():
    report = report_of(["a"])
    dataset, samples, tallies = parts_of("b")
    for sample in samples:
        object.__setattr__(sample, "document", 0)
    add_results(report, dataset, QA, samples, tallies, SEED, NUM_RESAMPLES)
    assert "macro_average_interval" not in report.averages(QA, "f1")


def test_what_cannot_be_averaged_is_saved_all_the_same(tmp_path):
    report = report_of(["a", "b"])
    report.add(EvaluationRow("a", "in", QA, "ratio=8", {"f1": 50.0}, 9))
    for name in ("a", "b"):
        report.add(EvaluationRow(name, "in", "summarisation", "ratio=8", {}, 9))
    assert EvaluationReport.load(report.save(tmp_path / "report.json")).to_dict()["averages"] == {}
