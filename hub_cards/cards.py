# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's card: its use, its training data, its scores with their bounds, and its limits."""

from __future__ import annotations

import inspect
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import EvalResult, ModelCardData
from transformers import AutoConfig

from ..configuration.configuration_compressor import RETRIEVAL_LOADER, CompressorConfig
from ..data.published_sets import PUBLISHED_SETS
from ..data.retrieval_sources import RetrievalSource
from ..data.sources import DataSource
from ..data.yaml_text import read_yaml
from ..evaluation.plots import plot_quality_by_ratio
from ..evaluation.report import EvaluationReport
from ..evaluation.report_tables import reservations
from ..evaluation.rows import BENCHMARK_SCORE, FULL_CONTEXT, NO_CONTEXT, EvaluationRow, ratio_condition
from ..modeling.checkpoint.checkpoint_card import card_text, facts, hub_fields, public_name, summary_of, usage
from ..modeling.memory.key_value_memory import position_bytes
from ..reporting.tables import markdown_table

logger = logging.getLogger(__name__)

# Metric -> how the card calls it, per task: the main ones.
_METRICS = {
    "question_answering": {
        BENCHMARK_SCORE: "the benchmark's own score",
        "exact_match": "exact match",
        "f1": "F1",
        "substring_accuracy": "contained",
    },
    "summarization": {"rouge1": "ROUGE-1", "rougeL": "ROUGE-L"},
    "reconstruction": {"token_accuracy": "token accuracy", "bleu": "BLEU"},
    "continuation": {"perplexity": "perplexity"},
}
_HUB_TASKS = {"question_answering": "question-answering", "summarization": "summarization"}
# Condition of the evaluation -> name of the baseline on the card.
_ALTERNATIVES = {
    "cut": "truncated text",
    "bm25": "BM25 sentences",
    "self_information": "unexpected tokens",
    "keep_drop": "kept words",
    "keep_drop_aware": "words kept for the question",
}
# Columns of a score table behind the full context.
_COSTS = ("retention, %", "slots", "kB", "cache, kB")
_NOT_STATED = "not stated"


@dataclass(frozen=True)
class Score:
    """A score at one ratio, the bounds and baselines of the same questions, and the sizes of a memory."""

    task: str
    dataset: str
    metric: str
    ratio: int | str
    value: float
    interval: tuple[float, float] | None = None
    no_context: float | None = None
    full_context: float | None = None
    alternatives: Mapping[str, float] = field(default_factory=dict)
    costs: Mapping[str, str] = field(default_factory=dict)


def write_card(
    folder: str | Path,
    reports: Sequence[EvaluationReport | str | Path],
    limits: Sequence[str],
    *,
    model_id: str | None = None,
    license: str = "apache-2.0",
    new_version: str | None = None,
) -> Path:
    """Write `README.md` of a checkpoint from its configuration, its training's record, and its scores, with pictures.

    Args:
        folder: of a training run, with `recipe.yaml` and `training_summary.json`.
        reports: evaluations of the checkpoint, or their files; `ValueError` where they do not belong to each other.
        limits: what it cannot do, one sentence each; never empty.
        model_id: repository or folder that the card's snippet loads; the folder's name when `None`.
        license: license of the weights, as the Hub writes it.
        new_version: repository of the checkpoint that replaces this one.
    """
    # Importing the models registers them, so that our own checkpoints need no remote code.
    from .. import modeling  # noqa: F401

    folder = Path(folder)
    config = AutoConfig.from_pretrained(folder)
    loaded = [report if isinstance(report, EvaluationReport) else EvaluationReport.load(report) for report in reports]
    for name in ("model", "num_parameters", "bounds"):
        if len(values := list(dict.fromkeys(vars(report)[name] for report in loaded))) > 1:
            raise ValueError(f"reports on one card must have the same {name}, got {values}")
    training, datasets = _training(folder)
    notes = list(dict.fromkeys(note for report in loaded for note in _notes(report)))
    size = None
    if loaded and not config.is_encoder_decoder:
        size = position_bytes(config.get_text_config(decoder=True), torch.bfloat16)
        end = "whole text" if config.position_layout == "enhanced" else "slots"
        notes.append("`cache, kB` is what the slots' keys and values take when they are read, in bfloat16.")
        notes.append(f"The question's position ids continue after the {end}.")
    pictures = [picture for number, report in enumerate(loaded) for picture in _pictures(report, folder, number)]
    text = model_card(
        config,
        training,
        [score for report in loaded for score in _scores(report, size)],
        limits,
        model_id=model_id or public_name(str(folder)),
        notes=[" ".join(notes), *pictures],
        datasets=datasets,
        license=license,
        new_version=new_version,
    )
    path = folder / "README.md"
    path.write_text(text, encoding="utf-8")
    return path


