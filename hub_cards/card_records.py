# SPDX-License-Identifier: Apache-2.0
"""What a card tells of a checkpoint: its data, its training and its scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

TASK_NAMES = {
    "reconstruction": "Reconstruction",
    "continuation": "Continuation",
    "question_answering": "Question answering",
    "summarisation": "Summarisation",
}


@dataclass(frozen=True)
class TrainingData:
    """One data set that the checkpoint was trained on.

    Args:
        name: what it is called.
        licence: its licence.
        hub_id: its repository on the Hub, if it has one.
        note: what of it was used, such as "train split, 87,599 rows".
    """

    name: str
    licence: str
    hub_id: str | None = None
    note: str = ""


@dataclass(frozen=True)
class TrainingRecord:
    """How the checkpoint was made.

    Args:
        data: all data sets; never empty.
        steps: optimizer steps; 0 where something is fitted to contexts alone.
        seeds: every seed, one for each run behind the scores.
        hardware: what it was trained on, such as "1 x H200".
        tokens: training tokens.
        context_tokens: tokens of the compressed contexts, beside `tokens` of text.
        hours: wall-clock hours.
        recipe: the recipe's file.
        versions: library versions by name.
    """

    data: Sequence[TrainingData]
    steps: int
    seeds: Sequence[int]
    hardware: str
    tokens: int | None = None
    context_tokens: int | None = None
    hours: float | None = None
    recipe: str | None = None
    versions: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.data:
            raise ValueError("a training record names at least one data set")
        if self.steps < 0 or not (self.steps or self.context_tokens):
            # Without a step something is fitted to contexts.
            raise ValueError(f"steps must be at least 1, or 0 with context_tokens, got {self.steps}")
        if not self.seeds:
            raise ValueError("a training record names its seeds")
        if not self.hardware.strip():
            raise ValueError("a training record names its hardware")


@dataclass(frozen=True)
class RetrievalScore:
    """How well a retrieval checkpoint ranks a collection at one ratio, and what the ratio saves.

    Args:
        dataset: the collection's name.
        ratio: tokens per vector, of queries and documents.
        ndcg_at_10: nDCG@10 in percent.
        bm25: nDCG@10 of BM25 on the same collection, in percent.
        storage_saving: tokens of the documents for each vector of the index.
    """

    dataset: str
    ratio: int
    ndcg_at_10: float
    bm25: float | None = None
    storage_saving: float | None = None


@dataclass(frozen=True)
class Score:
    """One number, with its two bounds beside it.

    Args:
        task: "reconstruction", "continuation", "question_answering" or "summarisation".
        dataset: data set's name.
        metric: metric's name, such as "exact match".
        ratio: compression ratio, or "auto".
        value: with the compressed context.
        no_context: the same questions with no context at all.
        full_context: the same questions with the whole context.
        split: data split; None where the data has none by name.
        interval: 95 % interval of `value`.
        alternatives: what else was tried at the same number of decoder positions -> its score, such as "cut text".
        reached_ratio: context tokens a slot, where the ratio is "auto".
        retention: (value - no_context) / (full_context - no_context) of the task's main metric, in percent.
        slots: of a document, on average.
        memory_bytes: of a document's memory, on average.
    """

    task: str
    dataset: str
    metric: str
    ratio: int | str
    value: float
    no_context: float | None = None
    full_context: float | None = None
    split: str | None = "test"
    interval: tuple[float, float] | None = None
    alternatives: Mapping[str, float] = field(default_factory=dict)
    reached_ratio: float | None = None
    retention: float | None = None
    slots: float | None = None
    memory_bytes: float | None = None

    def __post_init__(self) -> None:
        if self.task not in TASK_NAMES:
            raise ValueError(f"task must be one of {', '.join(TASK_NAMES)}, got {self.task!r}")
        if not math.isfinite(self.value):
            raise ValueError(f"score {self.metric!r} on {self.dataset!r} must be a finite number, got {self.value}")
