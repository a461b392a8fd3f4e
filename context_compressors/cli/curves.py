# SPDX-License-Identifier: Apache-2.0
"""`context-compressors curves SOURCE ... --output PNG`."""

from __future__ import annotations

import argparse
import math

from ..evaluation.curves import common_loss, read_curves, table
from .command import OVERWRITE, argument, check_outputs, command

_EXAMPLES = """
# Two runs, by the losses in their folders' logs, and how soon each is at a loss of 2.5:
context-compressors curves outputs/icae outputs/mean-pooling --loss 2.5 --output curves.png

# One value of joint pretraining under names of one's own; runs of one name are seeds, and their range is drawn:
context-compressors curves default=outputs/icae-default enhanced=outputs/icae-1 enhanced=outputs/icae-2 \\
    --metric loss_reconstruction_ratio_5 --output curves.png
"""


@command(
    "curves",
    "Draw a value of training logs by step, and tell how soon each run reaches a loss.",
    argument(
        "sources",
        nargs="+",
        metavar="SOURCE",
        help="[NAME=]folder of a run, or its log; the first is compared with, those of one name are seeds",
    ),
    argument("--output", required=True, metavar="PNG", help="the picture"),
    OVERWRITE,
    argument("--metric", default="loss", help="value of the logs' entries (default: loss)"),
    argument("--loss", type=float, metavar="X", help="loss to reach (default: the lowest that all runs reach)"),
    examples=_EXAMPLES,
)
def main(arguments: argparse.Namespace) -> None:
    """Run `context-compressors curves`.

    Raises:
        ValueError: a source that holds no such log, two runs of one name that was not given to them, or a loss that
            is not finite.
    """
    if arguments.loss is not None and not math.isfinite(arguments.loss):
        raise ValueError(f"--loss must be a finite number, got {arguments.loss}")
    from ..evaluation.plots import plot_curves

    check_outputs((arguments.output,), arguments.overwrite)
    curves = read_curves(arguments.sources, arguments.metric)
    loss = common_loss(curves) if arguments.loss is None else arguments.loss
    path = plot_curves(curves, arguments.metric, arguments.output, loss)
    print(f"{table(curves, loss)}\n\nwrote {path}")
