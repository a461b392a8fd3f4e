# SPDX-License-Identifier: Apache-2.0
"""The papers' stages of training, from their recipes in small: what trains moves, and nothing else."""

from pathlib import Path

import pytest
import small_recipes
import yaml

from context_compressors.training.arguments import parse_recipe
from context_compressors.training.train import build_trainer

STAGES = yaml.safe_load(Path(__file__).with_name("paper_stages.yaml").read_text(encoding="utf-8"))
SMALL = {
    **small_recipes.SMALL,
    "gradient_accumulation_steps": 1,
    "warmup_steps": 0,
    "min_context_tokens": 16,
    "max_context_tokens": 60,
    "max_target_tokens": 61,
    "min_document_tokens": 32,
    "max_document_tokens": 48,
    "data_dir": None,
    "prompts": "default",
    "prompt_format": "plain",
    "overlong_contexts": "truncate",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STAGES)
def test_a_stage_trains_what_it_says_and_nothing_else(name, base_folder, tmp_path):
    folder = None
    for number, stage in enumerate(STAGES[name]):
        fields = {**SMALL, "sources": [{"generated": True, "tasks": stage["tasks"], "weight": 1}]}
        if number == 0:
            fields |= {"base": str(base_folder), "method_config": stage["method_config"]}
            fields |= {"encoder": str(base_folder)} if name == "xrag" else {}
        else:
            fields |= {"checkpoint": str(folder), "method_config": None}
        folder = tmp_path / str(number)
        file = tmp_path / f"{number}.yaml"
        file.write_text(yaml.safe_dump(fields))
        trainer = build_trainer(*parse_recipe([*stage["recipes"], str(file), "--output_dir", str(folder)]))
        before = {key: parameter.detach().clone() for key, parameter in trainer.model.named_parameters()}
        trained = {key for key, parameter in trainer.model.named_parameters() if parameter.requires_grad}
        trainer.train()
        moved = {key for key, parameter in trainer.model.named_parameters() if not parameter.equal(before[key])}
        # Of vectors in front of a softmax, and behind the last word, none moves.
        assert moved <= trained
        assert len(moved) > 0.7 * len(trained)
        trainer.save_model(str(folder))
