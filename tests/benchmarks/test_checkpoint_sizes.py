# SPDX-License-Identifier: Apache-2.0
"""The table of sizes counts what is saved, and the page on methods shows it."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from context_compressors.configuration.methods import METHODS
from context_compressors.evaluation import flops
from context_compressors.modeling.parts.base_pass import CACHE

ROOT = Path(__file__).resolve().parents[2]
TINY = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture
def sizes(script):
    return script("checkpoint_sizes.measure")


@pytest.fixture(scope="module")
def tiny_base(tmp_path_factory):
    """A base of that shape, and its folder."""
    model = AutoModelForCausalLM.from_config(LlamaConfig(**{k: v for k, v in TINY.items() if k != "model_type"}))
    folder = tmp_path_factory.mktemp("base")
    model.save_pretrained(folder)
    return model, folder


@pytest.mark.slow
@pytest.mark.parametrize("method", [name for name in METHODS if name != "decal"])
def test_the_counts_are_those_of_saved_checkpoints(sizes, tiny_base, monkeypatch, tmp_path, method):
    monkeypatch.setitem(flops._SHAPES, "tiny", TINY)
    row = sizes.row_of(method, "tiny", [4, 16])
    base, folder = tiny_base
    config = flops.method_config(method, flops.named_config("tiny"), [4, 16])
    names = ("compression_ratios", "encoder_lora", "decoder_lora", "encoder_layers", "chunk_size", "memory_tokens")
    fields = {name: getattr(config, name) for name in names if getattr(config, name, None) is not None}
    model_class = type(sizes.on_meta(method, config))
    model = model_class.from_base(folder, **fields)
    for form, include_base in (("own_parameters", False), ("parameters", True)):
        model.save_pretrained(tmp_path / form, include_base=include_base, save_dtype="bfloat16")
        file = tmp_path / form / "model.safetensors"
        # What trains nothing stores nothing.
        assert file.exists() == bool(row[form])
        if not row[form]:
            continue
        weights = file.read_bytes()
        header = 8 + int.from_bytes(weights[:8], "little")
        assert len(weights) - header == sizes.BYTES * row[form]
    memory = model.compress(torch.arange(5, 37)[None], ratio=4)
    carried = [memory.embeddings] if memory.key_values is None else [part for kv in memory.key_values for part in kv]
    of_pairs = [part.nbytes for part in (memory.head_ids, memory.coarsest_ratios) if part is not None]
    num_bytes = sum(part.numel() for part in carried) * sizes.BYTES + sum(of_pairs)
    assert num_bytes / int(memory.num_slots) == row["slot_bytes"]
    cache = base(torch.arange(5, 37)[None], use_cache=True)[CACHE]
    kept = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert kept * 2 / 32 == row["base_bytes_per_token"]


def test_the_page_shows_the_result_file_with_every_method(sizes):
    rows = json.loads((ROOT / "benchmarks" / "checkpoint_sizes" / "sizes.json").read_text())["rows"]
    assert [row["method"] for row in rows] == list(METHODS)
    assert sizes.table_of(rows, [4, 16]) in (ROOT / "benchmarks" / "checkpoint_sizes" / "README.md").read_text()
