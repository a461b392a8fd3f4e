# SPDX-License-Identifier: Apache-2.0
"""Model cards: what a checkpoint is, what it was trained on, what it can do, and what it cannot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from .card_records import TASK_NAMES, Score, TrainingRecord

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_FOLDER = Path(__file__).parent
_HUB_TASKS = {"question_answering": "question-answering", "summarisation": "summarization"}


# Fields of some methods that the card names: field -> what the card calls it.
_OWN_FIELDS = {
    "memory_tokens": "Memory tokens of a chunk",
    "token_attention": "Attention among the copies",
    "reconstruction_trigger": "A reconstruction starts with",
    "encoder_name_or_path": "Encoder's base model",
    "encoder_layers": "Encoder layers",
    "appended_tokens": "Learned tokens behind the context",
    "lsa_layers": "Blocks of layer semantic alignment",
    "training_stage": "Last stage of training",
    "token_anchors": "Token anchors",
    "slot_aggregation": "Anchors become slots by",
    "window_size": "Longest window in tokens",
    "transport_epsilon": "Entropic strength",
    "transport_iterations": "Sinkhorn iterations",
    "literal_equations": "Equations as printed",
    "compression": "Slots are made by",
    "question_placement": "A question is read by",
}
NOT_MEASURED = "Not measured."
_USAGE = """\
memory = model.compress(**{document_tokenizer}(document, return_tensors="pt"), ratio={ratio})  # once
memory.save("document.safetensors")  # keep it
answer = model.generate(**{question}, memory=memory, max_new_tokens=32)"""
# Where a document is compressed together with its question.
_USAGE_WITH_QUESTION = """\
context = {document_tokenizer}(document, return_tensors="pt").input_ids
asked = {question}  # the document is compressed together with its question
answer = model.generate(**asked, context_input_ids=context, ratio={ratio}, max_new_tokens=32)"""
# The template's tokens stand around the slots: the pipeline puts them there.
_USAGE_IN_CHAT = """\
pipe = model.question_answering(tokenizer)
memory = pipe.compress(document, ratio={ratio})  # once
memory.save("document.safetensors")  # keep it
answer = pipe(question, memory=memory)["answer"]"""
_QUESTION = 'tokenizer(question, return_tensors="pt")'
# The task token takes BOS's place.
_QUESTION_BEHIND_TASK_TOKEN = 'tokenizer("[LM]" + question, add_special_tokens=False, return_tensors="pt")'


def method_text(model_type: str) -> str:
    """Read a method's own part of the card, its description and its citation.

    Args:
        model_type: the configuration's `model_type`.

    Raises:
        ValueError: no such method has a card.
    """
    name = model_type.removesuffix("_compressor")
    available = sorted(path.stem for path in _FOLDER.glob("*.md") if not path.stem.endswith("_template"))
    if name not in available:
        raise ValueError(f"there is no card text for the method {name!r}; there are: {', '.join(available)}")
    return (_FOLDER / f"{name}.md").read_text(encoding="utf-8").strip()


def model_card(
    config: PreTrainedConfig,
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
    ratios = tuple(config.compression_ratios)
    for score in scores:
        if score.ratio is not None and score.ratio not in ratios:
            raise ValueError(f"score {score.metric!r} has ratio {score.ratio}; the checkpoint has {ratios}")
    # On the Hub the base of a fine-tuned model is the model that it was fine-tuned from.
    base = next(
        (name for name in (config.parent_model_name_or_path, config.base_model_name_or_path) if _is_public(name)), None
    )
    metadata = card_metadata(model_id, training, scores, license, language)
    metadata.base_model = base
    metadata.tags = ["context-compression", "soft-prompt", method_name(config).replace(" ", "-")]
    return fill_template(
        "compressor_template.md",
        metadata,
        training,
        score_table(scores),
        "\n\n".join(filter(None, [scores_note, *(f"![{text}]({name})" for name, text in (pictures or {}).items())])),
        limits,
        model_id=model_id,
        summary=summary or _default_summary(config),
        facts=checkpoint_facts(config),
        usage=_usage(config).format(
            document_tokenizer="tokenizer" if config.encoder_tokenizer is None else "model.encoder_tokenizer",
            question=_QUESTION_BEHIND_TASK_TOKEN if config.task_token_ids else _QUESTION,
            ratio=ratios[0],
        ),
        requirements=" and `peft`" if config.encoder_lora or config.decoder_lora else "",
        auto_class="AutoModelForSeq2SeqLM" if config.is_encoder_decoder else "AutoModelForCausalLM",
        method=method_text(config.model_type),
    )


def _usage(config: PreTrainedConfig) -> str:
    if config.prompt_format == "chat":
        return _USAGE_IN_CHAT
    return _USAGE_WITH_QUESTION if config.compresses_questions else _USAGE


def language_model_card(
    config: PreTrainedConfig,
    training: TrainingRecord,
    scores: Sequence[Score],
    limits: Sequence[str],
    *,
    model_id: str,
    summary: str,
    num_parameters: int,
    scores_note: str | None = None,
    license: str = "apache-2.0",
    language: str | Sequence[str] = "en",
) -> str:
    """Write the card of a language model that compressors are built on.

    Args:
        config: the language model's configuration.
        training: how the checkpoint was made.
        scores: what it reached; their ratio is None.
        limits: what it cannot do, one sentence each; never empty.
        model_id: repository or folder that the snippet loads.
        summary: what it is, in a sentence or two.
        num_parameters: number of parameters.
        scores_note: how the scores were measured, in sentences under their table.
        license: licence of the weights, as the Hub writes it.
        language: ISO 639-1 code or codes.

    Returns:
        the text of `README.md`, which starts with YAML metadata.

    Raises:
        ValueError: no limits are named.
    """
    facts = [
        ("Architecture", config.model_type),
        ("Parameters", f"{num_parameters:,}"),
        ("Vocabulary", f"{config.vocab_size:,}"),
        ("Longest input", f"{config.max_position_embeddings:,} tokens"),
    ]
    metadata = card_metadata(model_id, training, scores, license, language)
    metadata.tags = ["context-compression"]
    return fill_template(
        "language_model_template.md",
        metadata,
        training,
        score_table(scores),
        scores_note,
        limits,
        model_id=model_id,
        summary=summary,
        facts=_table(facts),
    )


def card_metadata(
    model_id: str,
    training: TrainingRecord,
    scores: Sequence[Score],
    license: str,
    language: str | Sequence[str],
) -> ModelCardData:
    """What the Hub reads at the top of a card."""
    return ModelCardData(
        datasets=[data.hub_id for data in training.data if data.hub_id] or None,
        eval_results=_eval_results(scores),
        model_name=_title(model_id),
        language=language if isinstance(language, str) else list(language),
        library_name="transformers",
        license=license,
        pipeline_tag="text-generation",
    )


def fill_template(
    template: str,
    metadata: ModelCardData,
    training: TrainingRecord,
    scores: str,
    scores_note: str | None,
    limits: Sequence[str],
    **fields: str,
) -> str:
    """A card's text: its template with what all cards have, and the template's own fields.

    Raises:
        ValueError: no limits are named.
    """
    if not limits:
        raise ValueError("a card names what the checkpoint cannot do: give at least one limit")
    text = Template((_FOLDER / template).read_text(encoding="utf-8")).substitute(
        title=_title(fields["model_id"]),
        scores="\n\n".join(filter(None, [scores, scores_note])),
        training=_training(training),
        limits="\n".join(f"- {limit}" for limit in limits),
        **fields,
    )
    return str(ModelCard(f"---\n{metadata.to_yaml()}\n---\n\n{text}"))


def _title(model_id: str) -> str:
    return model_id.rstrip("/").rpartition("/")[2]


def _is_public(name: str | None) -> bool:
    """Whether a model's name is a Hub id and not a place on this machine, which the Hub refuses."""
    return bool(name) and name.count("/") == 1 and not name.startswith((".", "/", "~")) and not Path(name).is_dir()


