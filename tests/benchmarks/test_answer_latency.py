# SPDX-License-Identifier: Apache-2.0
"""The latency benchmark: settings of GMSA's tables, compiled decoding, result files."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

from context_compressors.modeling.parts.cache_name import CACHE

CPU = torch.device("cpu")
TOY = ["--hidden-size", "32", "--head-dim", "16", "--layers", "1", "--vocab-size", "64", "--device", "cpu"]


def llama(**fields) -> LlamaConfig:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    return LlamaConfig(**sizes, **heads, bos_token_id=0, eos_token_id=1, pad_token_id=1, **fields)


# --- settings ---


@pytest.mark.slow
def test_the_papers_setting_runs_small_on_a_cpu(script, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    latency, output = script("answer_latency.measure"), tmp_path / "latency.json"
    sizes = [*TOY, "--layers", "4"]
    arguments = ["--setting", "table7", *sizes, "--lengths", "40", "--new-tokens", "3", "--repeats", "2"]
    arguments += ["--batch-sizes", "1", "2", "--output", str(output)]
    assert latency.main(arguments) == 0
    content = json.loads(output.read_text(encoding="utf-8"))
    assert (content["benchmark"], content["settings"]["setting"]) == ("answer_latency", "table7")
    rows = content["rows"]
    assert [(row["batch_size"], row["ratio"], row["slots"]) for row in rows] == [
        (1, 4, 10),
        (1, 8, 5),
        (2, 4, 10),
        (2, 8, 5),
    ]
    for row in rows:
        assert len(row["samples"]["memory"]) == 2
    full, memory, compression = latency.medians(rows[0], "last_token")
    printed = capsys.readouterr().out
    assert "break-even reads" in printed
    assert f" {full / (memory + compression):.2f} " in printed


# --- compiled decoding ---


@pytest.mark.slow
def test_compiled_decoding_writes_the_same_tokens_and_leaves_prompts_alone(script, monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    config = llama(initializer_range=0.3)
    model, ids = LlamaForCausalLM(config).eval(), torch.arange(2, 22).view(2, 10)
    lengths = []
    original = torch.compile

    def recording(function, **options):
        compiled = original(function, **options)
        return lambda *args, **kwargs: lengths.append(kwargs["input_ids"].shape[1]) or compiled(*args, **kwargs)

    def generate() -> torch.Tensor:
        cache = StaticCache(config=config, max_cache_len=20)
        return model.generate(ids, **{CACHE: cache}, max_new_tokens=8, min_new_tokens=8, do_sample=False)

    expected = generate()
    monkeypatch.setattr(torch, "compile", recording)
    script("answer_latency.measure").compile_decoding(model.base_model, backend="eager")
    assert torch.equal(generate(), expected)
    assert lengths == [1] * 7


# --- result files ---
