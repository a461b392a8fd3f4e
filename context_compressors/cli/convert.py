# SPDX-License-Identifier: Apache-2.0
"""`context-compressors convert NAME OUT`: a published checkpoint of another code base becomes one of this package."""

from __future__ import annotations

import argparse

from .command import argument, command

_EXAMPLES = """
context-compressors convert Jiang-nan/comprexit-1b-4x-sft comprexit-1b
context-compressors convert mistral_7b_ft_icae.safetensors icae --base mistralai/Mistral-7B-Instruct-v0.2
"""


@command(
    "convert",
    "Convert a published checkpoint of ComprExIT, ICAE, 500xCompressor, AutoCompressor or LCLM.",
    argument("name", metavar="NAME", help="Hub id or folder of the checkpoint, or a file of its tensors"),
    argument("output", metavar="OUT", help="folder to write; it does not exist, or is empty"),
    argument("--base", metavar="MODEL", help="Hub id or folder of the language model, where the checkpoint lacks it"),
    examples=_EXAMPLES,
)
def convert(arguments: argparse.Namespace) -> None:
    """Run `context-compressors convert`."""
    from ..modeling.checkpoint import published_formats

    kind = published_formats.convert(arguments.name, arguments.output, arguments.base)
    print(f"wrote {arguments.output}, of the format {kind}")
