# SPDX-License-Identifier: Apache-2.0
"""One fact in running text, asked for at several lengths of text: what a memory still knows of a single sentence.

The facts are about towns and people that are nowhere else: names of towns and last names are made up, and belong to
the test split of `data.synthetic_documents`, so that no generated training document says them.
"""

# ruff: noqa: SIM905 (word lists read better as text)

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.document_ids import TrainingDocuments
from ..data.synthetic_documents import split_of
from ..reporting.result_files import write_results
from ..reporting.tables import markdown_table
from .bootstrap import mean_statistic, percentile_interval, resampled_scores
from .evaluate import evaluate_model
from .report import EvaluationReport
from .report_tables import held_out_lines
from .rows import EvaluationRow, SampleAnswers, number_of, ordered_conditions, plain_json
from .running_text import hidden_in_text
from .samples import EvaluationDataset
from .settings import NUM_RESAMPLES, EvaluationSettings

KINDS = ("numbers", "names", "dates")
LENGTHS = (256, 512, 1024, 2048, 4096)
METRICS = ("substring_accuracy", "exact_match")
NUM_NEEDLES = 102
_TASK = "question_answering"
# Standard deviations that hold 95 % of a normal distribution.
_WIDTH = 1.959964

_TOWNS = (
    "Barocombe Belegrove Beleport Calafield Calagate Coringbourne Delawick Dunerstead Eldenwick Eldihaven Eldthorpe "
    "Farenhurst Fengate Feniminster Harworth Kelaby Kelehurst Kelenton Kendale Kenelleigh Lorenthorpe Marenstoke "
    "Moreford Moromere Ormeldale Ormelridge Pelfield Pelgate Quenelmere Quenimouth Radiby Radiridge Silingdale "
    "Tamahurst Tamenmere Torergrove Valiby Weningwick Winerby Yaromere"
).split()
_FIRST_NAMES = (
    "Agnes Alma Arthur Basil Clara Cora Edgar Edith Elsie Ernest Felix Fergus Flora Gilbert Greta Harold Hazel Hector "
    "Hilda Hugo Ida Irene Ivor Lionel Mabel Martha Miles Nora Oscar Owen Ralph Rosa Ruth Sidney Silas Stella Una Vera "
    "Walter Winifred"
).split()
_LAST_NAMES = (
    "Beloaster Bramelkin Brennell Calakirk Daringric Daroshaw Dunercroft Farafell Fenefell Fenerook Garenbury "
    "Garerwell Glenelquist Halestone Holisman Kelelwell Lorestone Loringfell Loroquist Maringwald Marisric Melogard "
    "Morisbright Quenandick Quenomore Seliden Silingrook Tamemore Tamewell Torelshaw Toriscroft Verenbury Verequist "
    "Weninglow Windyke Winwell Yarowright"
).split()
_MONTHS = "January February March April May June July August September October November December".split()
# Sentence and question, with {t} for the town and {v} for the answer.
_FACTS = {
    "numbers": (
        ("The bell of the church in {t} weighs {v} kilograms.", "How many kilograms does the bell in {t} weigh?"),
        ("The mill of {t} ground {v} sacks of flour that year.", "How many sacks of flour did the mill of {t} grind?"),
        ("The library of {t} owns {v} books.", "How many books does the library of {t} own?"),
        ("The key to the archive of {t} lies in box {v}.", "In which box does the key to the archive of {t} lie?"),
        ("The new roof of the school in {t} cost {v} pounds.", "How many pounds did the new roof in {t} cost?"),
    ),
    "names": (
        ("The lighthouse at {t} is kept by {v}.", "Who keeps the lighthouse at {t}?"),
        ("The mayor of {t} is {v}.", "Who is the mayor of {t}?"),
        ("The bridge at {t} was designed by {v}.", "Who designed the bridge at {t}?"),
        ("The only pharmacy in {t} belongs to {v}.", "To whom does the only pharmacy in {t} belong?"),
        ("The choir of {t} is led by {v}.", "Who leads the choir of {t}?"),
    ),
    "dates": (
        ("The market hall of {t} was opened on {v}.", "When was the market hall of {t} opened?"),
        ("The first train reached {t} on {v}.", "When did the first train reach {t}?"),
        ("The old town hall of {t} burned down on {v}.", "When did the old town hall of {t} burn down?"),
        ("The peace of {t} was signed on {v}.", "When was the peace of {t} signed?"),
        ("The observatory at {t} was finished on {v}.", "When was the observatory at {t} finished?"),
    ),
}


