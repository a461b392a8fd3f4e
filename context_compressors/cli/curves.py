# SPDX-License-Identifier: Apache-2.0
"""`context-compressors curves SOURCE ... --output PNG`."""

from __future__ import annotations

import argparse

from ..configuration.nearest_names import check_choice
from ..evaluation.curves import BENCHMARK_METRIC, RUN_METRIC, common_loss, default_metric, read_curves, table
from .command import argument, command

_EXAMPLES = """
# Two runs, by the losses in their folders' logs, and how soon each is at a loss of 2.5:
context-compressors curves outputs/icae outputs/mean-pooling --loss 2.5 --output curves.png

# One value of two runs of joint pretraining, under names of their own:
context-compressors curves default=outputs/icae-default enhanced=outputs/icae-enhanced --output curves.png \\
    --metric loss_reconstruction_ratio_5

# Next-token losses of two methods, held-out, with their spread over seeds, by the rows of the small-scale benchmark:
context-compressors curves benchmarks/small_scale/methods.json --metric continuation_loss --output curves.png \\
    --runs "mean_pooling, ratio 2 4 5" "comprexit, gate_size=64, metric_size=64, ratio 2 4 5"
"""


@command(
    "curves",
    "Draw a value of training logs by step, and tell how soon each run reaches a loss.",
    argument(
        "sources", nargs="+", metavar="SOURCE", help="[NAME=]folder of a run, its log, or small-scale result file"
    ),
    argument("--output", required=True, metavar="PNG", help="the picture"),
    argument(
        "--metric", help=f"value of the logs' entries (default: {RUN_METRIC}, of a benchmark {BENCHMARK_METRIC})"
    ),
    argument("--loss", type=float, metavar="X", help="loss to reach (default: the lowest that all runs reach)"),
    argument(
        "--runs",
        nargs="+",
        metavar="NAME",
        help="only these, in this order; the first is compared with (default: all)",
    ),
    examples=_EXAMPLES,
)
def main(arguments: argparse.Namespace) -> None:
    """Run `context-compressors curves`.

    Raises:
        ValueError: a source that holds no such log, runs and benchmarks without a metric, two runs of one name, or a
            run that is not there.
    """
    from ..evaluation.plots import plot_curves

    metric = arguments.metric or default_metric(arguments.sources)
    read = [curve for source in arguments.sources for curve in read_curves(source, metric)]
    curves = {curve.name: curve for curve in read}
    if len(curves) < len(read):
        raise ValueError(f"two runs have one name among {[curve.name for curve in read]}: give names as NAME=SOURCE")
    for name in arguments.runs or ():
        check_choice("run", name, curves)
    chosen = [curves[name] for name in arguments.runs or curves]
    loss = common_loss(chosen) if arguments.loss is None else arguments.loss
    path = plot_curves(chosen, metric, arguments.output, loss)
    print(f"{table(chosen, loss)}\n\nwrote {path}")
