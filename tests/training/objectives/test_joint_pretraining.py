# SPDX-License-Identifier: Apache-2.0
import copy

import pytest
import torch
from torch.nn import functional

from context_compressors.data.task_tokens import task_start_ids
from context_compressors.modeling.modeling_five_hundred_x import FiveHundredXForCausalLM
from context_compressors.modeling.modeling_icae import ICAEForCausalLM
from context_compressors.modeling.modeling_mean_pooling import MeanPoolingForCausalLM
from context_compressors.training.arguments import DataArguments
from context_compressors.training.objectives.compression_collator import CompressionCollator
from context_compressors.training.objectives.compression_dataset import CompressionDataset
from context_compressors.training.objectives.compression_trainer import CompressionTrainer
from context_compressors.training.objectives.distillation import DistillationTrainer
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
TASK_TOKENS_ONLY = {"encoder_lora": None, "trainable_parameters": ["task_embeddings$"]}


@pytest.fixture(scope="module")
def dataset(tokenizer):
    sources = [{"generated": True, "tasks": list(TASKS), "weight": 1}]
    return JointDataset(DataArguments(sources=sources, min_document_tokens=24, max_document_tokens=80), tokenizer, 24)


@pytest.fixture
def build(base_folder):
    def build_model(name="icae_enhanced", **fields):
        model_class, settings = METHODS[name]
        torch.manual_seed(0)
        model = model_class.from_base(base_folder, **{**settings, **fields})
        # The adapters' B starts at zero, which would leave A without a gradient.
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += 0.05 * torch.randn_like(parameter)
        return model

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


def gradients(model):
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_same_gradients(found, expected):
    assert set(found) == set(expected)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-6, msg=name)


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
    assert set(found) == {name for name, p in model.named_parameters() if p.requires_grad}
    if "without" not in name:
        assert (found["model.task_embeddings"].abs().sum(dim=1) > 0).all()


@pytest.mark.parametrize(("alpha", "texts"), [(0.5, 2), (0.0, 1), (1.0, 1)])
def test_a_context_is_encoded_once_and_a_text_without_weight_is_not_read(
    make_trainer, build, dataset, tokenizer, alpha, texts
):
    model = build("mean_pooling").train()
    trainer = make_trainer(model, alpha=alpha)
    passes = []
    model.model.encoder_backbone.register_forward_hook(lambda *_: passes.append(1))
    batch = collator_of(model, tokenizer)([dataset[index] for index in range(2)])
    loss = trainer.compute_loss(model, batch)
    # One pass encodes; encoder and decoder share the base, so each reading is one more.
    assert len(passes) == 1 + 2 * texts
    loss.backward()
    expected = {
        f"{kind}_{task}_ratio_{ratio}" for kind in ("loss", "token_accuracy") for task in TASKS for ratio in (2, 4)
    }
    left_out = {0.0: "reconstruction", 1.0: "continuation"}.get(alpha, "none")
    kept = {name for name in expected if left_out not in name}
    assert {name for name in trainer._metrics["train"] if "_ratio_" in name} == kept
    if texts == 1:
        unused = TASKS.index(left_out)
        assert (model.model.task_embeddings.grad.abs().sum(dim=1) > 0).tolist() == [unused == 1, unused == 0]
    own = sum(
        trainer._metrics["train"][f"loss_{task}_ratio_{r}"][0] * w
        for task, w in trainer.weights.items()
        for r in (2, 4)
    )
    assert loss.item() == pytest.approx(own, rel=1e-5)


def test_random_ratio_trains_one_ratio_a_step(make_trainer, build, dataset, tokenizer):
    model = build().train()
    trainer = make_trainer(model, ratio_mode="random")
    trainer.compute_loss(model, collator_of(model, tokenizer)([dataset[0]]))
    (ratio,) = trainer.step_ratios()
    assert {name for name in trainer._metrics["train"] if name.startswith("loss_")} == {
        f"loss_{task}_ratio_{ratio}" for task in TASKS
    }


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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["icae_enhanced", "500x_enhanced", "without_task_tokens"])
def test_training_moves_exactly_the_trainable_parameters(make_trainer, build, name):
    data_steps = {"gradient_accumulation_steps": 2, "max_steps": 3, "include_num_input_tokens_seen": True}
    trainer = make_trainer(build(name), **data_steps)
    model = trainer.model
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer.train()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p.detach(), before[name])}
    assert moved == {name for name, p in model.named_parameters() if p.requires_grad}
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    parts = [logs[-1][f"loss_{task}_ratio_{ratio}"] for task in TASKS for ratio in (2, 4)]
    # Micro-batches of unequal length: the step's loss weighs their tokens, what is logged for each part does not.
    assert logs[-1]["loss_sum_over_ratios"] == pytest.approx(sum(parts) / 2, rel=0.05)
    assert logs[-1]["loss"] == logs[-1]["loss_sum_over_ratios"] / 2
    used = [trainer.train_dataset[index] for index in range(3 * 2 * 2)]
    assert logs[-1]["num_context_tokens"] == sum(1 + len(example["context_ids"]) for example in used)  # BOS
    # BOS is restored behind [AE].
    starts = 2 if name == "without_task_tokens" else 3
    tokens = sum(starts + len(example["reconstruction_ids"]) + len(example["continuation_ids"]) for example in used)
    assert logs[-1]["num_tokens"] == tokens
    assert trainer.state.num_input_tokens_seen >= tokens


