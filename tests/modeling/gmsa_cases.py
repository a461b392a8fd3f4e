# SPDX-License-Identifier: Apache-2.0
"""What the tests of GMSA and TCP-AE go through."""

import pytest
import torch

# Norms of heads and a window of their own; transformers has no sdpa for Gemma 2.
BASES = ["llama-sdpa", "qwen3-sdpa", "gemma2-eager"]
on_every_base = pytest.mark.parametrize("base", BASES)
both = pytest.mark.parametrize("method", ["gmsa", "tcp_autoencoder"])
TEXT = torch.tensor([[1, 9, 40, 7]])


def trainable(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}
