# SPDX-License-Identifier: Apache-2.0
"""What a ratio selector learns: log2 of a text's tokens over those of its summary (arXiv 2603.25926)."""

import json
import math

import pytest
import torch

from context_compressors.modeling.modeling_mean_pooling import MeanPoolingForCausalLM
from context_compressors.modeling.parts.text_ids import encode
from context_compressors.training.arguments import DataArguments, parse_recipe
from context_compressors.training.objectives.compression_collator import CompressionCollator
from context_compressors.training.objectives.compression_dataset import CompressionDataset
from context_compressors.training.objectives.compression_trainer import CompressionTrainer
from context_compressors.training.objectives.distillation import DistillationTrainer
from context_compressors.training.train import build_trainer

ROWS = [
    {"context": f"The harbour of Sandvik {index} has a lighthouse, two cranes and {index} boats.", "summary": summary}
    for index, summary in enumerate(["A harbour.", "A harbour with a lighthouse and two cranes.", None, "Boats."] * 4)
]
TASKS = ["reconstruction", "continuation"]


@pytest.fixture
def summaries(tmp_path):
    """A file of contexts, of which some have a summary."""
    path = tmp_path / "summaries.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    return path


@pytest.fixture
def dataset(summaries, tokenizer):
    sources = [{"path": str(summaries), "tasks": TASKS, "weight": 4}, {"generated": True, "tasks": TASKS, "weight": 1}]
    data = DataArguments(sources=sources, max_context_tokens=40, min_context_tokens=8, max_target_tokens=24)
    return CompressionDataset(data, tokenizer, 40, with_log_ratios=True)


@pytest.fixture
def model(base_folder):
    torch.manual_seed(0)
    return MeanPoolingForCausalLM.from_base(
        base_folder, compression_ratios=[2, 4], ratio_selector="ratio", chunk_size=16
    )


@pytest.fixture
def make_trainer(dataset, tokenizer, model, make_config):
    def make(trainer_class=CompressionTrainer, mode="compressed", **fields):
        return trainer_class(
            model=model,
            args=make_config(**fields),
            train_dataset=dataset.as_dataset(),
            eval_dataset=dataset.as_dataset().select(range(4)),
            processing_class=tokenizer,
            data_collator=CompressionCollator.from_tokenizer(tokenizer, mode=mode, with_metadata=True),
        )

    return make


def test_labels_come_from_whole_texts_and_their_summaries(dataset, tokenizer):
    known = 0
    for example in (dataset[index] for index in range(len(dataset))):
        source, _, row = example["id"].partition(".jsonl/")
        summary = None if source.startswith("generated") else ROWS[int(row)]["summary"]
        if summary is None:
            assert math.isnan(example["log_ratio"])
            continue
        lengths = [len(encode(tokenizer, text)) for text in (ROWS[int(row)]["context"], summary)]
        assert example["log_ratio"] == math.log2(lengths[0] / lengths[1])
        known += 1
    assert 10 < known < len(dataset)


@pytest.mark.parametrize(
    ("trainer_class", "mode"), [(CompressionTrainer, "compressed"), (DistillationTrainer, "distillation")]
)
def test_the_mean_squared_error_is_added_to_the_loss(make_trainer, dataset, trainer_class, mode):
    trainer = make_trainer(trainer_class, mode)
    model = trainer.model.train()
    batch = trainer.data_collator([dataset[index] for index in range(8)])
    labels = batch["log_ratios"]
    assert 0 < int(labels.isnan().sum()) < len(labels)
    total = trainer.compute_loss(model, dict(batch))
    context = {"input_ids": batch["context_input_ids"], "attention_mask": batch["context_attention_mask"]}
    _, predicted = model.model.compress_with_log_ratios(**context, ratios=[2])
    # Each chunk's text is as dense as the whole; rows without a summary teach nothing.
    errors = [
        (y - label) ** 2
        for row, label in zip(predicted, labels, strict=True)
        for y in row
        if not y.isnan() and not label.isnan()
    ]
    assert len(errors) > int((~labels.isnan()).sum())
    error = torch.stack(errors).mean()
    unknown = trainer.compute_loss(model, {**batch, "log_ratios": labels * math.nan})
    torch.testing.assert_close(total, unknown + error)
    assert unknown.isfinite()
    # The gradient goes on through the encoder, whose adapters are at their start: B alone has one.
    model.zero_grad()
    error.backward()
    moved = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert {"model.ratio_selector.weight", "model.ratio_selector.bias"} < moved
    assert all(".lora_B.encoder." in name for name in moved if ".lora_" in name)
    assert any(".lora_B.encoder." in name for name in moved)
    model.zero_grad()
    unknown.backward()
    assert not model.model.ratio_selector.weight.grad.any()


