# SPDX-License-Identifier: Apache-2.0
"""Activation Beacon's objective, next tokens behind beacons, and its recipes."""

import pytest
import torch
from datasets import Dataset

from context_compressors import ActivationBeaconForCausalLM
from context_compressors.data.sources import DataSource
from context_compressors.training.arguments import DataArguments
from context_compressors.training.objectives.windows import WindowDataset, WindowTrainer

NO_ROWS = Dataset.from_dict({"input_ids": [[5]]})


@pytest.fixture
def beacon(base_folder):
    return ActivationBeaconForCausalLM.from_base(base_folder, compression_ratios=[2, 4], window_size=8)


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
