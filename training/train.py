# SPDX-License-Identifier: Apache-2.0
"""`context-compressors train RECIPE.yaml [--field value]`: everything that this project trains."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    set_seed,
)

from ..configuration.configuration_compressor import RETRIEVAL_LOADER
from ..configuration.methods import methods_loaded_by
from ..configuration.nearest_names import check_choice
from ..data.prompts import load_prompts
from ..data.task_tokens import add_sentinel_tokens, text_starts
from ..modeling.parts.prompting import context_end_ids, opening_ids, text_tokenizer
from .arguments import DataArguments, ModelArguments, TrainingConfig, parse_recipe, recorded_recipe
from .loading import (
    DEFAULT_METHOD,
    load_compressor,
    load_tokenizer,
    new_language_model,
    pretrained_language_model,
    teacher_language_model,
)
from .objectives.compression import CompressionTrainer, DistillationTrainer, TeacherTrainer
from .objectives.compression_collator import CompressionCollator
from .objectives.compression_dataset import CompressionDataset
from .objectives.denoising import (
    DenoisingDataset,
    Seq2SeqCollator,
    Seq2SeqCompressionTrainer,
)
from .objectives.joint_pretraining import JointDataset
from .objectives.joint_trainer import JointPretrainingTrainer
from .objectives.language_modeling import (
    LanguageModelingBatches,
    LanguageModelingCollator,
    LanguageModelingRows,
    LanguageModelingTrainer,
)
from .objectives.retrieval import RetrievalTrainer, build_retrieval_trainer
from .objectives.span_corruption import SpanCorruptionCollator
from .resume import check_resumed
from .run_record import latest_checkpoint, write_summary
from .tokenizer import leave_out_bos
from .weight_files import store_weights_as


def build_language_modeling(
    model_args: ModelArguments, data_args: DataArguments, args: TrainingConfig
) -> LanguageModelingTrainer:
    """Trainer of a base language model, new (`model_config`) or pretrained (`base`)."""
    if (model_args.model_config is None) == (model_args.base is None):
        raise ValueError("language_modeling needs either model_config (a new model) or base (a pretrained one)")
    if args.max_steps < 1:
        raise ValueError(f"language_modeling needs max_steps: its rows never end (got {args.max_steps})")
    tokenizer = load_tokenizer(model_args, data_args, args.seed)
    if model_args.base is not None:
        model = pretrained_language_model(model_args)
    else:
        model = new_language_model(model_args, tokenizer)
    rows = LanguageModelingRows(
        data_args.parsed_sources(),
        tokenizer,
        data_args.data_dir,
        data_args.row_mixture,
        data_args.max_questions,
        data_args.canonical_prompts,
        data_args.prompts,
        args.seed,
    )
    batches = LanguageModelingBatches(
        rows,
        num_batches=args.max_steps * args.gradient_accumulation_steps * args.world_size,
        tokens_per_batch=data_args.tokens_per_batch,
        batches_per_step=args.gradient_accumulation_steps * args.world_size,
        length_schedule=data_args.length_schedule or [(0.0, data_args.max_context_tokens)],
        max_length=model.config.max_position_embeddings,
        seed=args.seed,
    )
    args.per_device_train_batch_size = 1
    return LanguageModelingTrainer(
        model=model,
        args=args,
        train_dataset=batches,
        data_collator=LanguageModelingCollator(tokenizer.pad_token_id),
        processing_class=tokenizer,
    )


def build_compression_dataset(
    data_args: DataArguments,
    tokenizer: PreTrainedTokenizerBase,
    num_examples: int | None,
    seed: int,
    batch_size: int = 1,
    name: str = "sources",
    context_tokenizer: PreTrainedTokenizerBase | None = None,
) -> CompressionDataset:
    """The examples that the recipe's `sources` (or `eval_sources`) describe."""
    return CompressionDataset(
        data_args.parsed_sources(name),
        tokenizer,
        num_examples,
        data_dir=data_args.data_dir,
        max_context_tokens=data_args.max_context_tokens,
        min_context_tokens=data_args.min_context_tokens,
        max_target_tokens=data_args.max_target_tokens,
        questions_per_example=data_args.questions_per_example,
        canonical_prompts=data_args.canonical_prompts,
        first_answer=data_args.first_answer,
        prompts=data_args.prompts,
        prompt_format=data_args.prompt_format,
        context_prefix=data_args.context_prefix,
        length_schedule=data_args.length_schedule if name == "sources" else None,
        task_schedule=data_args.task_schedule if name == "sources" else None,
        overlong_contexts=data_args.overlong_contexts,
        group_size=data_args.group_batches * batch_size,
        batch_size=batch_size,
        seed=seed,
        context_tokenizer=context_tokenizer,
    )


