# SPDX-License-Identifier: Apache-2.0
"""What is reported shares no document with what trained a checkpoint or chose it."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..data.document_ids import TrainingDocuments
from .samples import EvaluationDataset, Sample

_SHOWN = 3


def check_held_out(
    work: Sequence[tuple[EvaluationDataset, str, Sequence[Sample]]],
    records: Mapping[str, TrainingDocuments | None],
    allow_shared: bool = False,
) -> dict[str, dict[str, Any]]:
    """Compare the documents of an evaluation with what its models have seen.

    A document counts as a whole, whatever windows of it were read; of the questions about one context, one is enough.

    Args:
        work: data set, task and samples.
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
            for dataset, _, samples in work:
                named = {sample.document_id: sample.id for sample in samples[::-1] if sample.document_id in seen}
                if not named or part in shared.get(dataset.name, {}):
                    continue
                shared.setdefault(dataset.name, {})[part] = len(named)
                total = len({sample.document_id for sample in samples})
                names = ", ".join(sorted(named.values())[:_SHOWN]) + ", ..." * (len(named) > _SHOWN)
                faults.append(
                    f"{len(named)} of {total} documents of {dataset.name!r} {part} {model} (samples {names})"
                )
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
