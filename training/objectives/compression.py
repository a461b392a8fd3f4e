# SPDX-License-Identifier: Apache-2.0
"""The objective compression, and what the other objectives of a compressor share with it."""

from __future__ import annotations

import logging
from statistics import harmonic_mean
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from ...configuration.configuration_compressor import CompressorConfig
from ...configuration.nearest_names import check_choice
from ...data.prompts import load_prompts
from ...data.task_tokens import text_starts
from ...modeling.parts.text_ids import context_end_ids, leave_out_bos, opening_ids, prompt_ids, text_tokenizer
from ..arguments import DataArguments, ModelArguments, TrainingConfig
from ..loading import load_compressor, load_tokenizer
from .compression_collator import CompressionCollator, Seq2SeqCollator
from .compression_dataset import CompressionDataset
from .compression_trainer import CompressionTrainer, Seq2SeqCompressionTrainer
from .packed_texts import PackedTexts

logger = logging.getLogger(__name__)
# Whose lengths are looked at before a run starts.
_FIRST_EXAMPLES = 8


def load(model_args: ModelArguments, args: TrainingConfig) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the compressor that a recipe names, and its tokenizer; `ValueError` when it cannot have the objective."""
    tokenizer = load_tokenizer(model_args)
    model = load_compressor(model_args, tokenizer)
    check_choice(f"objective of {model.config.method}:", args.objective, model.config.objectives)
    if not (model.config.bos_before_text or model.config.opens_context):
        for reader in filter(None, (tokenizer, model.encoder_tokenizer)):
            leave_out_bos(reader)
    return model, tokenizer


def trainer_arguments(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    data_args: DataArguments,
    args: TrainingConfig,
    mode: str,
    dataset_class: type[CompressionDataset] = CompressionDataset,
    collator_class: type[CompressionCollator] = CompressionCollator,
    **collator_arguments: Any,
) -> dict[str, Any]:
    """Return what every trainer of tokenized examples takes: model, data sets, collator and tokenizer."""
    config, context_tokenizer, texts = model.config, None, tokenizer
    settings: dict[str, Any] = {"batch_size": args.per_device_train_batch_size}
    if isinstance(config, CompressorConfig):
        context_tokenizer = model.encoder_tokenizer
        collator_arguments |= text_starts(config, tokenizer)
        if args.context_mode == "compressed":
            settings["ratio"] = harmonic_mean(config.compression_ratios)
            if args.ratio_mode == "per_sample":
                collator_arguments["ratios"] = list(config.compression_ratios)
        if config.task_token_ids or config.is_encoder_decoder:
            texts = text_tokenizer(tokenizer)
    if data_args.memories is not None:
        if not config.has_frozen_memories:
            raise ValueError(
                "memories need a stage that trains nothing that makes them, such as training_stage 'reader' of "
                f"autocompressor: leave memories out, got {data_args.memories!r}"
            )
        collator_arguments |= {"memories": data_args.memories, "model_id": model.model_id}
    if data_args.pack_texts:
        dataset_class = PackedTexts
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    num_examples = args.max_steps * batch if args.max_steps > 0 else None
    if num_examples is None and not args.num_train_epochs:
        # No step: what scorers are fitted to.
        num_examples = args.fit_scorers or 1
    settings["context_tokenizer"] = context_tokenizer
    dataset = dataset_class(data_args, texts, num_examples, seed=args.seed, **settings)
    # An example is a function of its index, drawn at random already; in order, lengths grow and resuming is exact.
    args.train_sampling_strategy = "sequential"
    evaluation = None
    if data_args.eval_sources:
        evaluation_args = data_args.of_evaluation()
        evaluation = dataset_class(evaluation_args, texts, data_args.num_eval_examples, seed=args.seed + 1, **settings)
    collator = collator_class.from_tokenizer(
        tokenizer,
        context_tokenizer,
        seed=args.seed,
        mode=mode,
        with_metadata=True,
        context_mode=args.context_mode,
        pad_to_multiple_of=args.pad_to_multiple_of or 1,
        **collator_arguments,
    )
    callbacks: list[TrainerCallback] = []
    if args.max_steps < 1 and args.num_train_epochs > 1:
        # Workers that outlive an epoch would go on with its examples.
        args.dataloader_persistent_workers = False
        callbacks.append(NewEpochs(dataset))
    seen = range(min(_FIRST_EXAMPLES, len(dataset)))
    warns = mode in ("compressed", "distillation") and dataset_class in (CompressionDataset, PackedTexts)
    if warns and all(dataset[index]["num_cut"] for index in seen):
        logger.warning(
            f"each of the first {len(seen)} examples is cut to max_context_tokens {data_args.max_context_tokens} or "
            "its other limits: raise these, or give shorter texts"
        )
    return {
        "model": model,
        "args": args,
        "train_dataset": dataset.as_dataset(),
        "eval_dataset": None if evaluation is None else evaluation.as_dataset(),
        "processing_class": tokenizer,
        "data_collator": collator,
        "callbacks": callbacks,
    }


class NewEpochs(TrainerCallback):
    """Has each pass over a data set's rows draw its own examples."""

    def __init__(self, dataset: CompressionDataset):
        self.dataset = dataset

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Name the pass, also where a run is resumed inside of one."""
        # Behind an epoch of many steps their shares may not add up to a whole number.
        self.dataset.set_epoch(int((state.epoch or 0) + 1e-6))


def record_prompts(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, data_args: DataArguments) -> None:
    """Record the prompts of the training in the configuration, whose checkpoint is then asked with them."""
    is_chat = data_args.prompt_format == "chat"
    config.prompts = {task: templates[0] for task, templates in load_prompts(data_args.prompts).items()}
    config.context_prefix = data_args.context_prefix
    config.prompt_format = data_args.prompt_format
    # Behind a task token, and behind most memories of keys and values, the template follows the memory as a whole.
    has_opening = "opening_ids" in vars(config)
    stands_inside = is_chat and not config.task_token_ids and (config.carrier == "embeddings" or has_opening)
    config.slots_after_ids = opening_ids(tokenizer) if stands_inside else []
    if has_opening:
        config.opening_ids = prompt_ids(tokenizer, [""], "chat").head if stands_inside else []


def build(model_args: ModelArguments, data_args: DataArguments, args: TrainingConfig) -> CompressionTrainer:
    """Return the trainer of a recipe."""
    model, tokenizer = load(model_args, args)
    record_prompts(model.config, tokenizer, data_args)
    recipe = (model, tokenizer, data_args, args, args.context_mode)
    if not model.config.is_encoder_decoder:
        return CompressionTrainer(**trainer_arguments(*recipe))
    arguments = trainer_arguments(
        *recipe,
        collator_class=Seq2SeqCollator,
        question_placement=model.config.question_placement,
        context_end_ids=context_end_ids(tokenizer),
    )
    return Seq2SeqCompressionTrainer(**arguments)
