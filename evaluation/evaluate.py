# SPDX-License-Identifier: Apache-2.0
"""Evaluation of a compressor beside its two bounds, no context and full context."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..data.document_ids import TrainingDocuments
from ..data.prompts import default_prompts
from ..data.task_tokens import task_start_ids
from ..modeling.checkpoint.fingerprints import answer_settings_fingerprint, fingerprint
from ..modeling.parts.base_precision import trained_base_weights
from ..modeling.parts.text_ids import start_token_id, text_tokenizer
from ..reporting.result_files import rounded
from .bert_score import BertScorer
from .context_limits import context_limit, lowest_ratio, within_encoder_tokens
from .held_out import add_record, check_held_out, shared_documents
from .progress_file import ProgressFile
from .report import EvaluationReport
from .results import add_resamples, add_results, samples_digest
from .rows import FULL_CONTEXT, NO_CONTEXT, alternative_condition, ratio_condition
from .samples import EvaluationDataset, Sample, SampleBuilder
from .scoring import Condition, Scorer
from .seq2seq_scoring import Seq2SeqScorer
from .settings import EvaluationSettings
from .tallies import Tally

# What more data sets and tasks add to the settings of a report.
_GROWING = ("tasks", "samples", "sources", "left_out")


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
    notes: Mapping[str, Any] | None = None,
    records: Mapping[str, TrainingDocuments | None] | None = None,
    resume_from: EvaluationReport | None = None,
    progress_file: str | Path | None = None,
    on_result: Callable[[EvaluationReport], Any] = lambda report: None,
) -> EvaluationReport:
    """Score a model on data sets: without context, with full context, and a compressor at every ratio.

    All conditions see the same samples and the same prompt, the first template of each task; behind slots, a method's
    task token takes the place of BOS. Answers and summaries are written greedily; reconstructions and continuations
    are scored token by token given the right text before. Every score has a bootstrap interval over documents.

    Args:
        model: a compressor's `...ForCausalLM`, or a plain causal language model for the two bounds alone.
        tokenizer: the tokenizer saved with it.
        datasets: what to score; a data set takes part in the tasks that its columns allow.
        settings: options, see `EvaluationSettings`.
        teacher: language model of the two bounds; the compressor's own decoder as a plain language model when `None`.
        model_name: how the report calls the model; the last part of its Hub id or folder when `None`.
        num_parameters: of the checkpoint, where adapters are merged; the model's when `None`.
        progress: whether to show a progress bar.
        notes: what the report's settings should say besides.
        records: by name, what trained and chose the models, or whatever else chose them, none of which may be among
            the documents of `datasets`; what stands beside the weights of model and teacher when `None`.
        resume_from: an unfinished report of the same evaluation, whose rows are taken over and not scored again; data
            sets and tasks may be added to it.
        progress_file: what has been scored of a data set that is not done; it is gone on with where it is there, and
            deleted in the end.
        on_result: called with the report after each task on each data set.

    Returns:
        The report, a row for each data set, task and condition, and what every sample got that was scored now.

    Raises:
        TypeError: the model is neither a compressor nor a causal language model.
        ValueError: ratios, a memory type, a teacher or zero shot for a plain language model, a ratio that the
            checkpoint was not trained for, "auto" without a ratio selector, a task that no data set serves, two data
            sets of one name, a teacher with another vocabulary, a context that does not fit and may not be cut,
            documents that trained a model or chose it, generation settings that are not allowed, or a report or file
            to resume from that is of another evaluation.
    """
    settings = settings or EvaluationSettings()
    compresses = can_compress(model)
    if not compresses:
        _check_language_model(model, teacher, settings)
    elif model.config.task_token_ids or model.config.prompt_format == "chat":
        tokenizer = text_tokenizer(tokenizer)
    work = _work(datasets, settings)
    ratios = _ratios(model.config, settings) if compresses and not settings.bounds_only else []
    conditions = _conditions(model, teacher, ratios, settings)
    in_words = any(condition.with_context for condition in conditions)
    prompts = settings.prompts or (default_prompts(model.config) if compresses else None)
    builder = SampleBuilder(
        tokenizer,
        _max_positions([model.config] if teacher is None else [model.config, teacher.config]),
        settings.max_new_tokens,
        settings.context_tokens,
        settings.continuation_tokens,
        settings.truncate_context,
        settings.seed,
        _max_context_tokens(model, tokenizer, ratios, settings),
        prompts,
        settings.context_prefix or (model.config.context_prefix if compresses else ""),
        settings.truncation_side,
        prompt_format=model.config.prompt_format if compresses else settings.prompt_format,
        most_tokens=settings.max_context_tokens if settings.leave_out_long else None,
        context_per_position=lowest_ratio(model, ratios) if ratios and not in_words else 1,
    )
    if compresses:
        _check_prefix(model, builder.prefix_ids, teacher, ratios, settings)
    # All samples are made before anything is scored, so that a data set that does not fit is refused at once.
    lengths = settings.restoration_lengths
    samples: list[tuple[EvaluationDataset, str, Sequence[Sample]]] = [
        entry
        for dataset, task in work
        for entry in builder.build_by_length(dataset, task, lengths, settings.max_samples)
    ]
    if ratios:
        samples = within_encoder_tokens(model, builder, ratios, samples)
    scorer = (Seq2SeqScorer if model.config.is_encoder_decoder else Scorer)(
        model,
        tokenizer,
        conditions,
        start_token_id(tokenizer),
        task_start_ids(model.config) if compresses else {},
        settings.allow_untrained_ratio,
        _bert_scorer(settings, model.device),
        settings.repetition_penalty,
        settings.generation,
        settings.seed,
        settings.memory_dtype,
    )
    name = model_name or model_label(model.name_or_path or type(model).__name__)
    if records is None:
        records = {name: TrainingDocuments.of(model.name_or_path, on_hub=compresses)}
        if teacher is not None:
            label, of_teacher = model_label(teacher.name_or_path), TrainingDocuments.of(teacher.name_or_path)
            add_record(records, label, of_teacher)
    held_out = check_held_out(samples, records, settings.allow_trained_documents)
    report = EvaluationReport(
        model=name,
        bounds="own_decoder" if teacher is None else "teacher",
        num_parameters=num_parameters or model.num_parameters(),
        held_out=held_out,
        documents=_documents(samples),
        settings={
            **asdict(settings),
            "ratios": ratios,
            **({"ratio_scale": model.config.ratio_scale} if "auto" in ratios else {}),
            "prompts": model_label(prompts) if isinstance(prompts, str) else prompts,
            "prompt_format": builder.prompt_format,
            "context_prefix": builder.context_prefix,
            "generation": decoding_of(model, scorer.generation),
            "bert_score_model": settings.bert_score_model and model_label(settings.bert_score_model),
            "dtype": str(model.dtype),
            "device": model.device.type,
            **weights_and_configuration(model),
            "eos_token_id": model.generation_config.eos_token_id,
            "teacher_weights": None if teacher is None else fingerprint(teacher),
            "samples": {f"{data.name}, {task}": samples_digest(made) for data, task, made in samples},
            "sources": {data.name: data.source for data, *_ in samples if data.source},
            "left_out": builder.left_out,
            **(notes or {}),
        },
    )
    if resume_from is not None:
        _take_over(report, resume_from, records, {dataset.name: dataset.domain for dataset, *_ in samples})
    file = None
    if progress_file is not None:
        same = {name: value for name, value in report.settings.items() if name not in _GROWING}
        file = ProgressFile(progress_file, {"model": report.model, "bounds": report.bounds, **same})
    with _evaluation_mode([model] if teacher is None else [model, teacher]):
        _score_all(report, scorer, samples, settings, progress, on_result, file)
    if file is not None:
        file.path.unlink()
    return report


def _documents(samples: Sequence[tuple[EvaluationDataset, str, Sequence[Sample]]]) -> dict[str, str]:
    """Data set -> the ids of its documents."""
    found: dict[str, set[str]] = {}
    for dataset, _, made in samples:
        found.setdefault(dataset.name, set()).update(id_ for sample in made for id_ in sample.source_ids)
    return {name: " ".join(sorted(ids)) for name, ids in found.items()}


def decoding_of(model: PreTrainedModel, given: Mapping[str, Any]) -> dict[str, Any]:
    """How everything is written, where that is not greedy: the model's own configuration, and what was given."""
    own = model.generation_config.to_diff_dict() if model.generation_config is not None else {}
    kept = {name: value for name, value in own.items() if not name.endswith(("_id", "_version")) and name[0] != "_"}
    return {**kept, "do_sample": False, "num_beams": 1, **given}


