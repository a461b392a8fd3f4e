# SPDX-License-Identifier: Apache-2.0
"""`context-compressors demo [CHECKPOINT]`: the page of a checkpoint, or the demo that `make demo` runs in a clone."""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path

from .command import LOADING, REVISION, argument, command, positive_int

_PRINTED = {"checkpoint": None, "output": "outputs/demo", "steps": 20, "pages": None}
_PAGE = {"host": "127.0.0.1", "port": None, "max_tokens": 4096, "max_new_tokens": 64}

_EXAMPLES = """
context-compressors demo my-compressor
context-compressors demo my-compressor --port 8000 --max-tokens 2048
context-compressors demo
context-compressors demo --checkpoint my-compressor --output outputs/demo --steps 50
context-compressors demo --pages 1
"""


@command(
    "demo",
    "Open a page to try a checkpoint on. Without one, print a demo: answer questions about five pages from their text "
    "and from memories of it; fine-tune; save.",
    argument("model", nargs="?", metavar="CHECKPOINT", help="Hub id or folder of a compressor, for the page"),
    argument("--host", help=f"of the page: the address that is listened to (default: {_PAGE['host']})"),
    argument("--port", type=positive_int, metavar="N", help="of the page (default: the first free one from 7860 on)"),
    argument(
        "--max-tokens",
        type=positive_int,
        metavar="N",
        help=f"of the page: longest document (default: {_PAGE['max_tokens']})",
    ),
    argument(
        "--max-new-tokens",
        type=positive_int,
        metavar="N",
        help=f"of the page: longest answer (default: {_PAGE['max_new_tokens']})",
    ),
    REVISION,
    *LOADING,
    argument("--checkpoint", metavar="FOLDER", help="of the printed demo (default: the one in the clone)"),
    argument("--output", metavar="FOLDER", help=f"of the printed demo: results (default: {_PRINTED['output']})"),
    argument(
        "--steps",
        type=positive_int,
        metavar="N",
        help=f"of the printed demo: fine-tuning steps (default: {_PRINTED['steps']})",
    ),
    argument(
        "--pages",
        type=positive_int,
        metavar="N",
        help="of the printed demo: only the N shortest of its five pages, for a slow machine (default: all)",
    ),
    examples=_EXAMPLES,
)
def main(arguments: argparse.Namespace) -> None:
    """Run `context-compressors demo`.

    Raises:
        ValueError: there is no checkpoint, it answers from no memories, or an option belongs to the other demo.
        OSError: its base cannot be had, or the port is taken.
        ImportError: a page, and Gradio is not installed.
    """
    is_page = arguments.model is not None
    for name in _PRINTED if is_page else _PAGE:
        if getattr(arguments, name) is not None:
            wanted = "leave out CHECKPOINT" if is_page else "give CHECKPOINT as the first argument"
            which = "printed demo" if is_page else "page"
            raise ValueError(f"--{name.replace('_', '-')} is an option of the {which}: {wanted}")
    for name, default in (_PAGE if is_page else _PRINTED).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)
    from transformers.utils import logging

    logging.set_verbosity_error()
    with warnings.catch_warnings():
        # Notices of the libraries to their own developers would hide what the demo shows.
        warnings.simplefilter("ignore", FutureWarning)
        (_serve_page if is_page else _print_demo)(arguments)


def _print_demo(arguments: argparse.Namespace) -> None:
    from ..demo import CHECKPOINT, run

    start = time.perf_counter()
    checkpoint, output = arguments.checkpoint or CHECKPOINT, arguments.output
    run(Path(checkpoint).expanduser(), Path(output).expanduser(), arguments.steps, arguments.pages)
    print(f"done in {time.perf_counter() - start:.0f} s")


def _serve_page(arguments: argparse.Namespace) -> None:
    from ..demo import fastest_dtype, read_pages
    from ..serving.page import Example, Page, import_gradio
    from ..serving.page_answers import PageModel
    from .compress import load_pipeline

    # Before the model, which takes its time.
    import_gradio()
    if arguments.port is not None and arguments.port >= 2**16:
        raise ValueError(f"--port must be at most {2**16 - 1:,}, got {arguments.port}")
    if arguments.dtype == "auto" and arguments.device in ("auto", "cpu"):
        import torch

        if not torch.accelerator.is_available():
            arguments.dtype = str(fastest_dtype("cpu")).removeprefix("torch.")
    print(f"loading {arguments.model}", flush=True)
    pipe = load_pipeline(arguments)
    model, config = pipe.model, pipe.model.config
    reader = PageModel(pipe, arguments.max_tokens, arguments.max_new_tokens)
    reader.warm_up()
    facts = [
        f"on {config.base_model_name_or_path}" if config.base_model_name_or_path else config.model_type,
        f"{model.num_parameters() / 1e6:,.0f}M parameters",
        f"{str(model.dtype).removeprefix('torch.')} on {pipe.device}",
    ]
    examples = [Example(page.title, page.text, page.questions, page.answers) for page in read_pages()]
    page = Page(reader, Path(arguments.model).name, facts, examples)
    print(f"open {page.open(arguments.host, arguments.port)} in a browser; Ctrl-C ends it", flush=True)
    page.blocks.block_thread()
