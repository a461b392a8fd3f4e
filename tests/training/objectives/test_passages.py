# SPDX-License-Identifier: Apache-2.0
"""Contexts that are lists of passages: from the files to the loss, each is compressed apart from the others."""

import json

import pytest
import torch

from context_compressors import CompressedContext, CompressionTokensForCausalLM, ContextCompressionQAPipeline
from context_compressors.data.rows import read_rows
from context_compressors.data.sources import DataSource
from context_compressors.modeling.parts.prompting import cut_passages
from context_compressors.modeling.parts.text_ids import encode
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


def test_neighbouring_contexts_and_those_of_hotpotqa_may_stay_apart(tokenizer, tmp_path):
    rows = [{"context": passage, **QUESTION} for passage in PASSAGES]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = {**SOURCE, "contexts_per_document": 3}
    for separate in (False, True):
        _, examples = examples_of(tokenizer, str(tmp_path), {**source, "separate_passages": separate}, 8)
        found = {tuple(tokenizer.decode(ids) for ids in example["passages"] or ()) for example in examples}
        assert (tuple(PASSAGES) in found) == separate
        assert separate or found == {()}
    with pytest.raises(ValueError, match=r"separate_passages of source 'rows.jsonl' keeps nothing apart"):
        examples_of(tokenizer, str(tmp_path), {**SOURCE, "separate_passages": True})
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({**row, "context": [row["context"]]}) for row in rows))
    _, examples = examples_of(tokenizer, str(tmp_path), source, 8)
    assert PASSAGES in [[tokenizer.decode(ids) for ids in example["passages"] or ()] for example in examples]
    row = {"context": {"title": ["A", "B"], "sentences": [["One. ", "Two."], ["Three."]]}, **QUESTION}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    for separate, context in ((True, ["A\nOne. Two.", "B\nThree."]), (False, "A\nOne. Two.\n\nB\nThree.")):
        table = read_rows(DataSource(separate_passages=separate, **SOURCE), str(tmp_path))
        assert table["context"].to_pylist() == [context]


def test_lists_that_hold_no_texts_are_refused(tmp_path):
    for context, reason in (([], "is an empty list in row 0"), (["a", None], "has a null"), ([1], "lists of texts")):
        (tmp_path / "rows.jsonl").write_text(json.dumps({"context": context, **QUESTION}))
        with pytest.raises(ValueError, match=f"column 'context' .*{reason}"):
            read_rows(DataSource(**SOURCE), str(tmp_path))


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


def test_rows_of_texts_and_the_pipeline_take_lists_of_passages(tokenizer, cocom):
    collator = CompressionCollator.from_model(cocom, tokenizer)
    batch = collator([{"context": PASSAGES, "prompt": "Who?", "completion": " Bob"}])
    pipe = ContextCompressionQAPipeline(model=cocom, tokenizer=tokenizer, device="cpu", max_new_tokens=4)
    given = {name: batch[f"context_{name}"] for name in ("input_ids", "attention_mask", "chunk_lengths")}
    expected, found = cocom.compress(**given), pipe.compress([PASSAGES])
    torch.testing.assert_close(found.embeddings, expected.embeddings)
    assert pipe.document_ids([PASSAGES]) == batch["context_input_ids"].tolist()
    assert pipe("Who?", context=[PASSAGES]) == [pipe("Who?", memory=found)]
    assert pipe("Who?", context=[PASSAGES])[0] == pipe("Who?", context=PASSAGES, join=True)
    several = pipe.compress([PASSAGES, "A text."], max_tokens=9)
    assert several.num_context_tokens.tolist()[0] == 9
    with pytest.raises(TypeError, match="`context` must be a text"):
        pipe("Who?", context=[[1]])
    with pytest.raises(ValueError, match="a text or a list of passages, got"):
        collator([{"context": [], "prompt": "Who?", "completion": " Bob"}])