def build_joint_dataset(
    data_args: DataArguments,
    tokenizer: PreTrainedTokenizerBase,
    num_examples: int | None,
    seed: int,
    batch_size: int = 1,
    name: str = "sources",
    context_tokenizer: PreTrainedTokenizerBase | None = None,
) -> JointDataset:
    """The documents of joint pretraining that the recipe's `sources` (or `eval_sources`) describe."""
    return JointDataset(
        data_args.parsed_sources(name),
        tokenizer,
        num_examples,
        data_dir=data_args.data_dir,
        min_document_tokens=data_args.min_document_tokens,
        max_document_tokens=data_args.max_document_tokens,
        length_schedule=data_args.length_schedule if name == "sources" else None,
        group_size=data_args.group_batches * batch_size,
        batch_size=batch_size,
        seed=seed,
        context_tokenizer=context_tokenizer,
    )


def build_denoising_dataset(
    data_args: DataArguments,
    tokenizer: PreTrainedTokenizerBase,
    num_examples: int | None,
    seed: int,
    batch_size: int = 1,
    name: str = "sources",
    context_tokenizer: PreTrainedTokenizerBase | None = None,
) -> DenoisingDataset:
    """The texts to corrupt that the recipe's `sources` (or `eval_sources`) describe."""
    return DenoisingDataset(
        data_args.parsed_sources(name),
        tokenizer,
        num_examples,
        num_tokens=data_args.span_corruption().raw_length(data_args.max_context_tokens),
        data_dir=data_args.data_dir,
        group_size=data_args.group_batches * batch_size,
        batch_size=batch_size,
        seed=seed,
        context_tokenizer=context_tokenizer,
    )


_DATASETS = {"joint": build_joint_dataset, "denoising": build_denoising_dataset}


def _data_arguments(
    data_args: DataArguments,
    args: TrainingConfig,
    tokenizer: PreTrainedTokenizerBase,
    mode: str,
    starts: Mapping[str, Any] | None = None,
    has_task_tokens: bool = False,
    ratios: Sequence[int] | None = None,
    context_tokenizer: PreTrainedTokenizerBase | None = None,
    collator: Callable[..., CompressionCollator] = CompressionCollator.from_tokenizer,
) -> dict[str, Any]:
    """What every trainer of tokenized examples takes: data sets, collator and tokenizer."""
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    num_examples = args.max_steps * batch if args.max_steps > 0 else None
    rows = args.per_device_train_batch_size
    build = _DATASETS.get(mode, build_compression_dataset)
    texts = text_tokenizer(tokenizer) if has_task_tokens or data_args.prompt_format == "chat" else tokenizer
    dataset = build(data_args, texts, num_examples, args.seed, rows, context_tokenizer=context_tokenizer)
    # An example is a function of its index, drawn at random already; in order, lengths grow and resuming is exact.
    args.train_sampling_strategy = "sequential"
    evaluation = None
    if data_args.eval_sources:
        count = data_args.num_eval_examples
        evaluation = build(
            data_args, texts, count, args.seed + 1, name="eval_sources", context_tokenizer=context_tokenizer
        ).as_dataset()
    return {
        "args": args,
        "train_dataset": dataset.as_dataset(),
        "eval_dataset": evaluation,
        "processing_class": tokenizer,
        "data_collator": collator(
            tokenizer,
            context_tokenizer,
            ratios=ratios,
            seed=args.seed,
            mode="compressed" if mode == "denoising" else mode,
            with_metadata=True,
            context_mode=args.context_mode if mode == "joint" else "compressed",
            **(starts or {}),
        ),
    }


