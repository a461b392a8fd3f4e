# SPDX-License-Identifier: Apache-2.0
"""The checkpoints in the repository: small, whole, and with the code of today."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from context_compressors.configuration.configuration_mean_pooling import MeanPoolingConfig
from context_compressors.modeling.modeling_mean_pooling import MeanPoolingForCausalLM
from context_compressors.modeling.remote_code import write_code

CHECKPOINTS = Path(__file__).parent.parent / "checkpoints"


def test_both_fit_into_24_mib():
    assert sum(path.stat().st_size for path in CHECKPOINTS.rglob("*") if path.is_file()) <= 24 * 2**20


@pytest.mark.parametrize("name", ["base", "mean_pooling"])
def test_no_pickles_caches_or_optimizer_states(name):
    names = {path.name for path in (CHECKPOINTS / name).rglob("*")}
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json", "recipe.yaml"} <= names
    assert not [other for other in names if Path(other).suffix in (".bin", ".pt", ".pth", ".pkl", ".pyc")]


def test_the_code_beside_the_weights_is_the_code_of_the_package(tmp_path):
    write_code(MeanPoolingForCausalLM, MeanPoolingConfig, tmp_path)
    saved = {path.name: path.read_text() for path in (CHECKPOINTS / "mean_pooling").glob("*.py")}
    fresh = {path.name: path.read_text() for path in tmp_path.glob("*.py")}
    assert saved == fresh, "save it again: MeanPoolingForCausalLM.from_pretrained(folder).save_pretrained(folder)"


def test_the_base_of_the_compressor_is_the_base_beside_it():
    base = AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "base")
    compressor = MeanPoolingForCausalLM.from_pretrained(CHECKPOINTS / "mean_pooling")
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINTS / "base")
    assert sum(p.numel() for p in base.parameters()) <= 12e6
    text = tokenizer("The library is open on Monday.", return_tensors="pt")
    with torch.no_grad(), compressor.base_language_model():
        ours = compressor(input_ids=text.input_ids).logits
        torch.testing.assert_close(ours, base(input_ids=text.input_ids).logits, rtol=1e-5, atol=1e-4)


def test_the_compressor_has_its_four_ratios():
    compressor = MeanPoolingForCausalLM.from_pretrained(CHECKPOINTS / "mean_pooling")
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINTS / "mean_pooling")
    inputs = tokenizer("The baker opens at seven, and the mill is closed on Sunday.", return_tensors="pt")
    memories = compressor.compress(**inputs, ratio=[2, 4, 8, 16])
    length = inputs.input_ids.shape[1]
    assert [int(memory.num_slots) for memory in memories] == [-(-length // ratio) for ratio in (2, 4, 8, 16)]
