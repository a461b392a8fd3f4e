# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the optimal transport at toy size: its result file, its refusals, and that all compute the same."""

import json
from pathlib import Path

import pytest
import torch


@pytest.fixture
def benchmark(script):
    return script("sinkhorn.measure")


def test_writes_a_row_for_each_size_and_pass(benchmark, tmp_path: Path, capsys: pytest.CaptureFixture):
    output = tmp_path / "result.json"
    arguments = ["--windows", "1", "2", "--receivers", "2", "3", "--repeats", "2"]
    assert benchmark.main([*arguments, "--device", "cpu", "--output", str(output)]) == 0
    content = json.loads(output.read_text())
    assert (content["benchmark"], content["device"]) == ("sinkhorn", "cpu")
    sizes = [(row["num_windows"], row["num_receivers"], row["pass"]) for row in content["rows"]]
    assert sizes == [(b, k, which) for b in (1, 2) for k in (2, 3) for which in ("forward", "forward and backward")]
    for row in content["rows"]:
        assert {len(values) for values in row["seconds"].values()} == {2}
        assert all(value > 0 for value in row["peak_bytes"].values())
    assert "faster than pot" in capsys.readouterr().out
    seconds = {"sinkhorn": [1.0, 2.0, 9.0], "autograd": [5.0, 5.0, 5.0], "pot": [3.0, 1.0, 1.0]}
    assert benchmark.times_as_fast({"seconds": seconds}) == {"autograd": 2.5, "pot": 0.5}


def test_all_implementations_compute_the_same(benchmark):
    tensors = benchmark.windows(2, 16, 4, torch.device("cpu"))
    all_of_them = benchmark.IMPLEMENTATIONS.values()
    plans = [benchmark.call_of(one, tensors, (0.1, 30), False)() for one in all_of_them]
    gradients = [benchmark.call_of(one, tensors, (0.1, 30), True)() for one in all_of_them]
    for plan, others in zip(plans[1:], gradients[1:], strict=True):
        torch.testing.assert_close(plan, plans[0], rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(others, gradients[0], rtol=1e-3, atol=1e-4)
    assert gradients[0][0].abs().max() > 1e-3