@pytest.mark.slow
def test_a_ratio_is_drawn_for_each_step_and_the_error_logged(make_trainer):
    trainer = make_trainer(ratio_mode="random", max_steps=4, gradient_accumulation_steps=2, learning_rate=3e-2)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    moved = {name for name, p in trainer.model.named_parameters() if not p.detach().equal(before[name])}
    assert moved == {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    drawn = [{name for name in entry if name.startswith("loss_ratio_") and name[-1].isdigit()} for entry in steps]
    assert all(len(names) == 1 for names in drawn)
    assert all(entry["loss_ratio_selector"] > 0 for entry in steps)
    assert "num_ratios_summed" not in steps[0]
    evaluated = trainer.evaluate()
    entry = trainer.state.log_history[-1]
    parts = [entry[f"eval_loss_ratio_{ratio}"] for ratio in (2, 4)]
    assert evaluated["eval_loss"] == pytest.approx(sum(parts) / 2, rel=0.02)
    whole = sum(parts) + entry["eval_loss_ratio_selector"]
    assert evaluated["eval_loss_sum_over_ratios"] == pytest.approx(whole, rel=0.02)


def test_accumulated_batches_weigh_the_error_once(make_trainer, dataset):
    trainer = make_trainer()
    model = trainer.model.train()
    trainer.current_gradient_accumulation_steps = 4
    batch = trainer.data_collator([dataset[index] for index in range(8)])
    without = {**batch, "log_ratios": batch["log_ratios"] * math.nan}
    alone = trainer.compute_loss(model, dict(batch)) - trainer.compute_loss(model, dict(without))
    count = torch.tensor(200)
    part = trainer.compute_loss(model, dict(batch), num_items_in_batch=count)
    part = part - trainer.compute_loss(model, dict(without), num_items_in_batch=count)
    torch.testing.assert_close(part, alone / 4)


def test_without_summaries_a_selector_is_not_trained(dataset, make_trainer, summaries, tokenizer, base_folder):
    data = DataArguments(sources=[{"generated": True, "tasks": TASKS, "weight": 1}])
    with pytest.raises(ValueError, match=r"none of the sources \['generated'\] has a column 'summary'"):
        CompressionDataset(data, tokenizer, 4, with_log_ratios=True)
    recipe = {
        **{"base": str(base_folder), "method": "mean_pooling", "output_dir": str(summaries.parent / "out")},
        **{"method_config": {"ratio_selector": "log_ratio"}, "bf16": False, "use_cpu": True, "report_to": "none"},
        **{"sources": [{"path": str(summaries), "tasks": ["summarisation"], "skip_incomplete": True}], "max_steps": 1},
    }
    path = summaries.parent / "recipe.json"
    path.write_text(json.dumps(recipe))
    trainer = build_trainer(*parse_recipe([str(path)]))
    assert math.isfinite(trainer.train_dataset[0]["log_ratio"])
    batch = trainer.data_collator([trainer.train_dataset[0]])
    del batch["log_ratios"]
    with pytest.raises(ValueError, match="a ratio selector learns from `log_ratios`"):
        trainer.compute_loss(trainer.model, batch)


def test_a_selecting_compressor_is_measured_without_summaries(summaries, base_folder):
    recipe = {
        **{"base": str(base_folder), "method": "mean_pooling", "output_dir": str(summaries.parent / "out")},
        **{"method_config": {"compression_ratios": [2, 4], "ratio_selector": "ratio"}, "max_context_tokens": 40},
        **{"bf16": False, "use_cpu": True, "report_to": "none", "max_steps": 1, "num_eval_examples": 2},
        "sources": [{"path": str(summaries), "tasks": ["summarisation"], "skip_incomplete": True}],
        "eval_sources": [{"generated": True, "tasks": ["reconstruction"], "weight": 1}],
        "eval_strategy": "steps",
    }
    path = summaries.parent / "recipe.json"
    path.write_text(json.dumps(recipe))
    found = build_trainer(*parse_recipe([str(path)])).evaluate()
    assert found["eval_loss"] > 0


def test_recipes_have_the_published_settings_and_the_comparisons_size():
    model, data, args = parse_recipe(["mean_pooling/semi_dynamic.yaml", "--output_dir", "out", "--use_cpu", "true"])
    fields = model.method_config
    # All of one commit, the one with these models.
    assert (model.base, model.encoder) == ("Qwen/Qwen3-4B-Instruct-2507", "Qwen/Qwen3-Embedding-0.6B")
    assert (fields["compression_ratios"], fields["ratio_selector"]) == ([2, 4, 8, 16, 32], "ratio")
    assert (fields["linear_after_pooling"], fields["normed_mlp_size"]) == (False, 4096)
    # Rank-stabilised LoRA scales by alpha over the root of the rank.
    for side, alpha in (("encoder_lora", 32), ("decoder_lora", 16)):
        lora = fields[side]
        assert (lora["rank"], lora["dropout"], lora.get("target_modules")) == (16, 0.1, None)
        assert lora["alpha"] / lora["rank"] == alpha / lora["rank"] ** 0.5
    assert (args.learning_rate, args.lr_scheduler_type, args.warmup_steps) == (4e-5, "constant_with_warmup", 100)
    assert (args.per_device_train_batch_size, args.max_steps, args.ratio_mode) == (4, 200_000, "random")
    assert (data.min_context_tokens, data.max_context_tokens, args.objective) == (64, 1200, "compression")
    _, data, _ = parse_recipe(["smollm2/data.yaml", "--output_dir", "out", "--use_cpu", "true"])
    assert sum("summarisation" in source["tasks"] for source in data.sources) == 2
    plain, selecting = (
        parse_recipe([f"smollm2/comparison/{name}.yaml", "--output_dir", "out", "--use_cpu", "true"])[0].method_config
        for name in ("mean_pooling", "mean_pooling_semi_dynamic")
    )
    assert selecting == {**plain, "ratio_selector": "ratio"}
