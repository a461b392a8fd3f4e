# SPDX-License-Identifier: Apache-2.0
"""Sinkhorn beside naive loops of ComprExIT's equation 11, and its Triton kernels; POT: tests/benchmarks."""

import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.dynamic_module_utils import get_imports

from context_compressors import ComprExITConfig, ComprExITForCausalLM
from context_compressors.modeling.checkpoint.remote_code import write_code
from context_compressors.modeling.parts import optimal_transport
from context_compressors.modeling.parts.optimal_transport import sinkhorn


def problem(*shape, seed=0, dtype=torch.float64):
    """Costs as those of a cosine, and masses that sum to 1."""
    *batch, num_senders, num_receivers = shape
    generator = torch.Generator().manual_seed(seed)
    cost = torch.rand(*shape, generator=generator, dtype=torch.float64) * 2
    source = torch.rand(*batch, num_senders, generator=generator, dtype=torch.float64) + 0.05
    target = torch.rand(*batch, num_receivers, generator=generator, dtype=torch.float64) + 0.05
    masses = source / source.sum(-1, keepdim=True), target / target.sum(-1, keepdim=True)
    return cost.to(dtype), masses[0].to(dtype), masses[1].to(dtype)


def plan_and_gradients(function, tensors, **arguments):
    """A plan, and the gradients of a weighted sum of it, with weights that depend on the shape alone."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    # Of no masses at all, a naive plan depends on nothing.
    plan = function(*leaves, **arguments)
    plan = plan + sum(leaf[..., :0].sum() for leaf in leaves).to(plan.device)
    weights = torch.randn(plan.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return plan.detach(), *torch.autograd.grad((plan * weights.to(plan.dtype)).sum(), leaves)


def assert_all_close(actual, expected, rtol, atol):
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other.to(one.dtype), rtol=rtol, atol=atol * float(other.abs().max()))


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


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    batch=st.lists(st.integers(1, 3), max_size=2),
    num_senders=st.integers(1, 7),
    num_receivers=st.integers(1, 7),
    epsilon=st.sampled_from([1.0, 0.1, 0.01]),
    num_iterations=st.sampled_from([1, 4]),
    share_of_zeros=st.sampled_from([0.0, 0.3, 0.7]),
    seed=st.integers(0, 2**16),
)
def test_equals_the_naive_loops_for_any_shape_and_mask(
    batch, num_senders, num_receivers, epsilon, num_iterations, share_of_zeros, seed
):
    cost, *masses = problem(*batch, num_senders, num_receivers, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    masses = [mass * (torch.rand(mass.shape, generator=generator) >= share_of_zeros) for mass in masses]
    tensors = [cost, *masses]
    plan = sinkhorn(*tensors, epsilon=epsilon, num_iterations=num_iterations)
    flat = [tensor.reshape(-1, *tensor.shape[len(batch) :]) for tensor in tensors]
    found, expected = (
        plan_and_gradients(function, flat, epsilon=epsilon, num_iterations=num_iterations)
        for function in (sinkhorn, naive_sinkhorn)
    )
    torch.testing.assert_close(plan, expected[0].reshape(cost.shape), rtol=1e-8, atol=1e-12)
    # Without a mass, any gradient that is finite will do.
    has_mass = [expected[0] > 0, flat[1] > 0, flat[2] > 0]
    for one, other, mask in zip(found[1:], expected[1:], has_mass, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one[mask], other[mask], rtol=1e-6, atol=1e-8 / epsilon)


@pytest.mark.parametrize("scale", [1e4, 1e37])
def test_extreme_costs_give_finite_plans_and_gradients(scale):
    cost, source, target = problem(3, 20, 6, dtype=torch.float32)
    for values in (cost * scale, (cost - 1) * scale, (cost > 1) * torch.tensor(scale)):
        plan, *gradients = plan_and_gradients(sinkhorn, (values, source, target), epsilon=1e-3)
        torch.testing.assert_close(plan.sum(-2), target, rtol=1e-5, atol=0)
        assert (plan >= 0).all()
        assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_computed_in_float32(dtype):
    tensors = problem(2, 128, 32, dtype=dtype)
    actual = plan_and_gradients(sinkhorn, tensors)
    assert {tensor.dtype for tensor in actual} == {dtype}
    assert torch.equal(sinkhorn(*tensors), sinkhorn(*[tensor.float() for tensor in tensors]).to(dtype))
    mixed = sinkhorn(tensors[0], tensors[1].float(), tensors[2].double())
    assert torch.equal(mixed, sinkhorn(*[tensor.double() for tensor in tensors]).to(dtype))


has_triton = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not has_triton, reason="Triton is not installed")


@pytest.mark.slow
def test_remote_code_carries_the_kernels_and_needs_no_triton(tmp_path: Path):
    write_code(ComprExITForCausalLM, ComprExITConfig, tmp_path)
    assert "_solve_kernel" in (tmp_path / "compressor_base.py").read_text()
    assert all("triton" not in get_imports(file) for file in tmp_path.iterdir())


KERNEL_CHECK = """
import math
import torch
from context_compressors.modeling.parts import optimal_transport as reference
from context_compressors.modeling.parts.optimal_transport_triton import fits, fused_gradients, fused_solve

