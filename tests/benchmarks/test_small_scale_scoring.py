# SPDX-License-Identifier: Apache-2.0
"""The scores of the small-scale benchmark."""

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerState

from context_compressors.evaluation.evaluate import evaluate_model
from context_compressors.evaluation.samples import EvaluationDataset
from context_compressors.evaluation.settings import EvaluationSettings
from context_compressors.modeling.modeling_mean_pooling import MeanPoolingForCausalLM


def test_the_curves_are_the_losses_of_the_evaluation(script, base: Path, tokenizer: PreTrainedTokenizerFast):
    scoring = script("small_scale.scoring")
    model = MeanPoolingForCausalLM.from_base(str(base), compression_ratios=[4]).train()
    test = EvaluationDataset("d", [{"text": "The mill stands by the river."}, {"text": "Nora keeps eleven bees."}])
    state = TrainerState(log_history=[{"loss": 1.0}])
    tasks = ("reconstruction", "continuation")
    samples = {task: scoring.held_out(tokenizer, test, 16, None, task) for task in tasks}
    curves = scoring.HeldOutCurves(model, tokenizer, samples)
    curves.on_log(None, state, None, {"learning_rate": 1.0}, model)
    assert state.log_history == [{"loss": 1.0}]
    curves.on_log(None, state, None, {"loss": 1.0}, model)
    assert model.training
    settings = EvaluationSettings(tasks=tasks, context_tokens=16, batch_size=1)
    report = evaluate_model(model, tokenizer, [test], settings, progress=False)
    for task in tasks:
        perplexity = report.score("d", task, "ratio=4", "perplexity")
        assert state.log_history[0][f"{task}_loss"] == pytest.approx(math.log(perplexity), rel=1e-5)


def test_what_a_context_saves_is_the_difference_to_another_ones(
    script, base: Path, tokenizer: PreTrainedTokenizerFast
):
    scoring = script("small_scale.scoring")
    model = MeanPoolingForCausalLM.from_base(str(base), compression_ratios=[2, 4]).eval()
    reader = AutoModelForCausalLM.from_pretrained(base).eval()
    rows = [
        {"text": text}
        for text in ("The mill stands by the river.", "Nora keeps eleven bees.", "Rain, at last!", "A bell.")
    ]
    samples = scoring.held_out(tokenizer, EvaluationDataset("d", rows), 12, None, "continuation", 4)
    assert len(samples) == 4

    @torch.no_grad()
    def loss(shift: int, ratio: int | None) -> float:
        total = 0.0
        for index, sample in enumerate(samples):
            context = samples[(index + shift) % 4].context_ids
            text = [*sample.prompt_ids, *sample.target_ids]
            if ratio is None:
                logits = reader(torch.tensor([[256, *context, *text]])).logits
            else:
                # This tokenizer starts no text with BOS by itself.
                memory = model.compress(torch.tensor([context]), ratio=ratio)
                logits = model(torch.tensor([[256, *text]]), memory=memory).logits
            count = len(sample.target_ids)
            targets = torch.tensor(sample.target_ids)
            total += float(torch.nn.functional.cross_entropy(logits[0, -count - 1 : -1], targets, reduction="sum"))
        return total / sum(len(sample.target_ids) for sample in samples)

    saved = scoring.saved_by_context(model, reader, tokenizer, samples)
    expected = {"ratio=2": 2, "ratio=4": 4, "full_context": None}
    assert saved == pytest.approx({name: loss(2, r) - loss(0, r) for name, r in expected.items()}, abs=1e-5)
    assert all(value != 0 for value in saved.values())
    with pytest.raises(ValueError, match="it takes two texts, got 1"):
        scoring.saved_by_context(model, reader, tokenizer, samples[:1])


def test_tokens_per_slot_count_what_short_contexts_waste(script, base: Path, tokenizer: PreTrainedTokenizerFast):
    scoring = script("small_scale.scoring")
    model = MeanPoolingForCausalLM.from_base(str(base), compression_ratios=[2, 4])
    test = EvaluationDataset("d", [{"text": "seven b"}, {"text": "eleven byte"}])
    # 7 and 11 tokens in 4 + 6 slots, or in 2 + 3.
    samples = scoring.held_out(tokenizer, test, 16, None)
    assert scoring.tokens_per_slot(model, tokenizer, samples) == {"ratio=2": 1.8, "ratio=4": 3.6}
