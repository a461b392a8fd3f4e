# SPDX-License-Identifier: Apache-2.0
import copy

import pytest
import torch
from parameters import assert_same_gradients, disturb, gradients, trainable
from torch.nn import functional
from transformers import LlamaForCausalLM

from context_compressors.training.arguments import DataArguments
from context_compressors.training.objectives.compression_collator import CompressionCollator
from context_compressors.training.objectives.compression_dataset import CompressionDataset
from context_compressors.training.objectives.compression_trainer import CompressionTrainer
from context_compressors.training.objectives.distillation import DistillationTrainer

SOURCES = [{"generated": True, "tasks": ["question_answering", "reconstruction", "continuation"], "weight": 1}]


@pytest.fixture(scope="module")
def dataset(tokenizer):
    return CompressionDataset(
        DataArguments(sources=SOURCES, max_context_tokens=60, max_target_tokens=64, questions_per_example=2),
        tokenizer,
        24,
    )


def collate(tokenizer, mode, **fields):
    return CompressionCollator.from_tokenizer(tokenizer, mode=mode, **fields)


@pytest.fixture
def make_trainer(dataset, tokenizer, compressor, make_config):
    def make(trainer_class=CompressionTrainer, mode="compressed", config=None, **fields):
        return trainer_class(
            model=compressor,
            args=make_config(**(config or {})),
            train_dataset=dataset.as_dataset(),
            processing_class=tokenizer,
            data_collator=collate(tokenizer, mode, with_metadata=True),
            **fields,
        )

    return make


def text_of(batch):
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def context_of(batch):
    return {name: batch[f"context_{name}"] for name in ("input_ids", "attention_mask")}


def test_loss_is_the_sum_of_every_ratios_own_cross_entropy(make_trainer, dataset, tokenizer):
    trainer = make_trainer()
    model = trainer.model.train()
    batch = collate(tokenizer, "compressed")([dataset[index] for index in range(4)])
    labels = batch["labels"][:, 1:].flatten()
    plain = 0.0
    for ratio in (2, 4):
        context = {name: batch[name] for name in ("context_input_ids", "context_attention_mask")} | {"ratio": ratio}
        logits = model(**text_of(batch), **context).logits
        plain = plain + functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels)
    plain.backward()
    expected = gradients(model)
    loss = trainer.compute_loss(model, batch)
    loss.backward()
    torch.testing.assert_close(loss, plain)
    assert_same_gradients(gradients(model), expected)


def test_ratio_schedule_says_which_ratios_a_step_has(make_trainer):
    schedule = [[0.0, [4]], [0.5, [2, 4]]]
    trainer = make_trainer(config={"ratio_schedule": schedule})
    trainer.state.max_steps = 10
    trainer.model.train()
    expected = [[4]] * 5 + [[2, 4]] * 5
    for trainer.state.global_step, ratios in enumerate(expected):
        assert trainer.step_ratios() == ratios
    trainer.state.global_step = 0
    trainer.model.eval()
    assert trainer.step_ratios() == [2, 4]
    drawing = make_trainer(config={"ratio_schedule": schedule, "ratio_mode": "random"})
    drawing.state.max_steps = 100
    drawing.model.train()
    drawn = []
    for drawing.state.global_step in range(100):
        drawn += drawing.step_ratios()
    assert drawn[:50] == [4] * 50
    assert set(drawn[50:]) == {2, 4}
    with pytest.raises(ValueError, match=r"ratio_schedule has the ratios \[8\]; the model's compression_ratios are"):
        make_trainer(config={"ratio_schedule": [[0.0, [2, 8]]]})


def plain_distillation(model, teacher_logits, batch, kl_weight, nll_weight):
    """Equations 5 and 6 written out, with full vocabularies, and xRAG's cross-entropy beside them."""
    teacher = functional.log_softmax(teacher_logits[:, :-1], -1)[batch["full_labels"][:, 1:] != -100]
    total = 0.0
    for memory in model.compress(**context_of(batch), ratio=[2, 4]):
        logits = model(**text_of(batch), memory=memory).logits
        student = functional.log_softmax(logits[:, :-1], -1)[batch["labels"][:, 1:] != -100]
        total = total + kl_weight * (teacher.exp() * (teacher - student)).sum()
        labels = batch["labels"][batch["labels"] != -100]
        total = total - nll_weight * student.gather(1, labels[:, None]).sum()
    return total / len(batch["labels"])


