# SPDX-License-Identifier: Apache-2.0
"""Sinkhorn against naive loops, worked numbers of ComprExIT's equation 11, and POT."""

import ot
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sinkhorn_problems import assert_all_close, plan_and_gradients, problem

from context_compressors.modeling.parts import optimal_transport
from context_compressors.modeling.parts.optimal_transport import sinkhorn


def naive_window(cost, source, target, epsilon, num_iterations):
    """Equation 11 over one window's senders and receivers with mass, one number at a time, in logarithms."""
    senders = [t for t, mass in enumerate(source.tolist()) if mass > 0]
    receivers = [k for k, mass in enumerate(target.tolist()) if mass > 0]
    zero = cost.new_zeros(())
    plan = [[zero for _ in target] for _ in source]
    if senders and receivers:
        f, g = {}, dict.fromkeys(receivers, zero)
        for _ in range(num_iterations):
            for t in senders:
                f[t] = source[t].log() - torch.stack([g[k] - cost[t, k] / epsilon for k in receivers]).logsumexp(0)
            for k in receivers:
                g[k] = target[k].log() - torch.stack([f[t] - cost[t, k] / epsilon for t in senders]).logsumexp(0)
        for t in senders:
            for k in receivers:
                plan[t][k] = (f[t] + g[k] - cost[t, k] / epsilon).exp()
    return torch.stack([torch.stack(row) for row in plan])


def naive_sinkhorn(cost, source_mass, target_mass, epsilon=0.1, num_iterations=30):
    windows = zip(cost.double(), source_mass.double(), target_mass.double(), strict=True)
    return torch.stack([naive_window(*window, epsilon, num_iterations) for window in windows])


def tensor_sinkhorn(cost, source_mass, target_mass, epsilon=0.1, num_iterations=30):
    """Plain autograd through the iterations, for masses above zero."""
    scores, g = -cost / epsilon, torch.zeros_like(target_mass)
    for _ in range(num_iterations):
        f = source_mass.log() - (scores + g[..., None, :]).logsumexp(-1)
        g = target_mass.log() - (scores + f[..., :, None]).logsumexp(-2)
    return (scores + f[..., :, None] + g[..., None, :]).exp()


