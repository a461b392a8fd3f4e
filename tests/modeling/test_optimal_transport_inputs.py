# SPDX-License-Identifier: Apache-2.0
"""Sinkhorn on all that it may be given: extreme costs, masses of zero, types, shapes; what is refused."""

import math

import pytest
import torch
from sinkhorn_problems import assert_all_close, plan_and_gradients, problem

from context_compressors.modeling.parts import optimal_transport
from context_compressors.modeling.parts.optimal_transport import sinkhorn


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


def test_the_backward_pass_keeps_one_vector_for_each_iteration():
    num_windows, num_senders, num_receivers = 3, 128, 32

    def saved_numbers(num_iterations):
        tensors = [t.requires_grad_() for t in problem(num_windows, num_senders, num_receivers, dtype=torch.float32)]
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.untyped_storage().nbytes()) or t, id):
            sinkhorn(*tensors, 0.1, num_iterations)
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
