# SPDX-License-Identifier: Apache-2.0
"""The queue of the comparison: which jobs there are, side by side, and a stop that loses nothing."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# A job writes when it begins and ends, and its own file last. `waits` are files that it waits for.
QUEUE = """
import sys
from benchmarks.comparison import run
from benchmarks.comparison.plan import Comparison, Job

CODE = '''
import os, pathlib, sys, time
name, status, *waits = sys.argv[1:]
with open("events", "a") as file:
    print(f"+{name} {os.getpid()}", file=file, flush=True)
    end = time.time() + 60
    while not all(map(os.path.exists, waits)) and time.time() < end:
        time.sleep(0.01)
    print(f"-{name}", file=file, flush=True)
status = int(status) if all(map(os.path.exists, waits)) else 9
print("nothing is left of", name)
status or name == "page" or pathlib.Path(name.replace("/", ".")).touch()
sys.exit(status)
'''

class Toy(Comparison):
    def job(self, name, *waits, status=0):
        done = (lambda: True) if name == "page" else (self.folder / name.replace("/", ".")).is_file
        return Job(name, lambda: ["-c", CODE, name, str(status), *waits], done)

    def stages(self):
        yield [[self.job("questions")]]
        # Neither of the first two ends before the other has begun.
        yield [
            [self.job("a/0"), self.job("a/1", "b.0"), self.job("a/2")],
            [self.job("b/0"), self.job("b/1", "a.0", status=3), self.job("b/2")],
            [self.job("c/1", "go")],
        ]

    def page_job(self):
        return self.job("page")

