# SPDX-License-Identifier: Apache-2.0
"""`context-compressors demo`, which `make demo` runs in a clone."""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path

from .command import argument, command, positive_int

_EXAMPLES = """
context-compressors demo
context-compressors demo --checkpoint my-compressor --output outputs/demo --steps 50
"""


@command(
    "demo",
    "Answer questions about five pages from their text and from a few vectors; fine-tune; save.",
    argument("--checkpoint", metavar="FOLDER", help="default: the one in the clone's checkpoints/"),
    argument("--output", default="outputs/demo", metavar="FOLDER", help="where results go (default: %(default)s)"),
    argument("--steps", type=positive_int, default=20, metavar="N", help="fine-tuning steps (default: %(default)s)"),
    examples=_EXAMPLES,
)
def main(arguments: argparse.Namespace) -> None:
    """Run `context-compressors demo`.

    Raises:
        ValueError: there is no checkpoint, or it answers from no memories.
        OSError: its base cannot be had.
    """
    from transformers.utils import logging

    from ..demo import CHECKPOINT, run

    start = time.perf_counter()
    logging.set_verbosity_error()
    with warnings.catch_warnings():
        # Notices of the libraries to their own developers would hide what the demo shows.
        warnings.simplefilter("ignore", FutureWarning)
        run(
            Path(arguments.checkpoint or CHECKPOINT).expanduser(), Path(arguments.output).expanduser(), arguments.steps
        )
    print(f"done in {time.perf_counter() - start:.0f} s")
