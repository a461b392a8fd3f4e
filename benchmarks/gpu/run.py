# SPDX-License-Identifier: Apache-2.0
"""Everything that needs a GPU, by deadlines: correctness, the family's checkpoints, their answers, and times.

    python -m benchmarks.gpu.run --data DATA --questions QUESTIONS --output OUT

Each part is a set of commands that run side by side until the part's deadline. A command that fails or is late costs
its own part alone, and a second start does what is not done yet. `--pack FOLDER` writes what a machine without a
network needs, as archives of at most 60 MiB; `--minutes` scales the deadlines for another device.
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
FAMILY = ("mean_pooling_residual", "compression_tokens", "icae", "five_hundred_x", "comprexit", "gmsa")
MINUTES = 13.0
MIB = 2**20
_MOST_BYTES = 60 * MIB
_CLI = ("-m", "context_compressors.cli")


@dataclass(frozen=True)
class Part:
    """Commands that run side by side.

    Args:
        name: of its folder and log files.
        seconds: when it ends at the latest, of 13 minutes.
        commands: by name; arguments of Python.
    """

    name: str
    seconds: float
    commands: dict[str, list[str]]


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
    add("--steps", type=positive_int, default=560, metavar="N", help="of each training (default: 560)")
    add("--minutes", type=positive_float, default=MINUTES, metavar="M", help=f"for all parts (default: {MINUTES:g})")
    add("--parts", nargs="+", metavar="NAME", help="only these parts")
    add("--device", default="cuda", help="default: cuda")
    add("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="fields of the recipes, such as dtype=float32")
    add("--pack", type=Path, metavar="FOLDER", help="only write the archives")
    add("--wheels", type=Path, metavar="FOLDER", help="wheels to put into the archives")
    return parser


def plan(arguments: argparse.Namespace) -> list[Part]:
    """The parts in their order, with the checkpoints that there are now."""
    output, device = arguments.output, ["--device", arguments.device]

    def training(method: str) -> list[str]:
        recipes = [*arguments.recipes, f"smollm2/comparison/{method}.yaml"]
        places = ["--data_dir", str(arguments.data), "--output_dir", str(output / "runs" / method)]
        how = ["--base", arguments.base, "--max_steps", str(arguments.steps), "--resume_from_checkpoint", "latest"]
        if arguments.reader is not None:
            recipes.append("smollm2/from_reader.yaml")
            how += ["--adapter", str(arguments.reader.resolve())]
        return [*_CLI, "train", *recipes, *places, *how, *(f"--{pair}" for pair in arguments.set)]

    def answering(method: str) -> list[str]:
        files = (("--output", f"{method}.json"), ("--keep-answers", f"{method}.jsonl"))
        written = [word for option, name in files for word in (option, str(output / "answers" / name))]
        how = ["--tasks", "question_answering", "--batch-size", "128", "--max-new-tokens", "24", "--resume", *device]
        checkpoint = str(_newest(output / "runs" / method))
        return [*_CLI, "evaluate", checkpoint, "--data", *arguments.questions, *how, *written]

    def timing(name: str, *words: str) -> dict[str, list[str]]:
        written = ["--output", str(output / "times" / f"{name}.json")]
        return {name: ["-m", f"benchmarks.{name}.measure", *device, *words, *written]}

    llama = ("--shape", "llama-3.2-1b", "--dtype", "bfloat16", "--lengths", "2048", "--batch-size", "8")
    llama = (*llama, "--methods", "mean_pooling", "comprexit", "gmsa")
    latency = ("--setting", "table7", "--batch-sizes", "8", "--repeats", "2", "--static-cache", "--compile")
    steps = ["-m", "benchmarks.gpu.correctness", "--base", arguments.base, *device]
    checks = {
        "steps": [*steps, "--output", str(output / "correctness.json")],
        "kernels": ["-m", "pytest", "-q", "-n0", "tests/modeling/test_optimal_transport.py"],
    }
    asked = arguments.methods if arguments.questions else []
    return [
        Part("correctness", 60, checks),
        Part("training", 480, {method: training(method) for method in arguments.methods}),
        Part("answers", 600, {method: answering(method) for method in asked}),
        # Alone on the device, one behind the other.
        Part("sinkhorn", 640, timing("sinkhorn", "--windows", "1024", "16384", "--receivers", "32")),
        Part(
            "overhead", 690, timing("compression_overhead", *llama, "--methods", "mean_pooling", "comprexit", "gmsa")
        ),
        Part("latency", 770, timing("answer_latency", *latency)),
    ]


def _newest(folder: Path) -> Path:
    """A finished training, or its newest checkpoint."""
    checkpoints = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    return folder if (folder / "model.safetensors").exists() or not checkpoints else checkpoints[-1]


class Runner:
    """Runs parts, and keeps in `status.json` which commands are done.

    Args:
        arguments: the command line's.
    """

    def __init__(self, arguments: argparse.Namespace):
        self.output: Path = arguments.output
        self.scale, self.start = arguments.minutes / MINUTES, time.time()
        self._file = self.output / "status.json"
        self.status: dict[str, Any] = {"done": [], "events": [], "environment": environment()}
        if self._file.exists():
            self.status["done"] = json.loads(self._file.read_text(encoding="utf-8"))["done"]

    def run(self, part: Part) -> None:
        """Run a part's commands side by side until they end, or its deadline."""
        names = [name for name in part.commands if f"{part.name}/{name}" not in self.status["done"]]
        processes = {name: self._started(part, name) for name in names}
        deadline = self.start + part.seconds * self.scale
        while any(process.poll() is None for process in processes.values()) and time.time() < deadline:
            time.sleep(0.2)
        for name, process in processes.items():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            is_done = process.returncode == 0
            if is_done:
                self.status["done"].append(f"{part.name}/{name}")
            late = "too late" if process.returncode == -signal.SIGKILL else f"failed with {process.returncode}"
            self.say(f"{part.name}/{name}: {'done' if is_done else late}")

    def _started(self, part: Part, name: str) -> subprocess.Popen:
        log = self.output / "logs" / f"{part.name}.{name}.txt"
        log.parent.mkdir(parents=True, exist_ok=True)
        threads = str(max(1, (os.cpu_count() or 1) // max(1, len(part.commands))))
        environ = {**os.environ, "OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
        with log.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, *part.commands[name]],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environ,
                cwd=ROOT,
                start_new_session=True,
            )

    def say(self, line: str) -> None:
        """Print a line, and keep it with the time since the start."""
        line = f"[{time.time() - self.start:6.1f} s] {line}"
        print(line, flush=True)
        self.status["events"].append(line)
        write_json(self.status, self._file)


def pack(arguments: argparse.Namespace) -> list[Path]:
    """Write what a machine without a network needs: the tracked files, data and wheels.

    Returns:
        The archives, each of at most 60 MiB; a file that is larger is cut into pieces `NAME.00`, `NAME.01`, ...

    Raises:
        ValueError: the tracked files alone take more.
    """
    arguments.pack.mkdir(parents=True, exist_ok=True)
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    # Weights and pictures are not needed.
    code = [ROOT / name for name in tracked.split("\0") if name and not name.startswith(("checkpoints/", "docs/"))]
    files = [(path, f"code/{path.relative_to(ROOT)}") for path in code if path.is_file()]
    for folder, name in ((arguments.data, "data"), (arguments.reader, "reader"), (arguments.wheels, "wheels")):
        found = [] if folder is None else sorted(path for path in folder.iterdir() if path.is_file())
        files += [(path, f"{name}/{path.name}") for path in found]
    files += [(Path(pair.partition("=")[2]), f"questions/{Path(pair).name}") for pair in arguments.questions]
    groups: list[list[tuple[Path, str, int, int]]] = [[]]
    room = _MOST_BYTES
    for path, name in files:
        size = path.stat().st_size
        for number, start in enumerate(range(0, max(size, 1), _MOST_BYTES)):
            length = min(_MOST_BYTES, size - start)
            if length > room:
                groups.append([])
                room = _MOST_BYTES
            room -= length + 1024
            groups[-1].append((path, name if size <= _MOST_BYTES else f"{name}.{number:02}", start, length))
    written = []
    for number, group in enumerate(groups):
        written.append(arguments.pack / f"gpu_{number}.tar")
        with tarfile.open(written[-1], "w") as archive:
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
    runner, wanted = Runner(arguments), set()
    for index in range(len(plan(arguments))):
        # Made anew: answers are those of the checkpoints that the part before has left.
        part = plan(arguments)[index]
        if arguments.parts is None or part.name in arguments.parts:
            runner.run(part)
            wanted |= {f"{part.name}/{name}" for name in part.commands}
    return 0 if wanted <= set(runner.status["done"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