def method_name(config: PreTrainedConfig) -> str:
    """The method in words."""
    return config.model_type.removesuffix("_compressor").replace("_", " ")


def _number(value: float | None, interval: tuple[float, float] | None = None) -> str:
    if value is None:
        return "–"
    return f"{value:.2f}" if interval is None else f"{value:.2f} [{interval[0]:.2f}, {interval[1]:.2f}]"


def score_table(scores: Sequence[Score]) -> str:
    """A Markdown table of scores, each beside no context, what else was tried, and full context.

    Args:
        scores: the rows, in order.
    """
    if not scores:
        return NOT_MEASURED
    others = list(dict.fromkeys(name for score in scores for name in score.alternatives))
    columns = ["task", "data", "metric", "ratio", "no context", "compressed", *others, "full context"]
    lines = [f"| {' | '.join(columns)} |", f"| {' | '.join(['---'] * 3 + ['---:'] * (len(columns) - 3))} |"]
    for score in scores:
        # A model that does not compress reads the whole context.
        compressed, full = (score.value, score.full_context) if score.ratio is not None else (None, score.value)
        beside = [_number(score.alternatives.get(name)) for name in others]
        cells = [
            TASK_NAMES[score.task],
            f"{score.dataset} ({score.split})" if score.split else score.dataset,
            score.metric,
            "–" if score.ratio is None else str(score.ratio),
            _number(score.no_context),
            _number(compressed, score.interval),
            *beside,
            _number(full),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _default_summary(config: PreTrainedConfig) -> str:
    base = f" on {config.base_model_name_or_path}" if config.base_model_name_or_path else ""
    return (
        f"A soft context compressor ({method_name(config)}){base}: it reads a long context once, keeps "
        f"{_kept(config)} for {every(config.compression_ratios)}, and answers from those."
    )


def every(ratios: Sequence[int]) -> str:
    """What there is one vector for, in words: "every 2, 4 or 8 tokens", "each token"."""
    *first, last = map(str, ratios)
    if not first and last == "1":
        return "each token"
    return "every " + (f"{', '.join(first)} or {last}" if first else last) + " tokens"


def _kept(config: PreTrainedConfig) -> str:
    keeps_layers = config.model_type == "five_hundred_x_compressor"
    return "the keys and values of one memory token" if keeps_layers else "one vector"


def checkpoint_facts(config: PreTrainedConfig, is_encoder: bool = False) -> str:
    """A Markdown table of what a checkpoint is.

    Args:
        config: its configuration.
        is_encoder: whether it has no decoder, whatever its configuration says of one.
    """
    base = config.base_model_name_or_path or "none: trained from the start"
    if config.base_model_revision:
        base += f", revision {config.base_model_revision}"
    fields = {title: getattr(config, name, None) for name, title in _OWN_FIELDS.items()}
    if is_encoder:
        fields.pop(_OWN_FIELDS["question_placement"], None)
    own = [(title, value) for title, value in fields.items() if value is not None]
    return _table(
        [
            ("Base model", base),
            *([("Fine-tuned from", config.parent_model_name_or_path)] if config.parent_model_name_or_path else []),
            ("Method", method_name(config)),
            ("Compression ratios", ", ".join(map(str, config.compression_ratios))),
            ("Chunk size", f"{config.chunk_size} tokens" if config.chunk_size else "none: the context is read whole"),
            ("Position layout", config.position_layout),
            ("Encoder", _adapters(config.encoder_lora)),
            *([] if is_encoder else [("Decoder", _adapters(config.decoder_lora))]),
            *own,
        ]
    )


def _table(rows: Sequence[tuple[str, str]]) -> str:
    return "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows)])


def _adapters(lora: dict[str, Any] | None) -> str:
    return "no adapters" if lora is None else f"LoRA, rank {lora['rank']}, alpha {lora['alpha']:g}"


def _training(record: TrainingRecord) -> str:
    lines = ["| data | licence | what of it |", "| --- | --- | --- |"]
    for data in record.data:
        name = f"[{data.name}](https://huggingface.co/datasets/{data.hub_id})" if data.hub_id else data.name
        lines.append(f"| {name} | {data.licence} | {data.note or 'all'} |")
    facts = [f"Steps: {record.steps:,}"]
    if record.tokens is not None:
        contexts = f" of text, {record.context_tokens:,} of compressed contexts" if record.context_tokens else ""
        facts.append(f"Tokens: {record.tokens:,}{contexts}")
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
    return name if score.ratio is None else f"{name}, ratio {score.ratio}"


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
