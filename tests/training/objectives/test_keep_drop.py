# SPDX-License-Identifier: Apache-2.0
"""Token classifiers that learn which words a compressor's scores keep."""

import json

import pytest
import torch
from safetensors.torch import load_file
from small_recipes import write_recipe
from tiny_encoder import save_encoder, word_piece_tokenizer
from transformers import AutoModelForTokenClassification

from context_compressors import RankedKeyValuesForCausalLM, TextCompressor
from context_compressors.data.synthetic_documents import generate_document
from context_compressors.training.arguments import DataArguments, parse_recipe
from context_compressors.training.objectives import keep_drop
from context_compressors.training.objectives.keep_drop import (
    KeepDropCollator,
    drawn_texts,
    labelled_texts,
    pruned_tokenizer,
    student,
    word_labels,
)
from context_compressors.training.train import build_trainer, main

DOCUMENTS = [generate_document(index, num_tokens=60 + 40 * index).text for index in range(12)]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return save_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def teacher(base_folder, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher")
    torch.manual_seed(0)
    model = RankedKeyValuesForCausalLM.from_base(base_folder, compression_ratios=[2, 4], encoder_lora=None)
    for scorer in model.model.scorers:
        torch.nn.init.normal_(scorer.weight)
    model.save_pretrained(folder, include_base=True)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def recipe(tmp_path, encoder, teacher):
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    fields = {
        "objective": "keep_drop",
        "base": str(encoder),
        "teacher": str(teacher),
        "sources": [{"path": "texts.jsonl", "tasks": ["reconstruction"]}],
        "data_dir": str(tmp_path),
        "label_texts": 8,
        "max_context_tokens": 64,
        "min_context_tokens": 16,
        "model_config": {"num_hidden_layers": 1, "vocab_size": 260},
        "output_dir": str(tmp_path / "out"),
        "per_device_train_batch_size": 4,
        "max_steps": 4,
        "learning_rate": 1.0e-2,
        "bf16": False,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "save_dtype": "float16",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return write_recipe(tmp_path, **fields)


def test_labels_have_the_standardized_means_of_words_as_log_odds():
    offsets = [(0, 3), (3, 5), (5, 8), (9, 12)]
    labels = word_labels(torch.tensor([1.0, 5.0, 2.0, 0.5]), offsets, "abcde fg hij")
    scores = torch.tensor([3.0, 2.0, 0.5])
    wanted = (scores - scores.mean()) / scores.std(correction=0)
    torch.testing.assert_close(torch.tensor(labels).logit(), wanted, atol=1e-3, rtol=1e-3)


def test_texts_are_whole_words_and_documents_are_drawn_once(tokenizer, tmp_path):
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    sources = [{"path": "texts.jsonl", "tasks": ["reconstruction"]}]
    data = DataArguments(sources=sources, data_dir=str(tmp_path), max_context_tokens=70, min_context_tokens=40)
    found = list(drawn_texts(data, tokenizer, seed=1))
    documents = [document for _, document in found]
    # A part that begins near a document's end may be too short.
    assert set(documents) <= set(DOCUMENTS)
    assert len(set(documents)) == len(documents) > len(DOCUMENTS) / 2
    for text, document in found:
        assert f" {' '.join(text.split())} " in f" {' '.join(document.split())} "
        assert 40 <= len(tokenizer(text, add_special_tokens=False)["input_ids"]) <= 70
    assert found == list(drawn_texts(data, tokenizer, seed=1))


def test_a_pruned_student_reads_kept_pieces_as_the_encoder_does(encoder):
    texts = ["the harbour was built", "the harbour"]
    full, (small, ids) = word_piece_tokenizer(), pruned_tokenizer(word_piece_tokenizer(), texts, 196)
    assert len(small) == len(ids) == 196
    assert small("The harbour!").tokens() == full("The harbour!").tokens()
    assert small.convert_ids_to_tokens(range(196)) == full.convert_ids_to_tokens(ids)
    model, tokenizer = student(encoder, texts, num_hidden_layers=1, vocab_size=196)
    base = AutoModelForTokenClassification.from_pretrained(encoder, num_hidden_layers=1)
    inputs = [reading("the harbour", return_tensors="pt") for reading in (tokenizer, full)]
    found, wanted = (of(**given).last_hidden_state for of, given in zip((model.bert, base.bert), inputs, strict=True))
    torch.testing.assert_close(found, wanted)


def test_each_token_has_the_label_of_its_word():
    tokenizer = word_piece_tokenizer()
    rows = [
        {"text": "the Ab the", "labels": [0.1, 0.7, 0.3], "document": "a"},
        {"text": "the", "labels": [0.5], "document": "b"},
    ]
    batch = KeepDropCollator(tokenizer)(rows)
    assert tokenizer.convert_ids_to_tokens(batch["input_ids"][0])[1:-1] == ["the", "a", "##b", "the"]
    wanted = torch.tensor([[-1, 0.1, 0.7, 0.7, 0.3, -1], [-1, 0.5, -1, -1, -1, -1]])
    torch.testing.assert_close(batch["labels"], wanted)
    assert batch["documents"] == ["a", "b"]


def test_a_run_trains_all_weights_and_leaves_a_checkpoint_for_texts(recipe, tmp_path):
    trainer = build_trainer(*parse_recipe([str(recipe), "--output_dir", str(tmp_path / "other")]))
    before = {name: weight.clone() for name, weight in trainer.model.named_parameters()}
    assert main([str(recipe)]) == 0
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float16}
    # Positions behind the longest text, and pieces in none, have no gradient.
    for name, weight in weights.items():
        assert not torch.equal(weight.float(), before[name].half().float()), name
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"recipe.yaml", "training_summary.json", "training_documents.json", "labels.jsonl"} <= names
    text = TextCompressor.from_pretrained(tmp_path / "out").compress_text(DOCUMENTS[0], 4)
    assert 0 < len(text.split()) < len(DOCUMENTS[0].split()) / 2


def test_labels_of_an_earlier_run_are_taken_from_its_file(tmp_path, monkeypatch):
    texts = [("a b", "a b c"), ("d", "d")]
    monkeypatch.setattr(keep_drop, "teacher_labels", lambda *given: [0.0] * len(given[-1].split()))
    first = labelled_texts(None, None, texts[:1], tmp_path / "labels.jsonl")
    monkeypatch.setattr(keep_drop, "teacher_labels", lambda *given: [1.0] * len(given[-1].split()))
    again = labelled_texts(None, None, texts, tmp_path / "labels.jsonl")
    assert [row["labels"] for row in again] == [first[0]["labels"], [1.0]]


def test_a_teacher_is_needed(recipe):
    with pytest.raises(ValueError, match="keep_drop needs base"):
        build_trainer(*parse_recipe([str(recipe), "--teacher", "null"]))