def can_compress(model: PreTrainedModel) -> bool:
    """Whether a model is a compressor, and not a plain language model."""
    return callable(getattr(model, "compress", None))


def _check_language_model(
    model: PreTrainedModel, teacher: PreTrainedModel | None, settings: EvaluationSettings
) -> None:
    name = type(model).__name__
    if not model.can_generate() or model.config.is_encoder_decoder:
        raise TypeError(f"model must be a compressor or a causal language model, got {name}")
    refused = {
        "ratios": settings.ratios,
        "memory_dtype": settings.memory_dtype,
        "teacher": teacher,
        "zero shot": settings.zero_shot,
        "ratios_only": settings.ratios_only,
        "alternatives": settings.alternatives,
    }
    if wrong := [what for what, value in refused.items() if value]:
        raise ValueError(
            f"{name} is a plain language model, scored without context and with full context only: "
            f"it takes no {' and no '.join(wrong)}"
        )


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
    report: EvaluationReport,
    earlier: EvaluationReport,
    records: Mapping[str, TrainingDocuments | None],
    domains: Mapping[str, str],
) -> None:
    """Take over the rows of an earlier report of the same evaluation, and the documents that it scored."""
    # A file has fewer digits.
    mine, theirs = rounded(report.to_dict()), rounded(earlier.to_dict())
    differing = [name for name in ("model", "bounds", "num_parameters") if mine[name] != theirs[name]]
    mine, theirs = mine["settings"], theirs["settings"]
    differing += [name for name in mine if name not in _GROWING and mine[name] != theirs.get(name)]
    samples = theirs.get("samples", {})
    moved = {row.dataset for row in earlier.rows if domains.get(row.dataset, row.domain) != row.domain}
    differing += [f"the domain of {name}" for name in sorted(moved)]
    differing += [name for name, digest in mine["samples"].items() if samples.get(name, digest) != digest]
    check_is_same(differing)
    report.settings |= {name: theirs.get(name, {}) | mine[name] for name in _GROWING[1:]}
    report.settings["tasks"] = list(dict.fromkeys([*theirs.get("tasks", ()), *mine["tasks"]]))
    for name, ids in earlier.documents.items():
        both = {*ids.split(), *report.documents.get(name, "").split()}
        report.documents[name] = " ".join(sorted(both))
    report.held_out = earlier.held_out | report.held_out
    for name, record in records.items():
        if record is not None:
            report.held_out[name]["shared"] = shared_documents(report.documents, record)
    report.take_over(earlier)


