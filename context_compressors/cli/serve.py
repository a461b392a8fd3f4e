# SPDX-License-Identifier: Apache-2.0
"""`context-compressors serve MODEL`: memories and the chat that reads them, over HTTP."""

from __future__ import annotations

import argparse
import os
import sys

from .command import LOADING, MEMORY_DTYPE, REVISION, argument, command, positive_int
from .compress import load_pipeline

API_KEY = "CONTEXT_COMPRESSORS_API_KEY"
_LOOPBACK = ("127.0.0.1", "::1", "localhost")

_EXAMPLES = """
context-compressors serve my-compressor
context-compressors serve my-compressor --store memories.lance --port 8080
"""


@command(
    "serve",
    "Serve memories and the chat that reads them (pip install -e '.[serve]' in the clone).",
    argument("model", help="Hub id or folder of a compressor"),
    argument(
        "--store",
        help="where memories are kept, a folder or an address (default: in the process, as long as it runs)",
    ),
    MEMORY_DTYPE,
    argument(
        "--memory-megabytes",
        type=positive_int,
        default=1024,
        metavar="N",
        help="without a store: of all memories; the oldest go first (default: %(default)s)",
    ),
    argument("--host", default="127.0.0.1", help="(default: %(default)s, this machine alone)"),
    argument("--port", type=int, default=8000, help="(default: %(default)s)"),
    argument("--api-key", metavar="KEY", help=f"that requests must bring (default: ${API_KEY}, else none)"),
    argument("--batch-size", type=positive_int, default=8, help="requests computed at once (default: %(default)s)"),
    argument(
        "--max-tokens",
        type=positive_int,
        default=32_768,
        help="of a request: texts to compress; or slots, text and answer (default: %(default)s)",
    ),
    argument("--timeout", type=float, default=300.0, help="seconds for a request (default: %(default)s)"),
    argument(
        "--grace", type=positive_int, default=30, help="seconds to end what runs when it stops (default: %(default)s)"
    ),
    REVISION,
    *LOADING,
    examples=_EXAMPLES,
)
def main(arguments: argparse.Namespace) -> None:
    """Run `context-compressors serve`, until Ctrl-C."""
    api_key = os.environ.get(API_KEY) if arguments.api_key is None else arguments.api_key
    if api_key == "":
        raise ValueError(f"the key (--api-key, or else ${API_KEY}) is empty: give one, or leave both out")
    from ..corpus.corpus_compressor import CorpusCompressor
    from ..corpus.memory_store import MemoryStore
    from ..serving.server import ServerSettings, check_address, create_app, run

    settings = ServerSettings(
        api_key=api_key,
        batch_size=arguments.batch_size,
        max_tokens=arguments.max_tokens,
        max_memory_bytes=arguments.memory_megabytes * 2**20,
        timeout=arguments.timeout,
    )
    # A model may take minutes to load.
    check_address(arguments.host, arguments.port)
    name, pipe, store = arguments.model, load_pipeline(arguments), None
    if arguments.store is not None:
        form = CorpusCompressor(pipe, memory_dtype=arguments.memory_dtype).form
        store = MemoryStore.find_or_create(arguments.store, form)
        if store.form.dtype != form.dtype:
            raise ValueError(f"the store {arguments.store} is in {store.form.dtype!r}, not in {form.dtype!r}")
    # What requests call it: its Hub id, or the name of its folder.
    app = create_app(os.path.basename(os.path.abspath(name)) if os.path.isdir(name) else name, pipe, settings, store)
    if arguments.host not in _LOOPBACK and api_key is None:
        print(f"whoever reaches {arguments.host} can use this server: --api-key asks for a key", file=sys.stderr)
    run(app, arguments.host, arguments.port, arguments.grace)