assert fits(128, 64) and fits(100, 33) and not fits(128, 65)
CASES = [(2, 13, 5, 0.1, 30), (1, 128, 32, 0.1, 30), (2, 5, 13, 0.1, 1), (1, 4, 1, 0.07, 2), (5, 13, 5, 0.1, 6)]
for num_windows, num_senders, num_receivers, epsilon, num_iterations in CASES:
    generator = torch.Generator().manual_seed(0)
    shape = num_windows, num_senders, num_receivers
    cost = 2 * torch.rand(shape, generator=generator)
    source = torch.rand(shape[:2], generator=generator) + 0.1
    target = torch.rand(shape[::2], generator=generator) + 0.1
    if num_windows == 5:
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
    for one, other in zip(run(reference.Solver(fused_solve, fused_gradients), torch.float32), expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0, atol=2e-5 * float(other.abs().max()) + 2e-7 / epsilon)
"""


COMPILATION = """
import itertools
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton
from context_compressors.modeling.parts import optimal_transport_triton as kernels

shapes = [(128, 32), (128, 64)]
for kernel, shape in itertools.product((kernels._solve_kernel, kernels._gradients_kernel), shapes):
    options = kernels._launch_options(*shape)
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
@pytest.mark.parametrize(("code", "interpreted"), [(KERNEL_CHECK, "1"), (COMPILATION, "0")], ids=["run", "compile"])
def test_the_kernels_equal_the_tensor_functions_and_compile_for_a_gpu(code: str, interpreted: str, tmp_path: Path):
    environment = {**os.environ, "TRITON_INTERPRET": interpreted, "OMP_NUM_THREADS": "1"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("with_kernels", [pytest.param(True, marks=needs_triton), False])
def test_a_gpu_gives_the_same_without_waiting(with_kernels, monkeypatch):
    if not with_kernels:
        monkeypatch.setattr(optimal_transport, "fits", lambda *_: False)
    tensors = problem(5, 128, 32, dtype=torch.float32)
    tensors[1][0, 50:], tensors[2][1, 20:], tensors[1][2], tensors[0][0, 50:] = 0, 0, 0, math.nan
    expected = plan_and_gradients(sinkhorn, tensors, max_cost=2)
    on_gpu = [tensor.cuda() for tensor in tensors]
    assert (optimal_transport._solver_for(on_gpu[0]) is not optimal_transport._TORCH_SOLVER) == with_kernels
    actual = plan_and_gradients(lambda *t, **a: sinkhorn(*t, **a).cpu(), on_gpu, max_cost=2)
    assert_all_close([tensor.cpu() for tensor in actual], expected, rtol=0, atol=1e-4)
    leaves = [tensor.requires_grad_() for tensor in on_gpu]
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan = sinkhorn(*leaves, max_cost=2)
        torch.autograd.grad(plan, leaves, torch.ones_like(plan))
    finally:
        torch.cuda.set_sync_debug_mode("default")