def build_teacher(model_args: ModelArguments, data_args: DataArguments, args: TrainingConfig) -> TeacherTrainer:
    """Trainer of the full-context teacher: the base with LoRA (`teacher_lora`) or with all its weights."""
    tokenizer = load_tokenizer(model_args, data_args, args.seed)
    model = pretrained_language_model(model_args)
    peft_config = None
    if model_args.teacher_lora is not None:
        from peft import LoraConfig

        settings = {"rank": 16, "alpha": 16, "dropout": 0.0, "target_modules": "all-linear"}
        for name in model_args.teacher_lora:
            check_choice("field of teacher_lora", name, settings)
        settings |= model_args.teacher_lora
        for name, kind, words in (("rank", int, "a whole number"), ("alpha", (int, float), "a number")):
            value = settings[name]
            if isinstance(value, bool) or not isinstance(value, kind) or value <= 0:
                raise ValueError(f"{name} of teacher_lora must be {words} above 0, got {value!r}")
        if not isinstance(settings["dropout"], (int, float)) or not 0 <= settings["dropout"] < 1:
            raise ValueError(f"dropout of teacher_lora must be from 0 to below 1, got {settings['dropout']!r}")
        peft_config = LoraConfig(
            r=settings["rank"],
            lora_alpha=settings["alpha"],
            lora_dropout=settings["dropout"],
            target_modules=settings["target_modules"],
            task_type="CAUSAL_LM",
        )
    arguments = _data_arguments(data_args, args, tokenizer, "full_context")
    return TeacherTrainer(model=model, peft_config=peft_config, **arguments)


def build_compression(
    model_args: ModelArguments, data_args: DataArguments, args: TrainingConfig
) -> CompressionTrainer:
    """Trainer of a compressor: from the text itself, from whole documents, or from a teacher."""
    tokenizer = load_tokenizer(model_args, data_args, args.seed)
    model = load_compressor(model_args, tokenizer)
    if not model.config.bos_before_text:
        for reader in filter(None, (tokenizer, model.encoder_tokenizer)):
            leave_out_bos(reader)
    tokens = {"starts": text_starts(model.config, tokenizer), "has_task_tokens": bool(model.config.task_token_ids)}
    tokens["context_tokenizer"] = model.encoder_tokenizer
    if args.ratio_mode == "per_sample" and args.context_mode == "compressed":
        tokens["ratios"] = list(model.config.compression_ratios)
    if args.objective in ("compression", "distillation"):
        _record_prompts(model.config, tokenizer, data_args)
    if model.config.is_encoder_decoder:
        return _build_seq2seq(model, tokenizer, data_args, args, tokens)
    if args.objective == "joint":
        return JointPretrainingTrainer(model=model, **_data_arguments(data_args, args, tokenizer, "joint", **tokens))
    if args.objective == "compression":
        arguments = _data_arguments(data_args, args, tokenizer, args.context_mode, **tokens)
        return CompressionTrainer(model=model, **arguments)
    check_choice("objective of a decoder-only compressor:", args.objective, ("compression", "distillation", "joint"))
    teacher = None
    if model_args.teacher is not None:
        teacher = teacher_language_model(model_args)
    arguments = _data_arguments(data_args, args, tokenizer, "distillation", **tokens)
    return DistillationTrainer(model=model, teacher=teacher, **arguments)


def _record_prompts(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, data_args: DataArguments) -> None:
    """Whoever asks the checkpoint later shall ask as it was trained."""
    is_chat = data_args.prompt_format == "chat"
    if is_chat and config.is_encoder_decoder:
        raise ValueError("prompt_format 'chat' is for decoder-only compressors: an encoder-decoder has no template")
    config.prompts = {task: templates[0] for task, templates in load_prompts(data_args.prompts).items()}
    config.context_prefix = data_args.context_prefix
    config.prompt_format = data_args.prompt_format
    # Behind a task token, and behind keys and values, the template follows the memory as a whole.
    stands_inside = is_chat and not config.task_token_ids
    config.slots_after_ids = opening_ids(tokenizer) if stands_inside else []


