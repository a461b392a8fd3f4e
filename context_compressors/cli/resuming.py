# SPDX-License-Identifier: Apache-2.0
"""Commands that go on with what an earlier one has written to `--output`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from .command import check_outputs

if TYPE_CHECKING:
    from ..evaluation.needles import NeedleGrid
    from ..evaluation.report import EvaluationReport
    from ..evaluation.rows import EvaluationRow

Results = TypeVar("Results")


def earlier_results(arguments: argparse.Namespace, read: Callable[[str], Results]) -> Results | None:
    """What `--output` holds, with `--resume`; `None` without it, or where there is no such file yet.

    Args:
        arguments: with `output`, `keep_answers`, `overwrite` and `resume`.
        read: reads such a file.

    Raises:
        ValueError: `--resume` without `--output`, files that may not be replaced, or whatever `read` refuses.
    """
    check_outputs((arguments.output, arguments.keep_answers), arguments.overwrite or arguments.resume)
    if not arguments.resume:
        return None
    if not arguments.output:
        raise ValueError("--resume goes on with what is in --output: name it")
    return read(arguments.output) if Path(arguments.output).exists() else None


def progress_path(arguments: argparse.Namespace) -> str | None:
    """Where what has been scored so far is kept beside `--output`; without `--resume` it is deleted.

    Args:
        arguments: with `output` and `resume`.
    """
    if not arguments.output:
        return None
    path = Path(f"{arguments.output}.progress")
    if not arguments.resume:
        path.unlink(missing_ok=True)
    return str(path)


def writer(
    arguments: argparse.Namespace, earlier: Iterable[EvaluationRow]
) -> Callable[[EvaluationReport | NeedleGrid], None]:
    """What writes results to `--output` as they come, and their answers to `--keep-answers`.

    Args:
        arguments: with `output` and `keep_answers`.
        earlier: rows that are gone on from, whose answers stand there.
    """
    from ..evaluation.answers_file import AnswersFile

    done = {(row.dataset, row.task) for row in earlier}
    answers = AnswersFile(arguments.keep_answers, done) if arguments.keep_answers else None

    def write(results: EvaluationReport | NeedleGrid) -> None:
        # Answers first: what the results have, they have answers for.
        if answers is not None:
            answers.write_new(results)
        if arguments.output:
            results.save(arguments.output)

    return write


def say_if_done(arguments: argparse.Namespace, is_done: bool) -> None:
    """Print that `--resume` found nothing left to score.

    Args:
        arguments: with `output` and `resume`.
        is_done: whether nothing was scored.
    """
    if arguments.resume and is_done:
        print(f"{arguments.output} is done: nothing was left to score")
