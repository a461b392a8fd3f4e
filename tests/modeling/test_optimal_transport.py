# SPDX-License-Identifier: Apache-2.0
"""Sinkhorn against naive loops, worked numbers of ComprExIT's equation 11, POT, and the Triton kernels."""

import ast
import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path

import ot
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.dynamic_module_utils import get_imports

from context_compressors.modeling import optimal_transport, remote_code
from context_compressors.modeling.optimal_transport import sinkhorn

has_triton = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not has_triton, reason="Triton is not installed")


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


@pytest.fixture
def by_potentials(monkeypatch: pytest.MonkeyPatch):
    """Every problem goes through the logarithms."""
    monkeypatch.setattr(optimal_transport, "_TAME_SPREAD", {torch.float32: -1.0, torch.float64: -1.0})


@pytest.mark.parametrize("num_iterations", [1, 2, 30])
@pytest.mark.parametrize("epsilon", [1.0, 0.1, 0.004])
@pytest.mark.parametrize("shape", [(2, 6, 3), (1, 3, 6), (2, 5, 1), (2, 1, 5), (1, 1, 1)])
def test_equals_the_naive_loops(shape, epsilon, num_iterations):
    tensors = problem(*shape)
    arguments = {"epsilon": epsilon, "num_iterations": num_iterations}
    expected = plan_and_gradients(naive_sinkhorn, tensors, **arguments)
    actual = plan_and_gradients(sinkhorn, tensors, **arguments)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10 / epsilon)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    batch=st.lists(st.integers(1, 3), max_size=2),
    num_senders=st.integers(1, 9),
    num_receivers=st.integers(1, 9),
    epsilon=st.sampled_from([0.5, 0.1, 0.01, 0.002]),
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


@pytest.mark.parametrize(("epsilon", "tolerance"), [(0.1, 1e-5), (0.01, 2e-5), (0.003, 1e-4), (0.001, 2e-4)])
def test_float32_is_near_double_precision(epsilon, tolerance):
    tensors = problem(4, 128, 32)
    expected = plan_and_gradients(tensor_sinkhorn, tensors, epsilon=epsilon)
    actual = plan_and_gradients(sinkhorn, [tensor.float() for tensor in tensors], epsilon=epsilon)
    assert_all_close(actual, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_ways_of_iterating_agree(dtype, by_potentials, monkeypatch):
    tensors = problem(3, 20, 7, dtype=dtype)
    tensors[1][0, 5:], tensors[2][1, 3:], tensors[1][2] = 0, 0, 0
    logarithmic = plan_and_gradients(sinkhorn, tensors)
    monkeypatch.undo()
    calls = []
    solve = optimal_transport._solve_by_scalings
    monkeypatch.setattr(optimal_transport, "_solve_by_scalings", lambda *a: calls.append(1) or solve(*a))
    scaled = plan_and_gradients(sinkhorn, tensors)
    assert calls
    assert_all_close(scaled, logarithmic, rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-5)


def test_scalings_hold_up_to_the_largest_spread_they_are_used_for():
    """Rows that want all that other rows want, tiny masses, and a spread just below the limit."""
    spread = 0.1 * optimal_transport._TAME_SPREAD[torch.float32] * 0.999
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


@pytest.mark.parametrize("epsilon", [0.3, 0.002])
def test_gradients_pass_gradcheck(epsilon):
    tensors = [tensor.requires_grad_() for tensor in problem(2, 4, 3)]
    assert torch.autograd.gradcheck(lambda *t: sinkhorn(*t, epsilon, 3), tensors, eps=1e-7, atol=1e-4, rtol=1e-4)


def test_gradients_pass_gradcheck_through_logarithms(by_potentials):
    tensors = [tensor.requires_grad_() for tensor in problem(2, 4, 3)]
    assert torch.autograd.gradcheck(lambda *t: sinkhorn(*t, 0.3, 3), tensors)


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


def test_becomes_exact_transport_as_epsilon_goes_to_zero():
    cost = torch.tensor([[0.0, 1.0], [0.5, 0.5], [1.0, 0.0]], dtype=torch.float64)
    source, target = torch.tensor([0.2, 0.5, 0.3]).double(), torch.tensor([0.6, 0.4]).double()
    plan = sinkhorn(cost, source, target, 1e-3, 100)
    expected = torch.tensor([[0.2, 0.0], [0.4, 0.1], [0.0, 0.3]], dtype=torch.float64)
    torch.testing.assert_close(plan, expected, rtol=0, atol=1e-6)
    assert float((plan * cost).sum()) == pytest.approx(0.25, abs=1e-6)

    cost, source, target = problem(12, 5, seed=3)
    plan = sinkhorn(cost, source, target, 1e-3, 5000)
    exact = ot.emd(source, target, cost)
    assert float((plan * cost).sum()) == pytest.approx(float((exact * cost).sum()), abs=2e-3)
    torch.testing.assert_close(plan, exact, rtol=0, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e4, 1e15, 1e37])
