# SPDX-License-Identifier: Apache-2.0
"""Rows as TRL has them and their document train as they stand, in the words that the pipeline asks with."""

import datasets
import pytest
import torch
from byte_tokenizers import CHAT_TEMPLATE
from small_recipes import RUN
from trl import SFTConfig, SFTTrainer

from context_compressors.modeling.modeling_icae import ICAEForCausalLM
from context_compressors.modeling.modeling_mean_pooling import MeanPoolingForCausalLM
from context_compressors.modeling.parts.text_ids import encode, message_ids, opening_ids, question_ids
from context_compressors.training.objectives.compression_collator import CompressionCollator

CONTEXT = "Nora keeps eleven bees."


def said(role, content):
    return {"role": role, "content": content}


CONVERSATION = [said("system", "Be brief."), said("user", "Who?"), said("assistant", "Nora")]
LONGER = [*CONVERSATION, said("user", "How many?"), said("assistant", "eleven")]


@pytest.fixture
def chat(tokenizer, base_folder, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", CHAT_TEMPLATE)
    torch.manual_seed(0)
    how = {"prompt_format": "chat", "slots_after_ids": opening_ids(tokenizer)}
    return MeanPoolingForCausalLM.from_base(base_folder, compression_ratios=[2, 4], **how)


def collated(model, tokenizer, row):
    """The text of a row, and the places of it that are learned."""
    batch = CompressionCollator.from_model(model, tokenizer)([{"context": CONTEXT, **row}])
    document = batch["context_input_ids"][0].tolist()
    assert document[len(document) - len(encode(tokenizer, CONTEXT)) :] == encode(tokenizer, CONTEXT)
    ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
    assert all(label in (-100, token) for token, label in zip(ids, labels, strict=True))
    return ids, [label for label in labels if label != -100]


@pytest.mark.parametrize(
    ("row", "learned"),
    [
        ({"messages": CONVERSATION}, ["Nora"]),
        ({"messages": LONGER}, ["Nora", "eleven"]),
        ({"prompt": LONGER[:4], "completion": LONGER[4:]}, ["eleven"]),
        ({"prompt": "Who?", "completion": "Nora"}, ["Nora"]),
    ],
)
def test_a_chat_is_learned_in_the_words_that_the_pipeline_asks_with(chat, tokenizer, row, learned):
    ids, found = collated(chat, tokenizer, row)
    end = tokenizer.eos_token_id
    assert found == [token for answer in learned for token in [*encode(tokenizer, answer), end]]
    messages = row.get("messages") or (LONGER if isinstance(row["prompt"], list) else [said("user", "Who?"), None])
    asked = message_ids(chat.config, tokenizer, messages[:-1])
    assert ids == [*asked, *encode(tokenizer, learned[-1]), end]


def test_a_plain_checkpoint_learns_texts_as_they_stand_and_one_question_in_its_own_prompt(base_folder, tokenizer):
    tokens = {"[AE]": len(tokenizer), "[LM]": len(tokenizer) + 1}
    for model in (
        MeanPoolingForCausalLM.from_base(base_folder, compression_ratios=[2]),
        ICAEForCausalLM.from_base(base_folder, compression_ratios=[2], chunk_size=64, task_token_ids=tokens),
    ):
        config = model.config
        ids, learned = collated(model, tokenizer, {"messages": CONVERSATION[1:]})
        asked = question_ids(config, tokenizer, "Who?")
        assert ids[: len(asked)] == asked
        assert tokenizer.decode(learned).strip() == f"Nora{tokenizer.eos_token}"
        ids, learned = collated(model, tokenizer, {"prompt": "\nWho? It is", "completion": " Nora"})
        start = asked[: len(asked) - len(encode(tokenizer, config.question_prompt.replace("{question}", "Who?")))]
        learned_ids = [*encode(tokenizer, " Nora"), tokenizer.eos_token_id]
        assert (ids, learned) == ([*start, *encode(tokenizer, "\nWho? It is"), *learned_ids], learned_ids)


@pytest.mark.slow
def test_the_stock_trainer_trains_rows_as_they_stand(chat, tokenizer, tmp_path):
    rows = [{"prompt": "Who?", "completion": f"Nora {number}"} for number in range(6)]
    before = {name: parameter.detach().clone() for name, parameter in chat.named_parameters()}
    given = {"dataset_kwargs": {"skip_prepare_dataset": True}, "remove_unused_columns": False}
    trainer = SFTTrainer(
        model=chat,
        args=SFTConfig(str(tmp_path), **{**RUN, "max_steps": 3, "learning_rate": 1e-2}, **given),
        train_dataset=datasets.Dataset.from_list([{"context": CONTEXT, **row} for row in rows]),
        data_collator=CompressionCollator.from_model(chat, tokenizer),
        processing_class=tokenizer,
    )
    trainer.train()
    moved = {name for name, parameter in chat.named_parameters() if not parameter.detach().equal(before[name])}
    assert moved == {name for name, parameter in chat.named_parameters() if parameter.requires_grad}
