# SPDX-License-Identifier: Apache-2.0
"""`context-compressors serve` and `demo`: memories, the chat that reads them and a page, over HTTP or to an agent."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from .command import LOADING, MODEL, argument, command, config_argument, config_fields, positive_int
from .loading import load_pipeline

API_KEY = "CONTEXT_COMPRESSORS_API_KEY"
_LOOPBACK = ("127.0.0.1", "::1", "localhost")

_EXAMPLES = """
context-compressors serve my-compressor
context-compressors serve my-compressor --store memories.lance --port 8080 --config '{batch_size: 16, timeout: 60}'
context-compressors serve my-compressor --mcp notes
"""


@command(
    "serve",
    "Serve memories, the chat that reads them, and a page to try both on (pip install -e '.[serve]' in the clone).",
    MODEL,
    argument("--store", help="folder or address that keeps memories (default: in the process, as long as it runs)"),
    argument("--host", default="127.0.0.1", help="(default: %(default)s, this machine alone)"),
    argument("--port", type=int, default=8000, help="(default: %(default)s)"),
    argument("--api-key", metavar="KEY", help=f"that requests must bring (default: ${API_KEY}, else none)"),
    argument("--mcp", metavar="FOLDER", help="serve a folder's text files to an agent (pip install -e '.[mcp]')"),
    config_argument("fields of ServerSettings, and memory_dtype of a new store", "{timeout: 60}"),
    *LOADING,
    examples=_EXAMPLES,
)
def serve(arguments: argparse.Namespace) -> None:
    """Run `context-compressors serve`, until Ctrl-C."""
    if arguments.mcp is not None:
        from ..serving.mcp_server import create_mcp_server

        create_mcp_server(load_pipeline(arguments), arguments.mcp).run()
        return
    api_key = os.environ.get(API_KEY) if arguments.api_key is None else arguments.api_key
    if api_key == "":
        raise ValueError(f"the key (--api-key, or else ${API_KEY}) is empty: give one, or leave both out")
    from ..corpus.corpus_compressor import CorpusCompressor
    from ..corpus.memory_store import MemoryStore
    from ..demo import read_pages
    from ..serving.server import ServerSettings, check_address, create_app, run

    fields = config_fields(arguments.config, (*ServerSettings.__dataclass_fields__, "memory_dtype"))
    memory_dtype = fields.pop("memory_dtype", "int8")
    settings = ServerSettings(**{"api_key": api_key, **fields})
    # A model may take minutes to load.
    check_address(arguments.host, arguments.port)
    name, pipe, store = arguments.model, load_pipeline(arguments), None
    if arguments.store is not None:
        form = CorpusCompressor(pipe, memory_dtype=memory_dtype).form
        store = MemoryStore.find_or_create(arguments.store, form)
    # What requests call it: its Hub id, or the name of its folder.
    name = Path(name).resolve().name if Path(name).is_dir() else name
    app = create_app(name, pipe, settings, store, [page.example for page in read_pages()])
    if arguments.host not in _LOOPBACK and settings.api_key is None:
        print(f"whoever reaches {arguments.host} can use this server: --api-key asks for a key", file=sys.stderr)
    run(app, arguments.host, arguments.port, settings.grace)


@command(
    "demo",
    "Answer questions about five pages in the terminal, from their text and from memories of it. With a checkpoint as "
    "its first argument, open the page of `context-compressors serve`, whose options it takes.",
    argument("--pages", type=positive_int, metavar="N", help="only the N shortest pages, for a slow machine"),
    examples="""
context-compressors demo --pages 1
context-compressors demo my-compressor --port 7860
""",
)
def _terminal(arguments: argparse.Namespace) -> None:
    from transformers.utils import logging

    from ..demo import run

    logging.set_verbosity_error()
    with warnings.catch_warnings():
        # Notices of the libraries to their own developers would hide what the demo shows.
        warnings.simplefilter("ignore", FutureWarning)
        run(num_pages=arguments.pages)


def demo(argv: Sequence[str]) -> int:
    """Run the demo in the terminal, or serve the page of the checkpoint that the first argument names."""
    return serve(argv) if argv and not argv[0].startswith("-") else _terminal(argv)
