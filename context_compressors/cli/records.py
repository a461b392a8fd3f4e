# SPDX-License-Identifier: Apache-2.0
"""What trained and chose the models of a command that reports on documents."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..data.document_ids import TrainingDocuments


def records_of_reports(arguments: argparse.Namespace) -> dict[str, TrainingDocuments | None]:
    """Records of the documents of `--chosen-by`; raises `ValueError` for a file that names none.

    Args:
        arguments: with `model` and `chosen_by`.
    """
    from ..data.document_ids import TrainingDocuments
    from ..evaluation.evaluate import model_label
    from ..evaluation.held_out import add_record, reported_documents

    records: dict[str, TrainingDocuments | None] = {}
    for path in arguments.chosen_by:
        name = f"{model_label(arguments.model)}, by {Path(path).name}"
        add_record(records, name, TrainingDocuments(chose=reported_documents(path)))
    return records


def add_model_records(
    records: dict[str, TrainingDocuments | None], arguments: argparse.Namespace, on_hub: bool
) -> None:
    """Add what stands beside the weights of the model, and of the teacher where there is one.

    Args:
        records: as `records_of_reports` has them.
        arguments: with `model`, and `teacher` where the command has one.
        on_hub: whether to ask the Hub for the model's, see `TrainingDocuments.of`.
    """
    from ..data.document_ids import TrainingDocuments
    from ..evaluation.evaluate import model_label
    from ..evaluation.held_out import add_record

    add_record(records, model_label(arguments.model), TrainingDocuments.of(arguments.model, on_hub))
    if getattr(arguments, "teacher", None) is not None:
        add_record(records, model_label(arguments.teacher), TrainingDocuments.of(arguments.teacher))
