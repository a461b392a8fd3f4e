# SPDX-License-Identifier: Apache-2.0
"""Time and peak memory of the optimal transport, beside plain autograd through its iterations and beside POT.

    python -m benchmarks.sinkhorn.measure --windows 64 1024 --receivers 4 16 64

All of them run the same iterations in float32 on the same costs, those of a cosine, and take turns, so that whatever
else the machine does hits all. "autograd" is the iterations as anybody would write them, in logarithms; "pot" is
`ot.solve_batch` with `grad="autodiff"`. The goal on a CPU is half of POT's time or less, forward and with the backward
pass. Memory is what a call holds at its peak beyond its arguments.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import ot
import torch
from torch import Tensor

from benchmarks.common.tools import (
    add_place_arguments,
    device_of,
    peak_bytes,
    positive_int,
    save_and_report,
    script_parser,
    seconds,
    tells_errors,
)
from context_compressors.modeling.parts.optimal_transport import sinkhorn
from context_compressors.reporting.tables import markdown_table

PASSES = ("forward", "forward and backward")
# Tokens of a window, entropic strength and iterations.
SENDERS, SETTINGS = 128, (0.1, 30)


def by_autograd(cost: Tensor, source_mass: Tensor, target_mass: Tensor, epsilon: float, num_iterations: int) -> Tensor:
    """The iterations in logarithms, every intermediate value kept for autograd; the arguments are `sinkhorn`'s."""
    scores, log_source, log_target = -cost / epsilon, source_mass.log(), target_mass.log()
    g = torch.zeros_like(target_mass)
    for _ in range(num_iterations):
        f = log_source - torch.logsumexp(scores + g[:, None, :], dim=2)
        g = log_target - torch.logsumexp(scores + f[:, :, None], dim=1)
    return torch.exp(scores + f[:, :, None] + g[:, None, :])


def by_pot(cost: Tensor, source_mass: Tensor, target_mass: Tensor, epsilon: float, num_iterations: int) -> Tensor:
    """POT's own, with no early stop; the arguments are `sinkhorn`'s."""
    arguments = {"max_iter": num_iterations, "tol": 0.0, "method": "log_sinkhorn", "grad": "autodiff"}
    return ot.solve_batch(cost, reg=epsilon, a=source_mass, b=target_mass, **arguments).plan


IMPLEMENTATIONS = {"sinkhorn": sinkhorn, "autograd": by_autograd, "pot": by_pot}


def windows(num_windows: int, num_senders: int, num_receivers: int, device: torch.device) -> list[Tensor]:
    """Random costs between 0 and 2, source masses by a softmax, and uniform target masses."""
    generator = torch.Generator().manual_seed(0)
    cost = 2 * torch.rand(num_windows, num_senders, num_receivers, generator=generator)
    source = torch.randn(num_windows, num_senders, generator=generator).softmax(dim=1)
    target = torch.full((num_windows, num_receivers), 1 / num_receivers)
    return [tensor.to(device) for tensor in (cost, source, target)]


def call_of(
    implementation: Callable[..., Tensor], tensors: Sequence[Tensor], settings: tuple[float, int], with_backward: bool
) -> Callable[[], Any]:
    """One call, with gradients of all three arguments where they are asked for."""
    if not with_backward:
        return torch.no_grad()(lambda: implementation(*tensors, *settings))
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    weights = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(1)).to(tensors[0].device)
    return lambda: torch.autograd.grad(implementation(*leaves, *settings), leaves, weights)


def measure(arguments: argparse.Namespace, num_windows: int, num_receivers: int, which: str) -> dict[str, Any]:
    """One row of the result: seconds of every turn and peak memory, of each implementation."""
    device = device_of(arguments)
    tensors = windows(num_windows, SENDERS, num_receivers, device)
    calls = {
        name: call_of(implementation, tensors, SETTINGS, which != "forward")
        for name, implementation in IMPLEMENTATIONS.items()
    }
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(arguments.repeats):
        for name, call in calls.items():
            times[name].append(seconds(call, device))
    return {
        "num_windows": num_windows,
        "num_senders": SENDERS,
        "num_receivers": num_receivers,
        "pass": which,
        "peak_bytes": {name: peak_bytes(call, device) for name, call in calls.items()},
        "seconds": times,
    }


def times_as_fast(row: dict[str, Any]) -> dict[str, float]:
    """Return the medians of the other solvers' times over that of `sinkhorn`."""
    medians = {name: median(values) for name, values in row["seconds"].items()}
    return {name: medians[name] / medians["sinkhorn"] for name in medians if name != "sinkhorn"}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a table."""
    header = ["windows", "T", "K", "pass", *[f"{name} ms" for name in IMPLEMENTATIONS]]
    header += ["faster than autograd", "faster than pot", *[f"{name} MiB" for name in IMPLEMENTATIONS]]
    body = [
        [
            row["num_windows"],
            row["num_senders"],
            row["num_receivers"],
            row["pass"],
            *[f"{1e3 * median(row['seconds'][name]):.2f}" for name in IMPLEMENTATIONS],
            *[f"{times_as_fast(row)[name]:.1f} times" for name in ("autograd", "pot")],
            *[f"{row['peak_bytes'][name] / 2**20:.1f}" for name in IMPLEMENTATIONS],
        ]
        for row in rows
    ]
    return markdown_table(header, body)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = script_parser(__doc__)
    add = parser.add_argument
    add("--windows", nargs="+", type=positive_int, default=[64], metavar="B", help="default: 64")
    add("--receivers", nargs="+", type=positive_int, default=[32], metavar="K", help="slots of a window (default: 32)")
    add("--repeats", type=positive_int, default=7, metavar="N", help="turns of each (default: 7)")
    add_place_arguments(parser)
    return parser


@tells_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    arguments = build_parser().parse_args(argv)
    rows = []
    for num_windows in arguments.windows:
        for num_receivers in arguments.receivers:
            for which in PASSES:
                row = measure(arguments, num_windows, num_receivers, which)
                rows.append(row)
                ratios = ", ".join(f"{value:.1f} times as fast as {k}" for k, value in times_as_fast(row).items())
                print(f"{num_windows} windows, K = {num_receivers}, {which}: {ratios}")
    save_and_report(__file__, arguments, rows, table(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
