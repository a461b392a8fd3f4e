# SPDX-License-Identifier: Apache-2.0
"""`context-compressors demo`: the demo that `make demo` runs in a clone."""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Sequence

from .command import argument, command, positive_int

_EXAMPLES = """
context-compressors demo --pages 1
context-compressors demo my-compressor --port 7860
"""


@command(
    "demo",
    "Answer questions about five pages in the terminal, from their text and from memories of it. With a checkpoint as "
    "its first argument, open the page of `context-compressors serve`, whose options it takes.",
    argument(
        "--pages",
        type=positive_int,
        metavar="N",
        help="only the N shortest of the five pages, for a slow machine (default: all)",
    ),
    examples=_EXAMPLES,
)
def terminal(arguments: argparse.Namespace) -> None:
    """Run `context-compressors demo`."""
    from transformers.utils import logging

    from ..demo import run

    logging.set_verbosity_error()
    with warnings.catch_warnings():
        # Notices of the libraries to their own developers would hide what the demo shows.
        warnings.simplefilter("ignore", FutureWarning)
        start = time.perf_counter()
        run(num_pages=arguments.pages)
        print(f"done in {time.perf_counter() - start:.0f} s")


def main(argv: Sequence[str]) -> int:
    """Run the demo in the terminal, or serve the page of the checkpoint that the first argument names."""
    if argv and not argv[0].startswith("-"):
        from .serve import main as serve

        return serve(argv)
    return terminal(argv)
