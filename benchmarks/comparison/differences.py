# SPDX-License-Identifier: Apache-2.0
"""Differences between two systems, paired on the questions that both have answered, and what they say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.comparison.scores import Scores, averaged_sets, parsed_ratio, values_of, whole
from context_compressors.evaluation.bootstrap import percentile_interval
from context_compressors.evaluation.paired import resampled_means
from context_compressors.evaluation.rows import NO_CONTEXT, ascending

HOLDS, FAILS, OPEN, NOT_RUN = "holds", "does not", "cannot be told", "not run"
# Of 2,000 the ends of an interval move by a tenth of a point from draw to draw, which turned a verdict.
NUM_RESAMPLES = 10_000


def ordering(pair: Sequence[str], scores: Scores, questions: Any, table: Mapping[str, Any]) -> dict[str, Any]:
    """Whether the first system's F1 is above the second's, at each ratio, or at those that the names end in ("=4")."""
    (first, _, ratio), (second, _, other) = (side.partition("=") for side in pair)
    ratios = [(parsed_ratio(ratio), parsed_ratio(other))] if ratio else [(ratio, ratio) for ratio in table["ratios"]]
    found = [
        {
            "ratio": one,
            "second_ratio": two,
            **_paired((first, one), (second, two), scores, questions, table),
        }
        for one, two in ratios
    ]
    return {"first": first, "second": second, "ratios": found}


def _paired(
    first: tuple[str, int | str],
    second: tuple[str, int | str],
    scores: Scores,
    questions: Any,
    table: Mapping[str, Any],
) -> dict[str, Any]:
    """How much a system's F1 at a ratio is above another's: the mean over sets of paired differences."""
    mine, theirs = (scores.get(name, {}).get(ratio, {}) for name, ratio in (first, second))
    differences, resamples, num_questions = [], [], 0
    for number, title in enumerate(averaged_sets(table)):
        ids = whole(questions[title], mine.get(title, {}), theirs.get(title, {}))
        if not ids:
            return {"verdict": NOT_RUN}
        values = [values_of(system[title], ids, "f1") for system in (mine, theirs)]
        documents = [questions[title][id_]["document"] for id_ in ids]
        better, worse = resampled_means(values, documents, num_resamples=NUM_RESAMPLES, seed=number)
        resamples.append(better - worse)
        differences.append(float(values[0].mean() - values[1].mean()))
        num_questions += len(ids)
    low, high = percentile_interval(np.mean(resamples, axis=0))
    return {
        "difference": fmean(differences),
        "interval": [low, high],
        "num_questions": num_questions,
        "verdict": HOLDS if low > 0 else FAILS if high < 0 else OPEN,
    }


def against_no_context(
    names: Sequence[str], scores: Scores, questions: Any, table: Mapping[str, Any]
) -> dict[str, list[dict[str, Any]]]:
    """How much F1 is above that without context at each ratio, of the systems whose scores by question are there."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name in names:
        for ratio in ascending(scores.get(name, {})):
            at = _paired((name, ratio), (NO_CONTEXT, 0), scores, questions, table)
            if "difference" in at:
                kept = {"ratio": ratio, "difference": at["difference"], "interval": at["interval"]}
                found.setdefault(name, []).append(kept)
    return found


def against_embeddings(
    rows: Sequence[Mapping[str, Any]],
    carriers: Mapping[str, str | None],
    *given: Any,
) -> list[dict[str, Any]]:
    """Of each system of keys and values how much its F1 is above that of embeddings of as many positions and bytes.

    `positions` are the best at the same ratio. Of bytes there are both sides: `fewer`, the best of those that store no
    more, and `more`, the nearest of those that store no less, of several the best. Above the second it is better at
    equal bytes, below the first it is worse.
    """
    stored, f1 = {}, {}
    for row in rows:
        if row["set"] == "mean" and "bytes_per_context_token" in row["costs"]:
            key = row["system"], row["ratio"]
            stored[key], f1[key] = round(row["costs"]["bytes_per_context_token"]), row["scores"]["f1"]
    embeddings = [key for key in stored if carriers.get(key[0]) == "embeddings"]
    found = []
    for key, num_bytes in stored.items():
        if carriers.get(key[0]) != "key_values":
            continue
        rivals = {
            "positions": max((other for other in embeddings if other[1] == key[1]), key=f1.get, default=None),
            "fewer": max((other for other in embeddings if stored[other] <= num_bytes), key=f1.get, default=None),
            "more": min(
                (other for other in embeddings if stored[other] >= num_bytes),
                key=lambda other: (stored[other], -f1[other]),
                default=None,
            ),
        }
        against = {
            side: {"system": rival[0], "ratio": rival[1], **_paired(key, rival, *given)}
            for side, rival in rivals.items()
            if rival is not None
        }
        found.append({"system": key[0], "ratio": key[1], **against})
    return found
