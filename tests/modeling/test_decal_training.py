# SPDX-License-Identifier: Apache-2.0
"""DeCAL in the stock trainer, and its gradient checkpointing."""

import math

import pytest
import torch
from decal_models import build
from tokenizers import Tokenizer, models
from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerFast, Seq2SeqTrainer, Seq2SeqTrainingArguments


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["decal", "attention_pooling"])
def test_the_stock_trainer_moves_every_weight(setting, tmp_path, random_rows):
    model = build(setting)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    rows = random_rows([9, 4, 12, 7])
    data = [{"input_ids": row.tolist(), "labels": row[:5].tolist()} for row in rows]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1}, unk_token="<pad>")), pad_token="<pad>"
    )
    arguments = Seq2SeqTrainingArguments(
        output_dir=str(tmp_path),
        max_steps=3,
        learning_rate=1e-2,
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = Seq2SeqTrainer(
        model=model, args=arguments, train_dataset=data, data_collator=DataCollatorForSeq2Seq(tokenizer, model)
    )
    assert math.isfinite(trainer.train().training_loss)
    still = [name for name, parameter in model.named_parameters() if parameter.detach().equal(before[name])]
    assert not still


@pytest.mark.parametrize("setting", ["decal", "attention_pooling"])
def test_gradient_checkpointing_changes_no_gradient(setting, random_rows):
    ids = torch.stack(random_rows([9, 9]))
    gradients = []
    for checkpointing in (False, True):
        model = build(setting).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(input_ids=ids, labels=ids).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)