@pytest.mark.parametrize("own_base", [True, False])
def test_distillation_equals_a_plain_computation(
    make_trainer, dataset, tokenizer, base_folder, language_model, own_base
):
    teacher = None
    if not own_base:
        teacher = LlamaForCausalLM.from_pretrained(base_folder)
        torch.manual_seed(1)
        disturb(teacher)
    reference = (language_model if own_base else copy.deepcopy(teacher)).eval()
    weights = {"kl_weight": 2.0, "nll_weight": 1.0} if own_base else {"kl_weight": 1.0, "nll_weight": 0.0}
    trainer = make_trainer(DistillationTrainer, "distillation", weights, teacher=teacher)
    torch.manual_seed(2)
    model = disturb(trainer.model.train())
    batch = collate(tokenizer, "distillation")([dataset[index] for index in range(4)])
    with torch.no_grad():
        teacher_logits = reference(
            input_ids=batch["full_input_ids"], attention_mask=batch["full_attention_mask"]
        ).logits
    plain = plain_distillation(model, teacher_logits, batch, **weights)
    plain.backward()
    expected = gradients(model)
    loss = trainer.compute_loss(model, batch)
    loss.backward()
    torch.testing.assert_close(loss, plain, rtol=1e-4, atol=1e-5)
    assert expected.keys() == trainable(model)
    assert_same_gradients(gradients(model), expected)
    if teacher is not None:
        assert not any(p.requires_grad for p in teacher.parameters())


def test_accumulated_distillation_equals_one_big_batch(make_trainer, dataset, tokenizer):
    trainer = make_trainer(DistillationTrainer, "distillation", config={"gradient_accumulation_steps": 2})
    model = trainer.model
    trainer.current_gradient_accumulation_steps = 2
    collator = collate(tokenizer, "distillation", with_metadata=True)
    for start in (0, 2):
        trainer.training_step(model, collator([dataset[start], dataset[start + 1]]))
    split = gradients(model)
    trainer.compute_loss(model, collator([dataset[index] for index in range(4)])).backward()
    assert_same_gradients(gradients(model), split, atol=1e-6)


def test_an_evaluation_weighs_all_targets_alike_in_batches_of_any_size(make_trainer, compressor, dataset):
    # So that tokens have losses of their own.
    compressor.get_input_embeddings().weight.data.mul_(60)
    found = []
    for size in (1, 3, 5):
        trainer = make_trainer(config={"per_device_eval_batch_size": size})
        trainer.evaluate(dataset.as_dataset().select(range(5)))
        entry = trainer.state.log_history[-1]
        found.append({name: value for name, value in entry.items() if "loss" in name or "accuracy" in name})
    assert {"eval_loss", "eval_loss_ratio_2", "eval_token_accuracy_ratio_4"} < found[0].keys()
    assert [pytest.approx(metrics, rel=1e-4) for metrics in found[1:]] == [found[0]] * 2
    losses = [found[0][f"eval_loss_ratio_{ratio}"] for ratio in (2, 4)]
    assert found[0]["eval_loss_sum_over_ratios"] == pytest.approx(sum(losses)) == 2 * found[0]["eval_loss"]


@pytest.mark.slow
def test_nan_loss_stops_with_step_and_ids_and_the_last_checkpoint_stays(make_trainer, dataset, tmp_path):
    trainer = make_trainer(config={"save_strategy": "steps", "save_steps": 2, "max_steps": 6})
    losses = []

    def broken(states, labels, target, name, original=trainer._memory_loss):
        losses.append(name)
        loss = original(states, labels, target, name)
        return loss * float("nan") if len(losses) > 2 * 3 else loss

    trainer._memory_loss = broken
    ids = [dataset[index]["id"] for index in (6, 7)]
    with pytest.raises(ValueError, match=r"the loss is nan at step 4, batch ids") as error:
        trainer.train()
    assert all(name in str(error.value) for name in ids)
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-2"]