def test_extreme_costs_give_finite_plans_and_gradients(scale, dtype):
    cost, source, target = problem(3, 20, 6, dtype=dtype)
    for values in (cost * scale, (cost - 1) * scale, (cost > 1) * torch.tensor(scale, dtype=dtype)):
        plan, *gradients = plan_and_gradients(sinkhorn, (values, source, target), epsilon=1e-3)
        torch.testing.assert_close(plan.sum(-2), target, rtol=1e-5, atol=0)
        assert (plan >= 0).all()
        assert all(gradient.isfinite().all() for gradient in gradients)


def test_an_offset_of_all_costs_or_of_a_row_changes_nothing():
    cost, source, target = problem(2, 10, 4)
    offset = torch.linspace(-1e6, 1e6, 10, dtype=torch.float64)[:, None]
    actual = plan_and_gradients(sinkhorn, (cost + offset, source, target))
    assert_all_close(actual, plan_and_gradients(sinkhorn, (cost, source, target)), rtol=0, atol=1e-7)


def test_an_infinite_cost_forbids_a_path():
    cost, source, target = problem(1, 6, 3)
    forbidden, dear = cost.clone(), cost.clone()
    forbidden[0, 1, 2], dear[0, 1, 2] = math.inf, 1e6
    actual = plan_and_gradients(sinkhorn, (forbidden, source, target))
    assert actual[0][0, 1, 2] == 0
    assert_all_close(actual, plan_and_gradients(sinkhorn, (dear, source, target)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("epsilon", [0.1, 0.003])
@pytest.mark.parametrize("garbage", [0.0, 1e30, math.inf, -math.inf, math.nan])
def test_zero_masses_leave_a_smaller_problem(garbage, epsilon):
    cost, source, target = problem(1, 12, 5, dtype=torch.float32)
    source[0, 8:], target[0, :2], cost[0, 8:], cost[0, :, :2] = 0, 0, garbage, garbage
    plan, *gradients = plan_and_gradients(sinkhorn, (cost, source, target), epsilon=epsilon)
    assert torch.equal(plan.count_nonzero(), (plan[:, :8, 2:] > 0).sum())
    smaller = [tensor.clone().requires_grad_() for tensor in (cost[:, :8, 2:], source[:, :8], target[:, 2:])]
    small_plan = sinkhorn(*smaller, epsilon=epsilon)
    torch.testing.assert_close(plan[:, :8, 2:], small_plan.detach(), rtol=1e-5, atol=1e-9)
    weights = torch.randn(plan.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).float()
    expected = torch.autograd.grad((small_plan * weights[:, :8, 2:]).sum(), smaller)
    inside = gradients[0][:, :8, 2:], gradients[1][:, :8], gradients[2][:, 2:]
    assert_all_close(inside, expected, rtol=1e-4, atol=1e-5)
    for whole, part in zip(gradients, inside, strict=True):
        assert whole.isfinite().all()
        assert whole.count_nonzero() == part.count_nonzero()


@pytest.mark.parametrize("epsilon", [0.1, 0.003])
def test_windows_without_source_or_target_are_zero_and_disturb_no_other(epsilon):
    cost, source, target = problem(4, 9, 4, dtype=torch.float32)
    source[0], target[1], source[2], target[2] = 0, 0, 0, 0
    cost[:3] = math.nan
    plan, *gradients = plan_and_gradients(sinkhorn, (cost, source, target), epsilon=epsilon)
    assert not plan[:3].any()
    assert not any(gradient[:3].any() for gradient in gradients)
    torch.testing.assert_close(plan[3], sinkhorn(cost[3], source[3], target[3], epsilon), rtol=1e-6, atol=0)
    assert gradients[0][3].any()


def test_a_nan_stays_in_its_window():
    for index in range(3):
        tensors = problem(3, 6, 4)
        expected = sinkhorn(*tensors)
        tensors[index][1].flatten()[0] = math.nan
        plan = sinkhorn(*tensors)
        assert plan[1].isnan().any()
        torch.testing.assert_close(plan[[0, 2]], expected[[0, 2]], rtol=1e-12, atol=0)


def test_only_the_proportions_of_the_source_matter():
    cost, source, target = problem(2, 10, 4)
    expected = plan_and_gradients(naive_sinkhorn, (cost, 20 * source, 0.3 * target))
    actual = plan_and_gradients(sinkhorn, (cost, 20 * source, 0.3 * target))
    assert_all_close(actual, expected, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(actual[0], 0.3 * sinkhorn(cost, source, target), rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_computed_in_float32(dtype):
    tensors = problem(2, 128, 32, dtype=dtype)
    actual = plan_and_gradients(sinkhorn, tensors)
    assert {tensor.dtype for tensor in actual} == {dtype}
    assert torch.equal(sinkhorn(*tensors), sinkhorn(*[tensor.float() for tensor in tensors]).to(dtype))
    mixed = sinkhorn(tensors[0], tensors[1].float(), tensors[2].double())
    assert torch.equal(mixed, sinkhorn(*[tensor.double() for tensor in tensors]).to(dtype))


def test_autocast_changes_nothing():
    tensors = problem(2, 32, 8, dtype=torch.float32)
    expected = plan_and_gradients(sinkhorn, tensors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = plan_and_gradients(sinkhorn, tensors)
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)


def test_shapes_strides_and_blocks_change_nothing(monkeypatch):
    tensors = problem(2, 3, 10, 4)
    expected = plan_and_gradients(sinkhorn, tensors)
    strided = [tensors[0].mT.contiguous().mT, *[mass.flip(-1).contiguous().flip(-1) for mass in tensors[1:]]]
    monkeypatch.setattr(optimal_transport, "_BLOCK_ENTRIES", 90)  # two windows, then the rest of each
    for one, other in zip(plan_and_gradients(sinkhorn, strided), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
    alone = sinkhorn(tensors[0][1, 2], tensors[1][1, 2], tensors[2][1, 2])
    torch.testing.assert_close(alone, expected[0][1, 2], rtol=1e-12, atol=0)
    # Arguments are left as they came.
    assert all(torch.equal(one, other) for one, other in zip(tensors, problem(2, 3, 10, 4), strict=True))


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 0, 3), (2, 4, 0), (0, 0)])
def test_empty_problems_have_empty_plans(shape):
    cost = torch.zeros(shape, requires_grad=True)
    plan = sinkhorn(cost, torch.zeros(shape[:-1]), torch.zeros(shape[:-2] + shape[-1:]))
    assert plan.shape == shape
    plan.sum().backward()


@pytest.mark.parametrize("epsilon", [0.1, 0.001])
def test_the_backward_pass_keeps_one_vector_for_each_iteration(epsilon):
    num_windows, num_senders, num_receivers = 3, 128, 32

    def saved_numbers(num_iterations):
        tensors = [t.requires_grad_() for t in problem(num_windows, num_senders, num_receivers, dtype=torch.float32)]
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.untyped_storage().nbytes()) or t, id):
            sinkhorn(*tensors, epsilon, num_iterations)
        return sum(saved) / 4 / num_windows

    arguments = num_senders * num_receivers + num_senders + num_receivers
    for num_iterations in (1, 30, 60):
        assert saved_numbers(num_iterations) <= arguments + (num_iterations + 1) * num_receivers


