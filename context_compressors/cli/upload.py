# SPDX-License-Identifier: Apache-2.0
"""`context-compressors upload FOLDER REPOSITORY`."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import __version__
from ..hub_cards.public_files import tree
from ..hub_cards.repository import WEIGHTS, build_repository, push_repository
from .arguments import NearestNameParser

_EXAMPLES = """\
examples:
  context-compressors upload outputs/my-compressor me/my-compressor --dry-run
  context-compressors upload outputs/my-compressor me/my-compressor --license apache-2.0
  context-compressors upload outputs/my-compressor me/my-compressor --weights light --base-model Qwen/Qwen3-0.6B"""


def _parser() -> NearestNameParser:
    parser = NearestNameParser(
        prog="context-compressors upload",
        description="Build a Hub repository from a checkpoint's folder, and push it in one commit.",
        epilog=_EXAMPLES,
    )
    add = parser.add_argument
    add("checkpoint", help="folder of the checkpoint")
    add("repository", help="repository on the Hub, such as me/my-compressor")
    add("--dry-run", action="store_true", help="show the files and their sizes, and open no connection")
    add("--output", metavar="FOLDER", help="keep the repository's folder there")
    add(
        "--weights",
        default="saved",
        choices=WEIGHTS,
        help="as in the checkpoint, without the base's weights, or with them (default: %(default)s)",
    )
    add("--base-model", metavar="NAME", help="Hub id or folder of the base (default: as the checkpoint says)")
    add("--license", metavar="ID", help="licence of the weights (default: the card's, or else the base's)")
    add("--tag", default=f"v{__version__}", help="name of the version (default: %(default)s)")
    add("--public", action="store_true", help="let everybody see it (default: private)")
    add("--message", metavar="TEXT", help="commit message")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run `context-compressors upload`.

    Args:
        argv: the arguments after the command's name; `sys.argv[1:]` when None.

    Returns:
        the exit code, 0; wrong options exit with 2.

    Raises:
        ValueError: a name that the Hub does not allow, and as `build_repository` and `push_repository`.
    """
    arguments = _parser().parse_args(argv)

    from huggingface_hub.utils import validate_repo_id

    validate_repo_id(arguments.repository)
    options: dict[str, Any] = {
        "weights": arguments.weights,
        "base_model": arguments.base_model,
        "license": arguments.license,
        "local_files_only": arguments.dry_run,
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
    return 0
