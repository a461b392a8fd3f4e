# SPDX-License-Identifier: Apache-2.0
"""Trains, asks and times what systems.yaml names, one job after another, and writes the results and the page.

    python -m benchmarks.comparison.run --data DATA --output OUT

Everything runs from a copy of the last commit, which is installed into OUT first. A second start goes on with what the
first one left, whenever it was stopped; OUT/state.json has a line for each job, OUT/logs what it writes, and OUT/page
what is known when a system is done.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
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
    add("--size", default="small", choices=("small", "full"), help="of budget and sets (default: small)")
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
        facts: what its line in the states says of it when it is done.
        is_last: whether it is the last one of a system, behind which the page is written.
    """

    name: str
    command: Sequence[str] | Callable[[], Sequence[str]]
    is_done: Callable[[], bool]
    python: Path | None = None
    facts: Callable[[], Mapping[str, Any]] = field(default=dict)
    is_last: bool = False


class Comparison:
    """The jobs of a comparison, in the order that they are done in.

    Args:
        arguments: the command line.
        table: `systems.yaml` at one of its sizes, see `read_table`.
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

    @property
    def start(self) -> str | Path:
        """What the family is trained from: the reader, as what all others are read by, or by its name the base."""
        # Of a base by its name a checkpoint is light; of a folder it holds all weights.
        return self.reader if self.arguments.reader else self.arguments.base or self.table["base"]

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
        peers = self.table["peers"]
        for name in (name for name in peers if peers[name].get("all")):
            yield self._peer(name)
        # What takes minutes stands between what takes longer, so that a run that is not at its end has some of both.
        others = [name for name in peers if not peers[name].get("all")]
        family = [(name, seed) for seed in self.arguments.seeds for name in names if self._has_seed(name, seed)]
        for of_family, peer in zip_longest(family, others):
            if of_family is not None:
                yield from self._family(*of_family)
            if peer is not None:
                yield self._peer(peer)
        yield self._restored()

    def _has_seed(self, name: str, seed: int) -> bool:
        return self.table["family"][name].get("trains", True) or seed == self.arguments.seeds[0]

    def _own(self, function: str, *arguments: Any) -> list[str]:
        """A function of this file in a process of its own."""
        given = ", ".join(["run.Comparison.from_command_line()", *map(repr, arguments)])
        return ["-c", f"from benchmarks.comparison import run; run.{function}({given})", *sys.argv[1:]]

    @classmethod
    def from_command_line(cls) -> Comparison:
        """The comparison that this process's arguments name."""
        arguments = build_parser().parse_args()
        return cls(arguments, read_table(arguments.size))

    # --- the family ---

    def run_folder(self, name: str, seed: int) -> Path:
        """Where a system's checkpoint and answers are."""
        return self.folder / "family" / name / f"seed_{seed}"

    def trials(self, name: str) -> dict[float, Path]:
        """Where the trials of a system's learning rates are; they are those of the first seed."""
        first = self.run_folder(name, self.arguments.seeds[0])
        return {rate: first / f"trial_{rate:g}" for rate in self.table["budget"]["learning_rates"]}

    def _family(self, name: str, seed: int) -> Iterator[Job]:
        folder, title = self.run_folder(name, seed), f"{name}/seed_{seed}"
        if self.table["family"][name].get("trains", True):
            for rate, of_trial in self.trials(name).items() if seed == self.arguments.seeds[0] else ():
                done = of_trial / "trial.json"
                command = self._own("train_trial", name, seed, rate)
                yield Job(f"{title}/trial_{rate:g}", command, done.is_file, facts=lambda done=done: read_json(done))
            done = folder / "run"
            command = self._own("train_run", name, seed)
            yield Job(f"{title}/run", command, lambda: bool(summary(done)), facts=lambda: summary(done))
        else:
            # Saved last.
            made = folder / "run" / "tokenizer_config.json"
            yield Job(f"{title}/made", self._own("make_untrained", name, str(folder / "run")), made.is_file)
        for task in dict.fromkeys(entry["task"] for entry in self.table["sets"].values()):
            yield self._evaluation(name, seed, task)
        timed = [f"{self.questions / 'squad.jsonl'}#{self._most(self.table['timed_questions'])}"]
        checkpoint = ["--checkpoint", str(folder / "run")]
        yield self._asking(f"{title}/times", name, folder / "times.jsonl", timed, checkpoint)

    def training_command(self, name: str, seed: int, rate: float, folder: Path, **options: Any) -> list[str]:
        """Recipes and fields of a system's training."""
        steps = read_json(self.questions / "budget.json")["run"]["steps"]
        recipes = [*_SHARED, *self.recipe_of(name), "smollm2/cpu.yaml"]
        options = {
            "base": self.start,
            "data_dir": self.data,
            "output_dir": folder,
            "seed": seed,
            "max_steps": steps,
            "learning_rate": rate,
            "max_context_tokens": self.table["context_tokens"][1],
            "resume_from_checkpoint": "latest",
            "disable_tqdm": "true",
            **options,
        }
        return [*recipes, *(part for option, value in options.items() for part in (f"--{option}", str(value)))]

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
            given += ["--batch-size", str(self.table["batch_size"]), "--device", "cpu", "--resume"]
            given += [] if self.arguments.reader else ["--base-model", str(self.base)]
            return ["-m", "context_compressors.cli", "evaluate", str(folder / "run"), *given]

        num_sets = sum(map(len, groups.values()))
        return Job(f"{name}/seed_{seed}/{task}", command, lambda: num_scored(folder / f"{task}.json") == num_sets)

    # --- what people would use instead ---

    def _peer(self, name: str) -> Job:
        entry = self.table["peers"][name]
        number, tasks = "questions" if entry.get("all") else "peers", entry.get("tasks", _PEER_TASKS)
        sources = [
            f"{self.questions / title}.jsonl#{self._most(of_set[number])}"
            for title, of_set in self.table["sets"].items()
            if of_set["task"] in tasks
        ]
        return self._asking(f"peers/{name}", name, self.peers / f"{name}.jsonl", sources, entry=entry)

    def _restored(self) -> Job:
        """The bounds of what is restored."""
        done = self.peers / "restored.json"
        sources = [
            f"{title}={self.questions / title}.parquet"
            for title, entry in self.table["sets"].items()
            if entry["task"] == "reconstruction"
        ]
        given = ["--prompt-format", "chat", "--prompts", "chat", "--tasks", "reconstruction", "--data", *sources]
        given += ["--output", str(done), "--keep-answers", str(done) + "l", "--device", "cpu", "--resume"]
        given += ["--dtype", "bfloat16"]

        def command() -> list[str]:
            return ["-m", "context_compressors.cli", "evaluate", str(self.reader), *given]

        return Job("peers/restored", command, lambda: num_scored(done) == len(sources), is_last=True)

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

        return Job(name, command, is_done, python, is_last=True)

    def _most(self, number: int) -> int:
        return min(number, self.arguments.questions or number)