def test_a_second_derivative_is_refused():
    tensors = [tensor.requires_grad_() for tensor in problem(2, 4, 3)]
    (gradient,) = torch.autograd.grad(sinkhorn(*tensors).square().sum(), tensors[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_gives_the_same_without_gradients():
    tensors = problem(2, 10, 4)
    with torch.no_grad():
        plan = sinkhorn(*tensors)
    assert torch.equal(plan, plan_and_gradients(sinkhorn, tensors)[0])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"cost": torch.zeros(3)}, ValueError, r"cost must have shape .* got \(3,\)"),
        ({"source_mass": torch.ones(2, 3)}, ValueError, r"source_mass must have shape \(2, 4\) .* got \(2, 3\)"),
        ({"target_mass": torch.ones(3)}, ValueError, r"target_mass must have shape \(2, 3\) .* got \(3,\)"),
        ({"source_mass": -torch.ones(2, 4)}, ValueError, "source_mass must be zero or more everywhere, got -1.0"),
        ({"target_mass": torch.full((2, 3), -0.5)}, ValueError, "target_mass must be zero or more .* got -0.5"),
        ({"target_mass": torch.ones(2, 3, device="meta")}, ValueError, "target_mass must be on cpu .* got meta"),
        ({"cost": torch.zeros(2, 4, 3).long()}, TypeError, "cost must be a tensor of float16.* got torch.int64"),
        ({"source_mass": [1.0]}, TypeError, "source_mass must be a tensor of float16.* got list"),
        ({"epsilon": 0.0}, ValueError, "epsilon must be above 0 and finite, got 0.0"),
        ({"epsilon": -1}, ValueError, "epsilon must be above 0 and finite, got -1"),
        ({"epsilon": math.nan}, ValueError, "epsilon must be above 0 and finite, got nan"),
        ({"epsilon": "0.1"}, TypeError, "epsilon must be a number, got '0.1'"),
        ({"num_iterations": 0}, ValueError, "num_iterations must be 1 or more, got 0"),
        ({"num_iterations": 3.0}, TypeError, "num_iterations must be an int, got 3.0"),
    ],
)
def test_refuses_wrong_arguments(changes, error, message):
    arguments = {"cost": torch.zeros(2, 4, 3), "source_mass": torch.ones(2, 4), "target_mass": torch.ones(2, 3)}
    with pytest.raises(error, match=message):
        sinkhorn(**{**arguments, **changes})


