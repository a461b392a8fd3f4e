# SPDX-License-Identifier: Apache-2.0
"""BERTScore with a tiny scorer, against a twin that matches tokens one by one."""

import pytest
import torch
from naive_twin import QA, ROWS, run
from tiny_encoder import save_encoder
from transformers import AutoTokenizer, BertModel

from context_compressors.evaluation.metrics import BertScorer

PREDICTIONS = ["red fox", "the", "lazy dog over the fox today", "jumps over"]
REFERENCES = [["red fox jumps over"], ["dog today lazy", "the"], ["the fox"], ["red"]]


def twin(folder, prediction, reference):
    model, tokenizer = BertModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    vectors = []
    for text in (prediction, reference):
        with torch.no_grad():
            states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        vectors.append(torch.nn.functional.normalize(states[1:-1], dim=-1))
    similarity = vectors[0] @ vectors[1].T
    precision, recall = similarity.amax(dim=1).mean(), similarity.amax(dim=0).mean()
    return float(2 * precision * recall / (precision + recall))


def test_scores_are_those_of_each_pair_alone_and_of_what_is_written(model, tokenizer, tmp_path):
    folder = save_encoder(tmp_path / "scorer")
    scorer = BertScorer(str(folder))
    pairs = zip(PREDICTIONS, REFERENCES, strict=True)
    best = [max(twin(folder, prediction, text) for text in texts) for prediction, texts in pairs]
    assert scorer.score(PREDICTIONS, REFERENCES) == pytest.approx(100 * sum(best) / 4, abs=1e-3)
    assert scorer.score([""], [["red fox"]]) == 0
    report = run(model, tokenizer, tasks=(QA,), bert_score_model=str(folder))
    answers, references = [sample.answers["ratio=2"] for sample in report.answers], [row["answers"] for row in ROWS]
    expected = scorer.score(answers, references)
    assert report.score("tiny", QA, "ratio=2", "bert_score_f1") == pytest.approx(expected, abs=1e-3)
    # A report names no folders.
    assert report.settings["bert_score_model"] == "scorer"
