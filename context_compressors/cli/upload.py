# SPDX-License-Identifier: Apache-2.0
"""`context-compressors upload FOLDER REPOSITORY`."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from .. import __version__
from ..hub_cards.public_files import tree
from ..hub_cards.repository import WEIGHTS, build_repository, push_repository
from .command import BASE_MODEL, argument, command

_EXAMPLES = """
context-compressors upload outputs/my-compressor me/my-compressor --dry-run
context-compressors upload outputs/my-compressor me/my-compressor --license apache-2.0
context-compressors upload outputs/my-compressor me/my-compressor --weights light --base-model Qwen/Qwen3-0.6B
"""


@command(
    "upload",
    "Build a Hub repository from a checkpoint's folder, and push it in one commit.",
    argument("checkpoint", help="folder of the checkpoint"),
    argument("repository", help="repository on the Hub, such as me/my-compressor"),
    argument("--dry-run", action="store_true", help="show the files and their sizes, and open no connection"),
    argument("--output", metavar="FOLDER", help="keep the repository's folder there"),
    argument(
        "--weights",
        default="saved",
        choices=WEIGHTS,
        help="as in the checkpoint, without the base's weights, or with them (default: %(default)s)",
    ),
    BASE_MODEL,
    argument(
        "--include",
        action="append",
        default=[],
        metavar="FILE",
        help="a file in the folder that is left out or refused otherwise; give it again for several",
    ),
    argument("--license", metavar="ID", help="licence of the weights (default: the card's, or else the base's)"),
    argument("--tag", default=f"v{__version__}", help="name of the version (default: %(default)s)"),
    argument("--public", action="store_true", help="let everybody see it (default: private)"),
    argument("--message", metavar="TEXT", help="commit message"),
    examples=_EXAMPLES,
)
def main(arguments: argparse.Namespace) -> None:
    """Run `context-compressors upload`.

    Raises:
        ValueError: a name that the Hub does not allow, and as `build_repository` and `push_repository`.
    """
    from huggingface_hub.utils import validate_repo_id

    validate_repo_id(arguments.repository)
    options: dict[str, Any] = {
        "weights": arguments.weights,
        "base_model": arguments.base_model,
        "license": arguments.license,
        "local_files_only": arguments.dry_run,
        "include": arguments.include,
    }
    with tempfile.TemporaryDirectory() as scratch:
        folder = build_repository(arguments.checkpoint, arguments.output or Path(scratch) / "repository", **options)
        print(f"{arguments.repository}, {'public' if arguments.public else 'private'}, {arguments.tag}")
        print(tree(folder))
        if not arguments.dry_run:
            address = push_repository(
                folder,
                arguments.repository,
                tag=arguments.tag,
                private=not arguments.public,
                commit_message=arguments.message,
            )
            print(address)
