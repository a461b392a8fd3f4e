# SPDX-License-Identifier: Apache-2.0
"""`context-compressors mcp MODEL FOLDER`: compressed documents for agents, over the Model Context Protocol."""

from __future__ import annotations

import argparse

from .command import LOADING, REVISION, argument, command
from .compress import MODEL
from .loading import load_compressor

_EXAMPLES = """
context-compressors mcp my-compressor notes
"""


@command(
    "mcp",
    "Serve a folder's text files to an agent over standard input and output (pip install -e '.[mcp]' in the clone).",
    MODEL,
    argument("folder", help="only text files below it can be read"),
    REVISION,
    *LOADING,
    examples=_EXAMPLES,
)
def main(arguments: argparse.Namespace) -> None:
    """Run `context-compressors mcp` until standard input ends.

    Raises:
        ImportError: the package `mcp` is not installed.
        ValueError: a model that cannot be used.
    """
    from ..serving.mcp_server import create_mcp_server

    places = (arguments.revision, arguments.trust_remote_code, arguments.device, arguments.dtype, arguments.base_model)
    compressor, tokenizer = load_compressor(arguments.model, *places)
    create_mcp_server(compressor.question_answering(tokenizer), arguments.folder).run()