@dataclass(frozen=True)
class Needle:
    """A sentence with one fact, and the question that asks for it.

    Args:
        kind: one of `KINDS`.
        town: what the fact is about.
        sentence: says the fact.
        question: asks for it.
        answers: the accepted answers; the first one stands in the sentence.
    """

    kind: str
    town: str
    sentence: str
    question: str
    answers: tuple[str, ...]


def draw_needle(kind: str, rng: random.Random) -> Needle:
    """Draw a fact.

    Args:
        kind: one of `KINDS`.
        rng: draws town, answer and words.
    """
    sentence, question = rng.choice(_FACTS[kind])
    town = rng.choice(_TOWNS)
    if kind == "numbers":
        number = rng.randrange(1000, 100_000)
        while split_of(str(number)) != "test":
            number = rng.randrange(1000, 100_000)
        answers: tuple[str, ...] = (str(number),)
    elif kind == "names":
        answers = (f"{rng.choice(_FIRST_NAMES)} {rng.choice(_LAST_NAMES)}",)
    else:
        day, month, year = rng.randint(1, 28), rng.choice(_MONTHS), rng.randint(1801, 1999)
        answers = (f"{day} {month} {year}", f"{month} {day}, {year}")
    return Needle(kind, town, sentence.format(t=town, v=answers[0]), question.format(t=town), answers)


