# SPDX-License-Identifier: Apache-2.0
"""Compression overhead at toy size: complete result files, refusals, and what its numbers rest on."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from context_compressors.modeling.parts.pooling import mean_pool

TOY = ["--hidden-size", "32", "--head-dim", "16", "--layers", "1", "--vocab-size", "64", "--device", "cpu"]


def test_compression_overhead_writes_a_row_for_every_method_and_length(
    script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    output = tmp_path / "results" / "overhead.json"
    arguments = [*TOY, "--methods", "mean_pooling", "--lengths", "16", "33", "--batch-size", "2", "--repeats", "2"]
    assert script("compression_overhead.measure").main([*arguments, "--output", str(output)]) == 0
    content = json.loads(output.read_text(encoding="utf-8"))
    assert [(row["method"], row["num_tokens"]) for row in content["rows"]] == [
        ("mean_pooling", 16),
        ("mean_pooling", 33),
    ]
    assert content["environment"]["versions"]["torch"] == torch.__version__
    assert "output" not in content["settings"]
    for row in content["rows"]:
        assert len(row["seconds"]["encoder"]) == len(row["seconds"]["compress"]) == 2
        # Compressing runs the encoder, so it can hold no less at its peak.
        assert row["peak_bytes"]["compress"] >= row["peak_bytes"]["encoder"] > 0
        assert (row["padding_share"], "one_by_one" in row["seconds"], "profile" in row) == (0, False, False)
    assert "<= 1.05" in capsys.readouterr().out


def test_the_bare_encoder_does_the_encoders_whole_work_and_no_more(script):
    tools, overhead = script("common.tools"), script("compression_overhead.measure")
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    model = tools.random_compressor("mean_pooling", config, [4], "float32", torch.device("cpu"))
    input_ids = torch.arange(2, 32).view(2, 15)
    with torch.no_grad():
        states = overhead.bare_encoder(model, input_ids, torch.ones_like(input_ids))()
    # The linear map starts as the identity, so the slots are the means of the encoder's states.
    expected, _ = mean_pool(states, torch.ones_like(input_ids), 4)
    torch.testing.assert_close(model.compress(input_ids, ratio=4).embeddings, expected)
