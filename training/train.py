# SPDX-License-Identifier: Apache-2.0
"""`context-compressors train RECIPE.yaml [--field value]`: everything that this project trains."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    set_seed,
)
from transformers.trainer import TRAINER_STATE_NAME

from ..evaluation.report import environment
from ..modeling.modeling_decal_retrieval import DeCALForRetrieval
from ..modeling.prompting import context_end_ids
from .arguments import DataArguments, ModelArguments, TrainingConfig, parse_recipe
from .collators import CompressionCollator
from .data import task_start_ids
from .denoising import (
    DenoisingDataset,
    Seq2SeqCollator,
    Seq2SeqCompressionTrainer,
    new_encoder_decoder,
)
from .examples import CompressionDataset
from .joint_examples import JointDataset
from .joint_trainer import JointPretrainingTrainer
from .language_modeling import (
    LanguageModelingBatches,
    LanguageModelingCollator,
    LanguageModelingRows,
    LanguageModelingTrainer,
)
from .prompts import load_prompts
from .retrieval import RetrievalTrainer, build_retrieval_trainer
from .span_corruption import SpanCorruptionCollator, add_sentinel_tokens
from .stages import changed_config, check_resumed
from .suggestions import check_choice
from .task_tokens import add_task_tokens, check_task_tokens, text_tokenizer
from .tokenizer import train_tokenizer
from .trainers import CompressionTrainer, DistillationTrainer, TeacherTrainer
from .weight_files import store_weights_as

METHODS = {
    "mean_pooling": "MeanPoolingForCausalLM",
    "compression_tokens": "CompressionTokensForCausalLM",
    "icae": "ICAEForCausalLM",
    "five_hundred_x": "FiveHundredXForCausalLM",
    "comprexit": "ComprExITForCausalLM",
    "gmsa": "GMSAForCausalLM",
    "tcp_autoencoder": "TCPAutoencoderForCausalLM",
    "decal": "DeCALForConditionalGeneration",
}


def load_tokenizer(model_args: ModelArguments, data_args: DataArguments, seed: int) -> PreTrainedTokenizerBase:
    """Load the tokenizer that the recipe names, or train the one that it describes."""
    if model_args.train_tokenizer is not None and model_args.tokenizer is None:
        sources = data_args.parsed_sources()
        return train_tokenizer(sources, data_args.data_dir, **{"seed": seed, **model_args.train_tokenizer})
    name = model_args.tokenizer or model_args.checkpoint or model_args.base
    if name is None:
        raise ValueError("give a tokenizer, a base, a checkpoint, or train_tokenizer settings")
    tokenizer = AutoTokenizer.from_pretrained(name)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _new_language_model(model_args: ModelArguments, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    fields = dict(model_args.model_config)
    if "model_type" not in fields:
        raise ValueError("model_config needs a model_type, e.g. llama")
    config = AutoConfig.for_model(
        fields.pop("model_type"),
        **{
            "vocab_size": len(tokenizer),
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            **fields,
        },
    )
    return AutoModelForCausalLM.from_config(
        config, dtype=getattr(torch, model_args.dtype), attn_implementation=model_args.attn_implementation
    )


def _pretrained_language_model(model_args: ModelArguments) -> PreTrainedModel:
    if model_args.base is None:
        raise ValueError("give a base: folder or Hub id of the language model to start from")
    return AutoModelForCausalLM.from_pretrained(
        model_args.base,
        revision=model_args.base_revision or "main",
        dtype=getattr(torch, model_args.dtype),
        attn_implementation=model_args.attn_implementation,
    )


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
        model = _pretrained_language_model(model_args)
    else:
        model = _new_language_model(model_args, tokenizer)
    rows = LanguageModelingRows(
        data_args.parsed_sources(),
        tokenizer,
        data_args.data_dir,
        data_args.row_mixture,
        data_args.max_questions,
        data_args.canonical_prompts,
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
        prompts=data_args.prompts,
        context_prefix=data_args.context_prefix,
        length_schedule=data_args.length_schedule if name == "sources" else None,
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
    starts: Mapping[str, int] | None = None,
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
    texts = text_tokenizer(tokenizer) if has_task_tokens else tokenizer
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
            task_start_ids=starts,
            context_mode=args.context_mode if mode == "joint" else "compressed",
        ),
    }


def build_teacher(model_args: ModelArguments, data_args: DataArguments, args: TrainingConfig) -> TeacherTrainer:
    """Trainer of the full-context teacher: the base with LoRA (`teacher_lora`) or with all its weights."""
    tokenizer = load_tokenizer(model_args, data_args, args.seed)
    model = _pretrained_language_model(model_args)
    peft_config = None
    if model_args.teacher_lora is not None:
        from peft import LoraConfig

        settings = {"rank": 16, "alpha": 16, "dropout": 0.0, "target_modules": "all-linear"}
        for name in model_args.teacher_lora:
            check_choice("field of teacher_lora", name, settings)
        settings |= model_args.teacher_lora
        peft_config = LoraConfig(
            r=settings["rank"],
            lora_alpha=settings["alpha"],
            lora_dropout=settings["dropout"],
            target_modules=settings["target_modules"],
            task_type="CAUSAL_LM",
        )
    arguments = _data_arguments(data_args, args, tokenizer, "full_context")
    return TeacherTrainer(model=model, peft_config=peft_config, **arguments)


def load_compressor(
    model_args: ModelArguments,
    tokenizer: PreTrainedTokenizerBase | None = None,
    model_class: type[PreTrainedModel] | None = None,
) -> PreTrainedModel:
    """The compressor to train: a checkpoint to go on from, or a new one on a base.

    Args:
        model_args: names the method and where the weights come from.
        tokenizer: gets the method's task tokens, whose ids a new compressor takes; a checkpoint's must be in it. The
            ids behind the base's vocabulary are taken when `None`.
        model_class: the method's class to build; the one that generates when `None`.

    Raises:
        ValueError: fields that do not go together, or a tokenizer that does not know the checkpoint's task tokens.
    """
    check_choice("method", model_args.method, METHODS)
    given = [name for name in ("base", "checkpoint", "model_config") if getattr(model_args, name) is not None]
    if len(given) != 1 or (given == ["model_config"] and model_args.method != "decal"):
        raise ValueError(
            "give either base (a new compressor) or checkpoint (one to go on from), or for decal model_config (a new "
            f"encoder-decoder), got {given}"
        )
    if model_class is None:
        module = importlib.import_module(f"..modeling.modeling_{model_args.method}", __package__)
        model_class = getattr(module, METHODS[model_args.method])
    loading = {"dtype": getattr(torch, model_args.dtype), "attn_implementation": model_args.attn_implementation}
    loading = {name: value for name, value in loading.items() if value is not None}
    fields = dict(model_args.method_config or {})
    if model_args.checkpoint is not None:
        if fields:
            raise ValueError("method_config is fixed by the checkpoint: leave it out, or give checkpoint_config")
        if model_args.checkpoint_config:
            config = model_class.config_class.from_pretrained(model_args.checkpoint)
            loading["config"] = changed_config(config, model_args.checkpoint_config)
        model = model_class.from_pretrained(model_args.checkpoint, **loading)
        if tokenizer is not None:
            check_task_tokens(tokenizer, model.config.task_token_ids)
        return model
    if model_args.checkpoint_config:
        raise ValueError("checkpoint_config goes with a checkpoint; of a new compressor give method_config")
    if model_args.model_config is not None:
        return new_encoder_decoder(model_class, model_args.model_config, fields, tokenizer, loading)
    if model_args.base_revision is not None:
        loading["revision"] = model_args.base_revision
    for name in ("encoder", "encoder_revision"):
        if getattr(model_args, name) is not None:
            loading[name] = getattr(model_args, name)
    if tokenizer is not None:
        # With its default decoder a configuration tells which task tokens the method has; their ids are ours to give.
        names = tuple(model_class.config_class(**fields).task_token_ids)
        fields["task_token_ids"] = add_task_tokens(tokenizer, names)
    return model_class.from_base(model_args.base, **loading, **fields)


def build_compression(
    model_args: ModelArguments, data_args: DataArguments, args: TrainingConfig
) -> CompressionTrainer:
    """Trainer of a compressor: from the text itself, from whole documents, or from a teacher."""
    tokenizer = load_tokenizer(model_args, data_args, args.seed)
    model = load_compressor(model_args, tokenizer)
    tokens = {"starts": task_start_ids(model.config), "has_task_tokens": bool(model.config.task_token_ids)}
    tokens["context_tokenizer"] = model.encoder_tokenizer
    if args.ratio_mode == "per_sample" and args.context_mode == "compressed":
        tokens["ratios"] = list(model.config.compression_ratios)
    if args.objective in ("compression", "distillation"):
        # Whoever asks the checkpoint later shall ask as it was trained.
        model.config.prompts = {task: templates[0] for task, templates in load_prompts(data_args.prompts).items()}
        model.config.context_prefix = data_args.context_prefix
    if model.config.is_encoder_decoder:
        return _build_seq2seq(model, tokenizer, data_args, args, tokens)
    if args.objective == "joint":
        return JointPretrainingTrainer(model=model, **_data_arguments(data_args, args, tokenizer, "joint", **tokens))
    if args.objective == "compression":
        arguments = _data_arguments(data_args, args, tokenizer, args.context_mode, **tokens)
        return CompressionTrainer(model=model, **arguments)
    teacher = None
    if model_args.teacher is not None:
        teacher = AutoModelForCausalLM.from_pretrained(
            model_args.teacher,
            dtype=getattr(torch, model_args.dtype),
            attn_implementation=model_args.attn_implementation,
        )
    arguments = _data_arguments(data_args, args, tokenizer, "distillation", **tokens)
    return DistillationTrainer(model=model, teacher=teacher, **arguments)


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
        model.config.prompts = {task: templates[0] for task, templates in load_prompts(data_args.prompts).items()}
        model.config.context_prefix = data_args.context_prefix
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
    check_choice("method of the objective retrieval:", model_args.method, ("decal",))
    tokenizer = load_tokenizer(model_args, data_args, args.seed)
    model = load_compressor(model_args, tokenizer, DeCALForRetrieval)
    return build_retrieval_trainer(model, tokenizer, data_args, args)


def build_trainer(model_args: ModelArguments, data_args: DataArguments, args: TrainingConfig) -> Trainer:
    """The trainer of the recipe's objective, with its model and data.

    Raises:
        ValueError: fields that do not go together, a missing source, column or file.
    """
    set_seed(args.seed)
    build = {
        "language_modeling": build_language_modeling,
        "teacher": build_teacher,
        "retrieval": build_retrieval,
    }
    return build.get(args.objective, build_compression)(model_args, data_args, args)


_PRIVATE_FIELDS = ("data_dir", "output_dir", "logging_dir", "hub_token", "resume_from_checkpoint")


def latest_checkpoint(output_dir: str) -> str | None:
    """The newest complete checkpoint of a run, or `None`; one that a kill left half written is passed over."""
    folders = [path for path in Path(output_dir).glob("checkpoint-*") if path.name.split("-")[1].isdigit()]
    for folder in sorted(folders, key=lambda path: int(path.name.split("-")[1]), reverse=True):
        # The Trainer writes its state last.
        try:
            json.loads((folder / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        return str(folder)
    return None


def _device_name(args: TrainingConfig) -> str:
    """What the run computes on, such as "2 x NVIDIA H200" or a CPU's name and its number of threads."""
    if args.device.type == "cuda":
        return f"{args.world_size} x {torch.cuda.get_device_name(args.device)}"
    hardware = environment()
    threads = hardware["torch_threads"]
    return f"{hardware['cpu']}, {threads} thread{'s' if threads > 1 else ''}"


