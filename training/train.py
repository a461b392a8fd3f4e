"""`context-compressors train RECIPE.yaml [--field value]`: everything that this project trains."""

from __future__ import annotations

import dataclasses
import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, Trainer, set_seed
from transformers.trainer_utils import get_last_checkpoint

from .arguments import DataArguments, ModelArguments, TrainingConfig, parse_recipe
from .language_modeling import (
    LanguageModelingBatches,
    LanguageModelingCollator,
    LanguageModelingRows,
    LanguageModelingTrainer,
)
from .tokenizer import train_tokenizer


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


def _new_language_model(model_args: ModelArguments, tokenizer: PreTrainedTokenizerBase) -> torch.nn.Module:
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
        model = AutoModelForCausalLM.from_pretrained(
            model_args.base,
            revision=model_args.base_revision,
            dtype=getattr(torch, model_args.dtype),
            attn_implementation=model_args.attn_implementation,
        )
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


def _write_summary(trainer: Trainer, arguments: Sequence[object], output_dir: Path) -> None:
    """Beside the checkpoint: the recipe as it was run, and what came of it."""
    recipe = {}
    for group in arguments[:2]:
        recipe |= {name: value for name, value in dataclasses.asdict(group).items() if value is not None}
    changed = {
        field.name: getattr(arguments[2], field.name)
        for field in dataclasses.fields(arguments[2])
        if field.default is not dataclasses.MISSING and getattr(arguments[2], field.name) != field.default
    }
    plain = json.loads(json.dumps(recipe | changed, default=str))
    (output_dir / "recipe.yaml").write_text(yaml.safe_dump(plain, sort_keys=False), encoding="utf-8")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    summary = {
        "steps": trainer.state.global_step,
        "input_tokens": trainer.state.num_input_tokens_seen,
        "seed": trainer.args.seed,
        "device": device,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "log": trainer.state.log_history[-20:],
    }
    (output_dir / "training_summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the train command; returns the exit status."""
    arguments = parse_recipe(list(sys.argv[1:] if argv is None else argv))
    model_args, data_args, args = arguments
    set_seed(args.seed)
    trainer = build_language_modeling(model_args, data_args, args)
    resume = args.resume_from_checkpoint
    if resume == "latest":
        resume = get_last_checkpoint(args.output_dir) if Path(args.output_dir).is_dir() else None
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(args.output_dir)
    if trainer.is_world_process_zero():
        _write_summary(trainer, arguments, Path(args.output_dir))
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
