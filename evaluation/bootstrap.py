# SPDX-License-Identifier: Apache-2.0
"""Bootstrap intervals over documents: questions that share a context are drawn together, or not at all."""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from .settings import NUM_RESAMPLES

LEVEL = 0.95
# Resamples that are drawn at once: their counts are a matrix with a column for each document.
_BLOCK = 256
# Standard deviations that hold 95 % of a normal distribution.
_WIDTH = 1.959964

Key = TypeVar("Key", bound=Hashable)


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
    """Scores of bootstrap resamples: as many documents as there are, drawn with replacement.

    A resample is the same for all statistics, so that differences and ratios may be taken resample by resample.

    Returns:
        For each statistic its scores, `(num_resamples,)`.
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
    mean: float, intervals: Sequence[Sequence[float]], weights: Sequence[float] | None = None
) -> tuple[float, float]:
    """Both ends of a mean's interval, from those of its parts as independent ones.

    Half its width is the root of the summed squares of theirs, each times its part's weight; NaN where one has none.
    """
    weights = weights or [1 / len(intervals)] * len(intervals)
    half = math.hypot(*(weight * (high - low) / 2 for weight, (low, high) in zip(weights, intervals, strict=True)))
    return mean - half, mean + half


def wilson_interval(num_right: int, number: int) -> tuple[float, float]:
    """The 95 % interval of a share, in percent.

    Source: Wilson (1927), "Probable inference, the law of succession, and statistical inference".
    """
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
    """What the interval of a difference tells of the first of two: "better", "worse" or "inconclusive"."""
    low, high = interval
    if not (low > 0 or high < 0):
        return "inconclusive"
    return "better" if (low > 0) != is_lower_better(metric) else "worse"


def percentile_interval(scores: np.ndarray, level: float = LEVEL) -> tuple[float, float]:
    """The interval that holds the share `level` of the resampled scores; resamples without a score do not count."""
    defined = scores[~np.isnan(scores)]
    if not len(defined):
        return math.nan, math.nan
    # Without interpolation, which has no answer between an infinite score and another.
    low, high = np.quantile(defined, [(1 - level) / 2, (1 + level) / 2], method="nearest")
    return float(low), float(high)
