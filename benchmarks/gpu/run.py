# SPDX-License-Identifier: Apache-2.0
"""Everything that needs a GPU, by deadlines: correctness, the family's checkpoints, their answers, and times.

    python -m benchmarks.gpu.run --data DATA --questions QUESTIONS --output OUT

Times are measured alone, then some trainings run side by side, and each checkpoint answers once it is there. A command
that fails or is late costs itself and what needs it, and a second start does what is not done yet. `--pack FOLDER`
writes what a machine without a network needs, as archives of at most 60 MiB; `--minutes` scales the deadlines.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.tools import positive_float, positive_int, tells_errors
from context_compressors.reporting.environment import environment
from context_compressors.reporting.result_files import write_json

ROOT = Path(__file__).parents[2]
FAMILY = ("icae", "comprexit", "gmsa", "five_hundred_x", "compression_tokens", "mean_pooling_residual")
# A training that goes on from a checkpoint with twice the steps.
CONTINUED = "continued"
MINUTES = 13.0
# Seconds of 13 minutes when the trainings and the answers end at the latest.
TRAINED, ANSWERED = 560.0, 680.0
MIB = 2**20
_MOST_BYTES = 60 * MIB
_CLI = ("-m", "context_compressors.cli")


@dataclass(frozen=True, eq=False)
class Job:
    """One command.

    Args:
        name: PART/NAME, of its log file and in `status.json`.
        words: arguments of Python.
        until: seconds of 13 minutes when it ends at the latest.
        after: the job whose success it needs.
        alone: runs with nothing beside it.
    """

    name: str
    words: list[str]
    until: float
    after: str | None = None
    alone: bool = False

    @property
    def part(self) -> str:
        """The part that it belongs to."""
        return self.name.partition("/")[0]


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, metavar="FOLDER", help="folder with the training data's files")
    add("--questions", nargs="*", default=[], metavar="NAME=FILE", help="held-out sets for `evaluate`")
    add("--output", type=Path, metavar="FOLDER", help="where checkpoints, answers and figures go")
    add("--base", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="a base model's name or folder")
    add("--methods", nargs="+", default=list(FAMILY), metavar="NAME", help="default: the family's six")
    add("--recipes", nargs="+", default=["smollm2/data.yaml", "smollm2/family.yaml"], metavar="FILE")
    add("--reader", type=Path, metavar="FOLDER", help="PEFT adapter of the base that decoders start as")
    add("--continued", type=Path, metavar="CHECKPOINT", help="goes on with twice the steps of the others")
    add("--steps", type=positive_int, default=320, metavar="N", help="of each training (default: 320)")
    add("--at-once", type=positive_int, default=9, metavar="N", help="trainings side by side (default: 9)")
    add("--windows", metavar="NAME=FILE#N", help="texts to restore windows of")
    add("--minutes", type=positive_float, default=MINUTES, metavar="M", help=f"for all parts (default: {MINUTES:g})")
    add("--parts", nargs="+", metavar="NAME", help="only these parts")
    add("--device", default="cuda", help="default: cuda")
    add("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="fields of the recipes, such as dtype=float32")
    add("--pack", type=Path, metavar="FOLDER", help="only write the archives")
    add("--wheels", type=Path, metavar="FOLDER", help="wheels to put into the archives")
    return parser


def plan(arguments: argparse.Namespace) -> list[Job]:
    """The jobs in the order in which they start."""
    output, device = arguments.output, ["--device", arguments.device]

    def training(method: str) -> Job:
        recipes = [*arguments.recipes, f"smollm2/comparison/{method}.yaml"]
        places = ["--data_dir", str(arguments.data), "--output_dir", str(output / "runs" / method)]
        how = ["--base", arguments.base, "--max_steps", str(arguments.steps), "--resume_from_checkpoint", "latest"]
        if method == CONTINUED:
            recipes = recipes[:-1]
            how[1:2] = ["null", "--method_config", "null", "--checkpoint", str(arguments.continued.resolve())]
            how[how.index("--max_steps") + 1] = str(2 * arguments.steps)
        elif arguments.reader is not None:
            recipes.append("smollm2/from_reader.yaml")
            how += ["--adapter", str(arguments.reader.resolve())]
        words = [*_CLI, "train", *recipes, *places, *how, *(f"--{pair}" for pair in arguments.set)]
        return Job(f"training/{method}", words, TRAINED)

    def answering(method: str, name: str, *words: str) -> Job:
        files = (("--output", f"{name}.json"), ("--keep-answers", f"{name}.jsonl"))
        written = [word for option, file in files for word in (option, str(output / "answers" / file))]
        how = ["--dtype", "float32", "--merge-adapters", "--resume", *device]
        command = [*_CLI, "evaluate", str(output / "runs" / method), *words, *how, *written]
        return Job(f"answers/{name}", command, ANSWERED, after=f"training/{method}")

    def questions(sets: Sequence[str]) -> list[str]:
        return ["--data", *sets, "--tasks", "question_answering", "--batch-size", "128", "--max-new-tokens", "24"]

    def timing(part: str, name: str, until: float, *words: str) -> Job:
        written = ["--output", str(output / "times" / f"{name}.json")]
        return Job(
            f"{part}/{name}", ["-m", f"benchmarks.{name}.measure", *device, *words, *written], until, alone=True
        )

    llama = ("--shape", "llama-3.2-1b", "--dtype", "bfloat16", "--lengths", "2048", "--batch-size", "8")
    llama = (*llama, "--methods", "mean_pooling", "comprexit", "gmsa")
    latency = ("--setting", "table7", "--batch-sizes", "8", "--repeats", "2", "--static-cache", "--compile")
    steps = ["-m", "benchmarks.gpu.correctness", "--base", arguments.base, *device]
    tests = ["-m", "pytest", "-q", "-n0", "tests/modeling/test_optimal_transport.py", "-k", "a_gpu_gives"]
    methods = list(arguments.methods)
    if arguments.continued is not None:
        methods.insert(0, CONTINUED)
    jobs = [
        Job("kernels/tests", tests, 60, alone=True),
        timing("times", "sinkhorn", 90, "--windows", "1024", "16384", "--receivers", "32"),
        timing("times", "compression_overhead", 120, *llama),
        *(training(method) for method in methods),
    ]
    for method in methods if arguments.questions else ():
        jobs.append(answering(method, method, *questions(arguments.questions), "--config", "{ratios_only: true}"))
    for pair in arguments.questions if arguments.reader is not None else ():
        # The texts that memories are compared with, read by one reader, once for all methods.
        texts = ["--teacher", str(arguments.reader.resolve()), "--alternatives", "cut", "bm25"]
        jobs.append(answering(arguments.methods[0], f"texts_{pair.partition('=')[0]}", *questions([pair]), *texts))
    if arguments.windows is not None:
        restored = ["--data", f"{arguments.windows}", "--tasks", "reconstruction", "--config", "{ratios_only: true}"]
        jobs += [answering(method, f"restored_{method}", *restored, "--batch-size", "96") for method in methods]
    steps += ["--output", str(output / "correctness.json")]
    jobs.append(Job("correctness/steps", steps, ANSWERED + 60, alone=True))
    jobs.append(timing("latency", "answer_latency", 780, *latency))
    return jobs


class Runner:
    """Runs jobs, some side by side, and keeps in `status.json` which are done.

    Args:
        arguments: the command line's.
    """

    def __init__(self, arguments: argparse.Namespace):
        self.output: Path = arguments.output
        self.scale, self.start, self.at_once = arguments.minutes / MINUTES, time.time(), arguments.at_once
        self._file = self.output / "status.json"
        self.status: dict[str, Any] = {"done": [], "events": [], "environment": environment()}
        if self._file.exists():
            self.status["done"] = json.loads(self._file.read_text(encoding="utf-8"))["done"]

    def run(self, jobs: Sequence[Job]) -> None:
        """Run jobs until all have ended, or their time."""
        waiting = [job for job in jobs if job.name not in self.status["done"]]
        running: dict[Job, subprocess.Popen] = {}
        failed: set[str] = set()
        while waiting or running:
            for job, process in list(running.items()):
                is_late = self._seconds() > job.until * self.scale
                if process.poll() is None and is_late:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                if process.returncode is not None:
                    del running[job]
                    if not self._ended(job, process.returncode):
                        failed.add(job.name)
            for job in list(waiting):
                if job.after in failed or self._seconds() > job.until * self.scale:
                    waiting.remove(job)
                    failed.add(job.name)
                    self.say(f"{job.name}: not started")
                elif self._may_start(job, waiting, list(running)):
                    waiting.remove(job)
                    running[job] = self._started(job)
            time.sleep(0.2)

    def _may_start(self, job: Job, waiting: Sequence[Job], running: Sequence[Job]) -> bool:
        if job.alone:
            return not running and waiting[0] is job
        if any(other.alone for other in (*running, *waiting[: waiting.index(job)])):
            return False
        beside = [other for other in running if other.part == job.part]
        is_ready = job.after is None or job.after in self.status["done"]
        return is_ready and (job.part != "training" or len(beside) < self.at_once)

    def _ended(self, job: Job, code: int) -> bool:
        if code == 0:
            self.status["done"].append(job.name)
        late = "too late" if code == -signal.SIGKILL else f"failed with {code}"
        self.say(f"{job.name}: {'done' if code == 0 else late}")
        return code == 0

    def _seconds(self) -> float:
        return time.time() - self.start

    def _started(self, job: Job) -> subprocess.Popen:
        log = self.output / "logs" / f"{job.name.replace('/', '.')}.txt"
        log.parent.mkdir(parents=True, exist_ok=True)
        threads = str(max(1, (os.cpu_count() or 1) // (1 if job.alone else 2 * self.at_once)))
        # What one process has freed, another may need.
        memory = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
        environ = {**memory, **os.environ, "OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
        with log.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, *job.words],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environ,
                cwd=ROOT,
                start_new_session=True,
            )

    def say(self, line: str) -> None:
        """Print a line, and keep it with the time since the start."""
        line = f"[{self._seconds():6.1f} s] {line}"
        print(line, flush=True)
        self.status["events"].append(line)
        write_json(self.status, self._file)


def pack(arguments: argparse.Namespace) -> list[Path]:
    """Write what a machine without a network needs: the tracked files, wheels, and the recipes' data.

    Returns:
        The archives, each of at most 60 MiB; a file that two share is cut into pieces `NAME.00`, `NAME.01`, ...

    Raises:
        ValueError: the tracked files alone take more.
    """
    from context_compressors.training.arguments import read_recipe

    arguments.pack.mkdir(parents=True, exist_ok=True)
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    # Weights and pictures are not needed.
    code = [ROOT / name for name in tracked.split("\0") if name and not name.startswith(("checkpoints/", "docs/"))]
    links = [path for path in code if path.is_symlink()]
    files = [(path, f"code/{path.relative_to(ROOT)}") for path in code if path.is_file() and path not in links]
    # What is installed first comes first.
    folders = {"wheels": arguments.wheels, "reader": arguments.reader, "continued": arguments.continued}
    for name, folder in folders.items():
        found = [] if folder is None else sorted(path for path in folder.iterdir() if path.is_file())
        files += [(path, f"{name}/{path.name}") for path in found]
    sources = [source for recipe in arguments.recipes for source in read_recipe(recipe).get("sources", ())]
    read = dict.fromkeys(source["path"] for source in sources if "path" in source)
    files += [(arguments.data / name, f"data/{name}") for name in read]
    asked = [pair.partition("=")[2].partition("#")[0] for pair in [*arguments.questions, arguments.windows or ""]]
    files += [(Path(file), f"questions/{Path(file).name}") for file in asked if file]
    groups: list[list[tuple[Path, str, int, int]]] = [[]]
    room = _MOST_BYTES
    for path, name in files:
        size, start = path.stat().st_size, 0
        pieces: list[tuple[int, int, int]] = []
        while not pieces or start < size:
            if room < MIB:
                groups.append([])
                room = _MOST_BYTES
            pieces.append((len(groups) - 1, start, min(room, size - start)))
            start += pieces[-1][2]
            room -= pieces[-1][2] + 1024
        for number, (group, *place) in enumerate(pieces):
            groups[group].append((path, name if len(pieces) == 1 else f"{name}.{number:02}", *place))
    written = []
    for number, group in enumerate(groups):
        written.append(arguments.pack / f"gpu_{number}.tar")
        with tarfile.open(written[-1], "w") as archive:
            for path in links if number == 0 else ():
                archive.add(path, f"code/{path.relative_to(ROOT)}")
            for path, name, start, length in group:
                entry = tarfile.TarInfo(name)
                entry.size = length
                with path.open("rb") as file:
                    file.seek(start)
                    archive.addfile(entry, file)
    return written


@tells_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Run all parts; returns 1 if a command failed or was late."""
    arguments = build_parser().parse_args(argv)
    if arguments.pack is not None:
        for path in pack(arguments):
            print(path, f"{path.stat().st_size / MIB:.1f} MiB")
        return 0
    if arguments.data is None or arguments.output is None:
        raise ValueError("give --data and --output")
    arguments.data, arguments.output = arguments.data.resolve(), arguments.output.resolve()
    runner = Runner(arguments)
    jobs = [job for job in plan(arguments) if arguments.parts is None or job.part in arguments.parts]
    runner.run(jobs)
    return 0 if {job.name for job in jobs} <= set(runner.status["done"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
