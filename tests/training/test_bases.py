# SPDX-License-Identifier: Apache-2.0
"""Recipes name their base by its Hub id, which may be kept on this machine only, or as a GGUF file."""

import json
import shutil

import huggingface_hub
import pytest
from small_recipes import write_recipe
from transformers import AutoModelForCausalLM, AutoTokenizer

from context_compressors import RankedKeyValuesForCausalLM, cli
from context_compressors.modeling.checkpoint.pretrained_bases import WHEEL_BASES
from context_compressors.modeling.modeling_mean_pooling import MeanPoolingForCausalLM
from context_compressors.training.train import main

NAME = "me/kept"


@pytest.fixture
def kept_base(base_folder, tmp_path, monkeypatch):
    """A base in the cache, which is all that there is: neither the Hub nor a package index can be reached."""
    monkeypatch.setenv("CONTEXT_COMPRESSORS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setitem(WHEEL_BASES, NAME, next(iter(WHEEL_BASES.values())))
    folder = tmp_path / "cache" / "bases" / "me--kept"
    shutil.copytree(base_folder, folder)
    return folder


def texts(folder):
    return {path.name: path.read_text() for path in folder.iterdir() if path.suffix in (".json", ".yaml", ".md")}


@pytest.mark.slow
def test_a_kept_base_is_trained_on_and_named_by_its_hub_id(kept_base, tmp_path):
    main([write_recipe(tmp_path, base=NAME, method_config={"compression_ratios": [2]})])
    written = texts(tmp_path / "out")
    entry = json.loads(written["config.json"])["external_weights"]["decoder"]
    assert entry["repo_id"] == NAME
    for name, text in written.items():
        assert str(tmp_path) not in text, name
        assert "me--kept" not in text, name
    assert "model.safetensors" in {path.name for path in (tmp_path / "out").iterdir()}
    MeanPoolingForCausalLM.from_pretrained(tmp_path / "out")


@pytest.mark.slow
def test_a_readers_adapter_names_the_hub_and_teaches_without_a_network(kept_base, tmp_path):
    lora = {"rank": 2, "alpha": 4}
    recipe = write_recipe(tmp_path, objective="teacher", base=NAME, teacher_lora=lora)
    main([recipe, "--output_dir", str(tmp_path / "teacher")])
    assert json.loads((tmp_path / "teacher" / "adapter_config.json").read_text())["base_model_name_or_path"] == NAME
    for name, text in texts(tmp_path / "teacher").items():
        assert str(tmp_path) not in text, name
    recipe = write_recipe(
        tmp_path, objective="distillation", base=NAME, method_config={"compression_ratios": [2]}, learning_rate=1e-2
    )
    main([recipe, "--teacher", str(tmp_path / "teacher")])
    first, second = (
        json.loads((tmp_path / "out" / "training_summary.json").read_text())["log"][i]["loss"] for i in (0, 1)
    )
    assert first > 0
    assert second > 0


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


def test_a_gguf_file_that_is_not_there_is_refused_with_those_that_are(tiny_gguf_folder, tmp_path):
    recipe = write_recipe(tmp_path, base=str(tiny_gguf_folder), base_gguf_file="other.gguf")
    with pytest.raises(ValueError, match=r"base_gguf_file 'other.gguf' is not in .*, which has \['tiny.gguf'\]"):
        main([recipe])


@pytest.mark.slow
def test_a_compressor_is_fitted_to_a_gguf_file(tiny_gguf_folder, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("it'll 123 " * 9)
    command = ["fit", str(tiny_gguf_folder), "--data", str(tmp_path / "a.txt"), "--output", str(tmp_path / "out")]
    command += ["--contexts", "2", "--max-context-tokens", "24", "--dtype", "float32"]
    assert cli.main([*command, "--gguf-file", "other.gguf"]) == 1
    assert "which has ['tiny.gguf']" in capsys.readouterr().err
    assert cli.main([*command, "--gguf-file", "tiny.gguf"]) == 0
    config = RankedKeyValuesForCausalLM.from_pretrained(tmp_path / "out").config
    # Chunks of half of its 256 positions.
    assert (config.prompt_format, config.chunk_size) == ("chat", 128)


def test_a_gguf_file_goes_with_a_base(base_folder, tmp_path):
    recipe = write_recipe(tmp_path, checkpoint=str(base_folder), base_gguf_file="tiny.gguf")
    with pytest.raises(ValueError, match="base_gguf_file goes with base"):
        main([recipe])
