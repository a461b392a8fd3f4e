# SPDX-License-Identifier: Apache-2.0
"""Recipes that train in a second."""

from pathlib import Path

import yaml

from context_compressors.training.arguments import parse_recipe

RUN = {
    "max_steps": 2,
    "bf16": False,
    "use_cpu": True,
    "gradient_checkpointing": False,
    "per_device_train_batch_size": 2,
    "save_strategy": "no",
    "logging_steps": 1,
    "report_to": "none",
    "disable_tqdm": True,
}
# Read last: what brings a paper's settings down to what trains in a second.
SMALL = {**RUN, "learning_rate": 1.0e-2, "dtype": "float32", "gradient_accumulation_steps": 2}
GENERATED = "[{generated: true, tasks: [question_answering, reconstruction], weight: 1}]"


def parse(*files, folder):
    return parse_recipe([*files, "--output_dir", str(folder), "--use_cpu", "true"])


def write_recipe(path: Path, **fields) -> str:
    defaults = {
        **RUN,
        "sources": yaml.safe_load(GENERATED),
        "max_context_tokens": 60,
        "max_target_tokens": 64,
        "output_dir": str(path / "out"),
    }
    file = path / "recipe.yaml"
    file.write_text(yaml.safe_dump({**defaults, **fields}))
    return str(file)
