# SPDX-License-Identifier: Apache-2.0
"""Evaluation of a compressor and its two bounds, no context and full context."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..data.document_ids import TrainingDocuments
from ..data.prompts import default_prompts
from ..data.task_tokens import task_start_ids
from ..modeling.checkpoint.fingerprints import settings_fingerprint, weights_fingerprint
from ..modeling.parts.base_pass import trained_base_weights
from ..modeling.parts.text_ids import context_opening, text_tokenizer
from ..reporting.result_files import rounded
from .held_out import Sources, add_record, compare_sources
from .metrics import BertScorer
from .report import EvaluationReport
from .results import add_results, samples_digest
from .rows import FULL_CONTEXT, NO_CONTEXT, alternative_condition, ratio_condition
from .samples import EvaluationDataset, Sample, SampleBuilder
from .scoring import Condition, Scorer, Seq2SeqScorer
from .settings import EvaluationSettings

# What more data sets and tasks add to the settings of a report.
_GROWING = ("tasks", "samples", "sources", "left_out")
_Work = list[tuple[EvaluationDataset, str, list[Sample]]]


def evaluate_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    datasets: Sequence[EvaluationDataset],
    settings: EvaluationSettings | None = None,
    *,
    teacher: PreTrainedModel | None = None,
    model_name: str | None = None,
    num_parameters: int | None = None,
    progress: bool = True,
    records: Mapping[str, TrainingDocuments | None] | None = None,
    resume_from: EvaluationReport | None = None,
    on_result: Callable[[EvaluationReport], Any] = lambda report: None,
) -> EvaluationReport:
    """Score a model on data sets: without context, with full context, and a compressor at every ratio.

    All conditions see the same samples and prompts. Answers and summaries are written greedily; reconstructions and
    continuations are scored token by token given the right text before.

    Args:
        model: a compressor's `...ForCausalLM`, or a plain causal language model for the two bounds alone.
        teacher: language model of the two bounds; the compressor's own decoder when `None`.
        model_name: how the report calls the model; the last part of its Hub id or folder when `None`.
        num_parameters: of a model whose adapters have been merged since.
        records: by name, the documents that trained and chose the models; those saved with their weights when `None`.
        resume_from: an unfinished report of the same evaluation, whose rows are not scored again.
        on_result: called with the report after each task on each data set.

    Raises:
        TypeError: the model is neither a compressor nor a causal language model.
        ValueError: arguments that do not go with the model, a context that does not fit and may not be cut, or
            documents that trained or chose a model.
    """
    settings = settings or EvaluationSettings()
    compresses = can_compress(model)
    if not compresses:
        if not model.can_generate() or model.config.is_encoder_decoder:
            raise TypeError(f"model must be a compressor or a causal language model, got {type(model).__name__}")
    elif model.config.task_token_ids or model.config.prompt_format == "chat":
        tokenizer = text_tokenizer(tokenizer)
    ratios = _ratios(model.config, settings) if compresses and not settings.bounds_only else []
    conditions = _conditions(model, teacher, ratios, settings)
    if compresses:
        settings = replace(
            settings,
            prompts=settings.prompts or default_prompts(model.config),
            prompt_format=model.config.prompt_format,
            context_prefix=settings.context_prefix or model.config.context_prefix,
        )
    builder = SampleBuilder(
        tokenizer,
        settings,
        max_positions([model.config] if teacher is None else [model.config, teacher.config]),
        _max_context_tokens(model, tokenizer, ratios, settings),
        1 if any(condition.with_context for condition in conditions) else min(ratios, default=1),
    )
    # All samples are made before anything is scored, so that a data set that does not fit is refused at once.
    work: _Work = [
        entry
        for dataset, task in _tasks_of_datasets(datasets, settings)
        for entry in builder.build_by_length(dataset, task, settings.restoration_lengths, settings.max_samples)
    ]
    name = model_name or model_label(model.name_or_path or type(model).__name__)
    if records is None:
        records = {name: TrainingDocuments.of(model.name_or_path, on_hub=compresses)}
        if teacher is not None:
            add_record(records, model_label(teacher.name_or_path), TrainingDocuments.of(teacher.name_or_path))
    of_data_sets: dict[str, list[Sample]] = {}
    for dataset, _, samples in work:
        of_data_sets.setdefault(dataset.name, []).extend(samples)
    report = EvaluationReport(
        model=name,
        bounds="own_decoder" if teacher is None else "teacher",
        num_parameters=num_parameters or model.num_parameters(),
        held_out=compare_sources(of_data_sets, records, settings.allow_trained_documents),
        documents={
            name: " ".join(sorted({id_ for sample in samples for id_ in sample.source_ids}))
            for name, samples in of_data_sets.items()
        },
        settings={
            **asdict(settings),
            "ratios": ratios,
            "prompts": model_label(settings.prompts) if isinstance(settings.prompts, str) else settings.prompts,
            "generation": {**greedy_decoding(model), **settings.generation},
            "text_compressor": settings.text_compressor and model_label(settings.text_compressor),
            "bert_score_model": settings.bert_score_model and model_label(settings.bert_score_model),
            "dtype": str(model.dtype),
            "device": model.device.type,
            **weights_and_configuration(model),
            "eos_token_id": model.generation_config.eos_token_id,
            "teacher": None if teacher is None else model_label(teacher.name_or_path),
            "teacher_weights": None if teacher is None else weights_fingerprint(teacher, of_answers=True),
            "samples": {f"{data.name}, {task}": samples_digest(samples) for data, task, samples in work},
            "sources": {data.name: data.source for data, *_ in work if data.source},
            "left_out": builder.left_out,
        },
    )
    if resume_from is not None:
        _take_over(report, resume_from, records)
    starts = task_start_ids(model.config) if compresses else {}
    scorer = (Seq2SeqScorer if model.config.is_encoder_decoder else Scorer)(
        model, tokenizer, conditions, settings, starts
    )
    with _evaluation_mode([model] if teacher is None else [model, teacher]):
        _score_all(report, scorer, work, progress, on_result)
    return report


def greedy_decoding(model: PreTrainedModel) -> dict[str, Any]:
    """Return the settings of greedy generation, with those of the model's own generation configuration."""
    own = model.generation_config.to_diff_dict() if model.generation_config is not None else {}
    ends = ("_id", "_version", "repetition_penalty")
    kept = {name: value for name, value in own.items() if not name.endswith(ends) and name[0] != "_"}
    return {**kept, "do_sample": False, "num_beams": 1}


