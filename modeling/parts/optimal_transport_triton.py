# SPDX-License-Identifier: Apache-2.0
"""Sinkhorn's iterations of a window in one Triton kernel, on the chip from the first to the last.

Without Triton no window fits. `optimal_transport.py` holds the same mathematics for tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

# Kernels stay plain functions, which nobody calls, where there is no Triton.
_kernel: Any = (lambda function: function) if triton is None else triton.jit
# Entries of a window, padded to powers of two, that the registers of a program hold several times.
_MOST_ENTRIES = 8192
# That of float32 in optimal_transport.py.
_MOST_EXPONENT: Any = None if triton is None else tl.constexpr(30.0)


def fits(num_senders: int, num_receivers: int) -> bool:
    """Return whether there are kernels, and a window is small enough for them."""
    if triton is None:
        return False
    return triton.next_power_of_2(num_senders) * triton.next_power_of_2(num_receivers) <= _MOST_ENTRIES


def fused_solve(
    cost: Tensor, source_mass: Tensor, target_mass: Tensor, settings: tuple[float, int], keep_history: bool
) -> tuple[Tensor, Tensor | None]:
    """Plans of all windows.

    Args:
        cost: Shape `(num_windows, num_senders, num_receivers)`, float32 like the masses.
        source_mass: Shape `(num_windows, num_senders)`.
        target_mass: Shape `(num_windows, num_receivers)`.

    Returns:
        The plan in the shape of `cost`, and what `fused_gradients` needs of the iterations, or `None`.
    """
    cost, source_mass, target_mass = cost.contiguous(), source_mass.contiguous(), target_mass.contiguous()
    num_windows, num_senders, num_receivers = cost.shape
    epsilon, num_iterations = settings
    plan = torch.empty_like(cost)
    history = cost.new_empty((num_windows, num_iterations + 1, num_receivers)) if keep_history else None
    with _on_device_of(cost):
        _solve_kernel[(num_windows,)](
            *(cost, source_mass, target_mass, plan, plan if history is None else history),
            *(num_senders, num_receivers, num_iterations, 1 / epsilon),
            keep_history=keep_history,
            **_launch_options(num_senders, num_receivers),
        )
    return plan, history


def fused_gradients(
    grad_plan: Tensor,
    cost: Tensor,
    source_mass: Tensor,
    target_mass: Tensor,
    history: Tensor,
    settings: tuple[float, int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of cost and masses, through every iteration; the arguments are those of `fused_solve`."""
    cost, source_mass, target_mass = cost.contiguous(), source_mass.contiguous(), target_mass.contiguous()
    num_windows, num_senders, num_receivers = cost.shape
    epsilon, num_iterations = settings
    gradients = torch.empty_like(cost), torch.empty_like(source_mass), torch.empty_like(target_mass)
    with _on_device_of(cost):
        _gradients_kernel[(num_windows,)](
            *(grad_plan.contiguous(), cost, source_mass, target_mass, history, *gradients),
            *(num_senders, num_receivers, num_iterations, 1 / epsilon),
            **_launch_options(num_senders, num_receivers),
        )
    return gradients


def _on_device_of(tensor: Tensor) -> torch.cuda.device:
    # Triton launches on the current device; a CPU (in Triton's interpreter) is none.
    return torch.cuda.device(tensor.device.index if tensor.is_cuda else -1)


