# SPDX-License-Identifier: Apache-2.0
"""Folders and jobs of the comparison."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
PUBLISHED = HERE / "comparison.json"
BY_QUESTION = "by_question.json"
_RECIPE = "smollm2/comparison"
SHARED = ["smollm2/data.yaml", f"{_RECIPE}/budget.yaml"]
_PEER_TASKS = ("question_answering", "summarization")


def read_table(size: str = "small") -> dict[str, Any]:
    """Return `systems.yaml` with the fields of one size.

    Sets have the number of their `questions`; those without any at this size are left out.
    """
    table = yaml.safe_load((HERE / "systems.yaml").read_text(encoding="utf-8"))
    chosen = table.pop("sizes")[size]
    asked = chosen.pop("questions")
    sets = {title: {**entry, "questions": asked[title]} for title, entry in table["sets"].items() if title in asked}
    return {**table, **chosen, "size": size, "sets": sets}


@dataclass
class Job:
    """One process, and a check whether it is done.

    Args:
        name: parts with slashes between them, the system first.
        command: gives the arguments of its interpreter, when all earlier jobs of its system are done.
        is_done: whether there is nothing left to do.
        python: the interpreter; this one when `None`.
    """

    name: str
    command: Callable[[], Sequence[str]]
    is_done: Callable[[], bool]
    python: Path | None = None


class Comparison:
    """Folders and jobs of a comparison.

    Args:
        arguments: the command line of `run.py`.
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

    @cached_property
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
        """Return what the family is trained from: the reader, or the base by its name."""
        # Of a base by its name a checkpoint is light; of a folder it holds all weights.
        return self.reader if self.arguments.reader else self.arguments.base or self.table["base"]

    @cached_property
    def published(self) -> dict[str, Any]:
        """Return the published results; empty for other questions, another reader or another device."""
        content = read_results(PUBLISHED)
        asked = {name: self.table[name] for name in ("base", "ratios", "sets", "context_tokens", "max_new_tokens")}
        if not asked.items() <= content.get("settings", {}).items():
            return {}
        # Seconds of two devices do not stand in one table.
        is_same = content["reader"] == self.reader_name and content.get("device", "cpu") == self.device
        return content if is_same else {}

    def is_published(self, *names: str) -> bool:
        """Return whether these systems are published at all ratios with a score for each question.

        Rows without these cannot be paired with others, and those of fewer questions than others' are not whole. Of
        several seeds nothing counts as published.
        """
        rows = self.published.get("rows", [])
        means = [row for row in rows if row["set"] == "mean"]
        most = max((row["num_questions"] for row in means), default=0)
        whole = {(row["system"], row["ratio"]) for row in means if row["num_questions"] == most}
        paired = {(row["system"], row["ratio"]) for row in rows if "by_question" in row}
        found = whole & paired
        wanted = {(name, ratio) for name in names for ratio in self.ratios(name)}
        return wanted <= found and len(self.arguments.seeds) == 1 and not self.arguments.again

    @cached_property
    def device(self) -> str:
        """Return the device: "cpu", or an accelerator such as "cuda"."""
        from context_compressors.cli.loading import default_device

        return default_device() if self.arguments.device == "auto" else self.arguments.device

    # --- the order of things ---

    def stages(self) -> Iterator[list[list[Job]]]:
        """Yield the stages: shared jobs, the first seed with the peers, each other seed; without published systems.

        Of a stage systems may stand side by side; each is a list of jobs that need those in front of them.
        """
        first = [self._own("questions", (self.questions / "budget.json").is_file, "write_questions")]
        if self.arguments.reader:
            first.append(self._own("reader", (self.reader / "tokenizer.json").is_file, "merge_reader"))
        yield [first]
        peers = [name for name in self.table["peers"] if not self.is_published(name)]
        members = [
            name
            for name in self._leading()
            if not self.is_published(name, *self.rounded(name), *self._followers(name))
        ]
        first_seed, *seeds = self.arguments.seeds
        # What takes minutes stands between what takes longer, so that a run that is not at its end has some of both.
        mixed = []
        for member, peer in zip_longest(members, peers):
            mixed += [[self._peer(peer)]] if peer else []
            mixed += [self._member(member, first_seed)] if member else []
        yield [*mixed, [self._restored()]]
        for seed in seeds:
            yield [self._member(name, seed) for name in self._leading() if self._differs_by_seed(name)]

    def timed(self) -> Iterator[Job]:
        """Yield the jobs that measure seconds; systems without a checkpoint are timed untrained."""
        for name in self.members():
            checkpoint = self.timed_checkpoint(name)
            done = (checkpoint / "tokenizer_config.json").is_file
            yield self._own(f"{name}/times/checkpoint", done, "make_timed", name)
            for answering in (name, *self.rounded(name)):
                yield self._timing(f"{answering}/times", answering, checkpoint)
        for name in self.table["peers"]:
            yield self._timing(f"peers/{name}/times", name)

    def page_job(self) -> Job:
        """Return the job that writes the result file and the page."""
        return self._own("page", lambda: True, "write_page")

    def _own(self, name: str, is_done: Callable[[], bool], function: str, *given: Any) -> Job:
        """Return a job that runs a function of `jobs.py`."""
        arguments = json.dumps(given), json.dumps(vars(self.arguments))
        start = "from benchmarks.comparison import jobs; jobs.main()"
        return Job(name, lambda: ["-c", start, function, *arguments], is_done)

    # --- the family ---

    def members(self) -> list[str]:
        """Return the family's systems of the selected rounds."""
        family = self.table["family"]
        return [name for name, entry in family.items() if entry.get("round", 1) in self.arguments.rounds]

    def _leading(self) -> list[str]:
        """Return the members that start from the reader."""
        return [name for name in self.members() if "behind" not in self.entry(name)]

    def _followers(self, name: str) -> list[str]:
        """Return the members that continue another member's run."""
        return [other for other in self.members() if self.entry(other).get("behind") == name]

    def rounded(self, name: str) -> list[str]:
        """Return the systems that quantize a member's memories."""
        return [other for other, entry in self.table["rounded"].items() if entry["of"] == name]

    def entry(self, name: str) -> Mapping[str, Any]:
        """Return the entry of a system in `systems.yaml`."""
        return next(self.table[group][name] for group in ("family", "rounded", "peers") if name in self.table[group])

    def ratios(self, name: str) -> list[int]:
        """Return a system's ratios."""
        return self.entry(name).get("ratios", self.table["ratios"])

    def memory_dtype(self, name: str) -> str:
        """Return the dtype that memories of a system of the family are kept in."""
        return self.entry(name).get("memory_dtype", "bfloat16")

    def trains(self, name: str) -> bool:
        """Return whether a system of the family is trained at all."""
        return self.table["family"][name].get("trains", True)

    def _differs_by_seed(self, name: str) -> bool:
        # Scorers are fitted to contexts that a seed draws.
        return self.trains(name) or "fit_scorers" in self.table["family"][name]

    def run_folder(self, name: str, seed: int) -> Path:
        """Return the folder of a system's checkpoint and answers."""
        return self.folder / "family" / name / f"seed_{seed}"

    def checkpoint(self, name: str, seed: int) -> Path:
        """Return the checkpoint that a system answers with, and that those behind it continue."""
        return self.run_folder(self.entry(name).get("of", name), seed) / "run"

    def trials(self, name: str) -> dict[float, Path]:
        """Return the folders of a system's trials by learning rate; they are those of the first seed."""
        first = self.run_folder(name, self.arguments.seeds[0])
        return {rate: first / f"trial_{rate:g}" for rate in self.table["budget"]["learning_rates"]}

    def reports(self, name: str, seed: int, task: str) -> dict[Path, list[int | str]]:
        """Reports of a system's answers, each with its ratios; the answers stand beside it, as JSONL.

        Those of the table have one of their own, so that a system may be given more ratios when it has answered.
        """
        own, common, folder = self.ratios(name), self.table["ratios"], self.run_folder(name, seed)
        if not set(common) <= set(own):
            return {folder / f"{task}.json": own}
        more = [ratio for ratio in own if ratio not in common]
        reports = {folder / f"{task}.json": common}
        return reports | ({folder / f"{task}_at_{'_'.join(map(str, more))}.json": more} if more else {})

    def _member(self, name: str, seed: int) -> list[Job]:
        folder, title = self.run_folder(name, seed), f"{name}/seed_{seed}"
        jobs = []
        if self.trains(name):
            for rate, of_trial in self.trials(name).items() if seed == self.arguments.seeds[0] else ():
                done = (of_trial / "trial.json").is_file
                jobs.append(self._own(f"{title}/trial_{rate:g}", done, "train_trial", name, seed, rate))
            jobs.append(self._own(f"{title}/run", lambda: bool(summary(folder / "run")), "train_run", name, seed))
        else:
            # Saved last.
            done = (folder / "run" / "tokenizer_config.json").is_file
            jobs.append(self._own(f"{title}/made", done, "make_untrained", name, seed))
        for answering in (name, *self.rounded(name)):
            tasks = dict.fromkeys(entry["task"] for entry in self.table["sets"].values())
            if answering != name:
                tasks = self.entry(answering).get("tasks", ["question_answering"])
            for task in tasks:
                for report, ratios in self.reports(answering, seed, task).items():
                    jobs.append(self._evaluation(answering, seed, task, report, ratios))
        return [*jobs, *(job for other in self._followers(name) for job in self._member(other, seed))]

    def training_command(self, name: str, seed: int, rate: float, folder: Path, **options: Any) -> list[str]:
        """Recipes and fields of a system's training."""
        steps = read_json(self.questions / "budget.json")["run"]["steps"]
        recipes = [*SHARED, *self.recipe_of(name), *(["smollm2/cpu.yaml"] if self.device == "cpu" else [])]
        leader = self.entry(name).get("behind")
        start = {"base": "null", "checkpoint": self.checkpoint(leader, seed)} if leader else {"base": self.start}
        options = {
            **start,
            "data_dir": self.data,
            "output_dir": folder,
            "seed": seed,
            "max_steps": steps,
            "learning_rate": rate,
            "max_context_tokens": self.table["context_tokens"][1],
            "resume_from_checkpoint": "latest",
            "disable_tqdm": "true",
            "dtype": self.arguments.dtype,
            "bf16": str(self.arguments.dtype == "bfloat16").lower(),
            **self._sentence_encoder(name),
            **options,
        }
        return [*recipes, *(part for option, value in options.items() for part in (f"--{option}", str(value)))]

    def _sentence_encoder(self, name: str) -> dict[str, str]:
        if not self.table["family"][name].get("sentence_encoder"):
            return {}
        if self.arguments.encoder is None:
            raise ValueError(f"{name} reads with a sentence encoder: give the folder of all-MiniLM-L6-v2 as --encoder")
        return {"encoder": self.arguments.encoder}

    def recipe_of(self, system: str) -> list[str]:
        """Recipe files of a system of the family, the last with its changes to these."""
        entry = self.table["family"][system]
        recipe = [f"{_RECIPE}/{entry.get('recipe', system)}.yaml"]
        method_config = {"method_config": entry["changes"]} if "changes" in entry else {}
        if fields := {**method_config, **entry.get("fields", {})}:
            file = self.folder / "recipes" / f"{system}.yaml"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(yaml.safe_dump(fields), encoding="utf-8")
            recipe.append(str(file))
        return recipe

    def _evaluation(self, name: str, seed: int, task: str, report: Path, ratios: Sequence[int | str]) -> Job:
        groups: dict[str, list[str]] = {"in": [], "out": []}
        is_trained = self.trains(self.entry(name).get("of", name))
        for title, entry in self.table["sets"].items():
            if entry["task"] == task and (entry.get("trained", True) or not is_trained):
                groups[entry["domain"]].append(f"{title}={self.questions / title}.parquet")

        def command() -> list[str]:
            given = ["--max-new-tokens", str(self.table["max_new_tokens"][task]), "--tasks", task]
            config: dict[str, Any] = {"ratios_only": True, "memory_dtype": self.memory_dtype(name)}
            if ratios != self.table["ratios"]:
                given += ["--ratios", *map(str, ratios)]
                config["allow_untrained_ratio"] = True
            given += ["--config", json.dumps(config)]
            for option, sources in zip(("--data", "--out-of-domain"), groups.values(), strict=True):
                given += [option, *sources] if sources else []
            given += [] if self.arguments.reader else ["--base-model", str(self.base)]
            given += ["--batch-size", str(self.table["batch_size"])]
            return self._evaluate(self.checkpoint(name, seed), report, *given)

        num_sets = sum(map(len, groups.values()))
        return Job(f"{name}/seed_{seed}/{report.stem}", command, lambda: num_scored(report) == num_sets)

    def _evaluate(self, model: Path, report: Path, *given: str) -> list[str]:
        files = ["--output", str(report), "--keep-answers", f"{report}l", "--resume", "--dtype", self.arguments.dtype]
        return ["-m", "context_compressors.cli", "evaluate", str(model), *given, *files, "--device", self.device]

    # --- what people would use instead ---

    def answers(self, name: str) -> Path:
        """A peer's answers."""
        return self.peers / f"{name}.jsonl"

    def _peer(self, name: str) -> Job:
        tasks = self.entry(name).get("tasks", _PEER_TASKS)
        sources = [
            str(self.questions / f"{title}.jsonl")
            for title, of_set in self.table["sets"].items()
            if of_set["task"] in tasks
        ]
        return self._asking(f"peers/{name}", name, sources, self.answers(name), self.ratios(name))

    def _restored(self) -> Job:
        """The bounds of what is restored."""
        report, sets = self.peers / "restored.json", self.table["sets"]
        titles = [title for title, entry in sets.items() if entry["task"] == "reconstruction"]
        given = ["--config", "{prompt_format: chat, prompts: chat}", "--tasks", "reconstruction"]
        given += ["--data", *(f"{title}={self.questions / title}.parquet" for title in titles)]
        return Job(
            "peers/restored",
            lambda: self._evaluate(self.reader, report, *given),
            lambda: num_scored(report) == len(titles),
        )

    # --- one question at a time ---

    def times(self, name: str) -> Path:
        """A system's answers that are timed."""
        return self.peers / "times" / f"{name}.jsonl"

    def timed_checkpoint(self, name: str) -> Path:
        """The checkpoint of a system of the family that is timed: its own, or before any training."""
        own = self.checkpoint(name, self.arguments.seeds[0])
        has_own = (own / "tokenizer_config.json").is_file() or not self._differs_by_seed(name)
        return own if has_own else self.peers / "times" / name

    def _timing(self, name: str, system: str, checkpoint: Path | None = None) -> Job:
        """A system's answers to few questions at the table's ratios, each of as many tokens as an answer may have."""
        own = self.ratios(system)
        ratios = [ratio for ratio in own if ratio in (0, 1, *self.table["ratios"])] or own
        questions = [f"{self.questions / 'squad.jsonl'}#{self._most(self.table['timed_questions'])}"]
        given = ["--whole-length"]
        if checkpoint:
            given += ["--checkpoint", str(checkpoint), "--memory-dtype", self.memory_dtype(system)]
        return self._asking(name, system, questions, self.times(system), ratios, given)

    def _asking(
        self,
        name: str,
        system: str,
        sources: Sequence[str],
        output: Path,
        ratios: Sequence[int],
        given: Sequence[str] = (),
    ) -> Job:
        python = None
        if environment := self.entry(system).get("environment"):
            python = Path(self.arguments.environments or "environments").resolve() / environment / "bin" / "python"

        def command() -> list[str]:
            models = ["--base", str(self.base), "--reader", str(self.reader), "--dtype", self.arguments.dtype]
            models += ["--device", self.device]
            asked = ["--ratios", *map(str, ratios), "--output", str(output), "--questions", *sources]
            return [str(HERE / "peers.py"), "--system", system, *models, *given, *asked]

        def is_done() -> bool:
            # The questions are not there yet when jobs are only listed.
            wanted = sum(num_lines(*source.split("#")) for source in sources)
            return wanted > 0 and num_lines(output) == wanted * len(ratios)

        return Job(name, command, is_done, python)

    def _most(self, number: int) -> int:
        return min(number, self.arguments.questions or number)


