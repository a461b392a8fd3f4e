# SPDX-License-Identifier: Apache-2.0
"""Problems for Sinkhorn, and how its plans and gradients are compared."""

import torch


def problem(*shape, seed=0, dtype=torch.float64, spread=2.0):
    """Costs as those of a cosine, and masses that sum to 1."""
    *batch, num_senders, num_receivers = shape
    generator = torch.Generator().manual_seed(seed)
    cost = torch.rand(*shape, generator=generator, dtype=torch.float64) * spread
    source = torch.rand(*batch, num_senders, generator=generator, dtype=torch.float64) + 0.05
    target = torch.rand(*batch, num_receivers, generator=generator, dtype=torch.float64) + 0.05
    masses = source / source.sum(-1, keepdim=True), target / target.sum(-1, keepdim=True)
    return cost.to(dtype), masses[0].to(dtype), masses[1].to(dtype)


def plan_and_gradients(function, tensors, **arguments):
    """A plan, and the gradients of a weighted sum of it, with weights that depend on the shape alone."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    plan = function(*leaves, **arguments)
    weights = torch.randn(plan.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return plan.detach(), *torch.autograd.grad((plan * weights.to(plan.dtype)).sum(), leaves)


def assert_all_close(actual, expected, rtol, atol):
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other.to(one.dtype), rtol=rtol, atol=atol * float(other.abs().max()))
