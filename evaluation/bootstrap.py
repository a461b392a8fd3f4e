# SPDX-License-Identifier: Apache-2.0
"""Bootstrap intervals over documents, and paired differences on the same samples."""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from .rows import SampleAnswers
from .settings import NUM_RESAMPLES

# Resamples that are drawn at once: their counts are a matrix with a column for each document.
_BLOCK = 256
# Standard deviations that hold 95 % of a normal distribution.
_WIDTH = 1.959964

# A corpus' score is no mean over its samples.
_OF_A_CORPUS = ("bleu",)

Key = TypeVar("Key", bound=Hashable)
Run = Sequence[SampleAnswers]


@dataclass(frozen=True)
class Statistic:
    """A score that is a function of sums over samples, such as a mean, a perplexity or corpus BLEU.

    Args:
        values: what each sample adds, `(num_samples, num_values)`.
        of_sums: from sums `(..., num_values)` to scores `(...)`.
    """

    values: np.ndarray
    of_sums: Callable[[np.ndarray], np.ndarray]

    def score(self) -> float:
        """The score of all samples."""
        return float(self.of_sums(self.values.sum(axis=0)))

    def by_sample(self) -> list[float]:
        """Each sample's own score."""
        return self.of_sums(self.values).tolist()


def mean_statistic(
    values: Sequence[float] | np.ndarray, weights: Sequence[float] | np.ndarray | None = None
) -> Statistic:
    """Statistic of a mean."""
    numbers = np.asarray(values, dtype=np.float64)
    counts = np.ones_like(numbers) if weights is None else np.asarray(weights, dtype=np.float64)
    return Statistic(np.stack([numbers * counts, counts], axis=1), _quotient)


def perplexity_statistic(nll: Sequence[float] | np.ndarray, num_tokens: Sequence[int] | np.ndarray) -> Statistic:
    """Statistic of a perplexity, in which each token weighs the same."""
    return Statistic(np.stack([nll, num_tokens], axis=1).astype(np.float64), _perplexity)


def _quotient(sums: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return sums[..., 0] / sums[..., 1]


def _perplexity(sums: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.exp(_quotient(sums))


def resampled_scores(
    statistics: Mapping[Key, Statistic],
    documents: Sequence[Hashable],
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> dict[Key, np.ndarray]:
    """Return scores `(num_resamples,)` of each statistic over documents that are drawn with replacement.

    A resample is the same for all statistics, so that differences and ratios may be taken resample by resample.
    """
    columns = np.concatenate([statistic.values for statistic in statistics.values()], axis=1)
    numbers = {document: number for number, document in enumerate(dict.fromkeys(documents))}
    by_document = np.zeros((len(numbers), columns.shape[1]))
    np.add.at(by_document, [numbers[document] for document in documents], columns)
    rng = np.random.default_rng(seed)
    chances = np.full(len(numbers), 1 / len(numbers))
    sizes = [min(_BLOCK, num_resamples - start) for start in range(0, num_resamples, _BLOCK)]
    sums = np.concatenate([rng.multinomial(len(numbers), chances, size) @ by_document for size in sizes])
    ends = np.cumsum([statistic.values.shape[1] for statistic in statistics.values()])
    parts = np.split(sums, ends[:-1], axis=1)
    return {name: s.of_sums(part) for (name, s), part in zip(statistics.items(), parts, strict=True)}


def interval_of_mean(
    mean: float, intervals: Sequence[Sequence[float]], weights: Sequence[float], are_independent: bool
) -> tuple[float, float]:
    """Return the ends of a mean's interval from those of its parts, the widest if these share documents; NaN where
    one has none."""
    halves = [abs(weight) * (high - low) / 2 for weight, (low, high) in zip(weights, intervals, strict=True)]
    half = math.hypot(*halves) if are_independent else math.fsum(halves)
    return mean - half, mean + half


def wilson_interval(num_right: float, number: float) -> tuple[float, float]:
    """Return the 95 % interval of a share, in percent (Wilson, 1927)."""
    share, squared = num_right / number, _WIDTH**2
    centre = (share + squared / (2 * number)) / (1 + squared / number)
    half = _WIDTH / (1 + squared / number) * math.sqrt(share * (1 - share) / number + squared / (4 * number**2))
    return 100 * max(0.0, centre - half), 100 * min(1.0, centre + half)


def is_lower_better(metric: str) -> bool:
    """Return whether a lower score is the better one."""
    return metric.endswith("perplexity")


def helps(metric: str, full: float, none: float) -> bool:
    """Return whether the score `full` is better than `none`: only then a share of the difference means something."""
    return full < none if is_lower_better(metric) else full > none


def verdict(interval: tuple[float, float], metric: str = "") -> str:
    """Return "better", "worse" or "inconclusive", of the first of two by the interval of their difference."""
    low, high = interval
    if not (low > 0 or high < 0):
        return "inconclusive"
    return "better" if (low > 0) != is_lower_better(metric) else "worse"


def percentile_interval(scores: np.ndarray) -> tuple[float, float]:
    """Return the interval that holds 95 % of the resampled scores; resamples without a score do not count."""
    defined = scores[~np.isnan(scores)]
    if not len(defined):
        return math.nan, math.nan
    # Without interpolation, which has no answer between an infinite score and another.
    low, high = np.quantile(defined, [0.025, 0.975], method="nearest")
    return float(low), float(high)


# --- two conditions or systems on the very same samples ---


@dataclass(frozen=True)
class PairedDifference:
    """Difference between two conditions or systems on the same samples: `first` minus `second`.

    Intervals are 95 % bootstrap intervals over documents and seeds. A perplexity is compared in nats per token.
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
        """Return "better", "worse", or "inconclusive" where the interval includes 0, of the first one."""
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

    Args:
        first: answers of the samples, or a list of such, one for each seed.
        second: those of another system; or `first` again for another condition, whose runs are then drawn together.
        metric: a mean over samples, such as "f1"; of a perplexity, its logarithm is compared, in nats per token.
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
    """Return means `(num_resamples,)` of resamples of documents and seeds, from values `(num_seeds, num_samples)`.

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
