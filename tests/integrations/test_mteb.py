# SPDX-License-Identifier: Apache-2.0
"""MTEB evaluates a retriever: `make test-integrations`."""

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer

from context_compressors import DeCALConfig, DeCALForRetrieval
from context_compressors.evaluation.mteb_model import MTEBRetriever
from context_compressors.evaluation.retrieval import evaluate_retrieval

mteb = pytest.importorskip("mteb", reason="MTEB has an environment of its own: make test-integrations")
AbsTaskRetrieval = mteb.abstasks.AbsTaskRetrieval

WORDS = ("otter", "heron", "badger", "salmon", "lynx", "raven")
CORPUS = {f"d{row}": f"A {word} sleeps at noon." * (1 + row % 3) for row, word in enumerate(WORDS)}
QUERIES = {f"q{row}": f"When does the {word} sleep?" for row, word in enumerate(WORDS[:4])}
GRADES = {"q0": {"d0": 2, "d1": 1}, "q1": {"d1": 1}, "q2": {"d5": 3, "d2": 1}, "q3": {"d3": 1}}


class Judged:
    """What `evaluate_retrieval` reads of `JudgedQueries`."""

    query_ids, queries, grades = list(QUERIES), list(QUERIES.values()), list(GRADES.values())

    def documents(self):
        return iter(CORPUS.items())


def test_mteb_measures_what_evaluate_retrieval_measures(small_checkpoints):
    tokenizer = AutoTokenizer.from_pretrained(small_checkpoints / "base")
    torch.manual_seed(0)
    shape = {"vocab_size": len(tokenizer), "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 2}
    config = DeCALConfig(decoder_config={**shape, "dropout_rate": 0.0}, compression_ratios=[2, 4])
    retriever = DeCALForRetrieval(config).eval()

    class Animals(AbsTaskRetrieval):
        metadata = mteb.TaskMetadata(
            name="Animals",
            description="Sleeping animals.",
            type="Retrieval",
            dataset={"path": "local/animals", "revision": "1"},
            eval_splits=["test"],
            eval_langs=["eng-Latn"],
            main_score="ndcg_at_10",
        )

        def load_data(self, **kwargs):
            corpus, queries = (
                Dataset.from_dict({"id": list(texts), "text": list(texts.values())}) for texts in (CORPUS, QUERIES)
            )
            split = {"corpus": corpus, "queries": queries, "relevant_docs": GRADES, "top_ranked": None}
            self.dataset, self.data_loaded = {"default": {"test": split}}, True

    for ratio in (2, 4):
        model = MTEBRetriever(retriever, tokenizer, ratio)
        (result,) = mteb.evaluate(model, Animals(), cache=None, show_progress_bar=False).task_results
        (scores,) = result.scores["test"]
        row = evaluate_retrieval(retriever, tokenizer, Judged(), ratio)
        assert 100 * scores["ndcg_at_10"] == pytest.approx(row["ndcg_at_10"], abs=1e-2)
        assert 100 * scores["recall_at_100"] == row["recall_at_100"]
        assert model.mteb_model_meta.experiment_kwargs == {"ratio": ratio}
