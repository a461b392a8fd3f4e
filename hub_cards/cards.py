# SPDX-License-Identifier: Apache-2.0
"""Model cards: what a checkpoint is, what it was trained on, what it can do, and what it cannot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import EvalResult, ModelCardData

from ..configuration.configuration_compressor import RETRIEVAL_LOADER
from ..modeling.checkpoint.checkpoint_card import card_text, facts, hub_fields, summary_of, usage

if TYPE_CHECKING:
    from ..configuration.configuration_compressor import CompressorConfig

TASK_NAMES = {
    "reconstruction": "Reconstruction",
    "continuation": "Continuation",
    "question_answering": "Question answering",
    "summarisation": "Summarisation",
}
_FOLDER = Path(__file__).parent
_HUB_TASKS = {"question_answering": "question-answering", "summarisation": "summarization"}
_NOT_MEASURED = "Not measured."


@dataclass(frozen=True)
class TrainingData:
    """One data set that the checkpoint was trained on.

    Args:
        name: what it is called.
        licence: its licence.
        hub_id: its repository on the Hub, if it has one.
        note: what of it was used, such as "train split, 87,599 rows".
    """

    name: str
    licence: str
    hub_id: str | None = None
    note: str = ""


@dataclass(frozen=True)
class TrainingRecord:
    """How the checkpoint was made.

    Args:
        data: all data sets; never empty.
        steps: optimizer steps; 0 where something is fitted to contexts alone.
        seeds: every seed, one for each run behind the scores.
        hardware: what it was trained on, such as "1 x H200".
        tokens: training tokens.
        context_tokens: tokens of the compressed contexts, beside `tokens` of text.
        hours: wall-clock hours.
        recipe: the recipe's file.
        versions: library versions by name.
    """

    data: Sequence[TrainingData]
    steps: int
    seeds: Sequence[int]
    hardware: str
    tokens: int | None = None
    context_tokens: int | None = None
    hours: float | None = None
    recipe: str | None = None
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Score:
    """One number, with its two bounds beside it.

    Args:
        task: "reconstruction", "continuation", "question_answering" or "summarisation".
        dataset: data set's name.
        metric: metric's name, such as "exact match".
        ratio: compression ratio, or "auto".
        value: with the compressed context.
        no_context: the same questions with no context at all.
        full_context: the same questions with the whole context.
        split: data split; None where the data has none by name.
        interval: 95 % interval of `value`.
        alternatives: what else was tried at as many decoder positions -> its score, such as "truncated text".
        reached_ratio: context tokens a slot, where the ratio is "auto".
        retention: (value - no_context) / (full_context - no_context) of the task's main metric, in percent.
        slots: of a document, on average.
        memory_bytes: of a document's memory as it is stored, on average.
        cache_bytes: of the keys and values that the decoder has read when it starts to write, on average.
    """

    task: str
    dataset: str
    metric: str
    ratio: int | str
    value: float
    no_context: float | None = None
    full_context: float | None = None
    split: str | None = "test"
    interval: tuple[float, float] | None = None
    alternatives: Mapping[str, float] = field(default_factory=dict)
    reached_ratio: float | None = None
    retention: float | None = None
    slots: float | None = None
    memory_bytes: float | None = None
    cache_bytes: float | None = None


def method_text(method: str) -> str:
    """Read a method's own part of the card, its description and its citation."""
    available = sorted(path.stem for path in _FOLDER.glob("*.md"))
    if method not in available:
        raise ValueError(f"there is no card text for the method {method!r}; there are: {', '.join(available)}")
    return (_FOLDER / f"{method}.md").read_text(encoding="utf-8").strip()


def model_card(
    config: CompressorConfig,
    training: TrainingRecord,
    scores: Sequence[Score],
    limits: Sequence[str],
    *,
    model_id: str,
    scores_note: str | None = None,
    pictures: Mapping[str, str] | None = None,
    license: str = "apache-2.0",
) -> str:
    """Write the whole card of a compressor: metadata for the Hub, use, scores, training, limits, method, citation.

    Args:
        config: a compressor's configuration.
        training: how the checkpoint was made.
        scores: what it reached; each row stands beside its no-context and full-context bounds.
        limits: what it cannot do, one sentence each; never empty.
        model_id: repository or folder that the snippet loads.
        scores_note: how the scores were measured, in sentences under their table.
        pictures: file beside the card -> what it shows; they stand under the scores.
        license: licence of the weights, as the Hub writes it.

    Returns:
        the text of `README.md`, which starts with YAML metadata.

    Raises:
        ValueError: no limits are named, the method has no card text, or a score's ratio is none of the checkpoint's.
    """
    _check_ratios(config, scores)
    if not limits:
        raise ValueError("a card names what the checkpoint cannot do: give at least one limit")
    shown = [f"![{text}]({name})" for name, text in (pictures or {}).items()]
    sections = {
        "Scores": "\n\n".join(filter(None, [score_table(scores), scores_note, *shown])),
        "Training": _training(training),
        "Limits": "\n".join(f"- {limit}" for limit in limits),
    }
    title = model_id.rstrip("/").rpartition("/")[2]
    is_retrieval = config.auto_class == RETRIEVAL_LOADER
    data = ModelCardData(
        **hub_fields(config),
        datasets=list(dict.fromkeys(data.hub_id for data in training.data if data.hub_id)) or None,
        model_name=title,
        language="en",
        license=license,
        library_name="transformers",
        pipeline_tag="feature-extraction" if is_retrieval else "text-generation",
        eval_results=_eval_results(scores),
    )
    parts = [f"## {name}\n\n{text}" for name, text in sections.items()]
    opening = (title, summary_of(config), facts(config), usage(config, model_id))
    return card_text(data, *opening, *parts, method_text(config.card_text))