def _launch_options(num_senders: int, num_receivers: int) -> dict[str, int]:
    num_rows, num_columns = triton.next_power_of_2(num_senders), triton.next_power_of_2(num_receivers)
    # A thread holds 16 entries of each matrix: up to 4,096 of them the backward kernel fits into the registers.
    num_warps = min(16, max(1, num_rows * num_columns // 512))
    return {"num_rows": num_rows, "num_columns": num_columns, "num_warps": num_warps}


@_kernel
def _masses(pointer, window, index, count):
    """Masses of a window; zeros behind the last."""
    mass = tl.load(pointer + window * count + index, mask=index < count, other=0.0)
    # A comparison lets NaN through, unlike a maximum.
    return tl.where(mass <= 0, 0.0, mass)


@_kernel
def _kernel_and_masses(cost, source_mass, target_mass, row, column, window, num_senders, num_receivers, strength):
    """The kernel exp(-cost / epsilon), 1 where there is no mass, the masses over their sums, the mass of the plan."""
    source_sum, total = tl.sum(source_mass, axis=0), tl.sum(target_mass, axis=0)
    is_dead = (source_sum <= 0) | (total <= 0)
    # A window that has no plan gets any other masses, so that nothing is divided by zero, and a total of zero.
    uniform_source = tl.where(row < num_senders, 1.0 / num_senders, 0.0)
    uniform_target = tl.where(column < num_receivers, 1.0 / num_receivers, 0.0)
    source = tl.where(is_dead, uniform_source, source_mass / tl.where(is_dead, 1.0, source_sum))
    target = tl.where(is_dead, uniform_target, target_mass / tl.where(is_dead, 1.0, total))

    is_real = ~(source_mass <= 0)[:, None] & ~(target_mass <= 0)[None, :]
    place = window * num_senders * num_receivers + row[:, None] * num_receivers + column[None, :]
    values = tl.load(cost + place, mask=is_real, other=float("inf"))
    row_least = tl.min(values, axis=1)
    # Rows without any mass, for which infinity less infinity would be computed.
    row_least = tl.where(row_least == float("inf"), 0.0, row_least)
    scores = tl.where(is_real, (row_least[:, None] - values) * strength, 0.0)
    kernel = tl.exp(tl.where(scores < -_MOST_EXPONENT, -_MOST_EXPONENT, scores))
    return kernel, source, target, tl.where(is_dead, 0.0, total)


@_kernel
def _solve_kernel(
    cost,
    source,
    target,
    plan,
    history,
    num_senders,
    num_receivers,
    num_iterations,
    strength,
    keep_history: tl.constexpr,
    num_rows: tl.constexpr,
    num_columns: tl.constexpr,
):
    window = tl.program_id(0).to(tl.int64)
    row, column = tl.arange(0, num_rows), tl.arange(0, num_columns)
    source_mass = _masses(source, window, row, num_senders)
    target_mass = _masses(target, window, column, num_receivers)
    kernel, source_part, target_part, total = _kernel_and_masses(
        cost, source_mass, target_mass, row, column, window, num_senders, num_receivers, strength
    )
    is_column = column < num_receivers
    steps = history + window * (num_iterations + 1) * num_receivers + column
    u = source_part
    v = tl.where(target_part > 0, 1.0, 0.0)
    if keep_history:
        tl.store(steps, v, mask=is_column)
    for step in range(num_iterations):
        u = source_part / tl.sum(kernel * v[None, :], axis=1)
        v = target_part / tl.sum(kernel * u[:, None], axis=0)
        if keep_history:
            tl.store(steps + (step + 1) * num_receivers, v, mask=is_column)
    result = kernel * u[:, None] * (v * total)[None, :]
    is_inside = (row < num_senders)[:, None] & is_column[None, :]
    place = window * num_senders * num_receivers + row[:, None] * num_receivers + column[None, :]
    tl.store(plan + place, result, mask=is_inside)


@_kernel
def _gradients_kernel(
    grad_plan,
    cost,
    source,
    target,
    history,
    grad_cost,
    grad_source,
    grad_target,
    num_senders,
    num_receivers,
    num_iterations,
    strength,
    num_rows: tl.constexpr,
    num_columns: tl.constexpr,
):
    window = tl.program_id(0).to(tl.int64)
    row, column = tl.arange(0, num_rows), tl.arange(0, num_columns)
    source_mass = _masses(source, window, row, num_senders)
    target_mass = _masses(target, window, column, num_receivers)
    kernel, source_part, target_part, total = _kernel_and_masses(
        cost, source_mass, target_mass, row, column, window, num_senders, num_receivers, strength
    )
    is_column = column < num_receivers
    is_inside = (row < num_senders)[:, None] & is_column[None, :]
    place = window * num_senders * num_receivers + row[:, None] * num_receivers + column[None, :]
    grad_scores = tl.load(grad_plan + place, mask=is_inside, other=0.0)
    steps = history + window * (num_iterations + 1) * num_receivers + column
    before_last = steps + (num_iterations - 1) * num_receivers
    grad_log_source, grad_log_target = tl.zeros_like(source_part), tl.zeros_like(target_part)
    safe_target = tl.where(target_part > 0, target_part, 1.0)
    v = tl.load(before_last + num_receivers, mask=is_column, other=0.0)
    v_before = tl.load(before_last, mask=is_column, other=0.0)
    u = source_part / tl.sum(kernel * v_before[None, :], axis=1)
    grad_scores *= kernel * u[:, None] * (v * total)[None, :]
    grad_u, grad_v = tl.sum(grad_scores, axis=1), tl.sum(grad_scores, axis=0)
    for back in range(num_iterations):
        v_before = tl.load(before_last - back * num_receivers, mask=is_column, other=0.0)
        u_over_source = 1.0 / tl.sum(kernel * v_before[None, :], axis=1)
        u = source_part * u_over_source
        grad_log_target += grad_v
        x = grad_v * v / safe_target
        grad_u -= u * tl.sum(kernel * x[None, :], axis=1)
        grad_log_source += grad_u
        y = grad_u * u_over_source
        grad_v = -v_before * tl.sum(kernel * y[:, None], axis=0)
        grad_scores -= kernel * (u[:, None] * x[None, :] + y[:, None] * v_before[None, :])
        grad_u = tl.zeros_like(grad_u)
        v = v_before
    safe_source_mass = tl.where(source_mass <= 0, 1.0, source_mass)
    safe_target_mass = tl.where(target_mass <= 0, 1.0, target_mass)
    grad_source_mass = tl.where(source_mass <= 0, 0.0, grad_log_source / safe_source_mass)
    grad_target_mass = tl.where(target_mass <= 0, 0.0, grad_log_target / safe_target_mass)
    tl.store(grad_cost + place, grad_scores * -strength, mask=is_inside)
    tl.store(grad_source + window * num_senders + row, grad_source_mass, mask=row < num_senders)
    tl.store(grad_target + window * num_receivers + column, grad_target_mass, mask=is_column)