def _build_seq2seq(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    data_args: DataArguments,
    args: TrainingConfig,
    tokens: dict[str, Any],
) -> Seq2SeqCompressionTrainer:
    """Trainer of an encoder-decoder, to denoise or on questions, summaries and texts."""
    check_choice("objective of an encoder-decoder:", args.objective, ("denoising", "compression"))
    tokens["has_task_tokens"] = True
    if args.objective == "denoising":
        own = {
            "sentinel_ids": add_sentinel_tokens(tokenizer),
            "end_id": tokenizer.eos_token_id,
            "corruption": data_args.span_corruption(),
        }
        collator, mode = partial(SpanCorruptionCollator.from_tokenizer, **own), "denoising"
    else:
        _record_prompts(model.config, tokenizer, data_args)
        own = {
            "question_placement": model.config.question_placement,
            "context_end_ids": context_end_ids(tokenizer),
        }
        collator, mode = partial(Seq2SeqCollator.from_tokenizer, **own), args.context_mode
    if len(tokenizer) > model.config.vocab_size:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens, the model {model.config.vocab_size}: it lacks sentinels, "
            "which a new model (model_config) gets, or it is another model's"
        )
    arguments = _data_arguments(data_args, args, tokenizer, mode, collator=collator, **tokens)
    return Seq2SeqCompressionTrainer(model=model, **arguments)


def build_retrieval(model_args: ModelArguments, data_args: DataArguments, args: TrainingConfig) -> RetrievalTrainer:
    """Trainer of a dual encoder for retrieval, from the encoder of a checkpoint or of a T5."""
    if model_args.checkpoint is None or model_args.method is not None:
        methods = methods_loaded_by(RETRIEVAL_LOADER)
        check_choice("method of the objective retrieval:", model_args.method or DEFAULT_METHOD, methods)
    tokenizer = load_tokenizer(model_args, data_args, args.seed)
    model = load_compressor(model_args, tokenizer, RETRIEVAL_LOADER)
    return build_retrieval_trainer(model, tokenizer, data_args, args)


_READING = ("compression", "distillation", "teacher")
_OBJECTIVES_WITH = {
    "prompt_format": _READING,
    "task_schedule": _READING,
    "length_schedule": (*_READING, "joint", "language_modeling"),
    "ratio_schedule": ("compression", "distillation", "joint", "denoising"),
    "eval_sources": (*_READING, "joint", "denoising"),
}
_INSTEAD = {("eval_sources", "retrieval"): "measure rankings with benchmarks/decal/retrieval.py"}


def build_trainer(model_args: ModelArguments, data_args: DataArguments, args: TrainingConfig) -> Trainer:
    """The trainer of the recipe's objective, with its model and data.

    Raises:
        ValueError: fields that do not go together, a missing source, column or file.
    """
    for name, objectives in _OBJECTIVES_WITH.items():
        given = getattr(data_args if hasattr(data_args, name) else args, name)
        if given and given != "plain" and args.objective not in objectives:
            instead = _INSTEAD.get((name, args.objective), "leave it out")
            raise ValueError(
                f"{name} belongs to the objectives {', '.join(objectives[:-1])} and {objectives[-1]}, not to "
                f"{args.objective}: {instead}"
            )
    scheduled = [name for name in ("length_schedule", "task_schedule") if getattr(data_args, name) is not None]
    if scheduled and args.max_steps < 1 and args.num_train_epochs > 1:
        raise ValueError(
            f"{scheduled[0]} is told by the share of one pass over the examples, and would start again in each of the "
            f"{args.num_train_epochs:g} epochs: give max_steps, or num_train_epochs 1"
        )
    if model_args.teacher is not None and args.objective != "distillation":
        raise ValueError(
            f"teacher goes with the objective distillation, not with {args.objective!r}: leave it out, or distil"
        )
    set_seed(args.seed)
    build = {
        "language_modeling": build_language_modeling,
        "teacher": build_teacher,
        "retrieval": build_retrieval,
    }
    return build.get(args.objective, build_compression)(model_args, data_args, args)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the train command; returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    arguments = parse_recipe(argv)
    recipe = recorded_recipe(argv, arguments)
    args = arguments[2]
    trainer = build_trainer(*arguments)
    resume = args.resume_from_checkpoint
    if resume == "latest":
        resume = latest_checkpoint(args.output_dir)
    if resume is not None:
        check_resumed(trainer.model, resume)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(args.output_dir)
    if trainer.is_world_process_zero():
        # The Trainer's arguments are a pickle, which has no place in a folder that people share.
        (Path(args.output_dir) / "training_args.bin").unlink(missing_ok=True)
        if args.save_dtype is not None:
            store_weights_as(getattr(torch, args.save_dtype), Path(args.output_dir))
    write_summary(trainer, recipe, Path(args.output_dir))
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
