# SPDX-License-Identifier: Apache-2.0
"""Two conditions or systems on the very same questions: their difference, its interval, and what it tells."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .bootstrap import is_lower_better, percentile_interval, verdict
from .rows import SampleAnswers
from .settings import NUM_RESAMPLES

Run = Sequence[SampleAnswers]
# A corpus' score is no mean over its samples.
_OF_A_CORPUS = ("bleu",)


@dataclass(frozen=True)
class PairedDifference:
    """How much one condition or system is above another on the same samples.

    Args:
        metric: what was scored; of a perplexity, everything is in nats per token.
        first, second: means of both, over their seeds.
        difference: first minus second.
        interval: its 95 % bootstrap interval, over documents, and over seeds where there are several.
        num_samples, num_documents: of a seed.
        num_seeds: runs of the first and of the second one.
        first_interval, second_interval: as `interval`, of one alone.
    """

    metric: str
    first: float
    second: float
    difference: float
    interval: tuple[float, float]
    num_samples: int
    num_documents: int
    num_seeds: tuple[int, int]
    first_interval: tuple[float, float]
    second_interval: tuple[float, float]

    @property
    def verdict(self) -> str:
        """Of the first one: "better", "worse", or "inconclusive" where the interval includes 0."""
        return verdict(self.interval, self.metric)


def paired_difference(
    first: Run | Sequence[Run],
    second: Run | Sequence[Run],
    metric: str,
    first_condition: str,
    second_condition: str | None = None,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> PairedDifference:
    """Compare two conditions or systems on the very same samples of one data set and task.

    A resample draws documents with replacement, the same ones for both, so that what makes a question hard cancels.
    Where a system was trained with several seeds, it draws its runs, too, for two conditions of one system the same
    ones.

    Args:
        first: what the samples got, from `read_answers` or a report; or a list of such, one for each seed.
        second: the same of another system, its samples in any order; or `first` again for another condition.
        metric: a mean over samples, which weigh alike, such as "f1"; of a perplexity, the mean of its logarithm is
            compared, in nats per token.
        first_condition, second_condition: such as "ratio=4" and "bm25=4"; the same one when the second is `None`.
    """
    if metric in _OF_A_CORPUS:
        raise ValueError(f"{metric} is a score of a whole corpus, which has no difference by sample: take another one")
    runs = [_runs(first), _runs(second)]
    samples = {_key(sample): sample.document for sample in runs[0][0]}
    for run in (*runs[0], *runs[1]):
        keys = Counter(map(_key, run))
        if keys != dict.fromkeys(samples, 1):
            unlike = next((key for key, number in keys.items() if number > 1 or key not in samples), next(iter(keys)))
            raise ValueError(
                f"all runs must have the same samples of a data set and task, each once, got {len(samples)} and "
                f"{len(run)}, and {unlike} not once in each"
            )
    conditions = (first_condition, second_condition or first_condition)
    values = [
        np.array([_scores(run, list(samples), condition, metric) for run in side])
        for side, condition in zip(runs, conditions, strict=True)
    ]
    mine, theirs = (float(side.mean()) for side in values)
    resampled = resampled_means(values, list(samples.values()), num_resamples, seed, second is first)
    num_documents = len(set(samples.values()))
    # A single document says nothing about others.
    interval, *ends = [
        percentile_interval(scores) if num_documents > 1 else (math.nan, math.nan)
        for scores in (resampled[0] - resampled[1], *resampled)
    ]
    num_seeds = (len(runs[0]), len(runs[1]))
    counts = (len(samples), num_documents, num_seeds)
    return PairedDifference(metric, mine, theirs, mine - theirs, interval, *counts, *ends)


def resampled_means(
    values: Sequence[np.ndarray],
    documents: Sequence[int],
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
    same_runs: bool = False,
) -> list[np.ndarray]:
    """Means of bootstrap resamples that draw documents, and of each system its seeds.

    Args:
        values: of each system, `(num_seeds, num_samples)`.

    Returns:
        Of each system its means, `(num_resamples,)`.

    Source: Owen (2007), "The pigeonhole bootstrap".
    """
    numbers = {document: number for number, document in enumerate(dict.fromkeys(documents))}
    place = [numbers[document] for document in documents]
    sizes = np.bincount(place, minlength=len(numbers))
    rng = np.random.default_rng(seed)
    drawn = rng.multinomial(len(numbers), np.full(len(numbers), 1 / len(numbers)), num_resamples)
    means = []
    seeds: np.ndarray | None = None
    for system in values:
        by_document = np.zeros((len(numbers), len(system)))
        np.add.at(by_document, place, system.T)
        num_seeds = len(system)
        if seeds is None or not same_runs:
            seeds = rng.multinomial(num_seeds, np.full(num_seeds, 1 / num_seeds), num_resamples)
        means.append((drawn @ by_document * seeds).sum(axis=1) / num_seeds / (drawn @ sizes))
    return means


def _runs(runs: Run | Sequence[Run]) -> Sequence[Run]:
    if not runs or not (isinstance(runs[0], SampleAnswers) or runs[0]):
        raise ValueError("there are no samples to compare")
    return [runs] if isinstance(runs[0], SampleAnswers) else runs  # type: ignore[list-item,return-value]


def _key(sample: SampleAnswers) -> tuple[str, ...]:
    # A text's name is that of all its windows.
    return sample.dataset, sample.task, sample.id, sample.question, *sample.references


def _scores(run: Run, order: Sequence[tuple[str, ...]], condition: str, metric: str) -> list[float]:
    """A run's scores of a metric, in the order of the samples."""
    scores: dict[tuple[str, ...], Any] = {_key(sample): sample.scores.get(condition, {}).get(metric) for sample in run}
    if None in scores.values():
        known = {name: sorted(metrics) for name, metrics in run[0].scores.items()}
        raise ValueError(f"there is no {metric!r} under the condition {condition!r}; there are {known}")
    for key, score in scores.items():
        if not math.isfinite(score):
            raise ValueError(f"{metric} under the condition {condition!r} must be finite, got {score} of {key}")
    values = [scores[key] for key in order]
    return [math.log(value) for value in values] if is_lower_better(metric) else values
