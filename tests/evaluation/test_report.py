# SPDX-License-Identifier: Apache-2.0
"""Averages against the paper's own tables, and the report's file and table."""

import math

import pytest

from context_compressors.evaluation.report import EvaluationReport
from context_compressors.evaluation.report_tables import report_markdown
from context_compressors.evaluation.rows import EvaluationRow, ratio_of
from context_compressors.reporting.result_files import rounded

# Mean-pooling paper, tables 11 to 16, Qwen3-8B, 4x single: (4x, full context, no context).
PAPER_F1 = {
    "SQuAD": ("in", 83.76, 86.48, 20.31),
    "HotpotQA": ("in", 83.3, 84.67, 26.65),
    "NarrativeQA": ("in", 65.89, 68.0, 10.93),
    "TriviaQA": ("out", 87.94, 89.65, 53.79),
    "AdversarialQA": ("out", 53.71, 60.44, 19.15),
    "ParaphraseRC": ("out", 55.36, 56.77, 7.49),
}
QA = "question_answering"


def row(dataset="squad", condition="ratio=4", domain="in", task=QA, **metrics):
    return EvaluationRow(dataset, domain, task, condition, metrics or {"f1": 50.0}, 10)


def report_of(scores, **fields):
    """A report from data set -> (domain, 4x, full, none)."""
    report = EvaluationReport("tiny", **fields)
    for dataset, (domain, compressed, full, none) in scores.items():
        for condition, score in (("no_context", none), ("full_context", full), ("ratio=4", compressed)):
            report.rows.append(row(dataset, condition, domain, f1=score))
    return report


def test_normalised_score_is_taken_per_data_set_and_then_averaged():
    normalized = report_of(PAPER_F1).averages(QA, "f1")["teacher_normalized"]
    # Normalising the macro average gives 0.947837 instead: the two must not be mixed up.
    assert normalized["ratio=4"][0] == pytest.approx(0.94317, abs=1e-5)
    assert [normalized[name][0] for name in ("no_context", "full_context")] == pytest.approx([0, 1])


def test_domains_and_their_gap():
    averages = report_of(PAPER_F1).averages(QA, "f1")
    assert averages["in_domain"]["ratio=4"][0] == pytest.approx((83.76 + 83.3 + 65.89) / 3)
    assert averages["out_domain"]["full_context"][0] == pytest.approx((89.65 + 60.44 + 56.77) / 3)
    inside = (
        (83.76 - 20.31) / (86.48 - 20.31) + (83.3 - 26.65) / (84.67 - 26.65) + (65.89 - 10.93) / (68 - 10.93)
    ) / 3
    outside = (
        (87.94 - 53.79) / (89.65 - 53.79) + (53.71 - 19.15) / (60.44 - 19.15) + (55.36 - 7.49) / (56.77 - 7.49)
    ) / 3
    assert averages["domain_gap"] == {"ratio=4": (pytest.approx(inside - outside), None)}


def test_data_sets_where_the_context_is_worth_nothing_are_left_out_and_named():
    # A full text that misleads would turn the worst score into the most retained one.
    misled = ("in", 20.0, 30.0, 31.0)
    report = report_of({"a": ("in", 30.0, 50.0, 10.0), "easy": ("in", 90.0, 70.0, 70.0), "misled": misled})
    assert report.averages(QA, "f1")["teacher_normalized"]["ratio=4"][0] == 0.5
    assert "(the full context does not help): easy, misled." in report_markdown(report)


def test_conditions_come_in_the_order_of_ratios():
    report = EvaluationReport("tiny", rows=[row(condition=f"ratio={ratio}") for ratio in (16, 4, 128, 8)])
    report.rows.append(row(condition="full_context"))
    assert report.conditions(QA) == ["full_context", "ratio=4", "ratio=8", "ratio=16", "ratio=128"]
    assert report.ratios(QA) == [4, 8, 16, 128]
    report.rows += [row(condition=name) for name in ("cut=16", "ratio=256")]
    assert report.conditions(QA)[-3:] == ["ratio=128", "ratio=256", "cut=16"]
    assert [ratio_of(name) for name in ("ratio=12", "cut=2", "no_context")] == [12, None, None]


