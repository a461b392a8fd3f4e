# SPDX-License-Identifier: Apache-2.0
"""Recipes of xRAG: the values of the authors' configuration files, and both stages one after the other."""

import pytest
import small_recipes
import torch
import yaml
from small_recipes import parse

from context_compressors import XRAGForCausalLM
from context_compressors.training.train import main

SMALL = {
    **small_recipes.SMALL,
    "sources": [{"generated": True, "tasks": ["question_answering", "reconstruction"], "weight": 1}],
    "data_dir": None,
    "method_config": {"compression_ratios": [24], "passage_readout": "mean"},
    "prompts": "default",
    "prompt_format": "plain",
    "min_context_tokens": 16,
    "max_context_tokens": 60,
    "gradient_accumulation_steps": 1,
}


def test_recipes_hold_the_authors_values(tmp_path):
    first = parse("xrag/xrag.yaml", "xrag/restating.yaml", folder=tmp_path)
    second = parse("xrag/xrag.yaml", "xrag/tuning.yaml", "mean_pooling/data.yaml", folder=tmp_path)
    stages = (
        (first, "compression", 6e-3, 384, (1.0, 0.0), {"reconstruction"}),
        (second, "distillation", 2e-5, 64, (2.0, 1.0), {"question_answering", "summarisation"}),
    )
    for (model, data, args), objective, rate, batch, weights, tasks in stages:
        assert (args.objective, args.learning_rate, args.lr_scheduler_type) == (objective, rate, "linear")
        # Of 8 devices in the first stage, of 4 and 2 in the second.
        assert args.per_device_train_batch_size * args.gradient_accumulation_steps == batch
        assert (args.get_warmup_steps(5208), args.weight_decay, args.max_grad_norm) == (157, 0.0, 0.0)
        assert (args.kl_weight, args.nll_weight) == weights
        assert {task for source in data.parsed_sources() for task in source.tasks} == tasks
        assert (model.method, data.prompt_format, args.bf16) == ("xrag", "chat", True)
        config = XRAGForCausalLM.config_class(**model.method_config or {})
        assert (config.compression_ratios, config.passage_readout, config.normalize_embeddings) == (
            (180,),
            "last_token",
            False,
        )
    (model, data, args), (later, _, once) = first, second
    assert model.base == "mistralai/Mistral-7B-Instruct-v0.2"
    assert model.encoder == "Salesforce/SFR-Embedding-Mistral"
    assert (args.max_steps, 384 * args.max_steps) == (5208, 1_999_872)
    assert (data.max_context_tokens, data.max_target_tokens) == (180, 181)
    # Models and configuration come with the first stage's checkpoint.
    assert (later.base, later.encoder, later.method_config, later.teacher) == (None, None, None, None)
    assert (once.max_steps, once.num_train_epochs) == (-1, 1.0)


@pytest.mark.slow
def test_both_stages_train_the_perceptron_alone(base_folder, tmp_path):
    small, base = tmp_path / "small.yaml", str(base_folder)
    small.write_text(yaml.safe_dump(SMALL))
    stages = {
        "restating": ["xrag/restating.yaml", str(small), "--base", base, "--encoder", base],
        "tuning": ["xrag/tuning.yaml", str(small), "--method_config", "null", "--checkpoint", "CHECKPOINT"],
    }
    before = XRAGForCausalLM.from_base(base, encoder=base, **SMALL["method_config"]).state_dict()
    for stage, (recipe, *options) in stages.items():
        options = [option.replace("CHECKPOINT", str(tmp_path / "restating")) for option in options]
        main(["xrag/xrag.yaml", recipe, *options, "--output_dir", str(tmp_path / stage)])
        model = XRAGForCausalLM.from_pretrained(tmp_path / stage)
        after = model.state_dict()
        changed = {name for name, tensor in after.items() if not tensor.equal(before[name])}
        assert changed == {name for name in after if ".slot_mlp." in name}, stage
        assert torch.isfinite(model.model.slot_mlp[2].weight).all()
        before = after
