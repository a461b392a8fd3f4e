# SPDX-License-Identifier: Apache-2.0
"""Trains and asks what systems.yaml names, several systems side by side, and writes the results and the page.

    python -m benchmarks.comparison.run --data DATA --output OUT -n 2

Everything runs from a copy of the last commit, which is installed into OUT first. A second start goes on with what the
first one left, whenever it was stopped; OUT/logs has what the jobs write, and OUT/page what is known when a system is
done.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.comparison.plan import Comparison, Job, read_json, read_table
from context_compressors.cli.command import positive_int

ROOT = Path(__file__).parents[2]
_FROZEN = "COMPARISON_COMMIT"


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--data", required=True, metavar="FOLDER", help="folder with the data files")
    add("--output", required=True, metavar="FOLDER", help="where everything goes")
    add("--base", metavar="FOLDER", help="the base's folder (default: fetched)")
    add("--reader", metavar="FOLDER", help="adapter or compressor whose decoder reads (default: the base itself)")
    add(
        "--environments",
        metavar="FOLDER",
        help="has a virtual environment NAME for each requirements_NAME.txt",
    )
    add("--encoder", metavar="FOLDER", help="all-MiniLM-L6-v2, which xRAG reads contexts with")
    add("--size", default="small", choices=("small", "full"), help="of budget and sets (default: small)")
    add("--rounds", nargs="+", type=positive_int, default=[1], metavar="N", help="of the table's systems (default: 1)")
    add("--seeds", nargs="+", type=int, default=[1], metavar="S", help="of the trainings (default: 1)")
    add(
        "--dtype",
        default="bfloat16",
        choices=("bfloat16", "float32"),
        help="to compute in: float32 where the processor has no avx512_bf16 (default: bfloat16)",
    )
    add(
        "--device",
        default="auto",
        choices=("auto", "cpu"),
        help="auto: an accelerator if there is one, of several the first (default: auto)",
    )
    add(
        "-n", "--side-by-side", type=positive_int, default=1, metavar="N", help="systems at the same time (default: 1)"
    )
    add("--only", nargs="+", default=[""], metavar="TEXT", help="jobs whose names start with one of these")
    add("--again", action="store_true", help="also what comparison.json has, which is taken from there otherwise")
    instead = parser.add_mutually_exclusive_group().add_argument
    instead("--times", action="store_true", help="only measure seconds, one job at a time: on a machine at rest")
    instead("--page", action="store_true", help="only write the page, also beside another run")
    instead("--list", action="store_true", help="only print the jobs, and which are done")
    add("--questions", type=positive_int, metavar="N", help="most questions of a set, to try things out")
    add("--steps", type=positive_int, metavar="N", help="steps of each training, to try things out")
    return parser


class Queue:
    """Does jobs, several systems side by side, and leaves none of their processes behind.

    Args:
        comparison: whose jobs they are.
    """

    def __init__(self, comparison: Comparison):
        self.comparison, self.has_failed = comparison, False
        self._running: set[subprocess.Popen] = set()
        self._is_over = False

    def do_all(self, systems: Iterable[Sequence[Job]], side_by_side: int = 1, behind: Sequence[Job] = ()) -> None:
        """Do each system's jobs up to one that fails, and those behind them where some were left to do."""

        def do_system(jobs: Sequence[Job]) -> None:
            chosen = ("questions", "reader", *self.comparison.arguments.only)
            waiting = [job for job in jobs if job.name.startswith(chosen) and not job.is_done()]
            if waiting:
                all(map(self.do, [*waiting, *behind]))

        with ThreadPoolExecutor(side_by_side) as pool:
            list(pool.map(do_system, systems))

    def do(self, job: Job) -> bool:
        """Run a job to its end, its output in a file of its own; returns whether it is done."""
        start = time.time()
        try:
            status: Any = self._status(job)
        except Exception as error:
            # Such as an environment that is missing: other systems may do without.
            status = repr(error)
        is_done = status == 0 and job.is_done()
        self.has_failed |= not is_done
        if not self._is_over:
            state = "done" if is_done else f"failed with {status}"
            reason = "" if is_done else self._last_line(job)
            print(f"{job.name}: {state}, {time.time() - start:.0f} s{reason}", flush=True)
        return is_done

    def _log(self, job: Job) -> Path:
        return self.comparison.folder / "logs" / f"{job.name.replace('/', '.')}.txt"

    def _last_line(self, job: Job) -> str:
        log = self._log(job)
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.is_file() else []
        return next((f": {line}" for line in reversed(lines) if line.strip()), "")

    def _status(self, job: Job) -> int:
        if self._is_over:
            return signal.SIGTERM
        folder, log = self.comparison.folder, self._log(job)
        log.parent.mkdir(parents=True, exist_ok=True)
        arguments = [job.python or sys.executable, "-P", *job.command()]
        # An environment of its own finds nothing of this package's.
        environment = {**os.environ, **({"PYTHONPATH": ""} if job.python else {})}
        with log.open("a", encoding="utf-8") as output:
            # Jobs inherit the open file of `take_turn`.
            options: dict[str, Any] = {"stdout": output, "stderr": subprocess.STDOUT, "close_fds": False}
            process = subprocess.Popen(arguments, cwd=folder, env=environment, **options)
        self._running.add(process)
        # It may have begun while `end` ended the others.
        if self._is_over:
            process.terminate()
        status = process.wait()
        self._running.discard(process)
        return status

    def end(self, number: int, frame: Any) -> None:
        """End all jobs and this process, once: `timeout` sends its signal twice."""
        signal.signal(number, signal.SIG_IGN)
        self._is_over = True
        for process in tuple(self._running):
            process.terminate()
        raise SystemExit(128 + number)


