# SPDX-License-Identifier: Apache-2.0
"""`context-compressors train`: the help of our own fields at once; everything else loads what trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from ..training.fields import DESCRIPTION, EXAMPLES, USAGE, DataArguments, ModelArguments, TrainingFields
from .command import NearestNameParser


def build_parser() -> NearestNameParser:
    """A parser that has the help of this package's own fields, and reads nothing."""
    prog = "context-compressors train"
    parser = NearestNameParser(prog=prog, usage=f"{prog} {USAGE}", description=DESCRIPTION, epilog=EXAMPLES)
    parser.add_argument("--help-all", action="store_true", help="show trl.SFTConfig's fields, too, and exit")
    for title, group in (
        ("what is trained", ModelArguments),
        ("what it is trained on", DataArguments),
        (
            "how, in addition to all fields of trl.SFTConfig (learning_rate, max_steps, output_dir ...: --help-all)",
            TrainingFields,
        ),
    ):
        section = parser.add_argument_group(title)
        for entry in fields(group):
            default = "" if entry.default in (None, "") else f" (default: {entry.default})"
            section.add_argument(f"--{entry.name}", help=entry.metadata["help"] + default)
    return parser


def train(argv: Sequence[str]) -> int:
    """Run `context-compressors train`; returns the exit status."""
    if not argv or {"-h", "--help"}.intersection(argv):
        build_parser().parse_args(["--help"])
    from ..training.train import main_of_process

    return main_of_process(argv)
