# SPDX-License-Identifier: Apache-2.0
"""Contexts that are lists of passages: from the files to the loss, each is compressed apart from the others."""

import json

import pytest
import torch

from context_compressors import CompressedContext, CompressionTokensForCausalLM
from context_compressors.modeling.parts.text_ids import cut_passages, encode
from context_compressors.training.arguments import DataArguments
from context_compressors.training.objectives.compression_collator import CompressionCollator
from context_compressors.training.objectives.compression_dataset import CompressionDataset
from context_compressors.training.objectives.compression_trainer import CompressionTrainer

PASSAGES = ["Berth 4 belongs to Nora.", "Bob keeps eleven bees.", "Tarby has a mill."]
LORA = {"rank": 2}
QUESTION = {"question": "Who keeps bees?", "answers": ["Bob"]}
SOURCE = {"path": "rows.jsonl", "tasks": ["question_answering"]}


@pytest.fixture
def folder(tmp_path):
    rows = [{"context": PASSAGES, **QUESTION}, {"context": PASSAGES[:1], **QUESTION}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(tmp_path)


@pytest.fixture
def cocom(base_folder):
    """Chunks of 8 tokens, one adapter for both sides, and a separator."""
    fields = {"encoder_lora": LORA, "shared_adapter": True, "slot_markers": {"after": 1}, "chunk_size": 8}
    torch.manual_seed(0)
    model = CompressionTokensForCausalLM.from_base(
        str(base_folder), compression_ratios=[2, 4], decoder_lora=LORA, linear_after_encoder=False, **fields
    )
    return model.eval()


def examples_of(tokenizer, folder, source=SOURCE, num_examples=None, **fields):
    data = DataArguments(sources=[source], data_dir=folder, canonical_prompts=True, **fields)
    dataset = CompressionDataset(data, tokenizer, num_examples)
    return dataset, sorted(
        map(dataset.__getitem__, range(len(dataset))), key=lambda example: -len(example["context_ids"])
    )


def test_an_example_has_its_passages_and_all_of_them_as_one_text(tokenizer, folder):
    _, (several, one) = examples_of(tokenizer, folder)
    ids = [encode(tokenizer, passage) for passage in PASSAGES]
    assert several["passages"] == ids
    assert tokenizer.decode(several["context_ids"]) == "\n\n".join(PASSAGES)
    assert (one["passages"], one["context_ids"]) == (None, ids[0])
    assert several["documents"] != one["documents"]
    start = len(encode(tokenizer, "Read: "))
    limits = {"min_context_tokens": 1, "max_context_tokens": start * 3 + len(ids[0]) + 2}
    _, (several, _) = examples_of(tokenizer, folder, context_prefix="Read: ", **limits)
    assert [len(passage) for passage in several["passages"]] == [start + len(ids[0]), start + 2]
    assert several["num_cut"] > 0


def test_passages_are_cut_on_either_side():
    passages = [[1, 2], [3], [4, 5, 6]]
    assert cut_passages(passages, None) == cut_passages(passages, 6) == passages
    assert cut_passages(passages, 4) == [[1, 2], [3], [4]]
    assert cut_passages(passages, 4, keeps_end=True) == [[3], [4, 5, 6]]
    assert cut_passages(passages, 2) == [[1, 2]]


def test_a_batch_trains_on_what_each_passage_alone_gives(tokenizer, folder, cocom, make_config):
    dataset, examples = examples_of(tokenizer, folder)
    collator = CompressionCollator.from_model(cocom, tokenizer)
    batch = collator(examples)
    start = len(collator.context_start_ids)
    lengths = [start + len(ids) for ids in examples[0]["passages"]]
    assert batch["context_chunk_lengths"].tolist() == [lengths, [lengths[0], 0, 0]]
    assert "context_chunk_lengths" not in collator(examples[1:])
    trainer = CompressionTrainer(
        model=cocom,
        args=make_config(),
        train_dataset=dataset.as_dataset(),
        processing_class=tokenizer,
        data_collator=collator,
    )
    found = trainer.compute_loss(cocom.eval(), batch)
    own, mask = (batch[f"context_{name}"] for name in ("input_ids", "attention_mask"))
    rows = []
    for ratio in (2, 4):
        parts = [cocom.compress(part, ratio=ratio) for part in own[:1, : sum(lengths)].split(lengths, dim=1)]
        assert sum(int(part.num_slots) for part in parts) == sum(cocom.config.num_slots(n, ratio) for n in lengths)
        alone = cocom.compress(own[1:], mask[1:], ratio=ratio)
        rows.append(CompressedContext.stack([CompressedContext.concatenate(parts), alone]))
    text = {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}
    expected = sum(cocom(**text, memory=memory).loss for memory in rows)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
