# SPDX-License-Identifier: Apache-2.0
"""`context-compressors train`: the help of our own fields at once; everything else loads what trains."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields

from ..training.fields import DataArguments, ModelArguments, TrainingFields

DESCRIPTION = "Train a base model, a full-context teacher or a compressor from a recipe."


def usage(prog: str) -> str:
    """The command line in one line."""
    return f"{prog} RECIPE.yaml [RECIPE.yaml ...] [--field value ...]"


def examples(prog: str) -> str:
    """Command lines that can be run."""
    return (
        "examples:\n"
        f"  {prog} embedded/base.yaml --data_dir DATA --output_dir outputs/base\n"
        f"  {prog} mean_pooling/multi_ratio.yaml mean_pooling/bases/qwen3_0.6b.yaml --teacher TEACHER\n"
        f"  {prog} epl/icae.yaml epl/layouts/enhanced.yaml epl/bases/llama3.2_1b.yaml epl/pretraining.yaml\n"
        f"  {prog} my_recipe.yaml --resume_from_checkpoint latest\n"
    )


def build_parser() -> argparse.ArgumentParser:
    """A parser that has the help of this package's own fields, and reads nothing."""
    prog = "context-compressors train"
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=usage(prog),
        description=DESCRIPTION,
        epilog=examples(prog),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--help-all", action="store_true", help="show trl.SFTConfig's fields, too, and exit")
    for title, group in (
        ("what is trained", ModelArguments),
        ("what it is trained on", DataArguments),
        (
            "how, beside all fields of trl.SFTConfig (learning_rate, max_steps, output_dir ...: --help-all)",
            TrainingFields,
        ),
    ):
        section = parser.add_argument_group(title)
        for entry in fields(group):
            default = "" if entry.default in (None, "") else f" (default: {entry.default})"
            section.add_argument(f"--{entry.name}", help=entry.metadata["help"] + default)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run `context-compressors train`; returns the exit status.

    Args:
        argv: the arguments after the command's name; `sys.argv[1:]` when None.

    Raises:
        ValueError: a recipe, field or value that is not allowed, or that does not go with the others.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or {"-h", "--help"}.intersection(argv):
        build_parser().parse_args(["--help"])
    from ..training.train import main as train

    return train(argv)