def read_table(size: str = "small") -> dict[str, Any]:
    """`systems.yaml` at one of its sizes, whose fields stand beside the others.

    Sets have `questions` and `peers`, their numbers; those without questions at this size are left out.
    """
    table = yaml.safe_load((HERE / "systems.yaml").read_text(encoding="utf-8"))
    chosen = table.pop("sizes")[size]
    asked = chosen.pop("questions")
    sets = {
        title: {**entry, "questions": asked[title][0], "peers": asked[title][1]}
        for title, entry in table["sets"].items()
        if title in asked
    }
    return {**table, **chosen, "size": size, "sets": sets}


def write_questions(comparison: Comparison) -> None:
    """The job `questions`: all sets, and the steps that the budget comes to."""
    from transformers import AutoTokenizer

    from benchmarks.comparison.questions import counted, steps_for, write_sets

    tokenizer, table = AutoTokenizer.from_pretrained(comparison.base), comparison.table
    write_sets(table, comparison.data, tokenizer, comparison.questions, comparison.arguments.questions)
    # Which method reads them makes no difference to the examples.
    recipe = [*_SHARED, *comparison.recipe_of(next(iter(table["family"])))]
    longest = ["--max_context_tokens", str(table["context_tokens"][1])]
    where, steps = ([*recipe, *longest], comparison.data, tokenizer), comparison.arguments.steps
    found = counted(steps, *where) if steps else steps_for(table["training_tokens"], *where)
    budget = {"size": table["size"], "trial_steps": max(1, round(table["budget"]["trial_share"] * found["steps"]))}
    write_json({**budget, "run": found}, comparison.questions / "budget.json")


def merge_reader(comparison: Comparison) -> None:
    """The job `reader`: the adapter in the base, as a plain language model for all environments."""
    from transformers import AutoTokenizer

    from context_compressors.cli.loading import load_model
    from context_compressors.data.document_ids import TrainingDocuments

    reader = load_model(comparison.arguments.reader, base_model=str(comparison.base), dtype="bfloat16", device="cpu")
    reader.save_pretrained(comparison.reader)
    # What it has read goes with it.
    if documents := TrainingDocuments.of(comparison.arguments.reader):
        documents.save(comparison.reader)
    AutoTokenizer.from_pretrained(comparison.base).save_pretrained(comparison.reader)


