# SPDX-License-Identifier: Apache-2.0
"""The objective teacher: a plain language model learns to answer from the whole context."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from trl import SFTTrainer

from ...configuration.nearest_names import check_choice
from ..arguments import DataArguments, ModelArguments, TrainingConfig
from ..base_trainer import BaseTrainer, take_tokenized_examples, without_metadata
from ..loading import load_tokenizer, pretrained_language_model
from .compression import trainer_arguments


class TeacherTrainer(BaseTrainer, SFTTrainer):
    """Supervised fine-tuning of a plain language model on full contexts: the teacher of distillation.

    Takes the arguments of `trl.SFTTrainer`; batches come from `CompressionCollator(mode="full_context")`.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        take_tokenized_examples(kwargs["args"])
        super().__init__(*args, **kwargs)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """TRL's own loss."""
        inputs = without_metadata(inputs)
        found = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        # TRL's own count starts anew where a run is resumed.
        self._metrics["train" if self.model.training else "eval"].pop("num_tokens", None)
        if self.model.training:
            self.run_counts.add(num_tokens=int(inputs["attention_mask"].sum()))
        return found


def _earlier_teacher(model_args: ModelArguments) -> Any:
    """The base of an earlier teacher with its adapter, which goes on training."""
    folder = str(model_args.checkpoint)
    if model_args.base is not None or not (Path(folder) / "adapter_config.json").is_file():
        raise ValueError(
            "a teacher goes on from the folder of its adapter, checkpoint, without a base (one whose weights were all "
            f"trained is a base itself), got checkpoint {folder!r} and base {model_args.base!r}"
        )
    from peft import PeftConfig, PeftModel

    base = PeftConfig.from_pretrained(folder).base_model_name_or_path
    model = pretrained_language_model(replace(model_args, base=base, checkpoint=None))
    return PeftModel.from_pretrained(model, folder, is_trainable=True)


def build(model_args: ModelArguments, data_args: DataArguments, args: TrainingConfig) -> TeacherTrainer:
    """Trainer of the full-context teacher: the base with LoRA (`teacher_lora`) or with all its weights.

    Raises:
        ValueError: a field of `teacher_lora` that is not allowed, or a `checkpoint` that is no adapter's folder.
    """
    tokenizer = load_tokenizer(model_args)
    peft_config = None
    if model_args.checkpoint is not None:
        model: Any = _earlier_teacher(model_args)
    else:
        model = pretrained_language_model(model_args)
    if model_args.checkpoint is None and model_args.teacher_lora is not None:
        from peft import LoraConfig

        settings: dict[str, Any] = {"rank": 16, "alpha": 16, "dropout": 0.0, "target_modules": "all-linear"}
        for name in model_args.teacher_lora:
            check_choice("field of teacher_lora", name, settings)
        settings |= dict(model_args.teacher_lora)
        for name, kind, words in (("rank", int, "a whole number"), ("alpha", (int, float), "a number")):
            value = settings[name]
            if isinstance(value, bool) or not isinstance(value, kind) or value <= 0:
                raise ValueError(f"{name} of teacher_lora must be {words} above 0, got {value!r}")
        if not isinstance(settings["dropout"], (int, float)) or not 0 <= settings["dropout"] < 1:
            raise ValueError(f"dropout of teacher_lora must be from 0 to below 1, got {settings['dropout']!r}")
        targets = settings["target_modules"]
        names = [targets] if isinstance(targets, str) else targets
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            raise ValueError(f"target_modules of teacher_lora must be a text or a list of texts, got {targets!r}")
        peft_config = LoraConfig(
            r=settings["rank"],
            lora_alpha=settings["alpha"],
            lora_dropout=settings["dropout"],
            target_modules=settings["target_modules"],
            task_type="CAUSAL_LM",
        )
    arguments = trainer_arguments(model, tokenizer, data_args, args, "full_context")
    return TeacherTrainer(peft_config=peft_config, **arguments)
