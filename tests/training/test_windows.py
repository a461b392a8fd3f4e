# SPDX-License-Identifier: Apache-2.0
"""Activation Beacon's objective, next tokens behind beacons, and its recipes."""

import json

import pytest
import small_recipes
import torch
from datasets import Dataset
from small_recipes import parse
from transformers import AutoModelForCausalLM

from context_compressors import ActivationBeaconConfig, ActivationBeaconForCausalLM, MeanPoolingForCausalLM
from context_compressors.data.sources import DataSource
from context_compressors.training.arguments import DataArguments
from context_compressors.training.objectives.windows import WindowDataset, WindowTrainer
from context_compressors.training.train import main

SMALL = {**small_recipes.SMALL, "max_target_tokens": 48}
NO_ROWS = Dataset.from_dict({"input_ids": [[5]]})
PAPER = ["activation_beacon/activation_beacon.yaml", "activation_beacon/bases/llama3_8b.yaml"]


def test_questions_and_texts_stand_in_one_batch(tokenizer):
    source = {"generated": True, "tasks": ["continuation", "question_answering"], "weight": 1}
    lengths = {"min_context_tokens": 20, "max_context_tokens": 40, "max_target_tokens": 12}
    dataset = WindowDataset(DataArguments(sources=[source], **lengths), tokenizer, 12)
    tasks = [example["task"] for example in dataset.as_dataset().__getitems__(list(range(12)))]
    assert set(tasks) == {"continuation", "question_answering"}


@pytest.fixture
def beacon(base_folder):
    return ActivationBeaconForCausalLM.from_base(base_folder, compression_ratios=[2, 4], window_size=8)


def test_recipes_hold_the_authors_values(tmp_path):
    stages = [("pretraining", 5e-5, (2400, 20_000), None), ("fine_tuning", 1e-5, (7200, 20_000), [[0.0, [2, 4, 8]]])]
    for stage, rate, lengths, schedule in stages:
        files = [*PAPER, f"activation_beacon/{stage}.yaml"]
        model, data, args = parse(*files, folder=tmp_path)
        assert (args.objective, args.ratio_mode, args.learning_rate) == ("windows", "random", rate)
        assert (data.min_context_tokens, data.max_context_tokens, args.ratio_schedule) == (*lengths, schedule)
        assert args.per_device_train_batch_size * args.gradient_accumulation_steps == 8
        if stage == "pretraining":
            config = ActivationBeaconConfig(**model.method_config)
            assert (config.window_size, config.num_sinks, config.compression_ratios) == (1024, 1, (2, 4, 8, 16, 32))
            assert config.beacon_maps == ["query", "key", "value"]
    copied, *_ = parse("comprexit_baselines/activation_beacon.yaml", folder=tmp_path)
    config = ActivationBeaconConfig(**copied.method_config)
    assert (config.window_size, config.num_sinks, config.compression_ratios) == (64, 0, (4,))


def test_texts_to_be_continued_are_learned_whole(tokenizer):
    source = DataSource(generated=True, tasks=("continuation", "question_answering"), weight=1)
    data = DataArguments(sources=[source], min_context_tokens=20, max_context_tokens=40, max_target_tokens=12)
    dataset, found = WindowDataset(data, tokenizer, 40), set()
    for example in dataset:
        found.add(example["task"])
        if example["task"] == "continuation":
            assert example["context_ids"] == example["prompt_ids"] == []
            assert 12 < len(example["target_ids"]) <= 41
        else:
            assert example["context_ids"]
    assert found == {"continuation", "question_answering"}


def test_rows_with_shorter_texts_are_passed_over(tokenizer, tmp_path):
    texts = [f"Berth {number}. " * (4 if number % 3 else 20) for number in range(9)]
    rows = [{"context": text, "question": "Which?", "answers": ["one"]} for text in texts]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"path": str(tmp_path / "rows.jsonl"), "tasks": ["continuation", "question_answering"]}
    lengths = {"min_context_tokens": 40, "max_context_tokens": 400, "max_target_tokens": 12}
    examples = list(WindowDataset(DataArguments(sources=[source], **lengths), tokenizer))
    assert {example["task"] for example in examples} == set(source["tasks"])
    assert all(len(example["context_ids"] or example["target_ids"]) >= 40 for example in examples)
    with pytest.raises(ValueError, match="all rows are shorter than 390 or longer than 400 tokens"):
        WindowDataset(DataArguments(sources=[source], **{**lengths, "min_context_tokens": 390}), tokenizer)[0]