def test_remote_code_carries_the_kernels_and_needs_torch_alone():
    path = Path(optimal_transport.__file__)
    files = remote_code.collect(path)
    assert sorted(files) == ["optimal_transport.py", "optimal_transport_triton.py"]
    for file in files.values():
        assert set(get_imports(file)) <= set(sys.stdlib_module_names) | {"torch"}
        ast.parse(remote_code.flatten(file))


def in_interpreter(code: str) -> None:
    """Run code in a process whose Triton kernels are interpreted on the CPU."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


KERNEL_CHECK = """
import math
import torch
from context_compressors.modeling import optimal_transport as reference
from context_compressors.modeling.optimal_transport_triton import fits

assert fits(128, 64) and fits(100, 33) and not fits(128, 65)
for num_windows, num_senders, num_receivers, epsilon, num_iterations in {cases}:
    generator = torch.Generator().manual_seed(0)
    shape = num_windows, num_senders, num_receivers
    cost = 2 * torch.rand(shape, generator=generator)
    source = torch.rand(shape[:2], generator=generator) + 0.1
    target = torch.rand(shape[::2], generator=generator) + 0.1
    if {masked}:
        source[0, 5:], target[1, 2:], source[2], target[3] = 0, 0, 0, 0
        cost[0, 5:], cost[2] = math.nan, math.inf
    weights = torch.randn(shape, generator=generator)

    settings = reference.Settings(epsilon, num_iterations)

    def run(solver, dtype):
        leaves = [tensor.to(dtype).requires_grad_() for tensor in (cost, source, target)]
        plan = reference._Sinkhorn.apply(*leaves, settings, solver)
        kept = plan.detach()
        again, _ = solver.solve(*[leaf.detach() for leaf in leaves], settings, False)
        assert torch.equal(kept, again)
        return kept, *torch.autograd.grad((plan * weights.to(dtype)).sum(), leaves)

    expected = run(reference._TORCH_SOLVER, torch.float64)
    for one, other in zip(run(reference._fused_solver(), torch.float32), expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0, atol=2e-5 * float(other.abs().max()) + 2e-7 / epsilon)
