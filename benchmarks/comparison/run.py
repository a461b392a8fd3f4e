# SPDX-License-Identifier: Apache-2.0
"""Trains, asks and times what systems.yaml names, one job after another, and writes the results and the page.

    python -m benchmarks.comparison.run --data DATA --output OUT

Everything runs from a copy of the last commit, which is installed into OUT first. A second start goes on with what the
first one left, whenever it was stopped; OUT/state.json has a line for each job.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
_FROZEN = "COMPARISON_COMMIT"
_RECIPE = "smollm2/comparison"
_PEER_TASKS = ("question_answering", "summarisation")
_SHARED = ["smollm2/data.yaml", f"{_RECIPE}/budget.yaml"]


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--data", required=True, metavar="FOLDER", help="folder with the data files")
    add("--output", required=True, metavar="FOLDER", help="where everything goes")
    add("--base", metavar="FOLDER", help="the base's folder (default: fetched)")
    add("--reader", metavar="FOLDER", help="adapter of the full-text reader (default: the base itself)")
    add(
        "--environments",
        metavar="FOLDER",
        help="has a virtual environment NAME for each requirements_NAME.txt",
    )
    add("--rounds", nargs="+", type=int, default=[1], metavar="N", help="of the table's systems (default: 1)")
    add("--seeds", nargs="+", type=int, default=[1], metavar="S", help="of the trainings (default: 1)")
    add("--only", nargs="+", default=[""], metavar="TEXT", help="jobs whose names start with one of these")
    add("--list", action="store_true", help="print the jobs and their states, and do nothing")
    add("--questions", type=int, metavar="N", help="most questions of a set, to try things out")
    add("--steps", type=int, metavar="N", help="steps of each training, to try things out")
    return parser


@dataclass
class Job:
    """One process, and how to tell that it is done.

    Args:
        name: parts with slashes between them.
        command: arguments, or a function that gives them when all earlier jobs are done.
        is_done: whether there is nothing left to do.
        python: the interpreter; this one when `None`.
    """

    name: str
    command: Sequence[str] | Callable[[], Sequence[str]]
    is_done: Callable[[], bool]
    python: Path | None = None
    facts: Callable[[], Mapping[str, Any]] = field(default=dict)


class Comparison:
    """The jobs of a comparison, in the order that they are done in.

    Args:
        arguments: the command line.
        table: `systems.yaml`.
    """

    def __init__(self, arguments: argparse.Namespace, table: Mapping[str, Any]):
        self.arguments, self.table = arguments, table
        self.folder = Path(arguments.output).resolve()
        self.data = Path(arguments.data).resolve()
        self.questions = self.folder / "questions"
        # Another reader answers anew; what was trained stays.
        self.reader_name = Path(arguments.reader).name if arguments.reader else "base"
        self.peers = self.folder / f"read_by_{self.reader_name}"

    @property
    def base(self) -> Path:
        """Folder of the base."""
        from context_compressors import pretrained_base

        return pretrained_base(self.arguments.base or self.table["base"])

    @property
    def reader(self) -> Path:
        """Folder of the reader as a plain language model."""
        return self.peers / "reader" if self.arguments.reader else self.base

    def jobs(self) -> Iterator[Job]:
        """All jobs of the rounds and seeds that are asked for."""
        done = self.questions / "budget.json"
        yield Job("questions", self._own("write_questions"), done.is_file)
        if self.arguments.reader:
            done = self.reader / "tokenizer.json"
            yield Job("reader", self._own("merge_reader"), done.is_file)
        names = [
            name for name, entry in self.table["family"].items() if entry.get("round", 1) in self.arguments.rounds
        ]
        for seed in self.arguments.seeds:
            for name in names:
                yield from self._family(name, seed)
        yield from self._peers()

    def _own(self, function: str) -> list[str]:
        """A function of this file in a process of its own."""
        code = f"from benchmarks.comparison import run; run.{function}(run.Comparison.from_command_line())"
        return ["-c", code, *sys.argv[1:]]

    @classmethod
    def from_command_line(cls) -> Comparison:
        """The comparison that this process's arguments name."""
        return cls(build_parser().parse_args(), read_table())

    # --- the family ---

    def run_folder(self, name: str, seed: int) -> Path:
        """Where a system's checkpoint and answers are."""
        return self.folder / "family" / name / f"seed_{seed}"

    def _family(self, name: str, seed: int) -> Iterator[Job]:
        rates = self.table["budget"]["learning_rates"]
        first = self.run_folder(name, self.arguments.seeds[0])
        trials = {rate: first / f"trial_{rate:g}" for rate in rates}
        if seed == self.arguments.seeds[0]:
            for rate, folder in trials.items():
                yield self._training(f"{name}/seed_{seed}/trial_{rate:g}", folder, name, seed, lambda rate=rate: rate)
        folder = self.run_folder(name, seed)
        yield self._training(f"{name}/seed_{seed}/run", folder / "run", name, seed, lambda: best_rate(trials))
        for task in dict.fromkeys(entry["task"] for entry in self.table["sets"].values()):
            yield self._evaluation(name, seed, task)
        timed = [f"{self.questions / 'squad.jsonl'}#{self._most(self.table['timed_questions'])}"]
        checkpoint = ["--checkpoint", str(folder / "run")]
        yield self._asking(f"{name}/seed_{seed}/times", name, folder / "times.jsonl", timed, checkpoint)

    def _training(self, name: str, folder: Path, system: str, seed: int, rate: Callable[[], float]) -> Job:
        is_trial = "trial" in name

        def command() -> list[str]:
            budget = json.loads((self.questions / "budget.json").read_text(encoding="utf-8"))
            steps = budget["trial" if is_trial else "run"]["steps"]
            recipes = [*_SHARED, *self.recipe_of(system), "smollm2/cpu.yaml"]
            # By its name the checkpoint is light; with a folder it holds all weights.
            options = {
                "base": self.arguments.base or self.table["base"],
                "data_dir": self.data,
                "output_dir": folder,
                "seed": seed,
            }
            options |= {"max_steps": steps, "learning_rate": rate(), "resume_from_checkpoint": "latest"}
            if is_trial:
                chosen_by = self.table["budget"]
                options |= {"eval_sources": json.dumps(chosen_by["choosing"]), "eval_strategy": "steps"}
                options |= {"num_eval_examples": chosen_by["choosing_examples"], "eval_steps": steps}
            given = [part for option, value in options.items() for part in (f"--{option}", str(value))]
            return ["-m", "context_compressors.cli", "train", *recipes, *given, "--disable_tqdm", "true"]

        return Job(name, command, lambda: bool(summary(folder)), facts=lambda: summary(folder))

    def recipe_of(self, system: str) -> list[str]:
        """Recipe files of a system of the family, the last with its changes to the method's configuration."""
        entry = self.table["family"][system]
        recipe = [f"{_RECIPE}/{entry.get('recipe', system)}.yaml"]
        if "changes" in entry:
            file = self.folder / "recipes" / f"{system}.yaml"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(yaml.safe_dump({"method_config": entry["changes"]}), encoding="utf-8")
            recipe.append(str(file))
        return recipe

    def _evaluation(self, name: str, seed: int, task: str) -> Job:
        folder = self.run_folder(name, seed)
        groups: dict[str, list[str]] = {"in": [], "out": []}
        for title, entry in self.table["sets"].items():
            if entry["task"] == task and entry.get("trained", True):
                groups[entry["domain"]].append(f"{title}={self.questions / title}.parquet")

        def command() -> list[str]:
            given = ["--max-new-tokens", str(self.table["max_new_tokens"][task]), "--tasks", task, "--ratios-only"]
            given += [
                part
                for option, sources in zip(("--data", "--out-of-domain"), groups.values(), strict=True)
                for part in ([option, *sources] if sources else [])
            ]
            given += ["--output", str(folder / f"{task}.json"), "--keep-answers", str(folder / f"{task}.jsonl")]
            given += ["--base-model", str(self.base), "--device", "cpu", "--resume"]
            return ["-m", "context_compressors.cli", "evaluate", str(folder / "run"), *given]

        num_sets = sum(map(len, groups.values()))
        return Job(f"{name}/seed_{seed}/{task}", command, lambda: num_scored(folder / f"{task}.json") == num_sets)

    # --- what people would use instead ---

    def _peers(self) -> Iterator[Job]:
        for name, entry in self.table["peers"].items():
            number, tasks = "questions" if entry.get("all") else "peers", entry.get("tasks", _PEER_TASKS)
            sources = [
                f"{self.questions / title}.jsonl#{self._most(of_set[number])}"
                for title, of_set in self.table["sets"].items()
                if of_set["task"] in tasks
            ]
            yield self._asking(f"peers/{name}", name, self.peers / f"{name}.jsonl", sources, entry=entry)
        done = self.peers / "restored.json"
        sources = [
            f"{title}={self.questions / title}.parquet"
            for title, entry in self.table["sets"].items()
            if entry["task"] == "reconstruction"
        ]

        def command() -> list[str]:
            given = ["--prompt-format", "chat", "--prompts", "chat", "--tasks", "reconstruction", "--data", *sources]
            given += ["--output", str(done), "--keep-answers", str(done) + "l", "--device", "cpu", "--resume"]
            given += ["--dtype", "bfloat16"]
            return ["-m", "context_compressors.cli", "evaluate", str(self.reader), *given]

        yield Job("peers/restored", command, lambda: num_scored(done) == len(sources))

    def _asking(
        self,
        name: str,
        system: str,
        output: Path,
        sources: Sequence[str],
        options: Sequence[str] = (),
        entry: Mapping[str, Any] | None = None,
    ) -> Job:
        entry = entry or {}
        ratios = entry.get("ratios", self.table["ratios"])
        python = None
        if environment := entry.get("environment"):
            python = Path(self.arguments.environments or "environments").resolve() / environment / "bin" / "python"

        def command() -> list[str]:
            given = ["--system", system, "--base", str(self.base), "--ratios", *map(str, ratios)]
            given += [*(options or ["--reader", str(self.reader)]), "--output", str(output), "--questions", *sources]
            return [str(HERE / "peers.py"), *given]

        def is_done() -> bool:
            # The questions are not there yet when jobs are only listed.
            wanted = sum(num_lines(*source.split("#")) for source in sources)
            return wanted > 0 and num_lines(output) == wanted * len(ratios)

        return Job(name, command, is_done, python)

    def _most(self, number: int) -> int:
        return min(number, self.arguments.questions or number)