def model_card(
    config: CompressorConfig,
    training: str,
    scores: Sequence[Score],
    limits: Sequence[str],
    *,
    model_id: str,
    notes: Sequence[str] = (),
    datasets: Sequence[str] = (),
    **metadata: str | None,
) -> str:
    """Return the card of a compressor: metadata for the Hub, use, scores with `notes`, training, limits and method."""
    if not limits:
        raise ValueError("a card names what the checkpoint cannot do: give at least one limit")
    sections = {
        "Scores": "\n\n".join(filter(None, [score_table(scores), *notes])),
        "Training": training,
        "Limits": "\n".join(f"- {limit}" for limit in limits),
    }
    title = model_id.rstrip("/").rpartition("/")[2]
    is_retrieval = config.auto_class == RETRIEVAL_LOADER
    data = ModelCardData(
        **hub_fields(config),
        datasets=list(dict.fromkeys(datasets)) or None,
        model_name=title,
        language="en",
        library_name="transformers",
        pipeline_tag="feature-extraction" if is_retrieval else "text-generation",
        eval_results=list(map(_eval_result, scores)) or None,
        **{"license": "apache-2.0", **{name: value for name, value in metadata.items() if value}},
    )
    parts = [f"## {name}\n\n{text}" for name, text in sections.items()]
    opening = (title, summary_of(config), facts(config), usage(config, model_id))
    return card_text(data, *opening, *parts, method_text(config))


def method_text(config: CompressorConfig) -> str:
    """Return a method's description and citation: its file in this folder, or its configuration's docstring."""
    file = Path(__file__).with_name(f"{config.card_text}.md")
    if file.is_file():
        return file.read_text(encoding="utf-8").strip()
    return f"## Method\n\n{inspect.getdoc(type(config)).partition('Args:')[0].strip()}"  # type: ignore[union-attr]


# --- scores ---


def score_table(scores: Sequence[Score]) -> str:
    """Return a Markdown table of scores, no context, the baselines and full context, with sizes of memories."""
    if not scores:
        return "Not measured."
    others = list(dict.fromkeys(name for score in scores for name in score.alternatives))
    costs = [name for name in _COSTS if any(name in score.costs for score in scores)]
    rows = []
    for score in scores:
        low_high = "" if score.interval is None else f" [{score.interval[0]:.2f}, {score.interval[1]:.2f}]"
        numbers = [score.no_context, *(score.alternatives.get(name) for name in others), score.full_context]
        first, *rest = ["–" if value is None else f"{value:.2f}" for value in numbers]
        cells = [score.task.replace("_", " ").capitalize(), score.dataset, score.metric, score.ratio, first]
        rows.append([*cells, f"{score.value:.2f}{low_high}", *rest, *(score.costs.get(name, "–") for name in costs)])
    header = ["task", "data", "metric", "ratio", "no context", "compressed", *others, "full context", *costs]
    return markdown_table(header, rows)


def _eval_result(score: Score) -> EvalResult:
    is_known = score.task in _HUB_TASKS
    # The Hub puts all that is text generation into one group, so the name tells which task it was.
    name = score.metric if is_known else f"{score.task} {score.metric}"
    return EvalResult(
        task_type=_HUB_TASKS.get(score.task, "text-generation"),
        task_name=score.task.replace("_", " ").capitalize() if is_known else "Text generation",
        dataset_type=_hub_name(score.dataset.lower().replace(" ", "_")),
        dataset_name=score.dataset,
        metric_type=score.metric.lower().replace(" ", "_"),
        metric_name=f"{name}, ratio {score.ratio}",
        metric_value=round(score.value, 4),
    )


