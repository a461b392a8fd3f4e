# SPDX-License-Identifier: Apache-2.0

import pytest
import torch
from parameters import assert_same_gradients, disturb, gradients, trainable
from torch.nn import functional

from context_compressors.data.task_tokens import task_start_ids
from context_compressors.modeling.modeling_five_hundred_x import FiveHundredXForCausalLM
from context_compressors.modeling.modeling_icae import ICAEForCausalLM
from context_compressors.modeling.modeling_mean_pooling import MeanPoolingForCausalLM
from context_compressors.training.arguments import DataArguments
from context_compressors.training.objectives.compression_collator import CompressionCollator
from context_compressors.training.objectives.joint_pretraining import JointDataset, JointPretrainingTrainer

TASKS = ("reconstruction", "continuation")
LORA = {"rank": 4, "alpha": 8}
IDS = {"[AE]": 400, "[LM]": 401}
MEMORY_TOKENS = {"compression_ratios": [2, 4], "chunk_size": 16, "encoder_lora": LORA, "task_token_ids": IDS}
MEAN_POOLING = {"compression_ratios": [2, 4], "encoder_lora": LORA, "decoder_lora": LORA}
METHODS = {
    "icae_default": (ICAEForCausalLM, MEMORY_TOKENS),
    "icae_enhanced": (ICAEForCausalLM, {**MEMORY_TOKENS, "position_layout": "enhanced"}),
    "500x_enhanced": (FiveHundredXForCausalLM, {**MEMORY_TOKENS, "position_layout": "enhanced"}),
    "mean_pooling": (MeanPoolingForCausalLM, {**MEAN_POOLING, "task_token_ids": IDS, "position_layout": "enhanced"}),
    "without_task_tokens": (MeanPoolingForCausalLM, MEAN_POOLING),
}


@pytest.fixture(scope="module")
def dataset(tokenizer):
    sources = [{"generated": True, "tasks": list(TASKS), "weight": 1}]
    return JointDataset(DataArguments(sources=sources, min_document_tokens=24, max_document_tokens=80), tokenizer, 24)


@pytest.fixture
def build(base_folder):
    def build_model(name="icae_enhanced", **fields):
        model_class, settings = METHODS[name]
        torch.manual_seed(0)
        # The adapters' B starts at zero, which would leave A without a gradient.
        return disturb(model_class.from_base(base_folder, **{**settings, **fields}), 0.05)

    return build_model


@pytest.fixture
def make_trainer(dataset, tokenizer, build, make_config):
    def make(model=None, trainer_class=JointPretrainingTrainer, data=None, mode="joint", **config):
        model = build() if model is None else model
        args = make_config(objective="joint", **config)
        return trainer_class(
            model=model,
            args=args,
            train_dataset=(dataset if data is None else data).as_dataset(),
            processing_class=tokenizer,
            data_collator=collator_of(model, tokenizer, mode, args.context_mode, with_metadata=True),
        )

    return make


def collator_of(model, tokenizer, mode="joint", context_mode="compressed", **fields):
    return CompressionCollator.from_tokenizer(
        tokenizer,
        mode=mode,
        context_mode=context_mode if mode == "joint" else "compressed",
        task_start_ids=task_start_ids(model.config),
        **fields,
    )


def separate_steps(model, batch, alpha, ratios=(2, 4)):
    """Equations 2 and 3 and the weighted loss, every text with an encoding and a full table of logits of its own."""
    total = 0.0
    context = {f"context_{name}": batch[f"context_{name}"] for name in ("input_ids", "attention_mask")}
    for ratio in ratios:
        for task, weight in zip(TASKS, (alpha, 1 - alpha), strict=True):
            text = {name: batch[f"{task}_{name}"] for name in ("input_ids", "attention_mask")}
            logits = model(**text, **context, ratio=ratio).logits[:, :-1]
            loss = functional.cross_entropy(logits.flatten(0, 1), batch[f"{task}_labels"][:, 1:].flatten())
            total = total + weight * loss
    return total


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_shared_slots_give_the_loss_and_gradients_of_separate_steps(
    make_trainer, build, dataset, tokenizer, name, checkpointing
):
    model = build(name).train()
    trainer = make_trainer(model, alpha=0.3)
    batch = collator_of(model, tokenizer)([dataset[index] for index in range(4)])
    plain = separate_steps(model, batch, 0.3)
    plain.backward()
    expected = gradients(model)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    loss = trainer.compute_loss(model, batch)
    loss.backward()
    torch.testing.assert_close(loss, plain)
    found = gradients(model)
    assert_same_gradients(found, expected)
    assert found.keys() == trainable(model)
    if "without" not in name:
        assert (found["model.task_embeddings"].abs().sum(dim=1) > 0).all()


def test_accumulated_batches_equal_one_big_batch(make_trainer, build, dataset, tokenizer):
    model = build().train()
    trainer = make_trainer(model, gradient_accumulation_steps=2, alpha=0.3)
    trainer.current_gradient_accumulation_steps = 2
    collator = collator_of(model, tokenizer, with_metadata=True)
    examples = sorted((dataset[index] for index in range(6)), key=JointDataset.num_tokens)
    batches = [collator(examples[:2]), collator(examples[2:])]
    counts = trainer._get_num_items_in_batch(batches, torch.device("cpu"))
    # A reconstruction restores BOS, too.
    lengths = [sum(len(example[f"{task}_ids"]) for example in examples) for task in TASKS]
    assert counts.tolist() == [lengths[0] + len(examples), lengths[1]]
    losses = [trainer.training_step(model, batch, counts) for batch in batches]
    split = gradients(model)
    whole = trainer.compute_loss(model, collator(examples))
    whole.backward()
    assert_same_gradients(gradients(model), split)
    torch.testing.assert_close(sum(losses), whole.detach())
