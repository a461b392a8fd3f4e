# SPDX-License-Identifier: Apache-2.0
"""A stock `trl.SFTTrainer` trains every method with our collator."""

import random

import pytest
import torch
from byte_tokenizers import byte_tokenizer
from datasets import Dataset
from parameters import trainable
from small_recipes import RUN
from tiny_bases import BOS, PAD
from tiny_models import ON_EVERY_BASE, Case
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import SFTConfig, SFTTrainer

from context_compressors.modeling.checkpoint.base_weights import base_name
from context_compressors.modeling.compressor import modeling_compressor as compressing
from context_compressors.training.objectives.compression_collator import CompressionCollator

COLLATOR = CompressionCollator(PAD, BOS)
SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
TOKENIZER = byte_tokenizer(SPECIAL.values(), **SPECIAL)


def examples(num_rows=24):
    draw = random.Random(0)

    def ids(low, high):
        return [draw.randrange(5, 128) for _ in range(draw.randint(low, high))]

    return Dataset.from_list(
        [
            {"context_ids": ids(4, 16) if i != 3 else [], "prompt_ids": ids(1, 4), "target_ids": ids(2, 5)}
            for i in range(num_rows)
        ]
    )


def make_trainer(model, folder, callbacks=None, **settings):
    arguments = {**RUN, "max_steps": 4, "learning_rate": 1e-2, "lr_scheduler_type": "linear"}
    arguments |= {"remove_unused_columns": False, "dataset_kwargs": {"skip_prepare_dataset": True}, **settings}
    return SFTTrainer(
        model=model,
        args=SFTConfig(str(folder), **arguments),
        train_dataset=examples(),
        data_collator=COLLATOR,
        processing_class=TOKENIZER,
        callbacks=callbacks,
    )


def state(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def check_training(case, folder, **settings):
    """Every trainable parameter moves, no frozen one does, and the loss is the model's own."""
    model = case.build()
    if model.config.task_token_ids:
        # Only a token that stands in the text can move.
        model.model.task_embeddings.requires_grad_(False)
    before = state(model)
    trainer = make_trainer(model, folder, **settings)
    batch = COLLATOR([trainer.train_dataset[i] for i in (0, 1, 3)])
    model.train()
    loss = trainer.compute_loss(model, dict(batch))
    torch.testing.assert_close(loss, model(**batch).loss, atol=1e-4, rtol=1e-4)
    trainer.train()
    after = state(model)
    assert {name for name in before if not after[name].equal(before[name])} == trainable(model)
    assert all(torch.tensor(losses(trainer)).isfinite())
    return trainer


# On the base that differs most, one of each memory form: gradients on every base are in test_training.py.
@pytest.mark.slow
@pytest.mark.only(
    lambda case: case == Case(case.method) or (case.method.name in ON_EVERY_BASE and case.architecture == "gemma2")
)
def test_a_stock_trainer_moves_what_trains_and_nothing_else(backbone_case, tmp_path):
    check_training(backbone_case, tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
def test_the_trainers_usual_settings_work(form_case, tmp_path):
    settings = {"gradient_checkpointing": True, "bf16": True, "gradient_accumulation_steps": 2, "packing": False}
    check_training(form_case, tmp_path, **settings)


@pytest.mark.slow
def test_an_own_loss_is_the_same_in_any_split_of_a_step(method_cases, tmp_path):
    weights, first_losses = [], []
    for steps in (1, 2, 4):
        split = {"per_device_train_batch_size": 4 // steps, "gradient_accumulation_steps": steps}
        plain = {"optim": "sgd", "max_grad_norm": 0.0, "max_steps": 1, "learning_rate": 1.0}
        trainer = make_trainer(method_cases["ranked_key_values"].build(), tmp_path / str(steps), **split, **plain)
        trainer.train()
        weights.append(state(trainer.model))
        first_losses += losses(trainer)
    before = state(method_cases["ranked_key_values"].build())
    assert not weights[0]["model.scorers.0.weight"].allclose(before["model.scorers.0.weight"], atol=1e-3)
    for other in weights[1:]:
        for name, expected in weights[0].items():
            torch.testing.assert_close(other[name], expected, atol=1e-5, rtol=1e-4, msg=name)
    assert first_losses == pytest.approx([first_losses[0]] * 3, abs=1e-5)


class StopAfter(TrainerCallback):
    """Ends a run as if somebody had ended it."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


@pytest.mark.slow
@pytest.mark.parametrize("is_light", [False, True])
def test_a_run_resumes_from_its_folder_with_the_same_losses(form_case, tmp_path, local_hub, start_light, is_light):
    def start():
        return start_light(form_case, local_hub) if is_light else form_case.build()

    settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    whole = make_trainer(start(), tmp_path / "whole", **settings)
    whole.train()
    parts = tmp_path / "parts"
    stopped = make_trainer(start(), parts, callbacks=[StopAfter(3)], **settings)
    stopped.train()
    # The model comes from the checkpoint's folder alone, which holds code, tokenizer and settings, too.
    folder = parts / "checkpoint-3"
    names = {path.name for path in folder.iterdir()}
    assert {"generation_config.json", "tokenizer.json", f"modeling_{form_case.method.name}.py"} < names
    if is_light:
        own = sum(p.numel() for n, p in whole.model.named_parameters() if p.requires_grad or base_name(n) is None)
        assert (folder / "model.safetensors").stat().st_size < 4 * own + 20_000
    resumed = make_trainer(AutoModelForCausalLM.from_pretrained(folder), parts, **settings)
    resumed.train(resume_from_checkpoint=str(folder))
    assert losses(stopped) + losses(resumed)[3:] == pytest.approx(losses(whole), abs=1e-5)
    expected = state(whole.model)
    for name, parameter in state(resumed.model).items():
        torch.testing.assert_close(parameter, expected[name], atol=1e-5, rtol=1e-4, msg=name)


def test_training_without_a_context_warns(form_case, monkeypatch):
    warned, model = [], form_case.build().train()
    monkeypatch.setattr(compressing.logger, "warning_once", warned.append, raising=False)
    batch = COLLATOR([examples()[0]])
    model(**batch)
    assert warned == []
    model(**{name: batch[name] for name in ("input_ids", "attention_mask", "labels")})
    assert "training without a context" in warned[0]


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.parametrize("name", ["mean_pooling", "icae", "autocompressor", "comprexit", "ranked_key_values"])
def test_compiled_steps_are_the_eager_ones(name, method_cases, tmp_path):
    torch._dynamo.reset()
    weights, plain = [], {"optim": "sgd", "max_grad_norm": 0.0, "max_steps": 2, "learning_rate": 0.1}
    for compiled in ({}, {"torch_compile": True, "torch_compile_backend": "eager"}):
        trainer = make_trainer(method_cases[name].build(), tmp_path / str(len(weights)), **plain, **compiled)
        trainer.train()
        weights.append(state(trainer.model))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    for key, expected in weights[0].items():
        torch.testing.assert_close(weights[1][key], expected, atol=1e-5, rtol=1e-4, msg=key)
