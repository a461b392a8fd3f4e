# SPDX-License-Identifier: Apache-2.0
"""`context-compressors serve MODEL ...`: memories and the chat that reads them, over HTTP."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from .command import LOADING, MEMORY_DTYPE, REVISION, argument, command, positive_int
from .loading import load_compressor

if TYPE_CHECKING:
    from ..corpus.memory_store import MemoryStore
    from ..modeling.compressor.context_compression_qa import ContextCompressionQAPipeline

API_KEY = "CONTEXT_COMPRESSORS_API_KEY"
_LOOPBACK = ("127.0.0.1", "::1", "localhost")

_EXAMPLES = """
context-compressors serve my-compressor
context-compressors serve my-compressor --store memories.lance --port 8080
context-compressors serve my-compressor another-compressor --batch-size 16
"""


@command(
    "serve",
    "Serve memories and the chat that reads them (pip install -e '.[serve]' in the clone).",
    argument("models", nargs="+", metavar="MODEL", help="Hub ids or folders of compressors; requests say which"),
    argument(
        "--store",
        action="append",
        help="where memories are kept, a folder or an address; one for each model, in their order (default: in the "
        "process, as long as it runs)",
    ),
    MEMORY_DTYPE,
    argument("--no-texts", action="store_true", help="do not keep the texts in the store"),
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
    argument("--max-waiting", type=positive_int, default=256, help="requests that wait (default: %(default)s)"),
    argument(
        "--max-tokens",
        type=positive_int,
        default=32_768,
        help="of a request: texts to compress; or slots, text and answer (default: %(default)s)",
    ),
    argument("--max-body-bytes", type=positive_int, default=4 * 2**20, help="of a request (default: %(default)s)"),
    argument("--timeout", type=float, default=300.0, help="seconds for a request (default: %(default)s)"),
    argument(
        "--grace", type=positive_int, default=30, help="seconds to end what runs when it stops (default: %(default)s)"
    ),
    REVISION,
    *LOADING,
    examples=_EXAMPLES,
)
def main(arguments: argparse.Namespace) -> None:
    """Run `context-compressors serve`, until Ctrl-C.

    Raises:
        ImportError: FastAPI, uvicorn, prometheus_client or, with `--store`, Lance is not installed.
        OSError: the address is taken, or is none of this machine.
        ValueError: models or a store that cannot be used together, or a limit or a port that is none.
    """
    api_key = os.environ.get(API_KEY) if arguments.api_key is None else arguments.api_key
    if api_key == "":
        raise ValueError(f"the key (--api-key, or else ${API_KEY}) is empty: give one, or leave both out")
    from ..serving.server import ServerSettings, check_address, create_app
    from ..serving.server import run as run_server

    stores = arguments.store or []
    if stores and len(stores) != len(arguments.models):
        raise ValueError(f"--store must be given once for each model: {len(stores)} for {len(arguments.models)}")
    names = [_name(model) for model in arguments.models]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"two models have the name {min(twice)!r}: rename the folder of one")
    settings = ServerSettings(
        api_key=api_key,
        batch_size=arguments.batch_size,
        max_waiting=arguments.max_waiting,
        max_tokens=arguments.max_tokens,
        max_body_bytes=arguments.max_body_bytes,
        max_memory_bytes=arguments.memory_megabytes * 2**20,
        timeout=arguments.timeout,
    )
    # Models may take minutes to load.
    check_address(arguments.host, arguments.port)
    pipes = dict(zip(names, (_load(model, arguments) for model in arguments.models), strict=True))
    opened = {name: _open(path, pipes[name], arguments) for name, path in zip(names, stores, strict=False)}
    app = create_app(pipes, settings, opened, keeps_texts=not arguments.no_texts)
    if arguments.host not in _LOOPBACK and settings.api_key is None:
        print(f"whoever reaches {arguments.host} can use this server: --api-key asks for a key", file=sys.stderr)
    run_server(app, arguments.host, arguments.port, arguments.grace)


def _name(model: str) -> str:
    """What requests call a model: its Hub id, or the name of its folder."""
    return os.path.basename(os.path.abspath(model)) if os.path.isdir(model) else model


def _load(model: str, arguments: argparse.Namespace) -> ContextCompressionQAPipeline:
    places = (arguments.revision, arguments.trust_remote_code, arguments.device, arguments.dtype, arguments.base_model)
    compressor, tokenizer = load_compressor(model, *places)
    return compressor.question_answering(tokenizer)


def _open(path: str, pipe: ContextCompressionQAPipeline, arguments: argparse.Namespace) -> MemoryStore:
    """The store, a new one if need be."""
    from ..corpus.corpus_compressor import CorpusCompressor
    from ..corpus.memory_store import MemoryStore

    store = MemoryStore.find_or_create(path, CorpusCompressor(pipe, memory_dtype=arguments.memory_dtype).form)
    if store.form.dtype != arguments.memory_dtype:
        raise ValueError(f"the store {path} is in {store.form.dtype!r}, not in {arguments.memory_dtype!r}")
    return store