@pytest.mark.parametrize("context_mode", ["compressed", "full_context"])
def test_evaluation_gives_every_loss(make_trainer, build, dataset, context_mode):
    trainer = make_trainer(build(), context_mode=context_mode)
    metrics = trainer.evaluate(dataset.as_dataset().select(range(4)))
    log = trainer.state.log_history[-1]
    endings = ("ratio_2", "ratio_4") if context_mode == "compressed" else ("full_context",)
    names = [f"eval_loss_{task}_{ending}" for task in TASKS for ending in endings]
    assert metrics["eval_loss"] == pytest.approx(sum(log[name] for name in names) / len(names), rel=1e-4)
    trainer.args.per_device_eval_batch_size = 1
    again = trainer.evaluate(dataset.as_dataset().select(range(4)))
    assert again["eval_loss"] == pytest.approx(metrics["eval_loss"], rel=1e-4)


@pytest.fixture(scope="module")
def questions(tokenizer):
    sources = [{"generated": True, "tasks": ["question_answering", "reconstruction"], "weight": 1}]
    return CompressionDataset(
        DataArguments(sources=sources, max_context_tokens=60, prompts="memory_tokens"), tokenizer, 24
    )


def language_model_loss(base, model, input_ids, labels):
    """The plain language model, with the task tokens' embeddings put into its inputs."""
    embeddings = base.get_input_embeddings()(input_ids.clamp(max=399))
    for row, task_id in enumerate(IDS.values()):
        embeddings[input_ids == task_id] = model.model.task_embeddings[row]
    logits = base(inputs_embeds=embeddings).logits[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


@pytest.mark.slow
@pytest.mark.parametrize("context_mode", ["full_context", "no_context"])
@pytest.mark.parametrize("joint", [False, True])
def test_bounds_train_exactly_the_task_tokens(
    make_trainer, build, dataset, questions, tokenizer, language_model, context_mode, joint
):
    model = build(**TASK_TOKENS_ONLY)
    data, mode = (dataset, "joint") if joint else (questions, context_mode)
    trainer_class = JointPretrainingTrainer if joint else CompressionTrainer
    trainer = make_trainer(model, trainer_class, data, mode, context_mode=context_mode, max_steps=4)
    batch = collator_of(model, tokenizer, mode, context_mode)([data[index] for index in range(3)])
    base = copy.deepcopy(language_model)
    prefixes = [f"{task}_" for task in TASKS] if joint else [""]
    with torch.no_grad():
        texts = [(batch[f"{prefix}input_ids"], batch[f"{prefix}labels"]) for prefix in prefixes]
        expected = sum(language_model_loss(base, model, *text) for text in texts) / len(prefixes)
        torch.testing.assert_close(trainer.compute_loss(model.train(), batch), expected)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer.train()
    moved = [name for name, p in model.named_parameters() if not torch.equal(p.detach(), before[name])]
    assert moved == ["model.task_embeddings"]
    assert (model.model.task_embeddings != before["model.task_embeddings"]).any(dim=1).all()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert "num_context_tokens" not in logs[-1]
    name = f"loss_{TASKS[0]}_{context_mode}" if joint else f"loss_{context_mode}"
    assert name in logs[-1]


def test_batches_of_the_wrong_mode_are_refused(make_trainer, build, questions, tokenizer):
    model = build()
    question = [questions[0]]
    joint = make_trainer(model)
    with pytest.raises(ValueError, match=r"need context_input_ids: use CompressionCollator\(mode='joint'\)"):
        joint.compute_loss(model, collator_of(model, tokenizer, "no_context")(question))
    with pytest.raises(ValueError, match="batches need two texts"):
        joint.compute_loss(model, collator_of(model, tokenizer, "compressed")(question))
    assert joint._get_num_items_in_batch([{}], torch.device("cpu")) is None
    bound = make_trainer(model, CompressionTrainer, questions, "full_context", context_mode="full_context")
    with pytest.raises(ValueError, match="context_input_ids, which context_mode 'full_context' does not"):
        bound.compute_loss(model, collator_of(model, tokenizer, "compressed")(question))
    assert bound.compute_loss(model, collator_of(model, tokenizer, "full_context")(question)) > 0
    with pytest.raises(ValueError, match="distillation needs context_mode 'compressed'"):
        make_trainer(model, DistillationTrainer, questions, "distillation", context_mode="no_context")


def test_the_hub_tags_name_the_method(make_trainer, build):
    trainer = make_trainer(build("500x_enhanced"))
    assert trainer.model.model_tags == ["context-compression", "five-hundred-x"]
