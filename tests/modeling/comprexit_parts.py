# SPDX-License-Identifier: Apache-2.0
"""ComprExIT's transmission with random parameters."""

import torch

from context_compressors.configuration.configuration_comprexit import ComprExITConfig
from context_compressors.modeling.modeling_comprexit import Transmission


def random_like(module, seed=0):
    """The module with random parameters, so that no start value hides a mistake."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.4 * torch.randn_like(parameter) + (1 if parameter.dim() == 1 else 0))
    return module


def transmission(hidden_size=6, seed=0, **fields):
    config = ComprExITConfig(**{"metric_size": 4, "window_size": 8, **fields})
    return random_like(Transmission(hidden_size, config), seed)
