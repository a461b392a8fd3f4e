# SPDX-License-Identifier: Apache-2.0
"""Recipes name their base by its Hub id, which may be kept on this machine only, or as a GGUF file."""

import pytest
from small_recipes import write_recipe
from transformers import AutoModelForCausalLM, AutoTokenizer

from context_compressors.modeling.modeling_mean_pooling import MeanPoolingForCausalLM
from context_compressors.training.train import main


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["compression", "teacher"])
def test_a_gguf_file_is_trained_like_any_other_base(tiny_gguf_folder, tmp_path, objective):
    fields = {"compression": {"method_config": {"compression_ratios": [2]}}, "teacher": {}}[objective]
    recipe = write_recipe(
        tmp_path, objective=objective, base=str(tiny_gguf_folder), base_gguf_file="tiny.gguf", **fields
    )
    main([recipe])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert isinstance(model, MeanPoolingForCausalLM) == (objective == "compression")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.tokenize("123") == ["1", "2", "3"]
    assert str(tiny_gguf_folder) not in (tmp_path / "out" / "config.json").read_text()
