# SPDX-License-Identifier: Apache-2.0
"""Compression overhead at toy size: complete result files, refusals, and what its numbers rest on."""

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import LlamaConfig

from context_compressors.modeling.parts.cache_name import CACHE
from context_compressors.modeling.parts.pooling import mean_pool

TOY = ["--hidden-size", "32", "--head-dim", "16", "--layers", "1", "--vocab-size", "64", "--device", "cpu"]


# --- tools ---


def test_peak_memory_counts_what_is_held_at_once_and_not_what_was_there_before(script):
    tools: ModuleType = script("common.tools")
    weights = torch.zeros(1000, 1000)

    def one_after_the_other() -> None:
        for _ in range(3):
            weights + 1

    device = torch.device("cpu")
    assert tools.peak_bytes(one_after_the_other, device) == pytest.approx(4_000_000, rel=0.01)
    assert tools.peak_bytes(lambda: [weights + 1, weights + 2], device) == pytest.approx(8_000_000, rel=0.01)


def test_an_unknown_method_is_refused_with_the_nearest_one(script):
    random_compressor = script("common.tools").random_compressor
    with pytest.raises(ValueError, match=r"unknown method 'mean_poling'; did you mean 'mean_pooling'\?"):
        random_compressor("mean_poling", LlamaConfig(), [4], "float32", torch.device("cpu"))


def test_a_head_size_that_does_not_divide_the_width_is_refused(
    script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    output = tmp_path / "result.json"
    arguments = [*TOY, "--head-dim", "24", "--output", str(output)]
    assert script("compression_overhead.measure").main(arguments) == 1
    assert "--head-dim 24 must divide --hidden-size 32" in capsys.readouterr().err
    assert not output.exists()


# --- compression overhead ---


def test_compression_overhead_writes_a_row_for_every_method_and_length(
    script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    output = tmp_path / "results" / "overhead.json"
    arguments = [*TOY, "--lengths", "16", "33", "--batch-size", "2", "--repeats", "2", "--output", str(output)]
    assert script("compression_overhead.measure").main(arguments) == 0
    content = json.loads(output.read_text(encoding="utf-8"))
    assert [(row["method"], row["num_tokens"]) for row in content["rows"]] == [
        ("mean_pooling", 16),
        ("mean_pooling", 33),
    ]
    assert content["environment"]["versions"]["torch"] == torch.__version__
    assert "output" not in content["settings"]
    for row in content["rows"]:
        assert len(row["seconds"]["encoder"]) == len(row["seconds"]["compress"]) == 2
        # Compressing runs the encoder, so it can hold no less at its peak; and a cache comes on top.
        assert row["peak_bytes"]["compress"] >= row["peak_bytes"]["encoder"] > 0
        assert row["peak_bytes"]["cached"] > 0
        assert (row["padding_share"], "one_by_one" in row["seconds"], "profile" in row) == (0, False, False)
    assert "<= 1.05" in capsys.readouterr().out


def test_the_goal_counts_the_memory_tokens(script):
    overhead = script("compression_overhead.measure")
    goals = {("mean_pooling", 4): 1.05, ("icae", 4): 1.35, ("five_hundred_x", 5): 1.296, ("comprexit", 4): 1.15}
    for (method, ratio), expected in goals.items():
        assert overhead.goal(method, ratio) == pytest.approx(expected)
        memory = (1.3, "cached") if method == "comprexit" else (pytest.approx(expected), "encoder")
        assert overhead.memory_goal(method, ratio) == memory


@pytest.mark.slow
def test_a_batch_full_of_padding_stands_beside_its_contexts_one_by_one(
    script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    output = tmp_path / "overhead.json"
    arguments = [*TOY, "--methods", "comprexit", "mean_pooling", "--lengths", "32", "--row-lengths", "1", "0.25"]
    arguments += ["--batch-size", "3", "--repeats", "2", "--output", str(output)]
    assert script("compression_overhead.measure").main(arguments) == 0
    rows = json.loads(output.read_text(encoding="utf-8"))["rows"]
    assert [row["method"] for row in rows] == ["comprexit", "mean_pooling"]
    for row in rows:
        # Rows of 32, 8 and 32 tokens.
        assert row["padding_share"] == pytest.approx(24 / 96)
        assert len(row["seconds"]["one_by_one"]) == 2
    assert "| 25 %" in capsys.readouterr().out


def test_row_lengths_are_shares(script, capsys: pytest.CaptureFixture[str]):
    for value in ("0", "-1", "1.5", "nan", "x"):
        with pytest.raises(SystemExit):
            script("compression_overhead.measure").main([*TOY, "--row-lengths", value])
        assert "--row-lengths" in capsys.readouterr().err


def test_a_cached_pass_holds_the_keys_and_values(script):
    tools, overhead = script("common.tools"), script("compression_overhead.measure")
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2
    )
    model = tools.random_compressor("comprexit", config, [4], "float32", torch.device("cpu"))
    input_ids, mask = overhead.batch(model, 64, 2, [1.0, 0.5], torch.device("cpu"))
    assert mask.sum(dim=1).tolist() == [64, 32]
    with torch.no_grad():
        cached = overhead.cached_encoder(model, input_ids, mask)
        layers = [(layer.keys, layer.values) for layer in cached()[CACHE].layers]
        assert [tuple(keys.shape) for keys, _ in layers] == [(2, 2, 64, 16)] * 4
        size = sum(tensor.nbytes for pair in layers for tensor in pair)
        alone = tools.peak_bytes(overhead.bare_encoder(model, input_ids, mask), torch.device("cpu"))
        assert size < tools.peak_bytes(cached, torch.device("cpu")) <= alone + size


@pytest.mark.slow
def test_methods_with_memory_tokens_read_the_whole_context_as_one_chunk(
    script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    output = tmp_path / "overhead.json"
    methods = ["icae", "five_hundred_x", "compression_tokens"]
    arguments = [*TOY, "--lengths", "600", "--ratio", "5", "--repeats", "1", "--output", str(output)]
    assert script("compression_overhead.measure").main([*arguments, "--methods", *methods]) == 0
    rows = json.loads(output.read_text(encoding="utf-8"))["rows"]
    assert [row["method"] for row in rows] == methods
    assert capsys.readouterr().out.count("<= 1.296 of encoder") == 3
    tools = script("common.tools")
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    config.max_position_embeddings = 720
    model = tools.random_compressor("icae", config, [5], "float32", torch.device("cpu"))
    assert model.compress(torch.full((1, 600), 3)).position_ids.tolist() == [list(range(120))]


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
