# SPDX-License-Identifier: Apache-2.0
"""Recipes name their base by its Hub id, which may be kept on this machine only, or as a GGUF file."""

import pytest
from small_recipes import write_recipe
from transformers import AutoModelForCausalLM, AutoTokenizer

from context_compressors import RankedKeyValuesForCausalLM, cli
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


@pytest.mark.slow
def test_a_compressor_is_fitted_to_a_gguf_file(tiny_gguf_folder, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("it'll 123 " * 9)
    command = ["fit", str(tiny_gguf_folder), "--data", str(tmp_path / "a.txt"), "--output", str(tmp_path / "out")]
    command += ["--contexts", "2", "--max-context-tokens", "24", "--dtype", "float32"]
    assert cli.main([*command, "--gguf-file", "other.gguf"]) == 1
    assert "does not appear to have a file named other.gguf" in capsys.readouterr().err
    assert cli.main([*command, "--gguf-file", "tiny.gguf"]) == 0
    config = RankedKeyValuesForCausalLM.from_pretrained(tmp_path / "out").config
    # Chunks of half of its 256 positions.
    assert (config.prompt_format, config.chunk_size) == ("chat", 128)