def read_json(path: Path) -> dict[str, Any]:
    """A file's content; empty as long as it is not there, or not whole."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def read_results(path: Path) -> dict[str, Any]:
    """A result file, with the scores of each row's questions and their documents, which stand in a file beside it."""
    content, beside = read_json(path), read_json(path.with_name(BY_QUESTION))
    for row in content.get("rows", []):
        if found := beside.get("scores", {}).get(name_of_row(row)):
            row["by_question"] = found
    return {**content, "question_documents": beside.get("documents", {})} if content else {}


def name_of_row(row: Mapping[str, Any]) -> str:
    """Return the key of a row's scores by question."""
    return f"{row['system']}/{row['ratio']}/{row['set']}"


def summary(folder: Path) -> dict[str, Any]:
    """Steps, tokens, hours and the last loss of a training; none as long as it is not done."""
    if not (content := read_json(folder / "training_summary.json")):
        return {}
    found = {name: content[name] for name in ("steps", "input_tokens", "context_tokens", "hours")}
    losses = [entry["loss"] for entry in content["log"] if "loss" in entry]
    return {**found, "loss": losses[-1] if losses else None}


def num_scored(path: Path) -> int:
    """Data sets in a report of an evaluation."""
    return len({row["dataset"] for row in read_json(path).get("rows", [])})


def num_lines(path: str | Path, most: str | None = None) -> int:
    """Whole lines of a file, or of its beginning."""
    number = Path(path).read_bytes().count(b"\n") if Path(path).is_file() else 0
    return min(number, int(most)) if most else number