"""


@needs_triton
@pytest.mark.slow
def test_the_kernels_equal_the_tensor_functions():
    cases = [(2, 13, 5, 0.1, 30), (1, 128, 32, 0.1, 30), (2, 5, 13, 0.1, 1), (1, 1, 4, 0.1, 2), (1, 4, 1, 0.1, 2)]
    in_interpreter(KERNEL_CHECK.format(cases=[*cases, (2, 13, 5, 0.01, 30), (2, 13, 5, 0.003, 1)], masked=False))


@needs_triton
@pytest.mark.slow
def test_the_kernels_mask_zero_masses():
    in_interpreter(KERNEL_CHECK.format(cases=[(5, 13, 5, 0.1, 6), (5, 13, 5, 0.01, 6)], masked=True))


COMPILATION = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton
from context_compressors.modeling import optimal_transport_triton as kernels

for kernel in (kernels._solve_kernel, kernels._gradients_kernel):
    options = kernels._launch_options(128, 32)
    warps = options.pop("num_warps")
    constants = {**options, **({"keep_history": True} if "keep_history" in kernel.arg_names else {})}
    kinds = {"strength": "fp32", **{name: "i32" for name in kernel.arg_names if name.startswith("num_")}}
    kinds.update({name: "constexpr" for name in constants})
    signature = {name: kinds.get(name, "*fp32") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    assert ".entry" in compiled.asm["ptx"]
    assert compiled.metadata.shared < 48 * 1024
"""


@needs_triton
@pytest.mark.slow
def test_the_kernels_compile_for_a_gpu(tmp_path: Path):
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", COMPILATION], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("with_kernels", [pytest.param(True, marks=needs_triton), False])
@pytest.mark.parametrize("epsilon", [0.1, 0.003])
def test_a_gpu_gives_the_same_without_waiting(epsilon, with_kernels, monkeypatch):
    if not with_kernels:
        monkeypatch.setattr(optimal_transport, "_has_triton", lambda: False)
    tensors = problem(5, 128, 32, dtype=torch.float32)
    tensors[1][0, 50:], tensors[2][1, 20:], tensors[1][2], tensors[0][0, 50:] = 0, 0, 0, math.nan
    expected = plan_and_gradients(sinkhorn, tensors, epsilon=epsilon)
    on_gpu = [tensor.cuda() for tensor in tensors]
    assert optimal_transport._is_for_fused_solver(on_gpu[0]) == with_kernels
    actual = plan_and_gradients(lambda *t, **a: sinkhorn(*t, **a).cpu(), on_gpu, epsilon=epsilon)
    assert_all_close([tensor.cpu() for tensor in actual], expected, rtol=0, atol=1e-4)
    leaves = [tensor.requires_grad_() for tensor in on_gpu]
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan = sinkhorn(*leaves, epsilon=epsilon)
        torch.autograd.grad(plan, leaves, torch.ones_like(plan))
    finally:
        torch.cuda.set_sync_debug_mode("default")