def _scores(report: EvaluationReport, size: int | None) -> list[Score]:
    """Return the scores at each ratio; `size` is the bytes of a position in the KV cache."""
    scores = []
    for task in report.tasks():
        for dataset in report.datasets(task):
            rows = {row.condition: row for row in report.rows if (row.task, row.dataset) == (task, dataset)}
            for metric in _METRICS[task]:
                values = {name: row.metrics[metric] for name, row in rows.items() if metric in row.metrics}
                for ratio in report.ratios(task):
                    if (name := ratio_condition(ratio)) in values:
                        scores.append(_score(rows[name], metric, ratio, values, size))
    if not scores:
        raise ValueError(f"the report of {report.model} has no compression ratio, but the checkpoint is a compressor")
    return scores


def _score(row: EvaluationRow, metric: str, ratio: int, values: Mapping[str, float], size: int | None) -> Score:
    """Return a row's score with those of the same samples under other conditions, `values`."""
    low, high = row.intervals.get(metric, (math.nan, math.nan))
    names = {name: f"{kind}={ratio}" for kind, name in _ALTERNATIVES.items()}
    return Score(
        *(row.task, row.dataset, _METRICS[row.task][metric], ratio, row.metrics[metric]),
        interval=None if math.isnan(low) else (low, high),
        no_context=values.get(NO_CONTEXT),
        full_context=values.get(FULL_CONTEXT),
        alternatives={name: values[key] for name, key in names.items() if key in values},
        costs=_costs(row, metric, size),
    )


def _costs(row: EvaluationRow, metric: str, size: int | None) -> dict[str, str]:
    """Return the retention of a score and the size of its memory."""
    costs = {}
    if row.retention is not None and metric == row.main_metric:
        costs["retention, %"] = f"{row.retention:.0f}"
    if "slots" in row.costs:
        costs["slots"] = f"{row.costs['slots']:,.0f}"
        if "memory_bytes" in row.costs:
            costs["kB"] = f"{row.costs['memory_bytes'] / 1000:,.0f}"
        if size is not None:
            costs["cache, kB"] = f"{row.costs['slots'] * size / 1000:,.0f}"
    return costs


def _pictures(report: EvaluationReport, folder: Path, number: int) -> list[str]:
    """Draw each task of the card's report `number` by ratio, and return the images as Markdown."""
    images = []
    for task in report.tasks():
        if len(report.ratios(task)) > 1:
            path = folder / f"{task}_by_ratio{f'_{number + 1}' if number else ''}.png"
            try:
                plot_quality_by_ratio(report, task, report.main_metric(task), path)
            except ValueError as error:
                # The averages that it shows need all conditions of all data sets.
                logger.warning("no picture of %s by ratio: %s", task, error)
                continue
            images.append(f"![{task.replace('_', ' ').capitalize()} by compression ratio]({path.name})")
    return images


def _notes(report: EvaluationReport) -> list[str]:
    counts = [row.num_samples for row in report.rows]
    samples = f"{counts[0]:,}" if len(set(counts)) == 1 else f"{min(counts):,} to {max(counts):,}"
    reader = "a fine-tuned teacher" if report.bounds == "teacher" else "the checkpoint's own language model"
    notes = [f"Samples a row: {samples}, drawn by seed {report.settings.get('seed', 0)}."]
    if any(row.condition in (NO_CONTEXT, FULL_CONTEXT) for row in report.rows):
        notes.append(f"The reader without compression is {reader}.")
    notes.append("Perplexity is better when lower.")
    full = [row.costs for row in report.rows if row.condition == FULL_CONTEXT]
    sizes = [costs["memory_bytes"] for costs in full if "memory_bytes" in costs]
    if sizes:
        dtype = (report.settings.get("memory_dtype") or report.settings["dtype"]).removeprefix("torch.")
        size = sum(sizes) / len(sizes) / 1000
        notes.append(f"A text has {size:,.1f} kB on average; `kB` is what its memory takes in {dtype}.")
    if any(row.intervals for row in report.rows):
        notes.append("In brackets: 95 % bootstrap intervals over documents.")
    window = report.settings.get("context_tokens")
    if window is not None and {"reconstruction", "continuation"} & set(report.tasks()):
        notes.append(
            f"Reconstruction and continuation: windows of at most {window} tokens, scored token by token given the "
            "right text before."
        )
    cut = {(row.dataset, row.task): row.num_truncated for row in report.rows}
    if truncated := sum(cut.values()):
        notes.append(f"Contexts that were cut to fit: {truncated:,}.")
    notes += reservations(report)
    if outside := sorted({row.dataset for row in report.rows if row.domain == "out"}):
        notes.append(f"Out of domain (no part of the data set was trained on): {', '.join(outside)}.")
    return notes


