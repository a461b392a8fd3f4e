# SPDX-License-Identifier: Apache-2.0
"""Counts of trainable numbers on the papers' bases."""

from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoConfig

from context_compressors.configuration.methods import config_class
from context_compressors.modeling import model_class

SIZES = yaml.safe_load(Path(__file__).with_name("trainable_sizes.yaml").read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES["counts"])
def test_what_trains_has_the_papers_size(name):
    entry, fields = SIZES["counts"][name], dict(SIZES["counts"][name].get("fields", {}))
    bases = {part: AutoConfig.for_model(**SIZES["bases"][base]) for part, base in entry["bases"].items()}
    with torch.device("meta"):
        model = model_class(entry["method"], "AutoModel")(config_class(entry["method"])(**bases, **fields))
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert trained == sum(entry["parts"])
