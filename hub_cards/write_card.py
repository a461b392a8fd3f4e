# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's card, filled from what its training and evaluation left behind."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedConfig

from ..configuration.configuration_compressor import CompressorConfig
from ..data.retrieval_sources import RetrievalSource
from ..data.sources import DataSource
from ..evaluation.plots import plot_quality_by_ratio
from ..evaluation.report import EvaluationReport
from ..evaluation.report_tables import reservations
from ..evaluation.rows import BENCHMARK_SCORE, FULL_CONTEXT, NO_CONTEXT, ascending, ratio_condition
from ..modeling.checkpoint.checkpoint_card import public_name
from ..training.arguments import read_recipe
from ..training.run_record import without_folders
from .cards import TASK_NAMES, Score, TrainingData, TrainingRecord, model_card

logger = logging.getLogger(__name__)

# Metric -> how the card calls it, per task: the main ones.
_METRICS = {
    "question_answering": {
        BENCHMARK_SCORE: "the benchmark's own score",
        "exact_match": "exact match",
        "f1": "F1",
        "substring_accuracy": "contained",
    },
    "summarisation": {"rouge1": "ROUGE-1", "rougeL": "ROUGE-L"},
    "reconstruction": {"token_accuracy": "token accuracy", "bleu": "BLEU"},
    "continuation": {"perplexity": "perplexity"},
}
# Condition of the evaluation -> name of the baseline on the card.
_ALTERNATIVES = {
    "cut": "truncated text",
    "bm25": "BM25 sentences",
    "self_information": "unexpected tokens",
    "keep_drop": "kept words",
}
_NOT_STATED = "not stated"
# What a recipe's entry says of its data.
_OF_DATA = ("licence", "hub_id", "title")
_Source = DataSource | RetrievalSource


def write_card(
    folder: str | Path,
    reports: Sequence[EvaluationReport | str | Path],
    limits: Sequence[str],
    *,
    model_id: str | None = None,
    recipe: str | None = None,
    license: str = "apache-2.0",
) -> Path:
    """Write `README.md` of a checkpoint folder from its configuration, its training's record, and its scores.

    Of a compressor with several ratios the folder gets pictures of quality by ratio, too, which the card shows.

    Args:
        folder: what `context-compressors train` made: a compressor with `recipe.yaml` and
            `training_summary.json`.
        reports: evaluations of the checkpoint, or their files. The card says "Not measured." without any.
        limits: what it cannot do, one sentence each; never empty.
        model_id: repository or folder that the card's snippet loads; when `None` it is `folder`, without where that is
            on this machine.
        recipe: the recipe that was run, such as `embedded/icae.yaml`: the card names it, and takes from it the
            licences, titles and Hub ids that the folder's own `recipe.yaml`, or an earlier stage's, leaves out.
        license: licence of the weights, as the Hub writes it.

    Returns:
        the card's path.

    Raises:
        ValueError: a file that is missing or holds something else, reports that do not belong to the checkpoint or to
            each other, or no limits.
    """
    folder = Path(folder)
    config = _read_config(folder)
    if not isinstance(config, CompressorConfig):
        raise ValueError(f"a card is of a compressor, and {folder} has a model of type {config.model_type!r}")
    loaded = [report if isinstance(report, EvaluationReport) else _load(Path(report)) for report in reports]
    for name in ("model", "num_parameters", "bounds"):
        if len(values := list(dict.fromkeys(getattr(report, name) for report in loaded))) > 1:
            raise ValueError(f"reports on one card must have the same {name}, got {values}")
    if loaded and loaded[0].num_parameters not in (None, num_parameters := _num_parameters(config)):
        raise ValueError(
            f"the scores are of a model with {loaded[0].num_parameters:,} parameters ({loaded[0].model}); "
            f"the one in {folder} has {num_parameters:,}"
        )
    pictures: dict[str, str] = {}
    for report in loaded:
        pictures |= _pictures(report, folder)
    text = model_card(
        config,
        _training_record(folder, recipe),
        [score for report in loaded for score in _scores(report)],
        limits,
        model_id=model_id or public_name(str(folder)),
        scores_note=" ".join(dict.fromkeys(note for report in loaded for note in _notes(report))) or None,
        pictures=pictures,
        license=license,
    )
    path = folder / "README.md"
    path.write_text(text, encoding="utf-8")
    return path


