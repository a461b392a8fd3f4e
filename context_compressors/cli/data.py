# SPDX-License-Identifier: Apache-2.0
"""`context-compressors data NAME OUT`: a published data set as Parquet in our columns."""

from __future__ import annotations

import argparse

from .command import OVERWRITE, argument, command

_EXAMPLES = """
context-compressors data
context-compressors data hotpotqa hotpotqa_train.parquet --supporting-passages
context-compressors data quac quac_train.parquet --source train_v0.2.json
"""


@command(
    "data",
    "Write a published data set as Parquet in the columns that training and evaluation read.",
    argument("name", nargs="?", help="of the data set; without it, all names, licenses and tables are listed"),
    argument("output", nargs="?", help="Parquet file"),
    argument("--split", default="train", help="train (default), validation, test, or as the data set calls it"),
    argument("--source", metavar="FILE", help="file or pattern of what was published (default: the Hub)"),
    argument("--supporting-passages", action="store_true", help="leave out the distractors of multi-hop questions"),
    argument("--separate-passages", action="store_true", help="contexts are lists of passages, compressed apart"),
    OVERWRITE,
    examples=_EXAMPLES,
)
def data(arguments: argparse.Namespace) -> None:
    """Run `context-compressors data`."""
    from ..data.convert_published import convert
    from ..data.published_sets import PUBLISHED_SETS
    from ..reporting.tables import markdown_table

    if arguments.name is None:
        rows = [
            (name, entry.title, entry.task, entry.place, ", ".join(entry.splits), entry.license, entry.tables)
            for name, entry in PUBLISHED_SETS.items()
        ]
        print(markdown_table(("name", "data set", "task", "from", "splits", "license", "tables"), rows))
        return
    if arguments.output is None:
        raise ValueError("name the file to write")
    names = ("split", "source", "supporting_passages", "separate_passages", "overwrite")
    print(convert(arguments.name, arguments.output, **{name: vars(arguments)[name] for name in names}))
    print(f"license: {PUBLISHED_SETS[arguments.name].license}")
