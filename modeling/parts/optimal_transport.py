# SPDX-License-Identifier: Apache-2.0
"""Entropic optimal transport between the tokens of a window and its slots (ComprExIT, equation 11)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .optimal_transport_triton import fits, fused_gradients, fused_solve

# Largest cost / epsilon, less a row's least: scalings over masses then stay between exp(-2 L) / receivers and
# exp(2 L) * receivers, well within the range of the dtype for these L.
_MAX_COST_RANGE = {torch.float32: 30.0, torch.float64: 250.0}
# Entries of a block of windows that goes through all iterations at once on a CPU: what its caches hold.
_BLOCK_ENTRIES = 2**20


def sinkhorn(
    cost: Tensor,
    source_mass: Tensor,
    target_mass: Tensor,
    epsilon: float = 0.1,
    num_iterations: int = 30,
    max_cost: float | None = None,
) -> Tensor:
    """Transport plan between senders and receivers that Sinkhorn's algorithm finds (ComprExIT, equation 11).

    It minimises `sum(plan * cost) - epsilon * entropy(plan)`. Every iteration fits the row sums to `source_mass`, then
    the column sums to `target_mass`, so the column sums end exact and the row sums as near as the iterations bring
    them. Only the proportions of `source_mass` matter: where the two sums differ, the plan carries the target's.

    A zero mass gives a zero row or column, whatever its costs are (even infinite or NaN), and gets a zero gradient. A
    window without a source or without a target is all zero. The gradient is that of the iterations as they were run,
    not of their limit. For it only `num_receivers` numbers of each iteration are kept; it cannot be differentiated
    again.

    Half types are computed in float32, and costs that differ by more than 30 `epsilon` within a row in float64; there
    differences above 250 `epsilon` count as these. On a GPU one Triton kernel runs all float32 iterations of a window
    on the chip, where Triton is installed and the window is small enough.

    Args:
        cost: Shape `(..., num_senders, num_receivers)`, floating point.
        source_mass: Mass of each sender, shape `(..., num_senders)`, floating point, zero or more.
        target_mass: Mass of each receiver, shape `(..., num_receivers)`, likewise.
        epsilon: Entropic strength, in the unit of the cost, above zero.
        num_iterations: Iterations, one or more.
        max_cost: Most by which the costs of a row differ; looked up if not given, which waits for the device.

    Returns:
        The plan of shape `(..., num_senders, num_receivers)` in the dtype of `cost`.
    """
    if not cost.numel():
        return cost.clone()
    dtype = functools.reduce(torch.promote_types, (source_mass.dtype, target_mass.dtype, torch.float32), cost.dtype)
    if max_cost is None:
        # Between senders and receivers with mass.
        is_path, costs = (source_mass > 0)[..., None] & (target_mass > 0)[..., None, :], cost.detach()
        least = costs.masked_fill(~is_path, math.inf).amin(dim=-1)
        max_cost = float((costs.masked_fill(~is_path, -math.inf).amax(dim=-1) - least).amax())
    if max_cost > epsilon * _MAX_COST_RANGE[dtype]:
        dtype = torch.float64
    tensors = [
        cost.to(dtype).reshape(-1, *cost.shape[-2:]),
        source_mass.to(dtype).reshape(-1, cost.shape[-2]),
        target_mass.to(dtype).reshape(-1, cost.shape[-1]),
    ]
    settings = Settings(float(epsilon), num_iterations)
    solver = _solver_for(tensors[0])
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        plan = _Sinkhorn.apply(*tensors, settings, solver)
    else:
        plan, _ = solver.solve(*tensors, settings, False)
    return plan.to(cost.dtype).reshape(cost.shape)


class Settings(NamedTuple):
    """The numbers that all windows of a call share."""

    epsilon: float
    num_iterations: int


class Solver(NamedTuple):
    """The two directions of an implementation, over `(num_windows, num_senders, num_receivers)`.

    `solve(cost, source_mass, target_mass, settings, keep_history)` returns the plan and each iteration's receiver
    scalings `(num_windows, 1 + num_iterations, num_receivers)`, or `None`. `gradients(grad_plan, cost, source_mass,
    target_mass, history, settings)` returns the gradients of the three.
    """

    solve: Callable[..., tuple[Tensor, Tensor | None]]
    gradients: Callable[..., tuple[Tensor, Tensor, Tensor]]


class _Sinkhorn(torch.autograd.Function):
    """All iterations as one operation."""

    @staticmethod
    def forward(
        ctx: Any, cost: Tensor, source_mass: Tensor, target_mass: Tensor, settings: Settings, solver: Solver
    ) -> Tensor:
        plan, history = solver.solve(cost, source_mass, target_mass, settings, True)
        ctx.save_for_backward(cost, source_mass, target_mass, history)
        ctx.settings, ctx.solver = settings, solver
        return plan

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_plan: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.solver.gradients(grad_plan, *ctx.saved_tensors, ctx.settings)
        return *gradients, None, None


def _solve(
    cost: Tensor, source_mass: Tensor, target_mass: Tensor, settings: Settings, keep_history: bool
) -> tuple[Tensor, Tensor | None]:
    plan = torch.empty_like(cost, memory_format=torch.contiguous_format)
    num_windows, _, num_receivers = cost.shape
    history = cost.new_empty((num_windows, 1 + settings.num_iterations, num_receivers)) if keep_history else None
    # Under autocast the products would run in a half type.
    with torch.autocast(cost.device.type, enabled=False):
        for block in _blocks(cost):
            problem = _prepared(cost[block], source_mass[block], target_mass[block], settings)
            _iterate(problem, settings, None if history is None else history[block], plan[block])
    return plan, history


def _gradients(
    grad_plan: Tensor, cost: Tensor, source_mass: Tensor, target_mass: Tensor, history: Tensor, settings: Settings
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of cost and masses, through every iteration."""
    grads = [
        torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (cost, source_mass, target_mass)
    ]
    with torch.autocast(cost.device.type, enabled=False):
        for block in _blocks(cost):
            problem = _prepared(cost[block], source_mass[block], target_mass[block], settings)
            grad_scores, *grad_logs = _iterate_back(problem, settings, history[block], grad_plan[block])
            torch.mul(grad_scores, -1 / settings.epsilon, out=grads[0][block])
            for grad, grad_log, mass in zip(
                grads[1:], grad_logs, (source_mass[block], target_mass[block]), strict=True
            ):
                grad[block] = (grad_log / mass).masked_fill_(mass <= 0, 0)
    return grads[0], grads[1], grads[2]