def can_compress(model: PreTrainedModel) -> bool:
    """Return True for a compressor, False for a plain language model."""
    return callable(getattr(model, "compress", None))


def model_label(name: str) -> str:
    """A model's name for reports: a Hub id as it is, of a folder only the last part."""
    path = Path(name).expanduser()
    return path.resolve().name if path.is_absolute() or path.exists() else name


def weights_and_configuration(model: PreTrainedModel) -> dict[str, Any]:
    """Fingerprints of a model's weights and of what changes its answers."""
    return {
        "weights": weights_fingerprint(model, of_answers=True),
        "configuration": settings_fingerprint(model.config, of_answers=True),
    }


@contextmanager
def _evaluation_mode(models: Sequence[PreTrainedModel]) -> Iterator[None]:
    modes = [model.training for model in models]
    try:
        for model in models:
            model.eval()
        yield
    finally:
        for model, mode in zip(models, modes, strict=True):
            model.train(mode)


def _take_over(
    report: EvaluationReport, earlier: EvaluationReport, records: Mapping[str, TrainingDocuments | None]
) -> None:
    """Take over the rows of an earlier report of the same evaluation, and the documents that it scored."""
    # A file has fewer digits.
    mine, theirs = rounded(report.to_dict()), rounded(earlier.to_dict())
    differing = [name for name in ("model", "bounds", "num_parameters") if mine[name] != theirs[name]]
    mine, theirs = mine["settings"], theirs["settings"]
    differing += [name for name in mine if name not in _GROWING and mine[name] != theirs.get(name)]
    samples = theirs.get("samples", {})
    differing += [name for name, digest in mine["samples"].items() if samples.get(name, digest) != digest]
    if differing:
        raise ValueError(f"the report to resume from is of another evaluation; it differs in {', '.join(differing)}")
    report.settings |= {name: theirs.get(name, {}) | mine[name] for name in _GROWING[1:]}
    report.settings["tasks"] = list(dict.fromkeys([*theirs.get("tasks", ()), *mine["tasks"]]))
    for name, ids in earlier.documents.items():
        report.documents[name] = " ".join(sorted({*ids.split(), *report.documents.get(name, "").split()}))
    sources = {name: [Sources(name, tuple(ids.split()))] for name, ids in report.documents.items()}
    report.held_out = earlier.held_out | compare_sources(sources, records, allow_shared=True)
    report.rows += earlier.rows