def _over_all_parts(log_history: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """A quantity that grows over a run and starts anew when it is resumed, added up; `None` when it is not logged."""
    values = [entry[name] for entry in log_history if name in entry]
    if not values:
        return None
    return sum(value for value, later in zip(values, [*values[1:], 0], strict=True) if later < value)


def _training_hours(log_history: Sequence[Mapping[str, Any]], resumed: bool) -> float | None:
    """Wall-clock hours of a run, all its parts together when it was resumed; `None` when the log does not tell."""
    seconds = _over_all_parts(log_history, "train_runtime")
    # Only where tokens are counted does every entry show the clock; elsewhere the parts before the last are not timed.
    untimed = resumed and any("loss" in entry and "train_runtime" not in entry for entry in log_history)
    return None if seconds is None or untimed else float(f"{seconds / 3600:.3g}")


def _without_folder(value: Any) -> Any:
    """A path on this machine by its last part alone; anything else as it is."""
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def _write_summary(trainer: Trainer, arguments: Sequence[object], output_dir: Path, resumed: bool) -> None:
    """Beside the checkpoint: the recipe as it was run, and what came of it."""
    recipe = {}
    for group in arguments[:2]:
        recipe |= {name: value for name, value in dataclasses.asdict(group).items() if value is not None}
    changed = {
        field.name: getattr(arguments[2], field.name)
        for field in dataclasses.fields(arguments[2])
        if field.default is not dataclasses.MISSING and getattr(arguments[2], field.name) != field.default
    }
    # Where this machine keeps its files, and tokens, are nobody else's business.
    shown = {n: _without_folder(value) for n, value in (recipe | changed).items() if n not in _PRIVATE_FIELDS}
    plain = json.loads(json.dumps(shown, default=str))
    (output_dir / "recipe.yaml").write_text(yaml.safe_dump(plain, sort_keys=False), encoding="utf-8")
    history = trainer.state.log_history
    summary = {
        "steps": trainer.state.global_step,
        "input_tokens": trainer.state.num_input_tokens_seen,
        # Each process counts its own.
        "context_tokens": _over_all_parts(history, "num_context_tokens") if trainer.args.world_size == 1 else None,
        "seed": trainer.args.seed,
        "hours": _training_hours(history, resumed),
        "device": _device_name(trainer.args),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "log": history[-20:],
    }
    (output_dir / "training_summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the train command; returns the exit status."""
    arguments = parse_recipe(list(sys.argv[1:] if argv is None else argv))
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
        _write_summary(trainer, arguments, Path(args.output_dir), resumed=resume is not None)
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
