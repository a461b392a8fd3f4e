# SPDX-License-Identifier: Apache-2.0
"""Model cards: what a checkpoint is, what it was trained on, what it can do, and what it cannot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import EvalResult, ModelCardData

from ..modeling.checkpoint.checkpoint_card import card_text, facts, hub_fields, summary_of, usage
from .card_records import TASK_NAMES, RetrievalScore, Score, TrainingRecord

if TYPE_CHECKING:
    from ..configuration.configuration_compressor import CompressorConfig

_FOLDER = Path(__file__).parent
_HUB_TASKS = {"question_answering": "question-answering", "summarisation": "summarization"}
NOT_MEASURED = "Not measured."


def method_text(method: str) -> str:
    """Read a method's own part of the card, its description and its citation.

    Args:
        method: its name, that of its files.

    Raises:
        ValueError: no such method has a card.
    """
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
    summary: str | None = None,
    scores_note: str | None = None,
    pictures: Mapping[str, str] | None = None,
    license: str = "apache-2.0",
    language: str | Sequence[str] = "en",
) -> str:
    """Write the whole card of a compressor: metadata for the Hub, use, scores, training, limits, method, citation.

    Args:
        config: a compressor's configuration.
        training: how the checkpoint was made.
        scores: what it reached; each row stands beside its no-context and full-context bounds.
        limits: what it cannot do, one sentence each; never empty.
        model_id: repository or folder that the snippet loads.
        summary: what it is, in a sentence or two; made from the configuration when None.
        scores_note: how the scores were measured, in sentences under their table.
        pictures: file beside the card -> what it shows; they stand under the scores.
        license: licence of the weights, as the Hub writes it.
        language: ISO 639-1 code or codes.

    Returns:
        the text of `README.md`, which starts with YAML metadata.

    Raises:
        ValueError: no limits are named, the method has no card text, or a score's ratio is none of the checkpoint's.
    """
    _check_ratios(config, scores)
    shown = [f"![{text}]({name})" for name, text in (pictures or {}).items()]
    metadata = {**hub_fields(config), "pipeline_tag": "text-generation", "eval_results": _eval_results(scores)}
    return _card(
        _opening(config, model_id, summary),
        [score_table(scores), scores_note, *shown],
        training,
        limits,
        method_text(config.card_text),
        license=license,
        language=language,
        **metadata,
    )


def retrieval_card(
    config: CompressorConfig,
    training: TrainingRecord,
    scores: Sequence[RetrievalScore],
    limits: Sequence[str],
    *,
    model_id: str,
    summary: str | None = None,
    scores_note: str | None = None,
    license: str = "apache-2.0",
    language: str | Sequence[str] = "en",
) -> str:
    """Write the card of a compressor that ranks documents by several vectors each.

    Args:
        config: the configuration of a checkpoint that `AutoModelForTextEncoding` loads.
        training, limits, model_id, summary, scores_note, license, language: as `model_card`.
        scores: its rankings, each beside BM25's.

    Returns:
        the text of `README.md`, which starts with YAML metadata.

    Raises:
        ValueError: no limits are named, or a score's ratio is none of the checkpoint's.
    """
    _check_ratios(config, scores)
    results = [
        EvalResult(
            task_type="text-retrieval",
            task_name="Text retrieval",
            dataset_type=score.dataset.lower().replace(" ", "_"),
            dataset_name=score.dataset,
            metric_type="ndcg_at_10",
            metric_name=f"nDCG@10, ratio {score.ratio}",
            metric_value=round(score.ndcg_at_10, 4),
        )
        for score in scores
    ]
    metadata = {**hub_fields(config), "pipeline_tag": "feature-extraction", "eval_results": results or None}
    return _card(
        _opening(config, model_id, summary),
        [retrieval_table(scores), scores_note],
        training,
        limits,
        method_text(config.card_text),
        license=license,
        language=language,
        **metadata,
    )


def _check_ratios(config: CompressorConfig, scores: Sequence[Score] | Sequence[RetrievalScore]) -> None:
    ratios = (*sorted(config.compression_ratios), *(["auto"] if config.selects_ratios else []))
    for score in scores:
        if score.ratio not in ratios:
            raise ValueError(f"the score on {score.dataset!r} has ratio {score.ratio}; the checkpoint has {ratios}")


def _opening(config: CompressorConfig, model_id: str, summary: str | None) -> tuple[str, str, list, str]:
    """Title, summary, facts and use."""
    return _title(model_id), summary or summary_of(config), facts(config), usage(config, model_id)


def _card(
    opening: tuple[str, str, list, str],
    scores: Sequence[str | None],
    training: TrainingRecord,
    limits: Sequence[str],
    *method: str,
    language: str | Sequence[str],
    **metadata: Any,
) -> str:
    """A card: title, summary, facts and use, then what a configuration does not know."""
    if not limits:
        raise ValueError("a card names what the checkpoint cannot do: give at least one limit")
    sections = {
        "Scores": "\n\n".join(filter(None, scores)),
        "Training": _training(training),
        "Limits": "\n".join(f"- {limit}" for limit in limits),
    }
    data = ModelCardData(
        datasets=list(dict.fromkeys(data.hub_id for data in training.data if data.hub_id)) or None,
        model_name=opening[0],
        language=language if isinstance(language, str) else list(language),
        library_name="transformers",
        **metadata,
    )
    return card_text(data, *opening, *(f"## {name}\n\n{text}" for name, text in sections.items()), *method)


def _title(model_id: str) -> str:
    return model_id.rstrip("/").rpartition("/")[2]


def _number(value: float | None, interval: tuple[float, float] | None = None) -> str:
    if value is None:
        return "–"
    return f"{value:.2f}" if interval is None else f"{value:.2f} [{interval[0]:.2f}, {interval[1]:.2f}]"


def score_table(scores: Sequence[Score]) -> str:
    """A Markdown table of scores, beside no context, what else was tried and full context, with what memories hold.

    Args:
        scores: the rows, in order.
    """
    if not scores:
        return NOT_MEASURED
    others = list(dict.fromkeys(name for score in scores for name in score.alternatives))
    costs = {
        "retention, %": [None if score.retention is None else f"{score.retention:.0f}" for score in scores],
        "slots": [None if score.slots is None else f"{score.slots:,.0f}" for score in scores],
        "kB": [None if score.memory_bytes is None else f"{score.memory_bytes / 1000:,.0f}" for score in scores],
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


def retrieval_table(scores: Sequence[RetrievalScore]) -> str:
    """A Markdown table of rankings, each beside BM25's.

    Args:
        scores: the rows, in order.
    """
    if not scores:
        return NOT_MEASURED
    lines = ["| data | ratio | nDCG@10 | BM25 | index, times smaller |", "| --- | ---: | ---: | ---: | ---: |"]
    for score in scores:
        numbers = [score.ndcg_at_10, score.bm25, score.storage_saving]
        cells = [score.dataset, str(score.ratio), *("–" if n is None else f"{n:.1f}" for n in numbers)]
        lines.append(_row(cells))
    return "\n".join(lines)


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
