# SPDX-License-Identifier: Apache-2.0
import json

import numpy as np
import pytest
import yaml

from context_compressors.data.document_ids import document_id
from context_compressors.data.synthetic_documents import generate_document
from context_compressors.modeling.parts.text_ids import encode
from context_compressors.training.arguments import DataArguments, parse_recipe
from context_compressors.training.objectives.packed_texts import PackedTexts
from context_compressors.training.train import build_trainer

TEXTS = [generate_document(seed, num_tokens=40 + 60 * seed).text for seed in range(5)]
SOURCE = {"path": "texts.jsonl", "tasks": ["continuation"]}
CONTEXT, TARGET, EXAMPLES = 48, 16, 80


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("data")
    rows = [{"id": f"text {number}", "text": text} for number, text in enumerate(TEXTS)]
    (path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make(tokenizer, folder, num_examples=EXAMPLES, seed=3, sources=(SOURCE,), **fields):
    fields = {"max_context_tokens": CONTEXT, "min_context_tokens": 1, "max_target_tokens": TARGET, **fields}
    data = DataArguments(sources=list(sources), data_dir=str(folder), prompts="comprexit", **fields)
    return PackedTexts(data, tokenizer, num_examples, seed=seed)


def naive_stream(tokenizer, num_tokens, seed=3):
    """All rounds of the texts, one behind the other, and the number of the text that each token is of."""
    ids, texts, epoch = [], [], 0
    while len(ids) < num_tokens:
        for row in np.random.default_rng([seed, 1, 0, epoch]).permutation(len(TEXTS)):
            text = [*encode(tokenizer, TEXTS[row]), tokenizer.eos_token_id]
            ids, texts = ids + text, texts + [int(row)] * len(text)
        epoch += 1
    return ids, texts


def test_packed_texts_are_a_stream_cut_evenly(tokenizer, folder):
    dataset = make(tokenizer, folder)
    ids, texts = naive_stream(tokenizer, EXAMPLES * (CONTEXT + TARGET))
    # More than a round, in which every border stands in some context or target.
    assert len(ids) > 2 * sum(len(encode(tokenizer, text)) + 1 for text in TEXTS)
    for index in range(EXAMPLES):
        example, start = dataset[index], index * (CONTEXT + TARGET)
        assert example["context_ids"] == ids[start : start + CONTEXT]
        assert example["target_ids"] == ids[start + CONTEXT : start + CONTEXT + TARGET]
        assert (example["num_cut"], example["index"], example["more_turns"]) == (0, index, [])
        names = [name.rpartition("/")[2] for name in example["id"].split(" + ")]
        own = texts[start : start + CONTEXT + TARGET]
        borders = [i for i, token in enumerate(own[:-1]) if ids[start + i] == tokenizer.eos_token_id]
        parts = [own[0], *(own[i + 1] for i in borders)]
        assert names == [f"text {number}" for number in parts]
        assert example["documents"] == [document_id(TEXTS[number]) for number in parts]
    own = PackedTexts(dataset.data, tokenizer, EXAMPLES, seed=3, context_tokenizer=tokenizer)[0]
    assert tokenizer.decode(own["encoder_context_ids"]) == tokenizer.decode(own["context_ids"])


def test_an_example_depends_on_its_index_alone(tokenizer, folder):
    both = ({"generated": True, "tasks": ["continuation"], "weight": 1}, {**SOURCE, "weight": 2})
    forward, backward = (make(tokenizer, folder, 30, sources=both) for _ in range(2))
    examples = [forward[index] for index in range(30)]
    assert [backward[index] for index in reversed(range(30))] == examples[::-1]
    assert examples != list(map(make(tokenizer, folder, 30, 4, both).__getitem__, range(30)))
    assert {"generated", "texts.jsonl"} == {example["id"].partition("/")[0] for example in examples}


def test_the_recipe_of_next_tokens_trains_on_all_that_it_counts(base_folder, folder, tmp_path):
    """ComprExIT, Table 7: 512 tokens of context and 128 of target in every row, of 2,048 in 762 steps."""
    small = tmp_path / "small.yaml"
    source = [{**SOURCE, "weight": 1}]
    small.write_text(yaml.safe_dump({"sources": source, "dtype": "float32", "bf16": False, "max_steps": 2}))
    files = ["comprexit/comprexit.yaml", "comprexit/pretraining.yaml", str(small), "--base", str(base_folder)]
    options = ["--data_dir", str(folder), "--output_dir", str(tmp_path / "out"), "--use_cpu", "true"]
    trainer = build_trainer(*parse_recipe([*files, *options]))
    assert isinstance(trainer.train_dataset[0]["context_ids"], list)
    batch = trainer.data_collator([trainer.train_dataset[index] for index in range(4)])
    assert batch["context_input_ids"].shape == (4, 512)
    assert batch["input_ids"].shape == (4, 1 + 128)
    for name in ("context_attention_mask", "attention_mask"):
        assert batch[name].all()
    assert batch["labels"].ne(-100).sum() == 4 * 128
