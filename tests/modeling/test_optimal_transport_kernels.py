# SPDX-License-Identifier: Apache-2.0
"""Sinkhorn's Triton kernels in the interpreter, compiled, and on a GPU."""

import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sinkhorn_problems import assert_all_close, plan_and_gradients, problem
from transformers.dynamic_module_utils import get_imports

from context_compressors import ComprExITConfig, ComprExITForCausalLM
from context_compressors.modeling.checkpoint.remote_code import write_code
from context_compressors.modeling.parts import optimal_transport
from context_compressors.modeling.parts.optimal_transport import sinkhorn

has_triton = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not has_triton, reason="Triton is not installed")


def test_remote_code_carries_the_kernels_and_needs_no_triton(tmp_path: Path):
    write_code(ComprExITForCausalLM, ComprExITConfig, tmp_path)
    assert (tmp_path / "optimal_transport_triton.py").is_file()
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


@needs_triton
@pytest.mark.slow
def test_the_kernels_equal_the_tensor_functions():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", KERNEL_CHECK], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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
def test_the_kernels_compile_for_a_gpu(tmp_path: Path):
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", COMPILATION], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("with_kernels", [pytest.param(True, marks=needs_triton), False])
def test_a_gpu_gives_the_same_without_waiting(with_kernels, monkeypatch):
    if not with_kernels:
        monkeypatch.setattr(optimal_transport, "_has_triton", lambda: False)
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
