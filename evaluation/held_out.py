# SPDX-License-Identifier: Apache-2.0
"""What is reported shares no document with what trained a checkpoint or chose it."""

import json
import os
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ..data.document_ids import TrainingDocuments
from .samples import EvaluationDataset, Sample

_SHOWN = 3


class HasSources(Protocol):
    """A sample, or whatever else has a name and the ids of the documents that it is from, see `document_id`."""

    @property
    def id(self) -> str: ...

    @property
    def source_ids(self) -> tuple[str, ...]: ...


class Sources(NamedTuple):
    """What is reported by its name alone, such as a query, and the ids of its documents."""

    id: str
    source_ids: tuple[str, ...]


def add_record(
    records: MutableMapping[str, TrainingDocuments | None], name: str, record: TrainingDocuments | None
) -> None:
    """Add a model's record; where another model has its name, with a number behind it."""
    names = (name, *(f"{name} ({number})" for number in range(2, len(records) + 2)))
    records[next(free for free in names if free not in records)] = record


def reported_documents(path: str | os.PathLike[str]) -> set[str]:
    """Ids of the documents that a result file reports on: a report, a grid of needles, or rankings.

    Raises:
        ValueError: a file that is none, or does not say which documents it scored.
    """
    try:
        documents = json.loads(Path(path).read_text(encoding="utf-8")).get("documents", {})
        ids = set(" ".join(documents.values()).split())
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no result file with the documents that it scored: {error}") from error
    if not ids:
        raise ValueError(f"{path} does not say which documents it scored, as files of earlier versions do not")
    return ids


def check_held_out(
    work: Sequence[tuple[EvaluationDataset, str, Sequence[Sample]]],
    records: Mapping[str, TrainingDocuments | None],
    allow_shared: bool = False,
) -> dict[str, dict[str, Any]]:
    """Compare the documents of an evaluation with what its models have seen.

    A document counts as a whole, whatever windows of it were read; of the questions about one context, one is enough.
    A context that was put together from texts is all of these.

    Args:
        work: data set, task and samples.
        records, allow_shared: as in `check_sources`.

    Returns:
        As `check_sources`.

    Raises:
        ValueError: as `check_sources`.
    """
    of_data_sets: dict[str, list[Sample]] = {}
    for dataset, _, samples in work:
        of_data_sets.setdefault(dataset.name, []).extend(samples)
    return check_sources(of_data_sets, records, allow_shared)


def check_sources(
    of_data_sets: Mapping[str, Sequence[HasSources]],
    records: Mapping[str, TrainingDocuments | None],
    allow_shared: bool = False,
) -> dict[str, dict[str, Any]]:
    """Compare documents with what models have seen.

    Args:
        of_data_sets: data set -> samples, or what else is reported, with the ids of their documents; what was cut from
            or put together from others is one beside these.
        records: what each model has seen, by its name; `None` where it has no record.
        allow_shared: also score documents that a model has seen, and say so.

    Returns:
        By model: `record`, "whole", "in part" or "none"; how many documents `trained` and `chose` it; and `shared`,
        of each data set the numbers of its documents that did.

    Raises:
        ValueError: shared documents that are not allowed; some of their samples are named.
    """
    found: dict[str, dict[str, Any]] = {}
    faults = []
    for model, record in records.items():
        if record is None:
            found[model] = {"record": "none"}
            continue
        shared: dict[str, dict[str, int]] = {}
        for part in ("trained", "chose"):
            seen = getattr(record, part)
            for name, samples in of_data_sets.items():
                named = {id_: sample.id for sample in samples[::-1] for id_ in sample.source_ids if id_ in seen}
                if not named:
                    continue
                shared.setdefault(name, {})[part] = len(named)
                total = len({id_ for sample in samples for id_ in sample.source_ids})
                names = ", ".join(sorted(named.values())[:_SHOWN]) + ", ..." * (len(named) > _SHOWN)
                faults.append(f"{len(named)} of {total} documents of {name!r} {part} {model} (samples {names})")
        found[model] = {
            "record": "whole" if record.is_whole else "in part",
            "trained": len(record.trained),
            "chose": len(record.chose),
            "shared": shared,
        }
    if faults and not allow_shared:
        raise ValueError(
            f"{'; '.join(faults)}: what is reported must share no document with what trained or chose; "
            "allow_trained_documents (--allow-trained-documents) scores them all the same, and the report says so"
        )
    return found


def shared_documents(documents: Mapping[str, str], record: TrainingDocuments) -> dict[str, dict[str, int]]:
    """Of each data set's documents, ids with spaces between them, the numbers of those that a model has seen."""
    found: dict[str, dict[str, int]] = {}
    for name, ids in documents.items():
        parts = {part: len(getattr(record, part).intersection(ids.split())) for part in ("trained", "chose")}
        if seen := {part: number for part, number in parts.items() if number}:
            found[name] = seen
    return found
