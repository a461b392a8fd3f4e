# SPDX-License-Identifier: Apache-2.0
"""Helpers of tests for the parameters of a model."""

import torch


def trainable(model):
    """Return the names of what trains."""
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@torch.no_grad()
def disturb(model, size=0.1):
    """Add noise to what trains, so that no start value hides a mistake."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter += size * torch.randn_like(parameter)
    return model


def gradients(model):
    """Take the gradients, by name."""
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_same_gradients(found, expected, rtol=1e-3, atol=1e-5):
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=rtol, atol=atol, msg=name)