_TORCH_SOLVER = Solver(_solve, _gradients)


class _Problem(NamedTuple):
    """A block of windows, safe to iterate on."""

    kernel: Tensor  # (windows, senders, receivers): exp(-cost / epsilon) over each row's largest, 1 where no mass is
    source: Tensor  # (windows, 1, senders), sums to 1
    target: Tensor  # (windows, 1, receivers), sums to 1
    total: Tensor  # (windows, 1, 1), mass of the plan, 0 where no plan is possible


def _prepared(cost: Tensor, source_mass: Tensor, target_mass: Tensor, settings: Settings) -> _Problem:
    source, source_sum = _normalised(source_mass)
    target, total = _normalised(target_mass)
    is_dead = (source_sum <= 0) | (total <= 0)
    no_source, no_target = source_mass <= 0, target_mass <= 0
    # Another device is not waited for: there everything is masked, needed or not.
    any_masked = cost.device.type != "cpu" or bool(no_source.any() | no_target.any())
    if any_masked:
        is_masked = no_source[:, :, None] | no_target[:, None, :]
        cost = cost.masked_fill(is_masked, math.inf)
    # Adding to a row changes no plan.
    scores = torch.sub(cost.amin(dim=2, keepdim=True), cost).mul_(1 / settings.epsilon)
    if any_masked:
        scores.masked_fill_(is_masked, 0)
        # A window that has no plan gets any other masses, so that nothing is divided by zero, and a total of zero.
        source = source.masked_fill(is_dead, 1 / source.shape[1])
        target = target.masked_fill(is_dead, 1 / target.shape[1])
        total = total.masked_fill(is_dead, 0)
    kernel = scores.clamp_(min=-_MAX_COST_RANGE[scores.dtype]).exp_()
    return _Problem(kernel, source[:, None], target[:, None], total[:, None])