def read_table() -> dict[str, Any]:
    """`systems.yaml`."""
    return yaml.safe_load((HERE / "systems.yaml").read_text(encoding="utf-8"))


def write_questions(comparison: Comparison) -> None:
    """The job `questions`: all sets, and the steps that the budget comes to."""
    from transformers import AutoTokenizer

    from benchmarks.comparison.questions import counted, steps_for, write_sets

    tokenizer, table = AutoTokenizer.from_pretrained(comparison.base), comparison.table
    write_sets(table, comparison.data, tokenizer, comparison.questions, comparison.arguments.questions)
    # Which method reads them makes no difference to the examples.
    recipe = [*_SHARED, *comparison.recipe_of(next(iter(table["family"])))]
    where, steps = (recipe, comparison.data, tokenizer), comparison.arguments.steps
    budget = {
        kind: counted(steps, *where) if steps else steps_for(table["budget"][name], *where)
        for kind, name in (("trial", "trial_tokens"), ("run", "tokens"))
    }
    write_json(budget, comparison.questions / "budget.json")


def merge_reader(comparison: Comparison) -> None:
    """The job `reader`: the adapter in the base, as a plain language model for all environments."""
    from transformers import AutoTokenizer

    from context_compressors.cli.loading import load_model

    reader = load_model(comparison.arguments.reader, base_model=str(comparison.base), dtype="bfloat16", device="cpu")
    reader.save_pretrained(comparison.reader)
    AutoTokenizer.from_pretrained(comparison.base).save_pretrained(comparison.reader)


