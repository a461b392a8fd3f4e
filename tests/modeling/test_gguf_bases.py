# SPDX-License-Identifier: Apache-2.0
"""Bases in GGUF files: their weights, tokenizer, and checkpoints on them."""

import json
import shutil

import pytest
import tiny_gguf
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from context_compressors import MeanPoolingForCausalLM
from context_compressors.modeling.checkpoint.gguf_files import gguf_tokenizer


def test_digits_stay_single_and_contractions_whole(tiny_gguf_folder, tmp_path):
    tokenizer = gguf_tokenizer(tiny_gguf_folder, "tiny.gguf")
    tokens = ["Ġit", "'ll", "Ġ", "1", "2", "3"]
    assert tokenizer.tokenize(" it'll 123") == tokens
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.tokenize(" it'll 123") == tokens
    assert loaded.chat_template == tiny_gguf.CHAT_TEMPLATE
    # The library alone keeps the number together.
    plain = AutoTokenizer.from_pretrained(tiny_gguf_folder, gguf_file="tiny.gguf")
    assert plain.tokenize(" it'll 123") == ["Ġit", "'ll", "Ġ", "123"]


@pytest.mark.slow
@torch.no_grad()
def test_a_compressor_starts_from_a_file_and_is_saved_whole(tiny_gguf_folder, tmp_path):
    folder = tmp_path / "base"
    shutil.copytree(tiny_gguf_folder, folder)
    model = MeanPoolingForCausalLM.from_base(folder, gguf_file="tiny.gguf", compression_ratios=[2])
    expected = tiny_gguf.dequantised()["model.layers.1.mlp.up_proj.weight"]
    assert model.model.language_model.layers[1].mlp.up_proj.base_layer.weight.allclose(expected, atol=1e-6)
    shutil.rmtree(folder)
    model.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    ids = torch.arange(5, 18)[None]
    assert loaded(ids, context_input_ids=ids).logits.equal(model(ids, context_input_ids=ids).logits)
    assert loaded.config.external_weights is None
    assert "quantization_config" not in (tmp_path / "saved" / "config.json").read_text()


@pytest.mark.slow
@torch.no_grad()
def test_a_file_on_the_hub_is_named_by_a_light_checkpoint(tiny_gguf_folder, tmp_path, local_hub):
    repository = local_hub.folder / "models--me--tiny-GGUF"
    shutil.copytree(tiny_gguf_folder, repository / "snapshots" / f"{1:040x}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(f"{1:040x}")
    model = MeanPoolingForCausalLM.from_base("me/tiny-GGUF", gguf_file="tiny.gguf", compression_ratios=[2])
    model.save_pretrained(tmp_path / "light")
    entry = json.loads((tmp_path / "light" / "config.json").read_text())["external_weights"]["decoder"]
    assert (entry["repo_id"], entry["gguf_file"], entry["revision"]) == ("me/tiny-GGUF", "tiny.gguf", f"{1:040x}")
    ids = torch.arange(5, 18)[None]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "light")
    assert loaded(ids, context_input_ids=ids).logits.equal(model(ids, context_input_ids=ids).logits)
