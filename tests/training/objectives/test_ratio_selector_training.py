# SPDX-License-Identifier: Apache-2.0
"""What a ratio selector learns: log2 of a text's tokens over those of its summary (arXiv 2603.25926)."""

import json
import math

import pytest
import torch

from context_compressors.modeling.modeling_mean_pooling import MeanPoolingForCausalLM
from context_compressors.modeling.parts.text_ids import encode
from context_compressors.training.arguments import DataArguments
from context_compressors.training.objectives.compression_collator import CompressionCollator
from context_compressors.training.objectives.compression_dataset import CompressionDataset
from context_compressors.training.objectives.compression_trainer import CompressionTrainer
from context_compressors.training.objectives.distillation import DistillationTrainer

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
    return MeanPoolingForCausalLM.from_base(base_folder, compression_ratios=[2, 4], ratio_selector=True, chunk_size=16)


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
    # Rows without a summary teach nothing.
    errors = model.model.predicted_log_ratios(**context) - labels
    error = errors[~labels.isnan()].square().mean()
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
