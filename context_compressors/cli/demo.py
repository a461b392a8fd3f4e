# SPDX-License-Identifier: Apache-2.0
"""`context-compressors demo [CHECKPOINT]`: the page of a checkpoint, or the demo that `make demo` runs in a clone."""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path

from .command import DEVICE, DTYPE, argument, command, positive_int

_EXAMPLES = """
context-compressors demo my-compressor
context-compressors demo my-compressor --port 8000 --max-tokens 2048
context-compressors demo --pages 1
"""


@command(
    "demo",
    "Open a page to try a checkpoint on. Without one, answer questions about five pages in the terminal, from their "
    "text and from memories of it.",
    argument("model", nargs="?", metavar="CHECKPOINT", help="Hub id or folder of a compressor, for the page"),
    argument("--host", default="127.0.0.1", help="of the page (default: %(default)s, this machine alone)"),
    argument("--port", type=positive_int, metavar="N", help="of the page (default: the first free one from 7860 on)"),
    argument(
        "--max-tokens",
        type=positive_int,
        default=4096,
        metavar="N",
        help="of the page: longest document (default: %(default)s)",
    ),
    DEVICE,
    DTYPE,
    argument(
        "--pages",
        type=positive_int,
        metavar="N",
        help="without CHECKPOINT: only the N shortest of the five pages, for a slow machine (default: all)",
    ),
    examples=_EXAMPLES,
)
def main(arguments: argparse.Namespace) -> None:
    """Run `context-compressors demo`."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    with warnings.catch_warnings():
        # Notices of the libraries to their own developers would hide what the demo shows.
        warnings.simplefilter("ignore", FutureWarning)
        if arguments.model is not None:
            _serve_page(arguments)
            return
        from ..demo import run

        start = time.perf_counter()
        run(num_pages=arguments.pages)
        print(f"done in {time.perf_counter() - start:.0f} s")


def _serve_page(arguments: argparse.Namespace) -> None:
    from ..demo import fastest_dtype, read_pages
    from ..serving.page import Example, Page, import_gradio
    from ..serving.page_answers import PageModel
    from .loading import load_compressor

    # Before the model, which takes its time.
    import_gradio()
    if arguments.port is not None and arguments.port >= 2**16:
        raise ValueError(f"--port must be at most {2**16 - 1:,}, got {arguments.port}")
    dtype = arguments.dtype
    if dtype == "auto" and arguments.device in ("auto", "cpu"):
        import torch

        if not torch.accelerator.is_available():
            dtype = str(fastest_dtype("cpu")).removeprefix("torch.")
    print(f"loading {arguments.model}", flush=True)
    model, tokenizer = load_compressor(arguments.model, device=arguments.device, dtype=dtype)
    pipe, config = model.question_answering(tokenizer), model.config
    reader = PageModel(pipe, arguments.max_tokens)
    facts = [
        f"on {config.base_model_name_or_path}" if config.base_model_name_or_path else config.model_type,
        f"{model.num_parameters() / 1e6:,.0f}M parameters",
        f"{str(model.dtype).removeprefix('torch.')} on {pipe.device}",
    ]
    examples = [Example(page.title, page.text, page.questions, page.answers) for page in read_pages()]
    page = Page(reader, Path(arguments.model).name, facts, examples)
    print(f"open {page.open(arguments.host, arguments.port)} in a browser; Ctrl-C ends it", flush=True)
    page.blocks.block_thread()