run.Comparison = Toy
raise SystemExit(run.main())
"""


def start(folder: Path, *options: str) -> subprocess.Popen:
    command = [sys.executable, "-c", QUEUE, "--data", str(folder), "--output", str(folder), *options]
    environment = {**os.environ, "COMPARISON_COMMIT": "of the test", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def events(folder: Path) -> list[str]:
    file = folder / "events"
    return [line.split()[0] for line in file.read_text().splitlines()] if file.is_file() else []


@pytest.mark.slow
def test_systems_are_done_side_by_side_and_what_a_stop_or_a_failure_left_is_done_by_the_next_start(tmp_path: Path):
    queue = start(tmp_path, "-n", "2")
    end = time.time() + 60
    while not {"+c/1", "-page"} <= set(events(tmp_path)) and time.time() < end:
        time.sleep(0.05)
    beside, text = start(tmp_path, "-n", "2"), "another run, or a job of one that was killed, still works"
    assert text in beside.communicate(timeout=60)[0]
    # To the queue alone: its job does not get the signal from the shell.
    queue.terminate()
    printed = queue.communicate(timeout=60)[0]
    assert queue.returncode == 128 + 15
    pids = dict(line.split() for line in (tmp_path / "events").read_text().splitlines() if line[0] == "+")
    assert not Path("/proc", pids["+c/1"]).exists()
    first = events(tmp_path)
    assert first[:2] == ["+questions", "-questions"]
    assert [event for event in first if "a" in event[:2]] == ["+a/0", "-a/0", "+a/1", "-a/1", "+a/2", "-a/2"]
    assert max(first.index("+a/0"), first.index("+b/0")) < min(first.index("-a/1"), first.index("-b/1"))
    assert {"b/1: failed with 3", "a/2: done"} <= {line.split(",")[0] for line in printed.splitlines()}
    assert any(
        line.startswith("b/1: failed with 3") and line.endswith("nothing is left of b/1")
        for line in printed.splitlines()
    )
    assert not {"+b/2", "-c/1"} & set(first)
    # Behind a, which is done.
    assert first.count("-page") == 1

    (tmp_path / "go").touch()
    again = start(tmp_path, "-n", "2")
    again.communicate(timeout=60)
    assert again.returncode == 1, "b/1 fails once more"
    assert sorted(events(tmp_path)[len(first) :]) == sorted(
        ["+b/1", "-b/1", "+c/1", "-c/1", "+page", "-page", "+page", "-page"]
    )


def states(systems) -> dict[str, bool]:
    return {job.name: job.is_done() for stage in systems.stages() for jobs in stage for job in jobs}


def test_seeds_and_rounds_add_jobs_and_what_an_earlier_run_answered_is_done(comparison, tmp_path: Path):
    systems = comparison(tmp_path)
    names = list(states(systems))
    assert names[0] == "questions"
    assert (
        names.index("peers/no_context")
        < names.index("mean_pooling/seed_1/run")
        < names.index("peers/full_context")
        < names.index("icae/seed_1/run")
    )
    assert [name for name in names if name.startswith(("kv_zip/", "ranked_key_values_int4/"))] == [
        "ranked_key_values_int4/seed_1/question_answering",
        *(f"kv_zip/seed_1/{job}" for job in ("made", "question_answering", "question_answering_at_16_32")),
        *(f"kv_zip/seed_1/{job}" for job in ("reconstruction", "reconstruction_at_16_32")),
    ]
    more = states(comparison(tmp_path, "--seeds", "1", "2", "3", "--rounds", "1", "2"))
    added = [name for name in more if name not in names]
    assert "compression_tokens_causal/seed_1/trial_0.0005" in added
    later = [name for name in more if "seed_3" in name]
    assert [name for name in later if name.startswith("icae/")] == [
        f"icae/seed_3/{job}" for job in ("run", "question_answering", "reconstruction")
    ]
    assert [name for name in later if name.startswith("ranked_key_values_fitted")] == [
        f"ranked_key_values_fitted{job}"
        for job in (
            *(f"/seed_3/{part}" for part in ("made", "question_answering", "question_answering_at_16_32")),
            *(f"/seed_3/{part}" for part in ("reconstruction", "reconstruction_at_16_32")),
            *(f"_int2/seed_3/{task}" for task in ("question_answering", "reconstruction")),
        )
    ]
    # What trains nothing has one seed, and the rates are those of the first.
    assert not [name for name in later if "trial" in name or name.startswith(("kv_zip", "snap_kv", "peers"))]
    assert list(more)[-len(later) :] == later

    # Files as they were before memories were rounded and systems had ratios of their own.
    sets = {title: entry["task"] for title, entry in systems.table["sets"].items()}
    systems.questions.mkdir()
    for title in sets:
        (systems.questions / f"{title}.jsonl").write_text("{}\n" * 2)
    folder = systems.run_folder("ranked_key_values", 1)
    for trial in systems.trials("ranked_key_values").values():
        trial.mkdir(parents=True)
        (trial / "trial.json").write_text(json.dumps({"steps": 1, "eval_loss": 1.0}))
    summary = {"steps": 1, "input_tokens": 1, "context_tokens": 1, "hours": 0.1, "log": [{"loss": 1.0}]}
    (folder / "run").mkdir()
    (folder / "run" / "training_summary.json").write_text(json.dumps(summary))
    for task in ("question_answering", "reconstruction"):
        rows = [{"dataset": title} for title, of_set in sets.items() if of_set == task]
        (folder / f"{task}.json").write_text(json.dumps({"rows": rows}))
    systems.peers.mkdir()
    (systems.peers / "cut.jsonl").write_text("{}\n" * 2 * 3 * 4)
    done = {name for name, is_done in states(systems).items() if is_done}
    jobs = ("trial_0.0005", "trial_0.0015", "run", "question_answering", "reconstruction")
    assert done == {"peers/cut", *(f"ranked_key_values/seed_1/{job}" for job in jobs)}
    # Half written.
    (folder / "run" / "training_summary.json").write_text(json.dumps(summary)[:40])
    (systems.peers / "cut.jsonl").write_text("{}\n" * 23 + "{")
    assert done - {name for name, is_done in states(systems).items() if is_done} == {
        "peers/cut",
        "ranked_key_values/seed_1/run",
    }


def test_what_is_published_is_not_done_again_unless_that_is_asked_for(
    script, comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(script("comparison.plan"), "PUBLISHED", tmp_path / "comparison.json")
    table = comparison(tmp_path).table
    rows = [
        {"system": name, "ratio": ratio, **of_set}
        for of_set in ({"set": "mean", "num_questions": 8}, {"set": "squad", "by_question": [[100.0]]})
        for name, ratios in (
            ("cut", (2, 4, 8)),
            ("snapkv", (2, 4)),
            ("mean_pooling", (2, 4, 8)),
            ("snap_kv", (2, 4, 8)),
        )
        for ratio in ratios
    ]
    content = {"settings": {**table, "budget": {}}, "reader": "base", "rows": rows}
    (tmp_path / "comparison.json").write_text(json.dumps(content))

    def systems(*options: str) -> set[str]:
        jobs = [job.name for stage in comparison(tmp_path, *options).stages() for jobs in stage for job in jobs]
        return {name.removeprefix("peers/").partition("/")[0] for name in jobs}

    everything = systems("--again")
    # Memories of mean pooling are to be rounded, too: its checkpoint is needed.
    assert everything - systems() == {"cut", "snap_kv"}
    assert {"cut", "snapkv", "mean_pooling", "mean_pooling_int4", "snap_kv"} <= everything
    # Rows of fewer questions are done again, and so are those that cannot be paired.
    fewer = [row | {"num_questions": 6} if row["set"] == "mean" and row["system"] == "cut" else row for row in rows]
    (tmp_path / "comparison.json").write_text(json.dumps(content | {"rows": fewer}))
    assert everything - systems() == {"snap_kv"}
    content["rows"] = [row for row in rows if row["set"] == "mean" or row["system"] != "cut"]
    (tmp_path / "comparison.json").write_text(json.dumps(content))
    assert everything - systems() == {"snap_kv"}
    # Of more seeds there is nothing, and another reader's answers are others.
    assert systems("--seeds", "1", "2") == everything
    assert systems("--reader", "other") - {"reader"} == everything
