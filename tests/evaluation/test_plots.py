# SPDX-License-Identifier: Apache-2.0
"""Pictures: files that are there, axes that read right."""

import pytest
from matplotlib.figure import Figure
from PIL import Image

from context_compressors.evaluation.plots import plot_quality_by_ratio, write_plots
from context_compressors.evaluation.report import EvaluationReport
from context_compressors.evaluation.rows import EvaluationRow

QA = "question_answering"


@pytest.fixture
def figures(monkeypatch):
    """The figures that were saved, for a look at their axes."""
    saved = []
    save = Figure.savefig

    def keep(figure, *args, **kwargs):
        saved.append(figure)
        return save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", keep)
    return saved


def test_quality_by_ratio_draws_the_average_its_interval_and_both_bounds(tmp_path, figures):
    report = EvaluationReport("tiny", num_parameters=1_000_000)
    scores = {"no_context": 20.0, "full_context": 80.0, **{f"ratio={ratio}": 75.0 - ratio for ratio in (4, 8, 16)}}
    for dataset, shift in (("a", 0.0), ("b", 5.0)):
        for condition, score in scores.items():
            ends = {"f1": (score - 4, score + 4)} if condition != "ratio=8" else {}
            row = EvaluationRow(dataset, "in", QA, condition, {"f1": score - shift}, 10, intervals=ends)
            report.rows.append(row)
    path = tmp_path / "new" / "plot.png"
    assert plot_quality_by_ratio(report, QA, "f1", path) == path
    with Image.open(path) as image:
        assert (image.format, image.width >= 800) == ("PNG", True)
    axes = figures[0].axes[0]
    lines = {line.get_label(): line for line in axes.lines}
    assert list(lines["tiny"].get_xdata()) == [4, 8, 16]
    assert list(lines["tiny"].get_ydata()) == pytest.approx([68.5, 64.5, 56.5])
    assert set(lines["full context"].get_ydata()) == {77.5}
    assert set(lines["no context"].get_ydata()) == {17.5}
    drawn = [line.get_segments()[0].tolist() for line in axes.collections]
    low, high = report.averages(QA, "f1")["macro_average"]["ratio=4"][1]
    assert [segment[0][0] for segment in drawn] == [4.0, 16.0]
    assert drawn[0] == [[4.0, pytest.approx(low)], [4.0, pytest.approx(high)]]


def test_needles_are_a_heat_map_of_data_sets_and_conditions(tmp_path, figures):
    report = EvaluationReport("tiny")
    for dataset, share in (("needles, 256 tokens", 75.0), ("needles, 512 tokens", 25.0)):
        for condition in ("no_context", "full_context", "ratio=4"):
            metrics = {"substring_accuracy": share, "f1": 1.0}
            report.rows.append(EvaluationRow(dataset, "in", QA, condition, metrics, 10))
    paths = write_plots(report, tmp_path)
    assert [path.name for path in paths] == [f"{QA}_by_ratio.png", "needles.png"]
    axes = figures[1].axes[0]
    assert axes.images[0].get_array().tolist() == [[75.0] * 3, [25.0] * 3]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["no\ncontext", "full\ncontext", "4x"]