def _score_all(
    report: EvaluationReport,
    scorer: Scorer,
    work: _Work,
    progress: bool,
    on_result: Callable[[EvaluationReport], Any],
) -> None:
    settings, done = scorer.settings, {(row.dataset, row.task) for row in report.rows}
    folder = settings.bert_score_model
    bert_scorer = folder and BertScorer(folder, scorer.compressor.device)
    left = [(dataset, task, samples) for dataset, task, samples in work if (dataset.name, task) not in done]
    total = sum(len(samples) * sum(c.serves(task) for c in scorer.conditions) for _, task, samples in left)
    # Of each sample under each condition, which may take minutes.
    with tqdm(total=total, desc="evaluate", unit="answer", disable=not progress) as bar:
        for dataset, task, samples in left:
            name = f"{dataset.name}, {task}"
            bar.set_postfix_str(name)

            def show(condition: Condition, num_samples: int, name: str = name) -> None:
                bar.set_postfix_str(f"{name}, {condition.name}", refresh=False)
                bar.update(num_samples)

            tallies = scorer.tallies(task, samples, show)
            add_results(report, dataset, task, tallies, settings.seed, settings.num_resamples, bert_scorer or None)
            on_result(report)


def _tasks_of_datasets(
    datasets: Sequence[EvaluationDataset], settings: EvaluationSettings
) -> list[tuple[EvaluationDataset, str]]:
    names = [dataset.name for dataset in datasets]
    if len(set(names)) < len(names):
        raise ValueError(f"data sets must have different names, got {names}")
    work = [(dataset, task) for task in settings.tasks for dataset in datasets if task in dataset.tasks()]
    if missing := [task for task in settings.tasks if task not in {task for _, task in work}]:
        raise ValueError(f"no data set has the columns for {missing}; the data sets: {names}")
    return work


def _ratios(config: PreTrainedConfig, settings: EvaluationSettings) -> list[int]:
    trained = sorted(config.compression_ratios)
    ratios = list(settings.ratios or trained)
    untrained = [ratio for ratio in ratios if ratio not in trained and config.is_trained]
    if untrained and not settings.allow_untrained_ratio:
        raise ValueError(
            f"the checkpoint was not trained for the ratios {untrained}, only for {trained}; allow_untrained_ratio "
            "(--config) evaluates them all the same"
        )
    return ratios


def _conditions(
    model: PreTrainedModel, teacher: PreTrainedModel | None, ratios: list[int], settings: EvaluationSettings
) -> list[Condition]:
    if model.config.is_encoder_decoder and (teacher is not None or settings.zero_shot or settings.alternatives):
        raise ValueError(
            "an encoder-decoder takes no teacher, no zero shot and no alternatives: its full-context bound is a "
            "checkpoint of its own, with `compression='none'`"
        )
    reads_base = settings.zero_shot or "self_information" in settings.alternatives
    if reads_base and (trained := trained_base_weights(model)):
        raise ValueError(
            "zero_shot and self_information read the checkpoint without its adapters, and it has "
            f"trained weights of the base itself, such as {trained[0]}: score the base as --teacher BASE, or alone"
        )
    compressed = [Condition(ratio_condition(ratio), model, ratio=ratio) for ratio in ratios]
    if model.config.is_encoder_decoder:
        return compressed if settings.ratios_only else [Condition(NO_CONTEXT, model), *compressed]
    reader, starts = model if teacher is None else teacher, settings.task_tokens_in_bounds
    conditions = [
        Condition(NO_CONTEXT, reader, task_token=starts),
        Condition(FULL_CONTEXT, reader, with_context=True, task_token=starts),
    ]
    if settings.ratios_only:
        conditions = []
    if settings.zero_shot:
        base = model.base_language_model
        conditions += [
            Condition("zero_shot_no_context", model, active=base),
            Condition("zero_shot_full_context", model, with_context=True, active=base),
        ]
    conditions += compressed
    for kind in settings.alternatives:
        for ratio in ratios:
            selected = Condition(alternative_condition(kind, ratio), reader, selection=kind, budget_ratio=ratio)
            conditions.append(replace(selected, with_context=True, task_token=starts))
    return conditions


def max_positions(configs: Sequence[PreTrainedConfig]) -> int | None:
    """The fewest positions that decoders have; `None` where all are unlimited."""
    limits = [config.get_text_config(decoder=True).to_dict().get("max_position_embeddings") for config in configs]
    return min((limit for limit in limits if limit is not None), default=None)


def _max_context_tokens(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ratios: Sequence[int],
    settings: EvaluationSettings,
) -> int | None:
    """Return the most tokens of a context that the settings allow and the encoder, in the same tokens, reads."""
    limits = [settings.max_context_tokens]
    if ratios and model.encoder_tokenizer is None:
        limit = model.config.max_context_tokens(min(ratios))
        limits.append(None if limit is None else limit - len(context_opening(model.config, tokenizer)))
    return min((limit for limit in limits if limit is not None), default=None)