def _normalised(mass: Tensor) -> tuple[Tensor, Tensor]:
    """Masses over their sum, and the sum, `(windows, 1)`."""
    mass = mass.clamp(min=0)
    total = mass.sum(dim=1, keepdim=True)
    return mass / total, total


def _iterate(problem: _Problem, settings: Settings, history: Tensor | None, plan: Tensor) -> None:
    """Iterate `u = source / (kernel v)`, `v = target / (kernel^T u)`, whose plan is `u kernel v`.

    A vector stands on the left of its product: torch multiplies a batch of single rows several times as fast as a
    batch of single columns.
    """
    kernel, source, target, total = problem
    u, v = torch.empty_like(source), (target > 0).to(target.dtype)
    if history is not None:
        history[:, :1] = v
    row_sums, column_sums = torch.empty_like(source), torch.empty_like(target)
    for step in range(settings.num_iterations):
        torch.bmm(v, kernel.mT, out=row_sums)
        torch.div(source, row_sums, out=u)
        torch.bmm(u, kernel, out=column_sums)
        v = torch.div(target, column_sums, out=v if history is None else history[:, step + 1 : step + 2])
    torch.mul(kernel.mul_(u.mT), v * total, out=plan)


def _iterate_back(
    problem: _Problem, settings: Settings, history: Tensor, grad_plan: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of scores and log masses through the iterations of `_iterate`.

    With the scalings as exponentials of potentials, the two half steps of an iteration have the gradients
    `-kernel (u x)` and `-kernel (y v)` in the scores, each `kernel` times a matrix of rank one. So vectors alone
    go back through the iterations, and one product at the end adds up all that they leave in the scores.
    """
    kernel, source, target, total = problem
    before, after = history[:, :-1], history[:, 1:]  # v before and after each iteration
    u_over_source = torch.bmm(before, kernel.mT).reciprocal_()
    u = u_over_source * source
    v_over_target = after / target.masked_fill(target <= 0, 1)

    grad_scores = (kernel * u[:, -1, :, None]).mul_(after[:, -1:] * total).mul_(grad_plan)
    grad_u, grad_v = grad_scores.sum(dim=2)[:, None], grad_scores.sum(dim=1)[:, None]
    grad_log_source, grad_log_target = torch.zeros_like(source), torch.zeros_like(target)
    x, y = torch.empty_like(v_over_target), torch.empty_like(u)
    for step in reversed(range(settings.num_iterations)):
        now = slice(step, step + 1)
        grad_log_target += grad_v
        torch.mul(grad_v, v_over_target[:, now], out=x[:, now])
        grad_u = torch.addcmul(grad_u, u[:, now], torch.bmm(x[:, now], kernel.mT), value=-1)
        grad_log_source += grad_u
        torch.mul(grad_u, u_over_source[:, now], out=y[:, now])
        grad_v = torch.bmm(y[:, now], kernel).mul_(before[:, now]).neg_()
        grad_u = torch.zeros_like(grad_u)
    outer = torch.bmm(u.mT, x).baddbmm_(y.mT, before)
    return grad_scores.addcmul_(kernel, outer, value=-1), grad_log_source[:, 0], grad_log_target[:, 0]


def _blocks(cost: Tensor) -> Iterator[slice]:
    """Windows that go through the iterations together: all, or on a CPU as many as its caches hold."""
    num_windows, num_senders, num_receivers = cost.shape
    size = num_windows
    if cost.device.type == "cpu":
        size = max(1, _BLOCK_ENTRIES // (num_senders * num_receivers))
    for start in range(0, num_windows, size):
        yield slice(start, start + size)


def _solver_for(cost: Tensor) -> Solver:
    is_fused = cost.is_cuda and cost.dtype == torch.float32 and fits(cost.shape[1], cost.shape[2])
    return Solver(fused_solve, fused_gradients) if is_fused else _TORCH_SOLVER
