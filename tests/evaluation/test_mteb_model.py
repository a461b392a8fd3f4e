# SPDX-License-Identifier: Apache-2.0
"""The retriever that MTEB takes; with MTEB installed its own nDCG of a local task is the one measured here."""

import pytest
import torch

from context_compressors import DeCALConfig, DeCALForRetrieval
from context_compressors.data.retrieval_sources import TextEncoder
from context_compressors.evaluation.mteb_model import MTEBRetriever
from context_compressors.evaluation.retrieval import evaluate_retrieval
from context_compressors.modeling.parts.late_interaction import chamfer

WORDS = ("otter", "heron", "badger", "salmon", "lynx", "raven")
CORPUS = {f"d{row}": f"A {word} sleeps at noon." * (1 + row % 3) for row, word in enumerate(WORDS)}
QUERIES = {f"q{row}": f"When does the {word} sleep?" for row, word in enumerate(WORDS[:4])}
GRADES = {"q0": {"d0": 2, "d1": 1}, "q1": {"d1": 1}, "q2": {"d5": 3, "d2": 1}, "q3": {"d3": 1}}


class Judged:
    """What `evaluate_retrieval` reads of `JudgedQueries`."""

    query_ids, queries, grades = list(QUERIES), list(QUERIES.values()), list(GRADES.values())

    def documents(self):
        return iter(CORPUS.items())


@pytest.fixture(scope="module")
def retriever(tokenizer):
    torch.manual_seed(0)
    shape = {"vocab_size": len(tokenizer), "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 2}
    config = DeCALConfig(decoder_config={**shape, "dropout_rate": 0.0}, compression_ratios=[2, 4])
    return DeCALForRetrieval(config).eval()


def test_queries_and_documents_are_cut_to_their_lengths_and_compared_by_chamfer(retriever, tokenizer):
    encoder = MTEBRetriever(retriever, tokenizer, ratio=4, max_query_tokens=8, max_document_tokens=16)
    texts = list(CORPUS.values())
    batches = [{"text": texts[:4]}, {"text": texts[4:]}]
    sides = [
        encoder.encode(batches, prompt_type=kind, batch_size=2, hf_split="test") for kind in ("query", "document")
    ]
    for length, vectors in zip((8, 16), sides, strict=True):
        for text, found in zip(texts, vectors, strict=True):
            ids = torch.tensor([TextEncoder(tokenizer, length)(text)[0]])
            torch.testing.assert_close(found, retriever.encode(ids, ratio=4).vectors[0])
    scores = encoder.similarity(*sides)
    masks = [torch.ones(1, len(side[0]), dtype=torch.long) for side in sides]
    wanted = chamfer(sides[0][0][None], masks[0], sides[1][0][None], masks[1])[0, 0]
    torch.testing.assert_close(scores[0, 0], wanted)
    torch.testing.assert_close(encoder.similarity_pairwise(*sides), scores.diagonal())


def test_mteb_measures_what_evaluate_retrieval_measures(retriever, tokenizer):
    mteb = pytest.importorskip("mteb", reason="MTEB is not installed")
    from datasets import Dataset
    from mteb.abstasks import AbsTaskRetrieval

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