def write_json(content: Mapping[str, Any], path: Path) -> None:
    """Write a file at once, so that a stop leaves no half of it."""
    from context_compressors.reporting.result_files import write_json as write

    write(content, path)


def best_rate(trials: Mapping[float, Path]) -> float:
    """The learning rate whose trial has the lowest loss on the choosing part."""
    return min(trials, key=lambda rate: summary(trials[rate])["eval_loss"])


def summary(folder: Path) -> dict[str, Any]:
    """Steps, tokens, hours and losses of a training; none as long as it is not done."""
    try:
        content = json.loads((folder / "training_summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    found = {name: content[name] for name in ("steps", "input_tokens", "context_tokens", "hours")}
    for entry in content["log"]:
        found |= {name: entry[name] for name in ("loss", "eval_loss") if name in entry}
    return found


def num_scored(path: Path) -> int:
    """Data sets in a report of an evaluation."""
    if not path.is_file():
        return 0
    return len({row["dataset"] for row in json.loads(path.read_text(encoding="utf-8"))["rows"]})


def num_lines(path: str | Path, most: str | None = None) -> int:
    """Whole lines of a file, or of its beginning."""
    number = Path(path).read_bytes().count(b"\n") if Path(path).is_file() else 0
    return min(number, int(most)) if most else number


def freeze(folder: Path) -> dict[str, str]:
    """Install the last commit into a folder, once; returns the variables of a process that runs from there."""
    stamp = folder / "commit.txt"
    if not stamp.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as place:
            archive = Path(place, "tree.tar")
            subprocess.run(["git", "-C", ROOT, "archive", "-o", archive, "HEAD"], check=True)
            with tarfile.open(archive) as tree:
                tree.extractall(Path(place, "tree"), filter="data")
            install = ["install", "--quiet", "--no-deps", "--no-build-isolation", "--upgrade", "--target", folder]
            subprocess.run([sys.executable, "-m", "pip", *install, Path(place, "tree")], check=True)
            subprocess.run(["cp", "-r", Path(place, "tree", "benchmarks"), folder], check=True)
        commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
        stamp.write_text(commit.stdout, encoding="utf-8")
    return {**os.environ, "PYTHONPATH": str(folder), _FROZEN: stamp.read_text(encoding="utf-8").strip()}


def do(job: Job, folder: Path) -> int:
    """Run a job to its end, its output in a file of its own; returns its exit status."""
    command = job.command() if callable(job.command) else job.command
    log = folder / "logs" / f"{job.name.replace('/', '.')}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    # An environment of its own finds nothing of this package's.
    hidden = {"PYTHONPATH": ""} if job.python else {}
    with log.open("a", encoding="utf-8") as output:
        arguments = [job.python or sys.executable, "-P", *command]
        options: dict[str, Any] = {"stdout": output, "stderr": subprocess.STDOUT, "close_fds": False}
        return subprocess.run(arguments, cwd=folder, env={**os.environ, **hidden}, **options).returncode


def main(argv: Sequence[str] | None = None) -> int:
    """Do all jobs that are not done; returns the exit status, 1 where a job failed."""
    arguments = build_parser().parse_args(argv)
    folder = Path(arguments.output).resolve()
    if _FROZEN not in os.environ:
        variables = freeze(folder / "code")
        absolute = ["--data", str(Path(arguments.data).resolve()), "--output", str(folder)]
        for name in ("base", "reader", "environments"):
            if getattr(arguments, name) is not None:
                absolute += [f"--{name}", str(Path(getattr(arguments, name)).resolve())]
        given = [*(sys.argv[1:] if argv is None else argv), *absolute]
        command = [sys.executable, "-P", "-m", "benchmarks.comparison.run", *given]
        return subprocess.run(command, env=variables, cwd=folder).returncode
    comparison = Comparison(arguments, read_table())
    if not arguments.list:
        take_turn(folder)
    state_file = folder / "state.json"
    states = json.loads(state_file.read_text(encoding="utf-8")) if state_file.is_file() else {}
    has_failed = False
    for job in comparison.jobs():
        if not job.name.startswith(("questions", "reader", *arguments.only)):
            continue
        line = states.setdefault(job.name, {"state": "waits", "starts": 0, "seconds": 0.0})
        if job.is_done():
            line |= {"state": "done", **job.facts()}
        if arguments.list or line["state"] == "done":
            print(job.name, json.dumps(line), flush=True)
            continue
        line |= {"state": "runs", "starts": line["starts"] + 1, "commit": os.environ[_FROZEN]}
        write_states(states, state_file)
        start = time.time()
        try:
            status: Any = do(job, folder)
        except (OSError, ValueError, KeyError) as error:
            # Such as a trial that is missing, or an environment; the jobs behind it may do without.
            status = repr(error)
        line["seconds"] = round(line["seconds"] + time.time() - start, 1)
        is_done = status == 0 and job.is_done()
        line |= {"state": "done", **job.facts()} if is_done else {"state": f"failed with {status}"}
        has_failed |= not is_done
        write_states(states, state_file)
        print(job.name, json.dumps(line), flush=True)
    if not arguments.list:
        from benchmarks.comparison import page, results

        page.write(results.gather(comparison, states), folder / "page")
    return int(has_failed)


def take_turn(folder: Path) -> None:
    """Refuse to run beside another run in the same folder, or beside a job that a killed one left behind.

    Raises:
        SystemExit: there is one.
    """
    # Jobs inherit the open file, and with it the lock.
    lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR)
    os.set_inheritable(lock, True)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise SystemExit(f"another run, or a job of one that was killed, still works in {folder}") from error


def write_states(states: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """One line for each job."""
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(line)}" for name, line in states.items())
    draft = path.with_suffix(".part")
    draft.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    draft.replace(path)


if __name__ == "__main__":
    raise SystemExit(main())
