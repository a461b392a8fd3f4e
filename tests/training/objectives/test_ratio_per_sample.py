# SPDX-License-Identifier: Apache-2.0
"""`ratio_mode: per_sample`: rows of one batch at different ratios, for every objective that compresses."""

import pytest
import torch
from parameters import assert_same_gradients, gradients

from context_compressors.modeling.modeling_icae import ICAEForCausalLM
from context_compressors.training.arguments import DataArguments
from context_compressors.training.objectives.compression_collator import CompressionCollator
from context_compressors.training.objectives.compression_dataset import CompressionDataset
from context_compressors.training.objectives.compression_trainer import CompressionTrainer
from context_compressors.training.objectives.distillation import DistillationTrainer
from context_compressors.training.objectives.joint_pretraining import JointDataset, JointPretrainingTrainer

RATIOS = [2, 4]
TRAINERS = {"compressed": CompressionTrainer, "distillation": DistillationTrainer, "joint": JointPretrainingTrainer}
OBJECTIVES = {"compressed": "compression"}


@pytest.fixture(scope="module")
def datasets(tokenizer):
    questions = [{"generated": True, "tasks": ["question_answering", "reconstruction"], "weight": 1}]
    documents = [{"generated": True, "tasks": ["reconstruction", "continuation"], "weight": 1}]
    rows = CompressionDataset(
        DataArguments(sources=questions, max_context_tokens=60, max_target_tokens=64), tokenizer, 24
    )
    joint = JointDataset(
        DataArguments(sources=documents, min_document_tokens=24, max_document_tokens=80), tokenizer, 24
    )
    return {"compressed": rows, "distillation": rows, "joint": joint}


@pytest.fixture
def make_trainer(datasets, tokenizer, compressor, make_config):
    def make(mode, model=None, with_ratios=True, **fields):
        collator = CompressionCollator.from_tokenizer(
            tokenizer, mode=mode, ratios=RATIOS if with_ratios else None, with_metadata=True
        )
        return TRAINERS[mode](
            model=compressor if model is None else model,
            args=make_config(objective=OBJECTIVES.get(mode, mode), ratio_mode="per_sample", **fields),
            train_dataset=datasets[mode].as_dataset(),
            processing_class=tokenizer,
            data_collator=collator,
        )

    return make


@pytest.fixture
def icae(base_folder):
    torch.manual_seed(0)
    return ICAEForCausalLM.from_base(base_folder, compression_ratios=RATIOS, chunk_size=16, encoder_lora={"rank": 4})


@pytest.mark.parametrize("mode", TRAINERS)
@pytest.mark.parametrize("method", ["mean_pooling", "icae"])
def test_loss_and_gradients_are_those_of_each_row_at_its_own_ratio(mode, method, make_trainer, datasets, icae):
    trainer = make_trainer(mode, model=icae if method == "icae" else None)
    model = trainer.model.train()
    examples = [datasets[mode][index] for index in range(6)]
    batch = trainer.data_collator(examples)
    assert set(batch["ratio"].tolist()) == set(RATIOS)
    # A divisor that does not depend on the batch; distillation takes the mean over rows.
    count = torch.tensor([100.0, 70.0] if mode == "joint" else 100.0)
    loss = trainer.compute_loss(model, batch, num_items_in_batch=count)
    loss.backward()
    found, expected = gradients(model), torch.zeros(())
    for example in examples:
        row = trainer.data_collator([example])
        trainer.args.ratio_mode = "all"
        trainer.step_ratios = lambda row=row: row["ratio"].tolist()
        part = trainer.compute_loss(model, row, num_items_in_batch=count)
        part = part / len(examples) if mode == "distillation" else part
        part.backward()
        expected = expected + part.detach()
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-4, atol=1e-5)
    assert_same_gradients(found, gradients(model))
