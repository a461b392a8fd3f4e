# SPDX-License-Identifier: Apache-2.0
"""Rankings of a retrieval model: graded nDCG, folders of BEIR's form, and the command that reads them."""

import json
import math
import random

import pytest
import torch

from context_compressors import DeCALConfig, DeCALForRetrieval, cli
from context_compressors.data.retrieval_sources import JudgedQueries, RetrievalSource, TextEncoder
from context_compressors.evaluation import retrieval
from context_compressors.evaluation.retrieval import (
    Rankings,
    encode_texts,
    evaluate_bm25,
    evaluate_retrieval,
    ndcg,
    recall,
    score_texts,
)
from context_compressors.evaluation.rows import read_answers
from context_compressors.evaluation.settings import EvaluationSettings
from context_compressors.modeling.modeling_decal_retrieval import chamfer

ANIMALS = ("otter", "heron", "badger", "salmon", "lynx", "raven", "toad", "viper")


@pytest.fixture(scope="module")
def retriever(tokenizer):
    torch.manual_seed(0)
    shape = {"vocab_size": len(tokenizer), "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 2}
    config = DeCALConfig(decoder_config={**shape, "dropout_rate": 0.0}, compression_ratios=[2, 4])
    return DeCALForRetrieval(config).eval()


@pytest.fixture
def beir(tmp_path):
    """A folder as BEIR has it, with ids that look like numbers and dates, and with grades."""
    folder = tmp_path / "animals"
    (folder / "qrels").mkdir(parents=True)
    documents = [
        {"_id": f"00{row}", "title": f"The {animal}" if row else "", "text": f"A {animal} sleeps." * (1 + row % 3)}
        for row, animal in enumerate(ANIMALS)
    ]
    queries = [{"_id": f"2020-01-0{row}", "text": f"Where sleeps the {animal}?"} for row, animal in enumerate(ANIMALS)]
    for name, rows in (("corpus", documents), ("queries", queries)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = [("2020-01-00", "000", 2), ("2020-01-00", "001", 1), ("2020-01-05", "005", 1), ("2020-01-06", "001", 0)]
    lines = ["query-id\tcorpus-id\tscore", *("\t".join(map(str, pair)) for pair in pairs)]
    (folder / "qrels" / "test.tsv").write_text("\n".join(lines) + "\n")
    return folder


def test_ndcg_is_the_formula_over_grades():
    ranking = [f"d{place}" for place in range(12)]
    grades = {"d1": 1, "d3": 3, "d11": 2, "elsewhere": 1}
    gain = 1 / math.log2(3) + 3 / math.log2(5)
    ideal = sum(grade / math.log2(place + 2) for place, grade in enumerate((3, 2, 1, 1)))
    assert ndcg(ranking, grades) == pytest.approx(gain / ideal)
    assert recall(ranking, grades) == pytest.approx(3 / 4)
    # What a short ranking does not have is not found, whatever places are left.
    assert ndcg(["d0"], {"d9": 1}) == recall(["d0"], {"d9": 1}) == 0
    assert ndcg(["d9"], {"d9": 2}) == 1


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_the_best_of_a_stream_are_the_best_of_all_with_ties_in_the_corpus_order(chunk):
    rng = random.Random(0)
    scores = torch.tensor([[rng.randrange(6) for _ in range(20)] for _ in range(3)], dtype=torch.float32)
    ids = [f"d{place}" for place in range(20)]
    rankings = Rankings(["a", "b", "c"], top_k=7)
    for start in range(0, 20, chunk):
        rankings.add(ids[start : start + chunk], scores[:, start : start + chunk])
    orders = [sorted(range(20), key=lambda place: -row[place])[:7] for row in scores.tolist()]
    assert rankings.documents() == [[ids[place] for place in order] for order in orders]


@pytest.mark.parametrize("chunk", [1, 2, 5])
@pytest.mark.parametrize("top_k", [2, 5])
def test_a_query_that_is_a_document_of_the_corpus_is_not_its_own_answer(chunk, top_k):
    ids, scores = ["a", "b", "c", "d", "e"], torch.tensor([[9.0, 1, 4, 3, 2], [5, 8, 7, 6, 1]])
    rankings = Rankings(["a", "x"], top_k=top_k)
    for start in range(0, 5, chunk):
        rankings.add(ids[start : start + chunk], scores[:, start : start + chunk])
    assert rankings.documents() == [["c", "d", "e", "b"][:top_k], ["b", "c", "d", "a", "e"][:top_k]]


@torch.no_grad()
def test_scores_of_an_index_are_those_of_single_texts(retriever, tokenizer, beir):
    encode = TextEncoder(tokenizer, 40)
    judged = JudgedQueries(RetrievalSource.from_beir(beir))
    texts = (judged.queries, [text for _, text in judged.documents()])
    rows = [[encode(text)[0] for text in side] for side in texts]
    vectors = [encode_texts(retriever, side, 4, batch_size=3) for side in rows]
    for max_products in (1, 300, 10**6):
        scores = score_texts(*vectors, max_products=max_products)
        for row, query in enumerate(rows[0]):
            for column, document in enumerate(rows[1]):
                alone = [retriever.encode(torch.tensor([ids]), ratio=4).to_tuple() for ids in (query, document)]
                torch.testing.assert_close(scores[row, column], chamfer(*alone[0], *alone[1])[0, 0])


def test_a_folder_of_beirs_form_is_read_and_its_corpus_as_a_stream(beir):
    source = RetrievalSource.from_beir(beir)
    judged = JudgedQueries(source)
    assert judged.query_ids == ["2020-01-00", "2020-01-05"]
    assert judged.queries == ["Where sleeps the otter?", "Where sleeps the raven?"]
    assert judged.grades == [{"000": 2, "001": 1}, {"005": 1}]
    assert dict(judged.documents())["001"] == "The heron A heron sleeps.A heron sleeps."
    assert judged.pairs == [("2020-01-00", "000"), ("2020-01-00", "001"), ("2020-01-05", "005")]
    hub = RetrievalSource.from_beir("mteb/scifact")
    assert (hub.corpus.name, hub.corpus.config, hub.relevance.split) == ("mteb/scifact", "corpus", "test")
    with pytest.raises(ValueError, match=r"split of .*: 'dev'; .*test"):
        RetrievalSource.from_beir(beir, "dev")
    with (beir / "corpus.jsonl").open("a") as file:
        # Metadata may be anything.
        for row in ({"_id": "9", "text": "", "metadata": {"a": 1}}, {"_id": "x", "txt": "y", "metadata": {"a": "b"}}):
            file.write(json.dumps(row) + "\n")
    with pytest.raises(
        ValueError, match=r"row 9 \(counted from 0\) needs '_id' and a text in 'text'; did you mean 'txt'"
    ):
        list(judged.documents())


def test_a_corpus_in_parts_has_the_scores_of_one_in_memory(retriever, tokenizer, beir, monkeypatch):
    judged = JudgedQueries(RetrievalSource.from_beir(beir))
    settings = EvaluationSettings(max_context_tokens=24)
    whole, scores = evaluate_retrieval(retriever, tokenizer, judged, 2, settings)
    monkeypatch.setattr(retrieval, "CHUNK_SIZE", 3)
    assert evaluate_retrieval(retriever, tokenizer, judged, 2, settings) == (whole, scores)
    assert (whole["documents"], whole["queries"]) == (8, 2)
    assert whole["documents_cut"] == 6
    for name in ("ndcg_at_10", "recall_at_100"):
        low, high = whole[f"{name}_interval"]
        assert low <= whole[name] <= high
    assert evaluate_bm25(judged)[0]["ndcg_at_10"] > 80


def test_ratios_and_bm25_are_compared_query_by_query(retriever, tokenizer, beir, tmp_path, capsys):
    saved, output, kept = tmp_path / "retriever", tmp_path / "scores.json", tmp_path / "kept" / "queries.jsonl"
    retriever.save_pretrained(saved)
    tokenizer.save_pretrained(saved)
    argv = ["evaluate", str(saved), "--tasks", "retrieval", "--data", str(beir), "--device", "cpu"]
    argv += ["--output", str(output), "--keep-answers", str(kept), "--alternatives", "bm25", "--ratios", "4", "2"]
    assert cli.main(argv) == 0
    assert "| retriever | 4 " in capsys.readouterr().out
    samples, rows = read_answers(kept), json.loads(output.read_text())["rows"]
    assert [(sample.id, sample.question, sample.references) for sample in samples] == [
        ("2020-01-00", "Where sleeps the otter?", ["000", "001"]),
        ("2020-01-05", "Where sleeps the raven?", ["005"]),
    ]
    for name, row in zip(("bm25", "ratio=4", "ratio=2"), rows, strict=True):
        for metric in ("ndcg_at_10", "recall_at_100"):
            mean = sum(sample.scores[name][metric] for sample in samples) / 2
            assert mean == pytest.approx(row[metric], rel=1e-3)
    assert cli.main(["compare", str(kept), "--conditions", "bm25", "ratio=4"]) == 0
    assert "| animals, test | ndcg_at_10 | bm25  | ratio=4 | 2       | 2 " in capsys.readouterr().out
    assert cli.main([*argv, "--data", str(beir), str(beir), "--overwrite"]) == 1
    assert "--tasks retrieval ranks one corpus, PLACE[@SPLIT]" in capsys.readouterr().err
