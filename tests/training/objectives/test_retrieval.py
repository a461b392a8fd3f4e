# SPDX-License-Identifier: Apache-2.0
"""Data, contrastive loss, trainer and recipes of retrieval."""

import math
from pathlib import Path

import pytest
import torch
import yaml
from record_files import write_files
from small_recipes import write_recipe
from transformers import AutoModelForTextEncoding, AutoTokenizer

from context_compressors import DeCALConfig, DeCALForRetrieval
from context_compressors.data.document_ids import TrainingDocuments, document_id
from context_compressors.data.retrieval_sources import JudgedQueries
from context_compressors.evaluation.retrieval import evaluate_retrieval
from context_compressors.evaluation.settings import EvaluationSettings
from context_compressors.modeling.modeling_decal_retrieval import chamfer
from context_compressors.training.arguments import DataArguments
from context_compressors.training.objectives.retrieval import (
    RetrievalCollator,
    RetrievalPairs,
    RetrievalTrainer,
    contrastive_loss,
)
from context_compressors.training.train import main

SOURCE = {name: {"path": f"{name}.parquet"} for name in ("corpus", "queries", "relevance")}
TINY = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
ANIMALS = ("otter", "heron", "badger", "salmon", "lynx", "raven", "toad", "viper")


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A folder with the three tables of a collection."""
    places = range(len(ANIMALS))
    documents = [
        {"id": f"d{i}", "title": f"The {animal}" if i else None, "text": f"A {animal} sleeps at noon."}
        for i, animal in enumerate(ANIMALS)
    ]
    pairs = [*((i, i, 1) for i in places), (0, 1, 1), (1, 5, 0)]
    tables = {
        "corpus.parquet": documents,
        "queries.parquet": [{"id": f"q{i}", "query": f"When does a {ANIMALS[i]} sleep?"} for i in places],
        "relevance.parquet": [{"query_id": f"q{q}", "doc_id": f"d{d}", "score": score} for q, d, score in pairs],
    }
    write_files(tmp_path, tables)
    return str(tmp_path)


# --- data ---


def test_examples_are_the_relevant_pairs(tokenizer, folder):
    data = RetrievalPairs(DataArguments(sources=[SOURCE], data_dir=folder), tokenizer)
    assert [data[index]["id"] for index in range(len(data))] == [*(f"q{i}-d{i}" for i in range(8)), "q0-d1"]
    assert data[1]["documents"] == [document_id("The heron A heron sleeps at noon.")]
    assert tokenizer.decode(data[0]["document_ids"], skip_special_tokens=True) == "A otter sleeps at noon."


def test_a_batch_is_padded_and_keys_tell_equal_texts(tokenizer, folder):
    data = RetrievalPairs(DataArguments(sources=[SOURCE, SOURCE], data_dir=folder), tokenizer)
    assert len(data) == 2 * 9
    batch = RetrievalCollator(0)([data[index] for index in (0, 8, 1, 9)])
    # Rows 0 and 8 have one query, 8 and 1 one document; the second source's are others.
    queries, documents = batch["query_keys"].tolist(), batch["document_keys"].tolist()
    assert queries[0] == queries[1]
    assert documents[1] == documents[2]
    assert len(set(queries)) == len(set(documents)) == 3
    for side in ("query", "document"):
        for row, index in enumerate((0, 8, 1, 9)):
            ids, found = data[index][f"{side}_ids"], batch[f"{side}_input_ids"][row].tolist()
            assert found == ids + [0] * (len(found) - len(ids))
            assert batch[f"{side}_attention_mask"][row].sum() == len(ids)
    assert batch["example_ids"] == ["q0-d0", "q0-d1", "q1-d1", "q0-d0"]


# --- loss ---


@pytest.mark.parametrize("first", [0, 3])
def test_contrastive_loss_is_the_loop_over_queries(first):
    generator = torch.Generator().manual_seed(first)
    scores = torch.randn(4, 7, generator=generator, requires_grad=True)
    query_keys, document_keys = torch.tensor([1, 2, 3, 1, 4, 5, 6]), torch.tensor([9, 8, 9, 7, 6, 5, 6])
    terms = []
    for query in range(4):
        own = first + query
        candidates = [
            other
            for other in range(7)
            if other == own or (query_keys[other] != query_keys[own] and document_keys[other] != document_keys[own])
        ]
        weights = torch.stack([torch.exp(scores[query, other] / 0.5) for other in candidates])
        terms.append(-torch.log(torch.exp(scores[query, own] / 0.5) / weights.sum()))
    expected = torch.stack(terms).mean()
    (gradient,) = torch.autograd.grad(expected, scores)
    loss = contrastive_loss(scores, query_keys, document_keys, first, temperature=0.5)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, scores)[0], gradient)


# --- training ---


@pytest.mark.slow
def test_a_recipe_trains_a_model_that_finds_the_documents(folder, base_folder, tmp_path):
    output = tmp_path / "out"
    fields = {"objective": "retrieval", "method": "decal", "method_config": {"compression_ratios": [2]}}
    fields |= {"tokenizer": str(base_folder), "model_config": TINY, "sources": [SOURCE], "data_dir": folder, "seed": 1}
    fields |= {"max_context_tokens": 40, "max_steps": 40, "per_device_train_batch_size": 8, "learning_rate": 1e-2}
    fields |= {"lr_scheduler_type": "constant", "contrastive_temperature": 0.2}
    assert main([write_recipe(tmp_path, **fields)]) == 0
    log = yaml.safe_load((output / "training_summary.json").read_text())["log"]
    losses = [entry["loss"] for entry in log if "loss" in entry]
    assert losses[-1] < 0.2 * math.log(8)
    model, tokenizer = AutoModelForTextEncoding.from_pretrained(output).eval(), AutoTokenizer.from_pretrained(output)
    settings = EvaluationSettings(max_context_tokens=40)
    row, _ = evaluate_retrieval(model, tokenizer, JudgedQueries(SOURCE, folder), 2, settings)
    assert row["ndcg_at_10"] > 90
    assert (row["queries"], row["documents"]) == (len(ANIMALS), len(ANIMALS))
    texts = dict(JudgedQueries(SOURCE, folder).documents()).values()
    assert TrainingDocuments.of(output) == TrainingDocuments(set(map(document_id, texts)))


@pytest.mark.slow
def test_the_loss_adds_up_over_ratios_and_every_weight_trains(tokenizer, folder, make_config):
    torch.manual_seed(0)
    shape = {"vocab_size": len(tokenizer), **TINY, "pad_token_id": tokenizer.pad_token_id}
    model = DeCALForRetrieval(DeCALConfig(decoder_config=shape, compression_ratios=[2, 4]))
    trainer = RetrievalTrainer(
        model=model,
        args=make_config(per_device_train_batch_size=4, contrastive_temperature=0.5),
        train_dataset=RetrievalPairs(DataArguments(sources=[SOURCE], data_dir=folder), tokenizer),
        data_collator=RetrievalCollator(tokenizer.pad_token_id),
    )
    batch = trainer.data_collator([trainer.train_dataset[index] for index in range(4)])
    expected = 0
    for ratio in (2, 4):
        vectors = [
            model.encode(batch[f"{side}_input_ids"], batch[f"{side}_attention_mask"], ratio).to_tuple()
            for side in ("query", "document")
        ]
        scores = chamfer(*vectors[0], *vectors[1])
        expected = expected + torch.nn.functional.cross_entropy(scores / 0.5, torch.arange(4))
    torch.testing.assert_close(trainer.compute_loss(model, dict(batch)), expected)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    trainer.train()
    assert trainer.documents.is_whole
    trainer.training_step(model, {name: value for name, value in batch.items() if name != "documents"})
    assert not trainer.documents.is_whole
    for name, parameter in model.named_parameters():
        assert not parameter.equal(before[name]), name