def test_intervals_retention_and_costs_are_in_file_and_table(tmp_path):
    report = EvaluationReport("tiny", bounds="teacher", num_parameters=12, settings={"seed": 0, "ratios": [4]})
    report.rows.append(
        EvaluationRow(
            "squad", "in", QA, "ratio=4", {"f1": 30.25, "rouge1": 1.0}, 10, num_documents=8,
            intervals={"f1": (27.5, 33.04), "rouge1": (math.nan, math.nan), "retention": (51.0, math.inf)},
            retention=65.0, costs={"slots": 45.5, "memory_bytes": 52416.0, "decoder_positions": 70.25},
        )
    )  # fmt: skip
    report.rows.append(row(condition="cut=4", f1=20.0, rouge1=2.0))
    report.rows.append(EvaluationRow("squad", "in", QA, "bm25=4", {"f1": 20.0, "rouge1": 2.0}, 10, retention=math.nan))
    report.rows.append(row("openstax", "no_context", task="continuation", perplexity=math.inf))
    loaded = EvaluationReport.load(report.save(tmp_path / "new" / "report.json"))
    assert rounded(loaded.to_dict()) == rounded(report.to_dict())
    first = loaded.rows[0]
    assert (first.intervals["f1"], first.intervals["retention"]) == ((27.5, 33.04), (51.0, math.inf))
    assert math.isnan(first.intervals["rouge1"][0])
    assert [other.retention for other in loaded.rows] == [65.0, None, None, None]
    assert loaded.score("openstax", "continuation", "no_context", "perplexity") == math.inf
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in report_markdown(report).splitlines()]
    header = next(cells for cells in lines if cells[0] == "data set")
    found = dict(zip(header, next(cells for cells in lines if "ratio=4" in cells), strict=True))
    assert (found["samples"], found["documents"]) == ("10", "8")
    assert (found["f1"], found["rouge1"], found["retention"]) == (
        "30.25 [27.50, 33.04]",
        "1.000",
        "65.00 [51.00, inf]",
    )
    assert (found["slots"], found["memory bytes"], found["decoder positions"]) == ("45.50", "52,416", "70.25")
    assert report.conditions(QA) == ["ratio=4", "cut=4", "bm25=4"]
    assert report.ratios(QA) == [4]


def test_the_interval_of_an_average_is_that_of_independent_data_sets():
    report = EvaluationReport("tiny")
    for name, score, half in (("a", 20.0, 3.0), ("b", 40.0, 4.0)):
        ends = {"f1": (score - half, score + half)}
        report.rows.append(EvaluationRow(name, "in", QA, "ratio=4", {"f1": score}, 10, intervals=ends))
        report.rows.append(
            EvaluationRow(name, "in", QA, "ratio=8", {"f1": score}, 10, intervals=ends if name == "a" else {})
        )
    assert report.averages(QA, "f1")["macro_average"] == {"ratio=4": (30.0, (27.5, 32.5)), "ratio=8": (30.0, None)}
    report.documents = {"a": "x y", "b": "y z"}
    assert report.averages(QA, "f1")["macro_average"]["ratio=4"] == (30.0, (26.5, 33.5))
    report.documents = {"a": "x", "b": "y z"}
    assert "| ratio=4   | 30.00 [27.50, 32.50] |" in report_markdown(report)
    assert "| ratio=8   | 30.00                |" in report_markdown(report)


def test_other_files_are_refused(tmp_path):
    for content in ("[1]", "no json", '{"format_version": 99}'):
        (tmp_path / "other.json").write_text(content)
        with pytest.raises(ValueError, match=r"other\.json is not an evaluation report"):
            EvaluationReport.load(tmp_path / "other.json")


def test_table_shows_every_row_and_every_average():
    table = report_markdown(report_of(PAPER_F1))
    lines = table.splitlines()
    assert sum(line.startswith(("| SQuAD", "| ParaphraseRC")) for line in lines) == 6
    average = next(line for line in lines if line.startswith("| ratio=4"))
    cells = [cell.strip() for cell in average.strip("|").split("|")]
    # Condition, all data sets, teacher-normalised, gap, in-domain, out-of-domain.
    assert cells == ["ratio=4", "71.66", "0.943", "0.046", "77.65", "65.67"]
