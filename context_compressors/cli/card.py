# SPDX-License-Identifier: Apache-2.0
"""`context-compressors card FOLDER --scores FILE ... --limit TEXT ...`."""

from __future__ import annotations

import argparse

from .command import argument, command

_EXAMPLES = """
context-compressors card outputs/my-compressor --scores results.json --limit "It has read English only."

context-compressors card outputs/icae --scores generated.json books.json --recipe embedded/icae.yaml \\
    --limit "It reads at most 2,048 tokens." --limit "It does not follow instructions."
"""


@command(
    "card",
    "Write the card (README.md) of a checkpoint from its training run and its evaluation.",
    argument("folder", help="checkpoint folder, with recipe.yaml and training_summary.json"),
    argument(
        "--scores",
        nargs="+",
        default=[],
        metavar="FILE",
        help="reports of `context-compressors evaluate --output`, or of `evaluate-retrieval --output`",
    ),
    argument(
        "--limit", action="append", required=True, metavar="TEXT", help="what it cannot do; once for each sentence"
    ),
    argument(
        "--summary",
        metavar="TEXT",
        help="what it is, in a sentence or two (default: made from the configuration)",
    ),
    argument("--model-id", metavar="NAME", help="repository or folder that the snippet loads (default: the folder)"),
    argument(
        "--recipe", metavar="RECIPE", help="recipe that was run: names it, and gives licences the run did not record"
    ),
    argument("--hardware", metavar="TEXT", help="what it was trained on (default: as the training run says)"),
    argument("--license", default="apache-2.0", metavar="ID", help="licence of the weights (default: %(default)s)"),
    argument(
        "--language", nargs="+", default=["en"], metavar="CODE", help="ISO 639-1 codes of its languages (default: en)"
    ),
    examples=_EXAMPLES,
)
def main(arguments: argparse.Namespace) -> None:
    """Run `context-compressors card`; `ValueError` as `write_card`."""
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
        language=arguments.language[0] if len(arguments.language) == 1 else arguments.language,
    )
    print(f"wrote {path}")