def needle_examples(
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    num_tokens: int,
    num_needles: int = NUM_NEEDLES,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Contexts of running text with one needle each, at a place drawn uniformly between two sentences.

    Args:
        texts: running text; a context takes sentences that follow one another, and goes on in the next text.
        tokenizer: measures the length.
        num_tokens: of a context, needle included; no more, and less by some tokens at most.
        num_needles: how many contexts; the kinds take turns. The same needles are hidden at every length.
        seed: draws everything.

    Returns:
        Rows with `id` (kind and number), `context`, `question`, `answers` and `source_texts`, those of `texts` that
        the context is taken from.

    Raises:
        ValueError: the texts have fewer tokens than a context, or a needle is longer than that.
    """
    examples = []
    for number in range(num_needles):
        needle = draw_needle(KINDS[number % len(KINDS)], random.Random(f"{seed}/needle/{number}"))
        rng = random.Random(f"{seed}/{num_tokens}/{number}")
        context, sources = hidden_in_text(
            [needle.sentence], [needle.town, *needle.answers], texts, tokenizer, num_tokens, rng
        )
        row = {"id": f"{needle.kind}/{number}", "context": context, "question": needle.question}
        examples.append({**row, "answers": list(needle.answers), "source_texts": sources})
    return examples


def wilson_interval(num_right: int, number: int) -> tuple[float, float]:
    """The 95 % interval of a share, in percent.

    Source: Wilson (1927), "Probable inference, the law of succession, and statistical inference".
    """
    share, squared = num_right / number, _WIDTH**2
    centre = (share + squared / (2 * number)) / (1 + squared / number)
    spread = _WIDTH / (1 + squared / number) * math.sqrt(share * (1 - share) / number + squared / (4 * number**2))
    return 100 * max(0.0, centre - spread), 100 * min(1.0, centre + spread)


def needle_interval(
    found: Sequence[bool], documents: Sequence[int], num_resamples: int = NUM_RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """The 95 % interval of the share of needles that were found, in percent.

    It is the bootstrap's over the documents that contexts are from. Where each needle has one of its own it is
    Wilson's, which is nearly the same and holds at a share of 0 or 100 as well; and where all documents have the same
    share, as where everything is found, it is Wilson's over the needles, since resamples do not differ.

    Args:
        found: of each needle, whether it was found.
        documents: each needle's document.
        num_resamples: of the bootstrap.
        seed: draws them.

    Returns:
        Its two ends; NaN for several needles in one document, of which nothing can be told.
    """
    num_documents, wilson = len(set(documents)), wilson_interval(sum(found), len(found))
    if num_documents == len(found):
        return wilson
    if num_documents == 1:
        return math.nan, math.nan
    statistics = {"share": mean_statistic([100.0 * is_found for is_found in found])}
    low, high = percentile_interval(resampled_scores(statistics, documents, num_resamples, seed)["share"])
    return (low, high) if low < high else wilson


@dataclass(frozen=True)
class NeedleCell:
    """How many needles of one kind were found in contexts of one length under one condition.

    Args:
        length: tokens of a context.
        condition: "no_context", "full_context", "ratio=4" and so on.
        kind: one of `KINDS`, or "all".
        metric: one of `METRICS`.
        number: how many needles.
        accuracy: share that was found, in percent.
        interval: its 95 % interval, see `needle_interval`.
        num_documents: how many different documents their contexts are from, by the first of each; `None` in files of
            earlier versions, whose intervals are all `wilson_interval`.
    """

    length: int
    condition: str
    kind: str
    metric: str
    number: int
    accuracy: float
    interval: tuple[float, float]
    num_documents: int | None = None


# What a grid and a report have in common, and a grid's file holds beside its cells.
_SAVED = ("bounds", "num_parameters", "settings", "environment", "held_out", "documents")


@dataclass
class NeedleGrid:
    """Accuracy by length, condition and kind of needle.

    Args:
        model: its name.
        cells: the results.
        settings: options of the evaluation.
        environment: hardware and versions.
        held_out: what the models have seen of the texts, see `check_held_out`.
        documents: "256 tokens" and so on -> the ids of the texts that contexts are from, see `document_id`.
        bounds: where "no_context" and "full_context" come from: "teacher" or "own_decoder".
        num_parameters: the model's parameters; `None` where they are not known.
        answers: what every needle got; kept out of the grid's file.
    """

    model: str
    cells: list[NeedleCell]
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    held_out: dict[str, dict[str, Any]] = field(default_factory=dict)
    documents: dict[str, str] = field(default_factory=dict, repr=False)
    bounds: str = "own_decoder"
    num_parameters: int | None = None
    answers: list[SampleAnswers] = field(default_factory=list, repr=False)

    @classmethod
    def from_report(cls, report: EvaluationReport, earlier: NeedleGrid | None = None) -> NeedleGrid:
        """Count what an evaluation of `needle_examples` found; its data sets are called "256 tokens" and so on.

        Args:
            report: with the answers of all lengths but those of `earlier`.
            earlier: a grid of the same evaluation, whose cells are taken over.
        """
        cells = [] if earlier is None else list(earlier.cells)
        for name in dict.fromkeys(sample.dataset for sample in report.answers):
            samples = [sample for sample in report.answers if sample.dataset == name]
            for condition in samples[0].scores:
                for kind in ("all", *KINDS):
                    asked = [sample for sample in samples if kind in ("all", sample.id.partition("/")[0])]
                    cells += _cells(int(name.partition(" ")[0]), condition, kind, asked, report.settings)
        fields = {name: getattr(report, name) for name in (*_SAVED, "answers")}
        return cls(report.model, cells, **fields)

    def as_report(self) -> EvaluationReport:
        """The grid as a report that an evaluation may resume from: a row for each length and condition."""
        rows = [
            EvaluationRow(
                f"{cell.length} tokens",
                "out",
                _TASK,
                cell.condition,
                {name: self.cell(cell.length, cell.condition, "all", name).accuracy for name in METRICS},
                cell.number,
                self.settings.get("seed", 0),
            )
            for cell in self.cells
            if (cell.kind, cell.metric) == ("all", METRICS[0])
        ]
        return EvaluationReport(self.model, rows=rows, **{name: getattr(self, name) for name in _SAVED})

    def lengths(self) -> list[int]:
        """Lengths, ascending."""
        return sorted({cell.length for cell in self.cells})

    def conditions(self) -> list[str]:
        """Conditions, see `ordered_conditions`."""
        return ordered_conditions(cell.condition for cell in self.cells)

    def cell(self, length: int, condition: str, kind: str = "all", metric: str = METRICS[0]) -> NeedleCell:
        """One cell; raises `ValueError` when the grid does not have it."""
        wanted = (length, condition, kind, metric)
        for cell in self.cells:
            if (cell.length, cell.condition, cell.kind, cell.metric) == wanted:
                return cell
        raise ValueError(f"the grid has no cell (length, condition, kind, metric) = {wanted}")

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the grid as a JSON file, folders included, and return its path."""
        content = {
            "model": self.model,
            **{name: getattr(self, name) for name in _SAVED},
            "cells": [asdict(cell) for cell in self.cells],
        }
        return write_results(plain_json(content), path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> NeedleGrid:
        """Read a grid that `save` wrote; raises `ValueError` for any other file."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            cells = [
                NeedleCell(**{**cell, "interval": tuple(map(number_of, cell["interval"]))})
                for cell in content["cells"]
            ]
            fields = {name: content[name] for name in ("settings", "environment")}
            # Files of earlier versions lack some.
            return cls(content["model"], cells, **fields | {name: content[name] for name in _SAVED if name in content})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a grid of needles: {error}") from error

    def to_markdown(self) -> str:
        """The grid as Markdown: a table for each kind of needle and each metric."""
        titles = {"substring_accuracy": "answer contained in the output", "exact_match": "exact match"}
        parts = [
            f"# Needles: {self.model}",
            f"Share of needles that were found, in percent, with 95 % {self._kind_of_intervals()}.",
            *held_out_lines(self.held_out),
        ]
        for metric in METRICS:
            for kind in ("all", *KINDS):
                number = self.cell(self.lengths()[0], self.conditions()[0], kind, metric).number
                parts += [f"## {titles[metric].capitalize()}: {kind} ({number} a cell)", self._table(kind, metric)]
        return "\n\n".join(parts) + "\n"

    def _kind_of_intervals(self) -> str:
        numbers = {cell.num_documents for cell in self.cells if cell.num_documents != cell.number}
        if numbers <= {None}:
            return "Wilson intervals"
        earlier = ", and at lengths that an earlier version asked" if None in numbers else ""
        return f"bootstrap intervals over documents, Wilson's where each needle has its own{earlier}"

    def _table(self, kind: str, metric: str) -> str:
        rows = [
            [f"{length:,}", *(_text(self.cell(length, name, kind, metric)) for name in self.conditions())]
            for length in self.lengths()
        ]
        return markdown_table(["tokens", *(name.replace("_", " ") for name in self.conditions())], rows)


def _cells(
    length: int, condition: str, kind: str, asked: Sequence[SampleAnswers], settings: Mapping[str, Any]
) -> list[NeedleCell]:
    if not asked:
        return []
    cells, number, documents = [], len(asked), [sample.document for sample in asked]
    resampling = settings.get("num_resamples", NUM_RESAMPLES), settings.get("seed", 0)
    for metric in METRICS:
        found = [sample.scores[condition][metric] > 0 for sample in asked]
        accuracy, interval = 100 * sum(found) / number, needle_interval(found, documents, *resampling)
        cells.append(NeedleCell(length, condition, kind, metric, number, accuracy, interval, len(set(documents))))
    return cells


def _text(cell: NeedleCell) -> str:
    low, high = cell.interval
    return f"{cell.accuracy:.0f}" if math.isnan(low) else f"{cell.accuracy:.0f} [{low:.0f}, {high:.0f}]"


def evaluate_needles(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    lengths: Sequence[int] = LENGTHS,
    num_needles: int = NUM_NEEDLES,
    settings: EvaluationSettings | None = None,
    teacher: PreTrainedModel | None = None,
    model_name: str | None = None,
    progress: bool = True,
    notes: Mapping[str, Any] | None = None,
    records: Mapping[str, TrainingDocuments | None] | None = None,
    resume_from: NeedleGrid | None = None,
    progress_file: str | Path | None = None,
    on_result: Callable[[NeedleGrid], Any] = lambda grid: None,
) -> NeedleGrid:
    """Ask a model for one fact in running text, without context, with the full text, and from slots at every ratio.

    Args:
        model: a compressor's `...ForCausalLM`, or a plain causal language model for the two bounds alone.
        tokenizer: the tokenizer saved with it.
        texts: running text to hide needles in.
        lengths: tokens of a context, needle included.
        num_needles: needles of each length, a third of them of each kind.
        settings: options, see `EvaluationSettings`; the task is always question answering.
        teacher, model_name, progress, notes, records, progress_file: as in `evaluate_model`; one file has all lengths.
        resume_from: a grid of the same evaluation, whose lengths are taken over and not asked again; lengths may be
            added to it.
        on_result: called with the grid so far after each length.

    Returns:
        The grid, and what every needle got that was asked now.

    Raises:
        ValueError: fewer needles than kinds, lengths that are not different, a context that the model has no positions
            for, and whatever `evaluate_model` and `needle_examples` refuse.
    """
    if num_needles < len(KINDS):
        raise ValueError(f"num_needles must be at least {len(KINDS)}, one for each of {KINDS}, got {num_needles}")
    if not lengths or len(set(lengths)) < len(lengths):
        raise ValueError(f"lengths must be one or more different numbers of tokens, got {list(lengths)}")
    settings = replace(settings or EvaluationSettings(), tasks=(_TASK,), max_samples=None)
    datasets = [
        EvaluationDataset(
            f"{length} tokens", needle_examples(texts, tokenizer, length, num_needles, settings.seed), "out"
        )
        for length in lengths
    ]
    report = evaluate_model(
        model,
        tokenizer,
        datasets,
        settings,
        teacher=teacher,
        model_name=model_name,
        progress=progress,
        notes={**(notes or {}), "num_needles": num_needles},
        records=records,
        resume_from=None if resume_from is None else resume_from.as_report(),
        progress_file=progress_file,
        on_result=lambda report: on_result(NeedleGrid.from_report(report, resume_from)),
    )
    return NeedleGrid.from_report(report, resume_from)