@pytest.fixture
def make_trainer(tokenizer, make_config):
    def make(model, ratio_mode="random"):
        args = make_config(objective="windows", ratio_mode=ratio_mode)
        return WindowTrainer(model=model, args=args, train_dataset=NO_ROWS, processing_class=tokenizer)

    return make


def test_the_loss_is_every_tokens_at_the_ratios_of_the_step(beacon, make_trainer):
    trainer = make_trainer(beacon)
    ids = torch.randint(5, 400, (2, 30), generator=torch.Generator().manual_seed(3))
    labels = ids.clone()
    labels[0, :20] = -100
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    beacon.train()
    [(_, drawn)] = trainer.window_ratios(30)
    assert len(drawn) == 4
    assert [trainer.window_ratios(30)[0][1] for _ in range(3)] == [drawn] * 3
    trainer.state.global_step = 1
    assert set(drawn) | set(trainer.window_ratios(800)[0][1]) == {2, 4}
    trainer.state.global_step = 0
    loss = trainer._step_loss(batch, None)
    states = beacon.model.read_windows(ids, None, drawn)
    logits = beacon.lm_head(states)[:, :-1].transpose(1, 2)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, labels[:, 1:]))
    beacon.eval()
    with torch.no_grad():
        assert [ratios for _, ratios in trainer.window_ratios(30)] == [[2], [4]]
        each = [
            torch.nn.functional.cross_entropy(
                beacon.lm_head(beacon.model.read_windows(ids, None, [ratio]))[:, :-1].transpose(1, 2), labels[:, 1:]
            )
            for ratio in (2, 4)
        ]
        torch.testing.assert_close(trainer._step_loss(batch, None), sum(each))


def test_other_methods_and_modes_are_refused(beacon, base_folder, make_trainer):
    other = MeanPoolingForCausalLM.from_base(base_folder)
    for model, mode, match in ((other, "random", "activation_beacon, got mean_pooling"), (beacon, "all", "got 'all'")):
        with pytest.raises(ValueError, match=match):
            make_trainer(model, mode)
    with pytest.raises(ValueError, match="batches need whole texts"):
        make_trainer(beacon)._check_batch({"input_ids": 1, "context_input_ids": 1})


@pytest.mark.slow
def test_both_stages_and_answers_behind_memories_train(base_folder, tmp_path):
    """The paper's recipes at a small size: all that trains moves, and the base does not."""
    texts = [{"generated": True, "tasks": ["continuation"], "weight": 1}]
    questions = [{"generated": True, "tasks": ["question_answering"], "weight": 1}]
    short = {"min_context_tokens": 24, "max_context_tokens": 48, "report_to": "none"}
    window = {"compression_ratios": [2, 4, 8], "window_size": 16, "num_sinks": 1}

    def train(files, output, **fields):
        fields = {**SMALL, **short, **fields, "output_dir": str(tmp_path / output)}
        lines = [part for name, value in fields.items() for part in (f"--{name}", json.dumps(value).strip('"'))]
        assert main([*files, *lines]) == 0
        return AutoModelForCausalLM.from_pretrained(tmp_path / output)

    start = {"base": str(base_folder), "method_config": window, "tokenizer": str(base_folder)}
    first = train([*PAPER, "activation_beacon/pretraining.yaml"], "first", sources=texts, **start)
    untrained = ActivationBeaconForCausalLM.from_base(base_folder, **window)
    moved = {n for n, p in first.named_parameters() if not p.equal(untrained.get_parameter(n).float())}
    assert moved == {name for name, p in untrained.named_parameters() if p.requires_grad}
    again = {"checkpoint": str(tmp_path / "first"), "tokenizer": str(base_folder)}
    second = train([*PAPER, "activation_beacon/fine_tuning.yaml"], "second", sources=questions, **again)
    assert not second.model.beacon_embedding.equal(first.model.beacon_embedding)
    third = train(PAPER, "third", objective="compression", sources=questions, **start)
    assert third.config.prompts["question_answering"]
