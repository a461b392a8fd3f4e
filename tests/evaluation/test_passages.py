# SPDX-License-Identifier: Apache-2.0
"""Contexts of passages in an evaluation: compressed apart, read in words with blank lines between them."""

import json
from dataclasses import replace

import torch
from naive_twin import encode

from context_compressors.evaluation.data_sets import load_datasets
from context_compressors.evaluation.samples import SampleBuilder
from context_compressors.evaluation.scoring import Condition, Scorer
from context_compressors.evaluation.settings import EvaluationSettings
from context_compressors.modeling.parts.text_ids import context_start_ids

PASSAGES = ["Berth 4 belongs to Nora.", "Bob keeps eleven bees."]


def test_an_evaluation_compresses_each_passage_alone(model, tokenizer, tmp_path):
    row = {"id": "q", "context": PASSAGES, "question": "Who keeps bees?", "answers": ["Bob"]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    (data,) = load_datasets([str(tmp_path / "rows.jsonl")], tokenizer)
    settings = EvaluationSettings(max_new_tokens={"question_answering": 4}, allow_untrained_ratio=True)
    (sample,) = SampleBuilder(tokenizer, settings).build(data, "question_answering")
    assert tokenizer.decode(sample.context_ids) == "\n\n".join(PASSAGES)
    assert sample.passages == [encode(tokenizer, passage) for passage in PASSAGES]
    cut = SampleBuilder(tokenizer, replace(settings, truncate_context=True, max_context_tokens=9))
    (short,) = cut.build(data, "question_answering")
    assert short.passages == [sample.passages[0][:9]]
    scorer = Scorer(model, tokenizer, [Condition("ratio=4", model, ratio=4)], settings)
    memory = scorer._compress([sample])[4]
    rows = [[*context_start_ids(tokenizer), *ids] for ids in sample.passages]
    alone = [model.compress(torch.tensor([row]), ratio=4).embeddings for row in rows]
    torch.testing.assert_close(memory.embeddings, torch.cat(alone, dim=1), atol=1e-5, rtol=1e-5)
