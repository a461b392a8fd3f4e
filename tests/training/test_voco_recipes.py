# SPDX-License-Identifier: Apache-2.0
"""Recipes of VoCo: the paper's settings, what trains, and the small one."""

import pytest
import torch
import yaml
from small_recipes import parse
from transformers import LlamaConfig

from context_compressors import VoCoConfig, VoCoForCausalLM
from context_compressors.training.arguments import parse_recipe
from context_compressors.training.train import build_trainer


def on_meta(base, fields):
    """A recipe's model on a base, without memory for its weights; and the numbers that train."""
    with torch.device("meta"):
        model = VoCoForCausalLM(VoCoConfig(decoder_config=base, **fields))
    return model, sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def test_the_papers_settings_and_all_of_vicuna_trains(tmp_path):
    model, data, args = parse("voco/voco.yaml", folder=tmp_path)
    assert (args.learning_rate, args.lr_scheduler_type, args.warmup_steps) == (2e-5, "cosine", 0.03)
    assert (args.num_train_epochs, args.weight_decay) == (2, 0.0)
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps == 128
    (ratio,) = model.method_config["compression_ratios"]
    assert data.max_context_tokens * (ratio + 1) // ratio + data.max_target_tokens + 56 == 2048
    assert (model.method, model.base) == ("voco", "lmsys/vicuna-7b-v1.5")
    # Vicuna-7B has 6,738,415,616 parameters; one VoCo token of its width is new.
    built, trained = on_meta(LlamaConfig(max_position_embeddings=4096), model.method_config)
    assert trained == sum(parameter.numel() for parameter in built.parameters()) == 6_738_415_616 + 4096


@pytest.mark.slow
def test_the_comparisons_adapter_has_the_budget_of_all_methods(tmp_path):
    model, *_ = parse("smollm2/comparison/voco.yaml", folder=tmp_path)
    shape = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
    base = LlamaConfig(**shape, intermediate_size=1536, vocab_size=49152, tie_word_embeddings=True)
    _, trained = on_meta(base, model.method_config)
    assert trained == 4_884_480 + 576


@pytest.mark.slow
def test_the_embedded_recipe_trains_one_adapter_and_one_token(base_folder, tmp_path):
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text(yaml.safe_dump({"sources": [{"generated": True, "tasks": ["reconstruction"], "weight": 1}]}))
    files = ["embedded/five_hundred_x.yaml", "embedded/voco.yaml", str(overlay), "--base", str(base_folder)]
    options = ["--max_steps", "3", "--warmup_steps", "0", "--save_strategy", "no", "--use_cpu", "true"]
    options += ["--output_dir", str(tmp_path / "out")]
    trainer = build_trainer(*parse_recipe([*files, *options]))
    before = {name: parameter.clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    moved = {name for name, parameter in trainer.model.named_parameters() if not parameter.equal(before[name])}
    trained = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    assert moved == trained
    assert all(".shared." in name or name.endswith("memory_embeddings") for name in trained)
    assert trainer.model.config.position_layout == "enhanced"
