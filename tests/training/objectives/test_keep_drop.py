# SPDX-License-Identifier: Apache-2.0
"""Token classifiers that learn which words answer a question."""

import json
from statistics import fmean

import pytest
import torch
from safetensors.torch import load_file
from small_recipes import write_recipe
from tiny_encoder import save_encoder, word_piece_tokenizer
from transformers import AutoModelForTokenClassification

from context_compressors import TextCompressor
from context_compressors.data.synthetic_documents import generate_document
from context_compressors.training.arguments import DataArguments, parse_recipe
from context_compressors.training.objectives.keep_drop import (
    KeepDropCollator,
    answer_labels,
    drawn_examples,
    pruned_tokenizer,
    student,
    tokenized,
)
from context_compressors.training.train import build_trainer, main

DOCUMENTS = [generate_document(index, num_tokens=60 + 40 * index) for index in range(12)]
ROWS = [
    {"context": document.text, "question": question.question, "answers": [question.answer]}
    for document in DOCUMENTS
    for question in document.questions
]
SOURCES = [{"path": "rows.jsonl", "tasks": ["question_answering"]}]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return save_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture
def data_dir(tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


@pytest.fixture
def recipe(data_dir, encoder):
    fields = {
        "objective": "keep_drop",
        "base": str(encoder),
        "sources": SOURCES,
        "data_dir": str(data_dir),
        "max_context_tokens": 60,
        "model_config": {"num_hidden_layers": 1, "vocab_size": 260},
        "output_dir": str(data_dir / "out"),
        "per_device_train_batch_size": 4,
        "max_steps": 4,
        "learning_rate": 1.0e-2,
        "save_dtype": "float16",
    }
    return write_recipe(data_dir, **fields)


def test_the_sentence_with_the_answer_is_kept_and_its_words_most_of_all():
    text = 'Ann left Rome in 1974. In 1974, "Rome" fell. Bob stayed.'
    labels = answer_labels(text, "When fell Rome?", ["1974", "in 1974"])
    assert labels == [0, 0, 0, 0, 0, 1, 1, 0.7, 0.7, 0, 0]
    # Not in the words of the text.
    assert answer_labels(text, "Who stayed?", ["Bob did"]) == [0] * 9 + [1, 0.7]


def test_without_a_question_a_label_is_the_mean_over_a_texts_questions(data_dir):
    data = DataArguments(sources=SOURCES, data_dir=str(data_dir), max_context_tokens=60)
    examples = drawn_examples(data, 60, seed=1)
    assert examples == drawn_examples(data, 60, seed=1)
    assert {example["question"] is None for example in examples} == {True, False}
    for example in examples:
        text, question = example["text"], example["question"]
        assert len(text.split()) == len(example["labels"]) <= 60
        rows = [row for row in ROWS if row["context"] == text and question in (None, row["question"])]
        labels = [answer_labels(text, row["question"], row["answers"]) for row in rows]
        assert example["labels"] == [fmean(of_word) for of_word in zip(*labels, strict=True)]


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
    examples = [
        {"text": "the Ab the", "question": None, "labels": [0.1, 0.7, 0.3]},
        {"text": "the", "question": "a the", "labels": [0.5]},
    ]
    batch = KeepDropCollator(tokenizer.pad_token_id)([tokenized(tokenizer, example) for example in examples])
    tokens = [tokenizer.convert_ids_to_tokens(row) for row in batch["input_ids"]]
    assert tokens[0] == ["[CLS]", "the", "a", "##b", "the", "[SEP]"]
    assert tokens[1] == ["[CLS]", "a", "the", "[SEP]", "the", "[SEP]"]
    wanted = torch.tensor([[-1, 0.1, 0.7, 0.7, 0.3, -1], [-1, -1, -1, -1, 0.5, -1]])
    torch.testing.assert_close(batch["labels"], wanted)
    longest = tokenized(tokenizer, {"text": "the " * 200, "question": "a", "labels": [0.5] * 200})
    short, long = KeepDropCollator(tokenizer.pad_token_id)([tokenized(tokenizer, examples[0]), longest])[
        "attention_mask"
    ]
    assert (short.sum(), long.sum()) == (6, tokenizer.model_max_length)


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
    assert {"recipe.yaml", "training_summary.json", "training_documents.json"} <= names
    text = TextCompressor.from_pretrained(tmp_path / "out").compress_text(DOCUMENTS[0].text, 4)
    assert 0 < len(text.split()) < len(DOCUMENTS[0].text.split()) / 2


def test_accumulated_batches_have_the_loss_of_one(recipe):
    losses = []
    for size in (1, 4):
        sizes = ["--per_device_train_batch_size", str(size), "--gradient_accumulation_steps", str(4 // size)]
        trainer = build_trainer(*parse_recipe([str(recipe), *sizes, "--max_steps", "1", "--logging_steps", "1"]))
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=0.2)


def test_a_base_and_a_number_of_steps_are_needed(recipe):
    for field in ("base", "max_steps"):
        with pytest.raises(ValueError, match="keep_drop needs base"):
            build_trainer(*parse_recipe([str(recipe), f"--{field}", "null"]))