def _check_ratios(config: CompressorConfig, scores: Sequence[Score]) -> None:
    ratios = (*sorted(config.compression_ratios), *(["auto"] if config.selects_ratios else []))
    for score in scores:
        if score.ratio not in ratios:
            raise ValueError(f"the score on {score.dataset!r} has ratio {score.ratio}; the checkpoint has {ratios}")


def _number(value: float | None, interval: tuple[float, float] | None = None) -> str:
    if value is None:
        return "–"
    return f"{value:.2f}" if interval is None else f"{value:.2f} [{interval[0]:.2f}, {interval[1]:.2f}]"


def score_table(scores: Sequence[Score]) -> str:
    """A Markdown table of scores, beside no context, what else was tried and full context, with what memories hold."""
    if not scores:
        return _NOT_MEASURED
    others = list(dict.fromkeys(name for score in scores for name in score.alternatives))
    costs = {
        "retention, %": [None if score.retention is None else f"{score.retention:.0f}" for score in scores],
        "slots": [None if score.slots is None else f"{score.slots:,.0f}" for score in scores],
        "kB": [None if score.memory_bytes is None else f"{score.memory_bytes / 1000:,.0f}" for score in scores],
        "cache, kB": [None if score.cache_bytes is None else f"{score.cache_bytes / 1000:,.0f}" for score in scores],
    }
    costs = {name: cells for name, cells in costs.items() if any(cells)}
    columns = ["task", "data", "metric", "ratio", "no context", "compressed", *others, "full context", *costs]
    lines = [f"| {' | '.join(columns)} |", f"| {' | '.join(['---'] * 3 + ['---:'] * (len(columns) - 3))} |"]
    for place, score in enumerate(scores):
        beside = [_number(score.alternatives.get(name)) for name in others]
        cells = [
            TASK_NAMES[score.task],
            f"{score.dataset} ({score.split})" if score.split else score.dataset,
            score.metric,
            _ratio(score),
            _number(score.no_context),
            _number(score.value, score.interval),
            *beside,
            _number(score.full_context),
            *(cells[place] or "–" for cells in costs.values()),
        ]
        lines.append(_row(cells))
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    escaped = [cell.replace("|", "\\|") for cell in cells]
    return f"| {' | '.join(escaped)} |"


def _ratio(score: Score) -> str:
    return str(score.ratio) if score.reached_ratio is None else f"{score.ratio} ({score.reached_ratio:.1f})"


def _training(record: TrainingRecord) -> str:
    lines = ["| data | licence | what of it |", "| --- | --- | --- |"]
    for data in record.data:
        name = f"[{data.name}](https://huggingface.co/datasets/{data.hub_id})" if data.hub_id else data.name
        lines.append(_row([name, data.licence, data.note or "all"]))
    facts = [f"Steps: {record.steps:,}" if record.steps else "Steps: none, fitted to contexts"]
    if record.tokens is not None:
        contexts = f" of text, {record.context_tokens:,} of compressed contexts" if record.context_tokens else ""
        facts.append(f"Tokens: {record.tokens:,}{contexts}")
    elif record.context_tokens:
        facts.append(f"Tokens: {record.context_tokens:,} of contexts")
    facts.append(f"Seeds: {', '.join(map(str, record.seeds))}")
    facts.append(f"Hardware: {record.hardware}" + (f", {record.hours:g} hours" if record.hours is not None else ""))
    if record.recipe:
        facts.append(f"Recipe: `{record.recipe}`")
    if record.versions:
        facts.append("Versions: " + ", ".join(f"{name} {version}" for name, version in record.versions.items()))
    return "\n".join([*lines, "", *(f"- {fact}" for fact in facts)])


def _metric_name(score: Score) -> str:
    # The Hub puts all that is text generation into one group, so the name tells which task it was.
    name = score.metric if score.task in _HUB_TASKS else f"{score.task} {score.metric}"
    return f"{name}, ratio {score.ratio}"


def _eval_results(scores: Sequence[Score]) -> list[EvalResult] | None:
    results = [
        EvalResult(
            task_type=_HUB_TASKS.get(score.task, "text-generation"),
            task_name=TASK_NAMES[score.task] if score.task in _HUB_TASKS else "Text generation",
            dataset_type=score.dataset.lower().replace(" ", "_"),
            dataset_name=score.dataset,
            dataset_split=score.split,
            metric_type=score.metric.lower().replace(" ", "_"),
            metric_name=_metric_name(score),
            metric_value=round(score.value, 4),
        )
        for score in scores
    ]
    return results or None