# --- what the folder holds ---


def _training(folder: Path) -> tuple[str, list[str]]:
    """Return the section on a checkpoint's training, and the Hub ids of its data."""
    own_recipe, summary_file = folder / "recipe.yaml", folder / "training_summary.json"
    try:
        summary = json.loads(summary_file.read_text(encoding="utf-8"))
        steps, seed, device = summary["steps"], summary["seed"], summary["device"]
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(f"{summary_file} is not the summary of a training run: {error!r}") from error
    sources = read_yaml(own_recipe)["sources"], summary.get("earlier_sources", [])
    rows, earlier = (list(map(_data_row, each)) for each in sources)
    # What a later stage has trained on in the same way is named once.
    rows += [(*row[:2], f"earlier: {row[2]}", row[3]) for row in dict.fromkeys(earlier) if row not in rows]
    if unknown := [title for title, license_, *_ in rows if license_ == _NOT_STATED]:
        logger.warning("no license is named for %s: give `license` in its source", unknown)
    cells = [
        [f"[{title}](https://huggingface.co/datasets/{hub_id})" if hub_id else title, license_, note]
        for title, license_, note, hub_id in rows
    ]
    tokens, contexts, hours = (summary.get(name) for name in ("input_tokens", "context_tokens", "hours"))
    facts_of_run = [f"Steps: {steps:,}" if steps else "Steps: none, fitted to contexts"]
    # A run that does not count its tokens leaves 0.
    if tokens:
        facts_of_run.append(
            f"Tokens: {tokens:,}" + (f" of text, {contexts:,} of compressed contexts" if contexts else "")
        )
    elif contexts:
        facts_of_run.append(f"Tokens: {contexts:,} of contexts")
    facts_of_run += [f"Seeds: {seed}", f"Hardware: {device}" + (f", {hours:g} hours" if hours is not None else "")]
    facts_of_run.append(f"Recipe: `{own_recipe.name}`")
    versions = [f"{name} {summary[name]}" for name in ("torch", "transformers") if name in summary]
    facts_of_run += [f"Versions: {', '.join(versions)}"] * bool(versions)
    table = markdown_table(["data", "license", "what of it"], cells)
    return "\n".join([table, "", *(f"- {fact}" for fact in facts_of_run)]), [row[3] for row in rows if row[3]]


def _data_row(entry: Mapping[str, Any]) -> tuple[str, str, str, str | None]:
    """Return title, license, a note on what was used, and Hub id of a recipe's source."""
    source: Any = (RetrievalSource if "corpus" in entry else DataSource).from_mapping(entry)
    title, license_, hub_id = source.title, source.license, source.hub_id
    if isinstance(source, RetrievalSource):
        corpus = source.corpus
        title = title or corpus.name or Path(str(corpus.path)).stem
        note = "queries, and the documents that answer them"
        return title, license_ or _NOT_STATED, note, hub_id or _hub_name(corpus.name)
    parts = [source.kind] if source.kind is not None else []
    parts += [f"{source.split} split"] if source.name is not None else []
    parts.append(", ".join(task.replace("_", " ") for task in dict.fromkeys(source.tasks)))
    if source.rows is not None:
        parts.append(f"rows {source.rows[0]:,} to {source.rows[1] - 1:,}")
    if source.where is not None:
        parts.append("where " + ", ".join(f"{column} is {value}" for column, value in source.where.items()))
    if source.max_samples is not None:
        parts.append(f"at most {source.max_samples:,} rows")
    if source.generated:
        # The package makes these texts itself, so they come under its license.
        title, license_ = title or "generated documents", license_ or "Apache-2.0"
    title = title or _hub_name(source.name) or Path(source.name or source.path or "").stem
    return title, license_ or _NOT_STATED, "; ".join(parts), hub_id or _hub_name(source.name)


def _hub_name(name: str | None) -> str | None:
    """Return a data set's id on the Hub, also for its short name in the register; `None` for a folder."""
    if name is None or name.startswith((".", "/", "~")):
        return None
    return PUBLISHED_SETS[name].hub or name if name in PUBLISHED_SETS else name
