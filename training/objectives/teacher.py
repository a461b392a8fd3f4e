# SPDX-License-Identifier: Apache-2.0
"""The objective teacher: a plain language model learns to answer from the whole context."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from peft import LoraConfig, PeftConfig, PeftModel
from trl import SFTTrainer

from ...configuration.nearest_names import check_choice
from ..arguments import DataArguments, ModelArguments, TrainingConfig
from ..base_trainer import BaseTrainer
from ..loading import load_tokenizer, pretrained_language_model
from .compression import trainer_arguments

# A field of `teacher_lora` -> PEFT's name.
_LORA_FIELDS = {"rank": "r", "alpha": "lora_alpha", "dropout": "lora_dropout", "target_modules": "target_modules"}


class TeacherTrainer(BaseTrainer, SFTTrainer):
    """Supervised fine-tuning of a plain language model on full contexts, with the arguments of `trl.SFTTrainer`."""

    def __init__(self, *args: Any, **kwargs: Any):
        # Examples are tokenized already.
        kwargs["args"].dataset_kwargs = {**(kwargs["args"].dataset_kwargs or {}), "skip_prepare_dataset": True}
        kwargs["args"].remove_unused_columns = False
        super().__init__(*args, **kwargs)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Return TRL's own loss."""
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        # TRL's own count starts anew where a run is resumed.
        self._metrics["train" if self.model.training else "eval"].pop("num_tokens", None)
        if self.model.training:
            self.run_counts.add(num_tokens=int(inputs["attention_mask"].sum()))
        return loss


def build(model_args: ModelArguments, data_args: DataArguments, args: TrainingConfig) -> TeacherTrainer:
    """Return the trainer of the full-context teacher: the base with LoRA (`teacher_lora`) or with all its weights."""
    tokenizer = load_tokenizer(model_args)
    model: Any
    peft_config = None
    if model_args.checkpoint is not None:
        base = PeftConfig.from_pretrained(model_args.checkpoint).base_model_name_or_path
        model = pretrained_language_model(replace(model_args, base=base, checkpoint=None))
        model = PeftModel.from_pretrained(model, model_args.checkpoint, is_trainable=True)
    else:
        model = pretrained_language_model(model_args)
        if model_args.teacher_lora is not None:
            for name in model_args.teacher_lora:
                check_choice("field of teacher_lora", name, _LORA_FIELDS)
            lora = {"rank": 16, "alpha": 16, "dropout": 0.0, "target_modules": "all-linear", **model_args.teacher_lora}
            fields: dict[str, Any] = {_LORA_FIELDS[name]: value for name, value in lora.items()}
            peft_config = LoraConfig(task_type="CAUSAL_LM", **fields)
    arguments = trainer_arguments(model, tokenizer, data_args, args, "full_context")
    return TeacherTrainer(peft_config=peft_config, **arguments)
