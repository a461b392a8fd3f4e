# SPDX-License-Identifier: Apache-2.0
"""Document IDs of the training, validation and test parts, which must be disjoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pyarrow.parquet import read_table

from benchmarks.comparison.peers import KEEP_DROP
from context_compressors.data.document_ids import TrainingDocuments, document_id
from context_compressors.evaluation.held_out import Sources, check_sources

_FAMILY = "family"


def documents_of(comparison: Any, questions: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the IDs of each set and of the training and validation documents; missing ones stay as published.

    All methods learn from the same examples, so that their documents are one list for each part. What the reader has
    seen before stands in the record beside its weights, and not in these.

    Args:
        comparison: a `plan.Comparison`.
        questions: of `scores.questions_of`.

    Raises:
        ValueError: a document of a set has trained or chosen.
    """
    published = comparison.published.get("documents_apart", {"documents": {}, "held_out": {}})
    earlier, held_out = published["documents"], published["held_out"]
    seen = TrainingDocuments(
        *(set(earlier.get(part, "").split()) for part in ("trained", "chose")),
        is_whole=held_out.get(_FAMILY, {}).get("record") != "in part",
    )
    reader, names = TrainingDocuments.of(comparison.peers / "reader"), comparison.table["family"]
    runs = [comparison.checkpoint(name, seed) for name in names for seed in comparison.arguments.seeds]
    for record in filter(None, [reader, *map(TrainingDocuments.of, runs)]):
        seen.add(record)
    before = reader or TrainingDocuments()
    parts = {"trained": seen.trained - before.trained, "chose": seen.chose - before.chose}
    of_sets = {
        title: _reported(comparison, title, of_set.values()) or set(earlier.get(title, "").split())
        for title, of_set in questions.items()
    }
    records = {comparison.reader_name: reader, **({_FAMILY: seen} if any(parts.values()) else {})}
    records[KEEP_DROP.name] = TrainingDocuments.of(KEEP_DROP)
    found = check_sources({title: [Sources(title, tuple(ids))] for title, ids in of_sets.items()}, records)
    if reader is None:
        found |= {name: said for name, said in held_out.items() if name == comparison.reader_name}
    documents = {part: " ".join(sorted(ids)) for part, ids in (of_sets | parts).items() if ids}
    return {"model": comparison.reader_name, "held_out": found, "documents": documents}


def _reported(comparison: Any, title: str, questions: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the IDs of a set: its contexts, or the texts of its windows where the data are available."""
    entry = comparison.table["sets"][title]
    if entry["task"] != "reconstruction":
        return {document_id(question["context"]) for question in questions}
    file = comparison.data / entry["path"]
    texts = {row["id"]: row["text"] for row in read_table(file).to_pylist()} if file.is_file() else {}
    return {document_id(texts[question["document"]]) for question in questions if question["document"] in texts}
