# SPDX-License-Identifier: Apache-2.0
"""Pictures: files that are there, axes that read right."""

from dataclasses import replace

import pytest
from matplotlib.figure import Figure
from PIL import Image

from context_compressors.evaluation.plots import (
    plot_domain_gap,
    plot_quality_by_model_size,
    plot_quality_by_ratio,
    write_plots,
)
from context_compressors.evaluation.report import EvaluationReport
from context_compressors.evaluation.rows import EvaluationRow

QA = "question_answering"
PLOTS = (plot_quality_by_ratio, plot_quality_by_model_size, plot_domain_gap)


def report_of(name="tiny", num_parameters=1_000_000, ratios=(4, 8, 16), shift=0.0, metric="f1", domains=("in", "out")):
    report = EvaluationReport(name, bounds="teacher", num_parameters=num_parameters)
    for domain in domains:
        scores = {"no_context": 20.0, "full_context": 80.0}
        scores |= {f"ratio={ratio}": 75.0 - ratio - shift - 5 * (domain == "out") for ratio in ratios}
        for condition, score in scores.items():
            report.rows.append(EvaluationRow(f"set_{domain}", domain, QA, condition, {metric: score}, 10))
    return report


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


def texts_overlap(figure):
    """Return whether two tick labels, titles or legend entries share a pixel."""
    figure.canvas.draw()
    axes = figure.axes[0]
    texts = [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.get_xticklabels(), *axes.get_yticklabels()]
    texts += [text for legend in figure.legends for text in legend.get_texts()]
    bottom, top = axes.get_ylim()
    shown = [text for text in texts if text.get_text() and text not in axes.get_yticklabels()]
    shown += [
        label
        for label, place in zip(axes.get_yticklabels(), axes.get_yticks(), strict=True)
        if min(bottom, top) <= place <= max(bottom, top)
    ]
    boxes = [text.get_window_extent() for text in shown]
    return any(first.overlaps(second) for index, first in enumerate(boxes) for second in boxes[index + 1 :])


@pytest.mark.parametrize("plot", PLOTS)
def test_writes_a_readable_png_and_returns_its_path(plot, tmp_path, figures):
    path = tmp_path / "new" / "plot.png"
    reports = [report_of("small"), report_of("large", 8_000_000_000, shift=3.0)]
    assert plot(reports if plot is plot_quality_by_model_size else reports[0], QA, "f1", path) == path
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert image.width >= 800
    assert not texts_overlap(figures[0])


def test_quality_by_ratio_draws_the_average_and_both_bounds(tmp_path, figures):
    plot_quality_by_ratio(report_of(), QA, "f1", tmp_path / "plot.png")
    lines = {line.get_label(): line for line in figures[0].axes[0].lines}
    assert list(lines["tiny"].get_xdata()) == [4, 8, 16]
    assert list(lines["tiny"].get_ydata()) == pytest.approx([68.5, 64.5, 56.5])
    assert set(lines["full context"].get_ydata()) == {80.0}
    assert set(lines["no context"].get_ydata()) == {20.0}
    assert not figures[0].axes[0].collections
    report = EvaluationReport("tiny", rows=[replace(row, intervals={"f1": (40.0, 60.0)}) for row in report_of().rows])
    plot_quality_by_ratio(report, QA, "f1", tmp_path / "plot.png")
    drawn = [line.get_segments()[0].tolist() for line in figures[1].axes[0].collections]
    low, high = report.macro_average_interval(QA, "f1")["ratio=4"]
    assert drawn[0] == [[4.0, pytest.approx(low)], [4.0, pytest.approx(high)]]
    assert len(drawn) == 3


def test_quality_by_model_size_draws_a_line_per_ratio_in_order_of_size(tmp_path, figures):
    reports = [report_of("large", 3_000_000_000, shift=-2.0), report_of("small", 500_000_000, ratios=(4, 8))]
    plot_quality_by_model_size(reports, QA, "f1", tmp_path / "plot.png")
    axes = figures[0].axes[0]
    lines = {line.get_label(): line for line in axes.lines}
    assert list(lines["4x"].get_xdata()) == [500_000_000, 3_000_000_000]
    assert list(lines["4x"].get_ydata()) == pytest.approx([68.5, 70.5])
    # Only the larger model has ratio 16.
    assert list(lines["16x"].get_xdata()) == [3_000_000_000]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["500M", "3B"]


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