def check_is_same(differing: Sequence[str]) -> None:
    """Raise `ValueError` where an earlier report differs in anything.

    Args:
        differing: names of what differs.
    """
    if differing:
        raise ValueError(f"the report to resume from is of another evaluation; it differs in {', '.join(differing)}")


def _score_all(
    report: EvaluationReport,
    scorer: Scorer,
    work: Sequence[tuple[EvaluationDataset, str, Sequence[Sample]]],
    settings: EvaluationSettings,
    progress: bool,
    on_result: Callable[[EvaluationReport], Any],
    file: ProgressFile | None = None,
) -> None:
    done = {(row.dataset, row.task) for row in report.rows}
    conditions = {task: sum(condition.serves(task) for condition in scorer.conditions) for _, task, _ in work}
    total = sum(len(samples) * conditions[task] for dataset, task, samples in work if (dataset.name, task) not in done)
    # Of each sample under each condition, which may take minutes.
    with tqdm(total=total, desc="evaluate", unit="answer", disable=not progress) as bar:
        for dataset, task, samples in work:
            name = f"{dataset.name}, {task}"
            bar.set_postfix_str(name)
            digest = f"{dataset.name}, {task}, {samples_digest(samples)}"
            known = {} if file is None else file.rows(digest)
            is_done = (dataset.name, task) in done
            # Without what its samples got, nothing more is known of it than its rows.
            if is_done and len(known) < len(samples):
                continue
            bar.update(0 if is_done else len(known) * conditions[task])

            def note(rows: list[int], tallies: Mapping[str, Tally], digest: str = digest) -> None:
                if file is not None:
                    states = {row: {name: tally.state(row) for name, tally in tallies.items()} for row in rows}
                    file.add(digest, states)

            def show(condition: Condition, num_samples: int, name: str = name) -> None:
                bar.set_postfix_str(f"{name}, {condition.name}", refresh=False)
                bar.update(num_samples)

            tallies = scorer.tallies(
                task,
                samples,
                settings.batch_size,
                settings.max_new_tokens.get(task),
                settings.reconstruction_bleu,
                note,
                settings.answer_perplexity,
                known,
                show,
            )
            resampling = (settings.seed, settings.num_resamples)
            if is_done:
                add_resamples(report, dataset, task, samples, tallies, *resampling)
                continue
            add_results(report, dataset, task, samples, tallies, *resampling, scorer.bert_scorer)
            on_result(report)