def main(argv: Sequence[str] | None = None) -> int:
    """Do all jobs that are not done; returns the exit status, 1 where a job failed."""
    given = sys.argv[1:] if argv is None else argv
    arguments = build_parser().parse_args(given)
    for name in ("data", "output", "base", "reader", "environments", "encoder"):
        if (place := getattr(arguments, name)) is not None:
            setattr(arguments, name, str(Path(place).resolve()))
    # Of several GPUs a training would take all, and with them other steps.
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    folder = Path(arguments.output)
    if _FROZEN not in os.environ:
        # In place of this process, which is the one that whoever started it can stop.
        command = [sys.executable, "-P", "-m", "benchmarks.comparison.run", *given]
        os.execve(sys.executable, command, freeze(folder / "code"))
    comparison = Comparison(arguments, read_table(arguments.size))
    if arguments.list:
        for job in (job for stage in comparison.stages() for jobs in stage for job in jobs):
            if job.name.startswith(tuple(arguments.only)):
                print(f"{job.name}: {'done' if job.is_done() else 'waits'}")
        return 0
    queue = Queue(comparison)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, queue.end)
    if not arguments.page:
        take_turn(folder)
        check_size(comparison)
        first, *stages = comparison.stages()
        queue.do_all(first)
        if arguments.times and not queue.has_failed:
            queue.do_all([job] for job in comparison.timed())
        for stage in stages if not (arguments.times or queue.has_failed) else ():
            queue.do_all(stage, arguments.side_by_side, [comparison.page_job()])
    # Once more: of two systems that were done at once, the page of the first may be the later one.
    queue.do(comparison.page_job())
    return int(queue.has_failed)


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
            beside = [Path(place, "tree", name) for name in ("benchmarks", "checkpoints")]
            subprocess.run(["cp", "-r", *beside, folder], check=True)
        commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
        stamp.write_text(commit.stdout, encoding="utf-8")
    return {**os.environ, "PYTHONPATH": str(folder), _FROZEN: stamp.read_text(encoding="utf-8").strip()}


def check_size(comparison: Comparison) -> None:
    """Refuse to go on with a folder of another size.

    Raises:
        SystemExit: its questions are those of another size.
    """
    size, found = comparison.table["size"], read_json(comparison.questions / "budget.json").get("size")
    if found not in (None, size):
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


if __name__ == "__main__":
    raise SystemExit(main())