def _pictures(report: EvaluationReport, folder: Path) -> dict[str, str]:
    """Draw each task by ratio; what was drawn, by file."""
    drawn = {}
    for task in report.tasks():
        if len(report.ratios(task)) > 1:
            try:
                path = plot_quality_by_ratio(report, task, report.main_metric(task), folder / f"{task}_by_ratio.png")
            except ValueError as error:
                # The averages that it shows need all conditions of all data sets.
                logger.warning("no picture of %s by ratio: %s", task, error)
                continue
            drawn[path.name] = f"{TASK_NAMES[task]} by compression ratio"
    return drawn


def _read_config(folder: Path) -> PreTrainedConfig:
    # Importing the models registers them, so that our own checkpoints need no remote code.
    from .. import modeling  # noqa: F401

    _check_file(folder / "config.json", "the folder of a checkpoint has one")
    return AutoConfig.from_pretrained(folder)


def _check_file(path: Path, advice: str) -> None:
    if not path.is_file():
        raise ValueError(f"there is no file {path}: {advice}")


def _num_parameters(config: PreTrainedConfig) -> int:
    with torch.device("meta"):
        auto_class = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        return auto_class.from_config(config).num_parameters()


def _training_record(folder: Path, recipe: str | None) -> TrainingRecord:
    advice = "`context-compressors train` writes it"
    recipe_file, summary_file = folder / "recipe.yaml", folder / "training_summary.json"
    for file in (recipe_file, summary_file):
        _check_file(file, advice)
    try:
        summary = json.loads(summary_file.read_text(encoding="utf-8"))
        steps, seed, device = summary["steps"], summary["seed"], summary["device"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{summary_file} is not the summary of a training run: {error!r}") from error
    given = _sources(recipe) if recipe else []
    data = [_training_data(source, given) for source in _sources(str(recipe_file))]
    earlier = [_training_data(source, given) for source in map(_source, summary.get("earlier_sources", []))]
    # What a later stage has trained on in the same way is named once.
    data += [replace(entry, note=f"earlier: {entry.note}") for entry in dict.fromkeys(earlier) if entry not in data]
    if unknown := [entry.name for entry in data if entry.licence == _NOT_STATED]:
        logger.warning("no licence is named for %s: give `licence` in the recipe that --recipe names", unknown)
    return TrainingRecord(
        data=data,
        steps=steps,
        seeds=[seed],
        hardware=device,
        # A run that does not count its tokens leaves 0.
        tokens=summary.get("input_tokens") or None,
        context_tokens=summary.get("context_tokens"),
        hours=summary.get("hours"),
        recipe=public_name(recipe) if recipe else recipe_file.name,
        versions={name: summary[name] for name in ("torch", "transformers") if name in summary},
    )


def _sources(recipe: str) -> list[DataSource | RetrievalSource]:
    entries = read_recipe(recipe).get("sources")
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{recipe} has no list of sources: a card names what the checkpoint was trained on")
    return [_source(entry) for entry in entries]


def _source(entry: Any) -> _Source:
    return (RetrievalSource if isinstance(entry, dict) and "corpus" in entry else DataSource).from_mapping(entry)


def _place_of(source: _Source) -> Any:
    """What a source is called in the recipe of a run, where a folder has its own name alone."""
    return without_folders({"name": source.label})["name"].removeprefix("./")


def _training_data(source: _Source, given: Sequence[_Source]) -> TrainingData:
    said = next((entry for entry in given if _place_of(entry) == _place_of(source)), source)
    source = replace(source, **{name: getattr(source, name) or getattr(said, name) for name in _OF_DATA})
    if isinstance(source, RetrievalSource):
        corpus = source.corpus
        title = source.title or corpus.name or Path(str(corpus.path)).stem
        note = "queries, and the documents that answer them"
        return TrainingData(title, source.licence or _NOT_STATED, source.hub_id or _hub_name(corpus.name), note)
    parts = [", ".join(task.replace("_", " ") for task in dict.fromkeys(source.tasks))]
    if source.name is not None:
        parts.insert(0, f"{source.split} split")
    if source.kind is not None:
        parts.insert(0, source.kind)
    if source.rows is not None:
        parts.append(f"rows {source.rows[0]:,} to {source.rows[1] - 1:,}")
    if source.where is not None:
        parts.append("where " + ", ".join(f"{column} is {_kept(value)}" for column, value in source.where.items()))
    if source.max_samples is not None:
        parts.append(f"at most {source.max_samples:,} rows")
    if source.generated:
        # The package makes these texts itself, so they come under its licence.
        title, licence = source.title or "generated documents", source.licence or "Apache-2.0"
    else:
        title = source.title or _hub_name(source.name) or Path(source.name or source.path or "").stem
        licence = source.licence or _NOT_STATED
    return TrainingData(title, licence, source.hub_id or _hub_name(source.name), "; ".join(parts))


def _kept(wanted: Any) -> str:
    """Values of a column as a card names them."""
    if isinstance(wanted, dict):
        return " and ".join(f"{end} {wanted[end]}" for end in ("from", "below") if end in wanted)
    return ", ".join(map(str, wanted)) if isinstance(wanted, (list, tuple)) else str(wanted)


def _hub_name(name: str | None) -> str | None:
    """A data set's name on the Hub; `None` for a folder, which a training records as one."""
    return None if name is None or name.startswith((".", "/", "~")) else name


def _load(path: Path) -> EvaluationReport:
    _check_file(path, "`context-compressors evaluate --output` writes a report")
    return EvaluationReport.load(path)


def _scores(report: EvaluationReport) -> list[Score]:
    ratios = ascending(ratio for task in report.tasks() for ratio in report.ratios(task))
    if not ratios:
        raise ValueError(f"the report of {report.model} has no compression ratio, but the checkpoint is a compressor")
    scores = []
    for task in report.tasks():
        for dataset in report.datasets(task):
            for metric, label in _METRICS[task].items():
                row = {
                    condition: _score(report, dataset, task, condition, metric)
                    for condition in report.conditions(task)
                }
                full, none = row.get(FULL_CONTEXT), row.get(NO_CONTEXT)
                split = "test" if dataset.startswith("generated") else None
                for ratio in ratios:
                    condition = ratio_condition(ratio)
                    if (value := row.get(condition)) is not None:
                        score = Score(task, dataset, label, ratio, value, none, full, split)
                        found = {name: row.get(f"{kind}={ratio}") for kind, name in _ALTERNATIVES.items()}
                        beside = {name: number for name, number in found.items() if number is not None}
                        reached = report.reached_ratio(task, dataset) if ratio == "auto" else None
                        own = _of_one_row(report, dataset, task, condition, metric)
                        scores.append(replace(score, alternatives=beside, reached_ratio=reached, **own))
    return scores


def _of_one_row(report: EvaluationReport, dataset: str, task: str, condition: str, metric: str) -> dict[str, Any]:
    """Of a score that one row alone has its interval over documents, what is retained, and what a memory holds."""
    rows = [row for row in report.rows if (row.dataset, row.task, row.condition) == (dataset, task, condition)]
    if len(rows) != 1:
        return {}
    low, high = rows[0].intervals.get(metric, (math.nan, math.nan))
    costs = {
        name: rows[0].costs.get(name) for name in ("slots", "memory_bytes", "cache_bytes") if "slots" in rows[0].costs
    }
    return {
        "interval": None if math.isnan(low) else (low, high),
        "retention": rows[0].retention if metric == rows[0].main_metric else None,
        **{name: cost or None for name, cost in costs.items()},
    }


def _score(report: EvaluationReport, dataset: str, task: str, condition: str, metric: str) -> float | None:
    try:
        return report.score(dataset, task, condition, metric)
    except ValueError:
        return None


def _notes(report: EvaluationReport) -> list[str]:
    counts = [row.num_samples for row in report.rows]
    samples = f"{counts[0]:,}" if len(set(counts)) == 1 else f"{min(counts):,} to {max(counts):,}"
    seeds = sorted({row.seed for row in report.rows})
    reader = "a fine-tuned teacher" if report.bounds == "teacher" else "the checkpoint's own language model"
    bounds = {NO_CONTEXT: "no context", FULL_CONTEXT: "full context"}
    found = [name for condition, name in bounds.items() if any(row.condition == condition for row in report.rows)]
    notes = [f"Samples a row: {samples}, drawn by seed {', '.join(map(str, seeds))}."]
    if found:
        names = " and ".join(found).capitalize()
        notes.append(f"{names} {'are' if len(found) > 1 else 'is'} read by {reader}.")
    notes.append("Perplexity is better when lower.")
    if any(row.intervals for row in report.rows):
        notes.append("In brackets: 95 % bootstrap intervals over documents.")
    window = report.settings.get("context_tokens")
    if window is not None and {"reconstruction", "continuation"} & set(report.tasks()):
        notes.append(
            f"Reconstruction and continuation: windows of at most {window} tokens, scored token by token given the "
            "right text before."
        )
    cut = {(row.dataset, row.task, row.seed): row.num_truncated for row in report.rows}
    if truncated := sum(cut.values()):
        notes.append(f"Contexts that were cut to fit: {truncated:,}.")
    notes += reservations(report)
    outside = sorted({row.dataset for row in report.rows if row.domain == "out"})
    if outside:
        notes.append(f"Out of domain (no part of the data set was trained on): {', '.join(outside)}.")
    return notes