@pytest.mark.parametrize("epsilon", [1.0, 0.1, 0.01])
@pytest.mark.parametrize("shape", [(2, 6, 3), (1, 3, 6), (2, 5, 1), (2, 1, 5), (1, 1, 1)])
def test_equals_the_naive_loops(shape, epsilon):
    tensors = problem(*shape)
    for num_iterations in (1, 2, 30):
        arguments = {"epsilon": epsilon, "num_iterations": num_iterations}
        expected = plan_and_gradients(naive_sinkhorn, tensors, **arguments)
        actual = plan_and_gradients(sinkhorn, tensors, **arguments)
        for one, other in zip(actual, expected, strict=True):
            assert one.allclose(other, rtol=1e-8, atol=1e-10 / epsilon), num_iterations


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    batch=st.lists(st.integers(1, 3), max_size=2),
    num_senders=st.integers(1, 9),
    num_receivers=st.integers(1, 9),
    epsilon=st.sampled_from([0.5, 0.1, 0.01]),
    share_of_zeros=st.sampled_from([0.0, 0.3, 0.7]),
    seed=st.integers(0, 2**16),
)
def test_equals_the_naive_loops_for_any_shape_and_mask(
    batch, num_senders, num_receivers, epsilon, share_of_zeros, seed
):
    cost, *masses = problem(*batch, num_senders, num_receivers, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    masses = [mass * (torch.rand(mass.shape, generator=generator) >= share_of_zeros) for mass in masses]
    tensors = [cost, *masses]
    actual = plan_and_gradients(sinkhorn, tensors, epsilon=epsilon, num_iterations=4)
    assert actual[0].shape == cost.shape
    flat = [tensor.reshape(-1, *tensor.shape[len(batch) :]) for tensor in tensors]
    plan = naive_sinkhorn(*flat, epsilon, 4).reshape(cost.shape)
    torch.testing.assert_close(actual[0], plan, rtol=1e-8, atol=1e-12)
    assert all(gradient.isfinite().all() for gradient in actual)


@pytest.mark.parametrize(("epsilon", "tolerance"), [(0.1, 1e-5), (0.01, 2e-5)])
def test_float32_is_near_double_precision(epsilon, tolerance):
    tensors = problem(4, 128, 32)
    expected = plan_and_gradients(tensor_sinkhorn, tensors, epsilon=epsilon)
    actual = plan_and_gradients(sinkhorn, [tensor.float() for tensor in tensors], epsilon=epsilon)
    assert_all_close(actual, expected, rtol=0, atol=tolerance)


def test_the_largest_cost_decides_the_precision():
    tensors = problem(3, 20, 7, dtype=torch.float32)
    tensors[1][0, 5:], tensors[2][1, 3:], tensors[1][2] = 0, 0, 0
    looked_up = plan_and_gradients(sinkhorn, tensors)
    assert_all_close(plan_and_gradients(sinkhorn, tensors, max_cost=2), looked_up, rtol=0, atol=0)
    in_double = plan_and_gradients(sinkhorn, tensors, max_cost=4)
    assert not torch.equal(in_double[0], looked_up[0])
    assert_all_close(in_double, looked_up, rtol=0, atol=1e-5)


def test_scalings_hold_up_to_the_largest_spread_they_are_used_for():
    """Rows that want all that other rows want, tiny masses, and a spread just below the limit."""
    spread = 0.1 * optimal_transport._MOST_SPREAD[torch.float32] * 0.999
    generator = torch.Generator().manual_seed(0)
    cost = spread * (torch.rand(8, 128, 64, generator=generator) < 0.5)
    cost[0, :, :32] = 0
    cost[0, :, 32:] = spread
    cost[1] = spread * (torch.arange(128)[:, None] != torch.arange(64))
    source = torch.rand(8, 128, generator=generator, dtype=torch.float64).pow(40).float() + 1e-30
    target = torch.rand(8, 64, generator=generator, dtype=torch.float64).pow(40).float() + 1e-30
    source, target = source / source.sum(-1, keepdim=True), target / target.sum(-1, keepdim=True)
    actual = plan_and_gradients(sinkhorn, (cost, source, target), num_iterations=100)
    tensors = [tensor.double() for tensor in (cost, source, target)]
    expected = plan_and_gradients(tensor_sinkhorn, tensors, num_iterations=100)
    assert_all_close(actual[:2], expected[:2], rtol=1e-3, atol=1e-5)
    assert all(gradient.isfinite().all() for gradient in actual)


@pytest.mark.parametrize("epsilon", [0.3, 0.02])
def test_gradients_pass_gradcheck(epsilon):
    tensors = [tensor.requires_grad_() for tensor in problem(2, 4, 3)]
    assert torch.autograd.gradcheck(lambda *t: sinkhorn(*t, epsilon, 3), tensors, eps=1e-7, atol=1e-4, rtol=1e-4)


ONE_WAY = [[0.0, 1.0], [1.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("cost", "source", "target", "epsilon", "num_iterations", "plan"),
    [
        ([[3.0, 3.0], [3.0, 3.0]], [0.7, 0.3], [0.5, 0.5], 0.1, 1, [[0.35, 0.35], [0.15, 0.15]]),
        (ONE_WAY, [0.5, 0.5], [0.5, 0.5], 0.1, 30, [[0.4999773010656488, 2.2698934351217197e-05]] * 2),
        (ONE_WAY, [0.5, 0.5], [0.5, 0.5], 1.0, 30, [[0.36552928931500245, 0.13447071068499755]] * 2),
        (
            ONE_WAY,
            [0.8, 0.2],
            [0.5, 0.5],
            1.0,
            30,
            [[0.46796311681866026, 0.3320368831813398], [0.03203688318133974, 0.16796311681866022]],
        ),
        (
            ONE_WAY,
            [0.8, 0.2],
            [0.5, 0.5],
            1.0,
            1,
            [[0.4578880957995513, 0.29769516240415506], [0.042111904200448705, 0.20230483759584483]],
        ),
        ([[1.0] * 3] * 3, [0.0, 0.5, 0.5], [0.5, 0.5, 0.0], 0.1, 30, [[0, 0, 0], [0.25, 0.25, 0], [0.25, 0.25, 0]]),
        (
            [[0.0, 1.0], [0.0, 1.0], [1.0, 0.0], [1.0, 0.0]],
            [0.25] * 4,
            [0.5, 0.5],
            0.1,
            30,
            [[0.2499886505328244, 1.1349467175597594e-05]] * 4,
        ),
    ],
    ids=["constant", "symmetric", "symmetric-wide", "unequal", "one-iteration", "zero-masses", "window-by-hand"],
)
def test_worked_numbers(cost, source, target, epsilon, num_iterations, plan, dtype):
    tensors = [torch.tensor(value, dtype=dtype) for value in (cost, source, target)]
    actual = sinkhorn(*tensors, epsilon, num_iterations)
    expected = torch.tensor(plan, dtype=dtype)
    for row in range(len(plan)):
        # The symmetric cases are given by their first row.
        if cost[row] != cost[0] and plan[row] is plan[0]:
            expected[row] = expected[row].flip(0)
    torch.testing.assert_close(actual, expected, rtol=1e-12 if dtype == torch.float64 else 1e-5, atol=1e-9)


@pytest.mark.parametrize("epsilon", [0.1, 0.001])
def test_column_sums_are_exact_and_row_sums_come_near(epsilon):
    cost, source, target = problem(3, 128, 32)
    plan = sinkhorn(cost, source, target, epsilon)
    torch.testing.assert_close(plan.sum(-2), target, rtol=1e-12, atol=0)
    assert (plan.sum(-1) - source).abs().sum(-1).max() < 0.5
    plan = sinkhorn(cost, source, target, 0.1, 300)
    torch.testing.assert_close(plan.sum(-1), source, rtol=1e-6, atol=0)


@pytest.mark.parametrize("epsilon", [0.1, 0.02])
def test_equals_pot_and_its_gradients(epsilon):
    tensors = problem(3, 24, 8)

    def pot(cost, source_mass, target_mass):
        arguments = {"max_iter": 30, "tol": 0.0, "method": "log_sinkhorn", "grad": "autodiff"}
        return ot.solve_batch(cost, reg=epsilon, a=source_mass, b=target_mass, **arguments).plan

    expected = plan_and_gradients(pot, tensors)
    assert_all_close(plan_and_gradients(sinkhorn, tensors, epsilon=epsilon), expected, rtol=1e-8, atol=1e-10)


def test_converges_to_pots_entropic_plan():
    cost, source, target = problem(16, 5)
    expected = ot.sinkhorn(source, target, cost, reg=0.1, method="sinkhorn_log", stopThr=1e-13, numItermax=10000)
    torch.testing.assert_close(sinkhorn(cost, source, target, 0.1, 2000), expected, rtol=1e-6, atol=1e-10)


def test_only_the_proportions_of_the_source_matter():
    cost, source, target = problem(2, 10, 4)
    expected = plan_and_gradients(naive_sinkhorn, (cost, 20 * source, 0.3 * target))
    actual = plan_and_gradients(sinkhorn, (cost, 20 * source, 0.3 * target))
    assert_all_close(actual, expected, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(actual[0], 0.3 * sinkhorn(cost, source, target), rtol=1e-12, atol=0)