def _bert_scorer(settings: EvaluationSettings, device: torch.device) -> BertScorer | None:
    folder = settings.bert_score_model
    return None if folder is None else BertScorer(folder, settings.bert_score_layer, device)


def weights_and_configuration(model: PreTrainedModel) -> dict[str, Any]:
    """What tells a model from another one of its name: fingerprints of its weights and of what changes its answers."""
    return {
        "weights": fingerprint(model, of_answers=True),
        "configuration": answer_settings_fingerprint(model.config),
    }


def model_label(name: str) -> str:
    """A model's name for reports: a Hub id as it is, of a folder only the last part."""
    path = Path(name).expanduser()
    return path.resolve().name if path.is_absolute() or path.exists() else name


def _work(datasets: Sequence[EvaluationDataset], settings: EvaluationSettings) -> list[tuple[EvaluationDataset, str]]:
    if not datasets:
        raise ValueError("datasets are empty: there is nothing to evaluate on")
    names = [dataset.name for dataset in datasets]
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"data sets must have different names, got {doubled} more than once")
    work = [(dataset, task) for task in settings.tasks for dataset in datasets if task in dataset.tasks()]
    if missing := [task for task in settings.tasks if task not in {task for _, task in work}]:
        raise ValueError(f"no data set has the columns for {missing}; the data sets: {names}")
    return work


def _ratios(config: PreTrainedConfig, settings: EvaluationSettings) -> list[int | str]:
    trained = sorted(config.compression_ratios)
    ratios = list(settings.ratios or trained)
    if "auto" in ratios and not config.selects_ratios:
        raise ValueError(f"the ratio 'auto' needs a checkpoint with a ratio selector; this one has {trained} alone")
    untrained = [ratio for ratio in ratios if ratio not in (*trained, "auto") and config.is_trained]
    if untrained and not settings.allow_untrained_ratio:
        raise ValueError(
            f"the checkpoint was not trained for the ratios {untrained}, only for {trained}; allow_untrained_ratio "
            "(--allow-untrained-ratio) evaluates them all the same"
        )
    return ratios


