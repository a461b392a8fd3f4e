# SPDX-License-Identifier: Apache-2.0
"""`context-compressors data NAME OUT`: a published data set as Parquet in our columns."""

from __future__ import annotations

import argparse
import sys

from .command import OVERWRITE, argument, command

_EXAMPLES = """
context-compressors data --list
context-compressors data hotpotqa hotpotqa_train.parquet --supporting-passages

# Files as their authors publish them, in place of the Hub:
context-compressors data quac quac_train.parquet --source train_v0.2.json
context-compressors data mediasum mediasum_test.parquet --split test --source MediaSum/data/news_dialogue.json
"""


@command(
    "data",
    "Write a published data set as Parquet in the columns that training and evaluation read.",
    argument("name", nargs="?", help="of the list"),
    argument("output", nargs="?", help="Parquet file"),
    argument("--list", action="store_true", help="tell names, licenses and which tables of the papers need them"),
    argument("--split", default="train", help="train (default), validation, test, or as the data set calls it"),
    argument("--source", metavar="FILE", help="file or pattern of what was published (default: the Hub)"),
    argument("--supporting-passages", action="store_true", help="leave out the distractors of multi-hop questions"),
    argument("--separate-passages", action="store_true", help="contexts are lists of passages, compressed apart"),
    OVERWRITE,
    examples=_EXAMPLES,
)
def main(arguments: argparse.Namespace) -> None:
    """Run `context-compressors data`."""
    from tqdm.auto import tqdm

    from ..data.convert_published import convert
    from ..data.published_sets import PUBLISHED_SETS
    from ..reporting.tables import markdown_table

    if arguments.list:
        rows = [
            (name, entry.title, entry.task, entry.place, ", ".join(entry.splits), entry.license, entry.tables)
            for name, entry in PUBLISHED_SETS.items()
        ]
        print(markdown_table(("name", "data set", "task", "from", "splits", "license", "tables"), rows))
        return
    if arguments.output is None:
        raise ValueError("name a data set and the file to write, or pass --list")
    with tqdm(unit="row", desc=arguments.name, disable=not sys.stderr.isatty()) as progress:
        done = convert(
            arguments.name,
            arguments.output,
            split=arguments.split,
            source=arguments.source,
            supporting_passages=arguments.supporting_passages,
            separate_passages=arguments.separate_passages,
            overwrite=arguments.overwrite,
            on_rows=progress.update,
        )
    print(done)
    print(f"license: {PUBLISHED_SETS[arguments.name].license}")
