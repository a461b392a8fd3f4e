# SPDX-License-Identifier: Apache-2.0
"""`context-compressors card FOLDER --scores FILE ... --limit TEXT ...`."""

from __future__ import annotations

from collections.abc import Sequence

from .arguments import NearestNameParser

_EXAMPLES = """\
examples:
  context-compressors card outputs/my-compressor --scores results.json --limit "It has read English only."

  context-compressors card outputs/base --scores generated.json books.json --recipe embedded/base.yaml \\
      --limit "It reads at most 2,048 tokens." --limit "It does not follow instructions."
"""


def build_parser() -> NearestNameParser:
    """The command line of `context-compressors card`."""
    parser = NearestNameParser(
        prog="context-compressors card",
        description="Write the card (README.md) of a checkpoint from its training run and its evaluation.",
        epilog=_EXAMPLES,
    )
    add = parser.add_argument
    add("folder", help="checkpoint folder, with recipe.yaml and training_summary.json")
    add(
        "--scores",
        nargs="+",
        default=[],
        metavar="FILE",
        help="reports of `context-compressors evaluate --output`, or of benchmarks/decal/retrieval.py",
    )
    add("--limit", action="append", required=True, metavar="TEXT", help="what it cannot do; once for each sentence")
    add("--summary", metavar="TEXT", help="what it is, in a sentence or two (default: made from the configuration)")
    add("--model-id", metavar="NAME", help="repository or folder that the snippet loads (default: the folder)")
    add("--recipe", metavar="RECIPE", help="recipe that was run: names it, and gives licences the run did not record")
    add("--hardware", metavar="TEXT", help="what it was trained on (default: as the training run says)")
    add("--license", default="apache-2.0", metavar="ID", help="licence of the weights (default: %(default)s)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run `context-compressors card`; returns the exit status.

    Args:
        argv: the arguments after the command's name; `sys.argv[1:]` when None.

    Raises:
        ValueError: as `write_card`.
    """
    arguments = build_parser().parse_args(argv)

    from ..hub_cards.write_card import write_card

    path = write_card(
        arguments.folder,
        arguments.scores,
        arguments.limit,
        arguments.summary,
        arguments.model_id,
        recipe=arguments.recipe,
        hardware=arguments.hardware,
        license=arguments.license,
    )
    print(f"wrote {path}")
    return 0