def _conditions(
    model: PreTrainedModel, teacher: PreTrainedModel | None, ratios: list[int | str], settings: EvaluationSettings
) -> list[Condition]:
    if settings.task_tokens_in_bounds and (teacher is not None or not getattr(model.config, "task_token_ids", None)):
        raise ValueError(
            "task_tokens_in_bounds (--task-tokens-in-bounds) is for a compressor with task tokens, without a teacher: "
            "nothing else has embeddings for them"
        )
    if teacher is not None and teacher.config.get_text_config().vocab_size < model.config.vocab_size:
        raise ValueError(
            f"the teacher's vocabulary of {teacher.config.get_text_config().vocab_size} tokens is smaller than the "
            f"model's of {model.config.vocab_size}: the teacher must use the same tokenizer"
        )
    if model.config.is_encoder_decoder and (teacher is not None or settings.zero_shot or settings.alternatives):
        raise ValueError(
            "an encoder-decoder takes no teacher, no zero shot and no alternatives: its full-context bound is a "
            "checkpoint of its own, with `compression='none'`"
        )
    reads_base = settings.zero_shot or "self_information" in settings.alternatives
    if reads_base and (trained := trained_base_weights(model)):
        raise ValueError(
            "zero_shot (--zero-shot) and self_information read the checkpoint without its adapters, and it has "
            f"trained weights of the base itself, such as {trained[0]}: score the base as --teacher BASE, or alone"
        )
    compressed = [Condition(ratio_condition(ratio), model, ratio=ratio) for ratio in ratios]
    if settings.ratios_only:
        return compressed
    if model.config.is_encoder_decoder:
        return [Condition(NO_CONTEXT, model), *compressed]
    reader, starts = model if teacher is None else teacher, settings.task_tokens_in_bounds
    conditions = [
        Condition(NO_CONTEXT, reader, task_token=starts),
        Condition(FULL_CONTEXT, reader, with_context=True, task_token=starts),
    ]
    if settings.zero_shot:
        base = model.base_language_model
        conditions += [
            Condition("zero_shot_no_context", model, active=base),
            Condition("zero_shot_full_context", model, with_context=True, active=base),
        ]
    alternatives = [
        Condition(
            alternative_condition(selection, ratio),
            reader,
            with_context=True,
            task_token=starts,
            selection=selection,
            budget_ratio=ratio,
        )
        for selection in settings.alternatives
        for ratio in ratios
    ]
    return [*conditions, *compressed, *alternatives]


def _max_positions(configs: Sequence[PreTrainedConfig]) -> int | None:
    texts = [config.get_text_config(decoder=True) for config in configs]
    limits = [getattr(config, "max_position_embeddings", None) for config in texts]
    return min((limit for limit in limits if limit is not None), default=None)


def _max_context_tokens(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ratios: Sequence[int | str],
    settings: EvaluationSettings,
) -> int | None:
    """Most tokens of a context: what the settings allow and, where it is compressed, what the encoder reads."""
    limits = [settings.max_context_tokens, context_limit(model, tokenizer, ratios) if ratios else None]
    return min((limit for limit in limits if limit is not None), default=None)


def _check_prefix(
    model: PreTrainedModel,
    prefix_ids: Sequence[int],
    teacher: PreTrainedModel | None,
    ratios: Sequence[int | str],
    settings: EvaluationSettings,
) -> None:
    """Raise `ValueError` when a context starts with learned tokens and another model than the decoder reads it."""
    learned = [name for name, token_id in model.config.task_token_ids.items() if token_id in prefix_ids]
    if learned and (ratios or settings.zero_shot or teacher is not None):
        raise ValueError(
            f"context_prefix has learned tokens, {', '.join(learned)}, which only the compressor's own decoder reads: "
            "score it with bounds_only (--bounds-only), without a teacher and without zero shot"
        )
