# SPDX-License-Identifier: Apache-2.0
"""Paired differences of F1 between two systems, with verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.comparison.scores import Scores, averaged_sets, parsed_ratio, values_of, whole
from context_compressors.evaluation.bootstrap import percentile_interval, resampled_means
from context_compressors.evaluation.rows import NO_CONTEXT

HOLDS, FAILS, OPEN, NOT_RUN = "higher", "lower", "inconclusive", "not run"
# Of 2,000 the ends of an interval move by a tenth of a point from draw to draw, which turned a verdict.
NUM_RESAMPLES = 10_000


def ordering(pair: Sequence[str], scores: Scores, questions: Any, table: Mapping[str, Any]) -> dict[str, Any]:
    """Compare the F1 of two systems, at each ratio or at the ratios that end the names ("=4")."""
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
    """Return the mean over sets of the paired differences of F1."""
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
    """Return the difference to no context at each ratio, of the systems with scores by question."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name in names:
        for ratio in sorted(scores.get(name, {})):
            at = _paired((name, ratio), (NO_CONTEXT, 0), scores, questions, table)
            if "difference" in at:
                kept = {"ratio": ratio, "difference": at["difference"], "interval": at["interval"]}
                found.setdefault(name, []).append(kept)
    return found
