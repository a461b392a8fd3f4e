# SPDX-License-Identifier: Apache-2.0
"""Training curves on made-up logs, with exact numbers."""

import json
import math

import pytest
from matplotlib.figure import Figure

from context_compressors import cli
from context_compressors.evaluation.curves import Curve, common_loss, read_curves, speed_ups, table
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
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table([FAST, SLOW], 0.5).splitlines()]
    assert lines[0] == ["run", "seeds", "first", "last", "lowest", "steps to 0.5", "times faster than enhanced"]
    assert lines[2:] == [
        ["enhanced", "2", "4", "0.25", "0.25", "300", "1.00"],
        ["default", "1", "4", "1", "1", "never", "-"],
    ]


def test_curves_come_from_states_summaries_and_folders(tmp_path):
    state = write(tmp_path / "a" / "trainer_state.json", {"log_history": log([2.0, 1.0], "loss")})
    summary = write(tmp_path / "b" / "training_summary.json", {"steps": 20, "log": log([3.0, 2.5], "loss")})
    assert read_curves([state]) == [Curve("a", (10, 20), ((2.0, 1.0),))]
    assert read_curves([f"name={summary}"]) == [Curve("name", (10, 20), ((3.0, 2.5),))]
    assert read_curves([f"x={tmp_path / 'a'}"]) == [Curve("x", (10, 20), ((2.0, 1.0),))]
    # In a run's folder, the checkpoint that came furthest; a summary has the end of the log only.
    for step in (20, 100):
        losses = [1.0] * (step // 10)
        write(tmp_path / "b" / f"checkpoint-{step}" / "trainer_state.json", {"log_history": log(losses, "loss")})
    (curve,) = read_curves([str(tmp_path / "b")])
    assert (curve.name, curve.steps[-1]) == ("b", 100)
    write(tmp_path / "b" / "checkpoint-best" / "trainer_state.json", {"log_history": log([1.0], "loss")})
    assert read_curves([str(tmp_path / "b")]) == [curve]
    other = write(tmp_path / "c" / "trainer_state.json", {"log_history": log([2.0, 1.5], "eval_loss")})
    assert read_curves([other], "eval_loss") == [Curve("c", (10, 20), ((2.0, 1.5),))]


@pytest.mark.parametrize("name", ["", "lr=5"])
def test_names_and_folders_may_hold_an_equals_sign(name, tmp_path):
    folder = tmp_path / "rate=3"
    run(folder, [2.0])
    expected = Curve(name or "rate=3", (10,), ((2.0,),))
    assert read_curves([f"{name}={folder}" if name else str(folder)]) == [expected]


def run(folder, losses):
    return write(folder / "trainer_state.json", {"log_history": log(losses, "loss")})


def test_runs_that_are_given_one_name_are_seeds_of_one_curve(tmp_path):
    first, second = run(tmp_path / "1", [4.0, 3.0]), run(tmp_path / "2", [2.0, 2.0])
    other = run(tmp_path / "3", [2.0, 1.0])
    assert read_curves([f"icae={first}", other, f"icae={second}"]) == [
        Curve("icae", (10, 20), ((4.0, 3.0), (2.0, 2.0))),
        Curve("3", (10, 20), ((2.0, 1.0),)),
    ]
    longer = run(tmp_path / "4", [2.0, 2.0, 1.0])
    with pytest.raises(ValueError, match="the seeds of 'icae' were logged at different steps"):
        read_curves([f"icae={first}", f"icae={longer}"])
    with pytest.raises(ValueError, match="two runs have the name '1': give names as NAME=SOURCE"):
        read_curves([first, first])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"log_history": log([1.0], "accuracy")},
            "no 'loss' in its log; allowed: accuracy, train_runtime",
        ),
        ({"log_history": log([1.0, math.nan], "loss")}, "has 'loss' nan at step 20"),
        ({"rows": []}, "has no training log: KeyError"),
        ([], "has no training log"),
    ],
)
def test_files_without_such_a_log_are_refused(tmp_path, content, message):
    with pytest.raises(ValueError, match=message):
        read_curves([write(tmp_path / "state.json", content)])


def test_a_place_without_a_log_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"is no file, and no folder with trainer_state.json or training_summary"):
        read_curves([str(tmp_path)])


@pytest.mark.parametrize(
    ("steps", "seeds", "message"),
    [
        ((), (), "has no values"),
        ((1, 2), (), "has no values"),
        ((2, 1), ((1.0, 1.0),), "must ascend"),
        ((1, 1), ((1.0, 1.0),), "must ascend"),
        ((1, 2), ((1.0, 1.0), (1.0,)), "has 2 steps, but 1 values"),
    ],
)
def test_impossible_curves_are_refused(steps, seeds, message):
    with pytest.raises(ValueError, match=message):
        Curve("a", steps, seeds)


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
    with pytest.raises(ValueError, match="nothing to draw"):
        plot_curves([], "loss", path, 0.5)


def test_command_draws_the_losses_of_two_runs_by_the_names_of_their_folders(tmp_path, capsys):
    for name, losses in (("slow", [4.0, 3.0]), ("fast", [3.0, 2.0])):
        write(tmp_path / name / "checkpoint-20" / "trainer_state.json", {"log_history": log(losses, "loss")})
    output = tmp_path / "curves.png"
    argv = ["curves", str(tmp_path / "slow"), str(tmp_path / "fast"), "--loss", "3", "--output", str(output)]
    assert cli.main(argv) == 0
    lines = [[cell.strip() for cell in line.split("|")] for line in capsys.readouterr().out.splitlines()]
    assert [(line[1], line[6]) for line in lines[2:4]] == [("slow", "20"), ("fast", "10")]
    assert output.is_file()
    assert cli.main([*argv[:-1], str(tmp_path / "new.png"), "--metric", "accuracy"]) == 1
    assert "has no 'accuracy' in its log" in capsys.readouterr().err
    for loss in ("nan", "inf"):
        assert cli.main([*argv[:-1], str(tmp_path / "new.png"), "--loss", loss]) == 1
        assert f"--loss must be a finite number, got {loss}" in capsys.readouterr().err
    assert not (tmp_path / "new.png").exists()
