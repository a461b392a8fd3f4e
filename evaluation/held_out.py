# SPDX-License-Identifier: Apache-2.0
"""Checks that no reported document trained a checkpoint or chose it."""

import json
import os
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..data.document_ids import TrainingDocuments
from .samples import Sample

_SHOWN = 3
_PARTS = ("trained", "chose")


class Sources(NamedTuple):
    """A reported sample, such as a query: its name, and the ids of its documents, see `document_id`."""

    id: str
    source_ids: tuple[str, ...]


def add_record(
    records: MutableMapping[str, TrainingDocuments | None], name: str, record: TrainingDocuments | None
) -> None:
    """Add a model's record; where another model has its name, with a number behind it."""
    names = (name, *(f"{name} ({number})" for number in range(2, len(records) + 2)))
    records[next(free for free in names if free not in records)] = record


def reported_documents(path: str | os.PathLike[str]) -> set[str]:
    """Ids of the documents that a result file reports on."""
    try:
        documents = json.loads(Path(path).read_text(encoding="utf-8"))["documents"]
        ids = set(" ".join(documents.values()).split())
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no result file with the documents that it scored: {error!r}") from error
    if not ids:
        raise ValueError(f"{path} does not say which documents it scored")
    return ids


def compare_sources(
    of_data_sets: Mapping[str, Sequence[Sources | Sample]],
    records: Mapping[str, TrainingDocuments | None],
    allow_shared: bool = False,
) -> dict[str, dict[str, Any]]:
    """Compare the documents of each data set with what models have seen; `ValueError` where some are shared."""
    comparisons: dict[str, dict[str, Any]] = {}
    faults = []
    for model, record in records.items():
        if record is None:
            comparisons[model] = {"record": "none"}
            continue
        shared: dict[str, dict[str, int]] = {}
        for part in _PARTS:
            seen = vars(record)[part]
            for name, samples in of_data_sets.items():
                named = {id_: sample.id for sample in samples[::-1] for id_ in sample.source_ids if id_ in seen}
                if not named:
                    continue
                shared.setdefault(name, {})[part] = len(named)
                total = len({id_ for sample in samples for id_ in sample.source_ids})
                names = ", ".join(sorted(named.values())[:_SHOWN]) + ", ..." * (len(named) > _SHOWN)
                faults.append(f"{len(named)} of {total} documents of {name!r} {part} {model} (samples {names})")
        comparisons[model] = {
            "record": "whole" if record.is_whole else "in part",
            "trained": len(record.trained),
            "chose": len(record.chose),
            "shared": shared,
        }
    if faults and not allow_shared:
        raise ValueError(
            f"{'; '.join(faults)}: what is reported must share no document with what trained or chose; "
            "`allow_trained_documents` scores them all the same, and the report says so"
        )
    return comparisons
