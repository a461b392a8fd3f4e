# SPDX-License-Identifier: Apache-2.0
"""Training curves on made-up logs, with exact numbers."""

import json

import pytest
from matplotlib.figure import Figure

from context_compressors.evaluation.curves import Curve, common_loss, curves_table, read_curves, speed_ups
from context_compressors.evaluation.plots import plot_curves

SLOW = Curve("default", (100, 200, 300, 400), ((4.0, 3.0, 1.5, 1.0),))
FAST = Curve("enhanced", (100, 200, 300, 400), ((3.0, 1.0, 0.5, 0.25), (5.0, 1.0, 0.5, 0.25)))


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
    return str(path)


def log(losses, name="reconstruction_loss"):
    entries = [{"step": 10 * (index + 1), "epoch": 0.1, name: loss} for index, loss in enumerate(losses)]
    return [*entries, {"step": 10 * len(losses), "train_runtime": 3.0}]


def test_the_mean_is_over_the_seeds():
    assert FAST.mean == (4.0, 1.0, 0.5, 0.25)


@pytest.mark.parametrize(
    ("loss", "steps"),
    [(4.0, 100.0), (9.0, 100.0), (3.5, 150.0), (3.0, 200.0), (2.25, 250.0), (1.0, 400.0), (0.9, None)],
)
def test_steps_to_reach_a_loss_are_linear_between_the_entries(loss, steps):
    assert SLOW.steps_to_reach(loss) == steps


def test_the_first_time_counts_when_a_loss_rises_again():
    assert Curve("a", (1, 2, 3, 4), ((2.0, 1.0, 2.0, 0.5),)).steps_to_reach(1.5) == 1.5


def test_speed_ups_are_steps_of_the_first_over_ones_own():
    # 250 steps against 100 + 100 * (4 - 2.25) / 3.
    assert speed_ups([SLOW, FAST], 2.25) == {"default": 1.0, "enhanced": pytest.approx(250 / (100 + 175 / 3))}
    assert speed_ups([SLOW, FAST], 1.0) == {"default": 1.0, "enhanced": 2.0}
    assert speed_ups([FAST, SLOW], 1.0) == {"enhanced": 1.0, "default": 0.5}
    assert speed_ups([SLOW, FAST], 0.5) == {"default": None, "enhanced": None}
    assert speed_ups([FAST, SLOW], 0.5) == {"enhanced": 1.0, "default": None}
    assert common_loss([SLOW, FAST]) == 1.0


def test_the_table_shows_what_was_never_reached():
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in curves_table([FAST, SLOW], 0.5).splitlines()
    ]
    assert lines[0] == ["run", "seeds", "first", "last", "lowest", "steps to 0.5", "times faster than enhanced"]
    assert lines[2:] == [
        ["enhanced", "2", "4", "0.25", "0.25", "300", "1.00"],
        ["default", "1", "4", "1", "1", "never", "-"],
    ]


def test_curves_come_from_states_summaries_and_folders(tmp_path):
    state = write(tmp_path / "a" / "trainer_state.json", {"log_history": log([2.0, 1.0], "loss")})
    summary = write(tmp_path / "b" / "training_summary.json", {"steps": 20, "log": log([3.0, 2.5], "loss")})
    assert read_curves({"a": state, "b": summary}) == [
        Curve("a", (10, 20), ((2.0, 1.0),)),
        Curve("b", (10, 20), ((3.0, 2.5),)),
    ]
    assert read_curves({"x": tmp_path / "a"}) == [Curve("x", (10, 20), ((2.0, 1.0),))]
    # In a run's folder, the checkpoint that came furthest; a summary has the end of the log only.
    for step in (20, 100):
        losses = [1.0] * (step // 10)
        write(tmp_path / "b" / f"checkpoint-{step}" / "trainer_state.json", {"log_history": log(losses, "loss")})
    (curve,) = read_curves({"b": tmp_path / "b"})
    assert curve.steps[-1] == 100
    other = write(tmp_path / "c" / "trainer_state.json", {"log_history": log([2.0, 1.5], "eval_loss")})
    assert read_curves({"c": other}, "eval_loss") == [Curve("c", (10, 20), ((2.0, 1.5),))]
    with pytest.raises(ValueError, match="has no 'eval_los' in its log; did you mean 'eval_loss'"):
        read_curves({"c": other}, "eval_los")
    for place, message in (("nowhere", "is no file, and no folder with"), (__file__, "has no training log")):
        with pytest.raises(ValueError, match=message):
            read_curves({"a": place})


def run(folder, losses):
    return write(folder / "trainer_state.json", {"log_history": log(losses, "loss")})


def test_runs_that_are_given_one_name_are_seeds_of_one_curve(tmp_path):
    first, second = run(tmp_path / "1", [4.0, 3.0]), run(tmp_path / "2", [2.0, 2.0])
    other = run(tmp_path / "3", [2.0, 1.0])
    assert read_curves({"icae": [first, second], "3": other}) == [
        Curve("icae", (10, 20), ((4.0, 3.0), (2.0, 2.0))),
        Curve("3", (10, 20), ((2.0, 1.0),)),
    ]
    longer = run(tmp_path / "4", [2.0, 2.0, 1.0])
    with pytest.raises(ValueError, match="the seeds of 'icae' were logged at different steps"):
        read_curves({"icae": [first, longer]})


@pytest.mark.slow
def test_the_picture_has_every_run_its_range_and_where_it_reaches_the_loss(tmp_path, monkeypatch):
    saved = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *a, **k: saved.append(figure) or save(figure, *a, **k))
    path = plot_curves([SLOW, FAST], "reconstruction_loss", tmp_path / "new" / "curves.png", 1.0)
    assert path.read_bytes().startswith(b"\x89PNG")
    axes = saved[0].axes[0]
    lines = {line.get_label(): line for line in axes.lines}
    for curve in (SLOW, FAST):
        assert tuple(lines[curve.name].get_xdata()) == curve.steps
        assert tuple(lines[curve.name].get_ydata()) == curve.mean
    marks = [(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.lines if len(line.get_xdata()) == 1]
    assert marks == [(400.0, 1.0), (200.0, 1.0)]
    # Only the run with several seeds has a range: 3 to 5 at its first step.
    (shade,) = axes.collections
    first = [y for x, y in shade.get_paths()[0].vertices if x == 100]
    assert (min(first), max(first)) == (3.0, 5.0)
    assert axes.get_yscale() == "log"
    plot_curves([SLOW], "loss", path, 0.5)
    assert saved[1].axes[0].get_yscale() == "linear"
