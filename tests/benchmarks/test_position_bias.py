# SPDX-License-Identifier: Apache-2.0
"""The benchmark of learned position encodings, against loops and against T5's own attention."""

import json

import pytest
import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel, T5Config, T5Model

SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture
def measured(script, tmp_path):
    def run(model):
        model.save_pretrained(tmp_path / "model")
        output = tmp_path / "out" / "result.json"
        status = script("position_bias.measure").main(
            [str(tmp_path / "model"), "--name", "tiny", "--output", str(output)]
        )
        assert status == 0
        assert {path.suffix for path in output.parent.iterdir()} == {".json", ".png"}
        return json.loads(output.read_text(encoding="utf-8"))["rows"]

    return run


@pytest.mark.slow
def test_similarities_of_position_vectors(measured):
    torch.manual_seed(0)
    model = BertModel(BertConfig(vocab_size=16, max_position_embeddings=12, **SIZES))
    rows = measured(model)
    vectors = model.embeddings.position_embeddings.weight.detach()
    assert [row["distance"] for row in rows] == [1, 2, 4, 8]

    def cosine(i, j):
        return torch.nn.functional.cosine_similarity(vectors[i], vectors[j], dim=0).item()

    for row in rows:
        pairs = [cosine(i, i + row["distance"]) for i in range(1, 12 - row["distance"])]
        assert row["others"] == pytest.approx(sum(pairs) / len(pairs), abs=1e-4)
        assert row["first"] == pytest.approx(cosine(0, row["distance"]), abs=1e-4)


def test_biases_are_those_of_the_models_own_attention(measured):
    torch.manual_seed(0)
    config = T5Config(vocab_size=16, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    model = T5Model(config)
    model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.data.normal_()
    bias = model.encoder.block[0].layer[0].SelfAttention.compute_bias(64, 64)[0]
    for row in measured(model)[:6]:
        distance = row["distance"]
        assert row["behind"] == pytest.approx(bias[:, distance, 0].tolist(), abs=1e-3)
        assert row["ahead"] == pytest.approx(bias[:, 0, distance].tolist(), abs=1e-3)


def test_a_model_without_learned_positions_is_refused(script, tmp_path, capsys):
    LlamaModel(LlamaConfig(vocab_size=16, **SIZES)).save_pretrained(tmp_path)
    assert script("position_bias.measure").main([str(tmp_path)]) == 1
    assert "learns neither vectors of positions nor relative biases" in capsys.readouterr().err