def train_trial(comparison: Comparison, name: str, seed: int, rate: float) -> None:
    """A job `trial_RATE`: the beginning of a run, and its loss on the choosing part."""
    from transformers import TrainerCallback

    from context_compressors.training.arguments import parse_recipe
    from context_compressors.training.run_record import latest_checkpoint
    from context_compressors.training.train import build_trainer

    folder, table = comparison.trials(name)[rate], comparison.table
    steps = read_json(comparison.questions / "budget.json")["trial_steps"]
    options = {"eval_sources": json.dumps(table["budget"]["choosing"]), "eval_strategy": "steps", "eval_steps": steps}
    options |= {"num_eval_examples": table["choosing_examples"], "per_device_eval_batch_size": 2}
    trainer = build_trainer(*parse_recipe(comparison.training_command(name, seed, rate, folder, **options)))

    class Stop(TrainerCallback):
        """The schedules are those of the whole run, which stops here, and goes on from here."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_save |= state.global_step == steps
            control.should_training_stop |= state.global_step >= steps

    trainer.add_callback(Stop())
    trainer.train(resume_from_checkpoint=latest_checkpoint(str(folder)))
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    write_json({"steps": steps, "eval_loss": losses[-1]}, folder / "trial.json")


def train_run(comparison: Comparison, name: str, seed: int) -> None:
    """A job `run`: with the first seed the better trial's end, with others a run of its own at the same rate."""
    from context_compressors.training.run_record import latest_checkpoint
    from context_compressors.training.train import main as train

    folder, trials = comparison.run_folder(name, seed) / "run", comparison.trials(name)
    rate = best_rate(trials)
    if seed == comparison.arguments.seeds[0] and latest_checkpoint(str(folder)) is None:
        begun = Path(latest_checkpoint(str(trials[rate])) or "")
        # Renamed when it is whole, so that a stop leaves no half of it.
        shutil.copytree(begun, folder / "begun", dirs_exist_ok=True)
        (folder / "begun").rename(folder / begun.name)
    train(comparison.training_command(name, seed, rate, folder))
    # Each holds all weights and the optimizer's states.
    for done in (folder, *trials.values()):
        for checkpoint in done.glob("checkpoint-*"):
            shutil.rmtree(checkpoint)


def make_untrained(comparison: Comparison, name: str, folder: str) -> None:
    """A job `made`: a checkpoint of a method that trains nothing, on the reader."""
    from transformers import AutoTokenizer

    from context_compressors.modeling import model_class
    from context_compressors.training.fields import DataArguments
    from context_compressors.training.objectives.compression import record_prompts

    changes = comparison.table["family"][name].get("changes", {})
    ratios = comparison.table["ratios"]
    model = model_class(name).from_base(comparison.start, dtype="bfloat16", compression_ratios=ratios, **changes)
    tokenizer = AutoTokenizer.from_pretrained(comparison.base)
    record_prompts(model.config, tokenizer, DataArguments(prompts="chat", prompt_format="chat"))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_json(content: Mapping[str, Any], path: Path) -> None:
    """Write a file at once, so that a stop leaves no half of it."""
    from context_compressors.reporting.result_files import write_json as write

    write(content, path)


def read_json(path: Path) -> dict[str, Any]:
    """A file's content."""
    return json.loads(path.read_text(encoding="utf-8"))


def best_rate(trials: Mapping[float, Path]) -> float:
    """The learning rate whose trial has the lowest loss on the choosing part."""
    return min(trials, key=lambda rate: read_json(trials[rate] / "trial.json")["eval_loss"])


def summary(folder: Path) -> dict[str, Any]:
    """Steps, tokens, hours and the last loss of a training; none as long as it is not done."""
    try:
        content = read_json(folder / "training_summary.json")
    except (OSError, ValueError):
        return {}
    found = {name: content[name] for name in ("steps", "input_tokens", "context_tokens", "hours")}
    losses = [entry["loss"] for entry in content["log"] if "loss" in entry]
    return {**found, "loss": losses[-1] if losses else None}


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
    comparison = Comparison(arguments, read_table(arguments.size))
    if not arguments.list:
        take_turn(folder)
        check_size(comparison)
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
        if is_done and job.is_last:
            write_page(comparison, states)
    if not arguments.list:
        write_page(comparison, states)
    return int(has_failed)


def write_page(comparison: Comparison, states: Mapping[str, Mapping[str, Any]]) -> None:
    """The result file and the page of what has been answered so far."""
    from benchmarks.comparison import page, results

    page.write(results.gather(comparison, states), comparison.folder / "page")


def check_size(comparison: Comparison) -> None:
    """Refuse to go on with a folder of another size.

    Raises:
        SystemExit: its questions are those of another size.
    """
    file, size = comparison.questions / "budget.json", comparison.table["size"]
    if file.is_file() and (found := read_json(file)["size"]) != size:
        raise SystemExit(f"{comparison.folder} is of --size {found}, not of {size}: give another folder")


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
