# SPDX-License-Identifier: Apache-2.0
"""What a condition has scored so far, by sample: it is saved as it grows, and taken up again after a stop."""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .benchmark_metrics import BENCHMARK_SCORE, BenchmarkMetric
from .bert_score import BertScorer
from .bootstrap import Statistic, mean_statistic, perplexity_statistic
from .metrics import (
    bleu_counts,
    bleu_of_counts,
    prefix_exact_match,
    rouge_lsum,
    rouge_scores,
    squad_scores,
    substring_accuracy,
)
from .samples import Sample

# By sample, in the order of a tally's rows.
_COSTS = ("slots", "memory_bytes", "decoder_positions", "cache_bytes")
_SECONDS = ("compress", "answer")


class GivenTokens:
    """What a condition makes of tokens that it is given one after another, by sample.

    Args:
        num_samples: how many there are.
    """

    def __init__(self, num_samples: int):
        self.nll, self.hits, self.counts = np.zeros((3, num_samples))

    def state(self, row: int) -> list[float]:
        """What is known of a sample."""
        return [float(values[row]) for values in (self.nll, self.hits, self.counts)]

    def restore(self, row: int, state: Sequence[float]) -> None:
        """Take over what `state` gave."""
        self.nll[row], self.hits[row], self.counts[row] = state

    def token_accuracy(self) -> Statistic:
        """Share of the tokens that were the likeliest in their place, 0 to 100."""
        return mean_statistic(100 * self.hits / self.counts, self.counts)

    def perplexity(self) -> Statistic:
        """Perplexity of the tokens."""
        return perplexity_statistic(self.nll, self.counts)


@dataclass
class Tally:
    """What a condition has scored on one task of one data set; every list has an entry for each sample, in order.

    Args:
        references: the accepted texts of each sample.
        predictions: what was written, if anything was.
        targets: scores of the given targets.
        recovered: scores of what was written, given once more.
        written_ids: token ids of what was written.
        target_ids: token ids of what should have been.
        used: by sample, `(6, num_samples)`: number of slots and their bytes, NaN where nothing was compressed; what
            the decoder has read when it starts to write, slots included; seconds to compress the document, at all
            ratios of the evaluation at once; seconds to read and write, its share of the batch's; and context tokens
            where the text selected its ratio, else NaN.
        metrics: how a benchmark scores each sample, `None` where none does.
        position_bytes: bytes of a position in the decoder's cache; NaN where they are not known.
    """

    references: list[list[str]]
    predictions: list[str] = field(default_factory=list)
    targets: Any = None
    recovered: Any = None
    written_ids: list[list[int]] = field(default_factory=list)
    target_ids: list[list[int]] = field(default_factory=list)
    used: np.ndarray = field(default_factory=lambda: np.zeros((6, 0)))
    metrics: list[BenchmarkMetric | None] = field(default_factory=list)
    position_bytes: float = math.nan

    def statistics(self, task: str, bert_scorer: BertScorer | None = None) -> dict[str, Statistic]:
        """The task's metrics."""
        found: dict[str, Statistic] = {}
        if task == "question_answering":
            metrics = [metric for metric in self.metrics if metric is not None]
            if metrics and len(metrics) == len(self.metrics):
                rows = zip(metrics, self.predictions, self.references, strict=True)
                found[BENCHMARK_SCORE] = mean_statistic([metric.score(text, wanted) for metric, text, wanted in rows])
            found |= self._means(squad_scores)
            found |= self._means(lambda *texts: {"substring_accuracy": substring_accuracy(*texts)})
            found |= self._means(rouge_scores)
            if self.targets is not None:
                found["answer_perplexity"] = self.targets.perplexity()
        elif task == "summarisation":
            found |= self._means(rouge_scores)
            found |= self._means(lambda *texts: {"rougeLsum": rouge_lsum(*texts)})
        else:
            found |= {"token_accuracy": self.targets.token_accuracy(), "perplexity": self.targets.perplexity()}
            if self.predictions:
                found |= self._restoration()
        if bert_scorer is not None and self.predictions:
            found |= self._means(lambda *texts: {"bert_score_f1": bert_scorer.score(*texts)})
        return found

    def _restoration(self) -> dict[str, Statistic]:
        pairs = zip(self.predictions, self.references, strict=True)
        ids = zip(self.written_ids, self.target_ids, strict=True)
        return {
            "bleu": Statistic(np.array([bleu_counts(*pair) for pair in pairs], dtype=np.float64), bleu_of_counts),
            **self._means(rouge_scores),
            "prefix_exact_match": mean_statistic([prefix_exact_match([wrote], [target]) for wrote, target in ids]),
            "recovered_perplexity": self.recovered.perplexity(),
        }

    def _means(self, score: Callable[[list[str], list[list[str]]], dict[str, float]]) -> dict[str, Statistic]:
        """Statistics of scores that are means over samples, from a function of a list of samples."""
        texts = zip(self.predictions, self.references, strict=True)
        by_sample = [score([prediction], [references]) for prediction, references in texts]
        return {name: mean_statistic([scores[name] for scores in by_sample]) for name in by_sample[0]}

    def costs(self, contexts: Sequence[Hashable]) -> dict[str, float]:
        """Mean slots and bytes of a context's memory, and of a question the decoder's positions and the bytes of their
        keys and values; without those unknown.

        Where texts selected their ratios, also context tokens per slot over all contexts together.

        Args:
            contexts: each sample's context; one that is asked several times counts once.
        """
        slots, memory_bytes, tokens = (_of_contexts(self.used[place], contexts) for place in (0, 1, 5))
        found = _known_means(_COSTS, slots, memory_bytes, self.used[2], self.used[2] * self.position_bytes)
        return found if np.isnan(tokens).any() else {**found, "reached_ratio": float(tokens.sum() / slots.sum())}

    def seconds(self, contexts: Sequence[Hashable]) -> dict[str, float]:
        """Mean seconds to `compress` a context, where it was, and to `answer` a question.

        Args:
            contexts: as in `costs`.
        """
        return _known_means(_SECONDS, _of_contexts(self.used[3], contexts), self.used[4])

    def state(self, row: int) -> dict[str, Any]:
        """All that is known of a sample, as JSON holds it."""
        found: dict[str, Any] = {"used": self.used[:, row].tolist()}
        if self.predictions:
            found |= {"prediction": self.predictions[row], "written": self.written_ids[row]}
        for name in ("targets", "recovered"):
            if getattr(self, name) is not None:
                found[name] = getattr(self, name).state(row)
        return found

    def restore(self, row: int, state: Mapping[str, Any]) -> None:
        """Take over what `state` gave."""
        self.used[:, row] = state["used"]
        if self.predictions:
            self.predictions[row], self.written_ids[row] = state["prediction"], state["written"]
        for name in ("targets", "recovered"):
            if getattr(self, name) is not None:
                getattr(self, name).restore(row, state[name])


def _of_contexts(values: np.ndarray, contexts: Sequence[Hashable]) -> np.ndarray:
    """Of each context the value of its first sample."""
    first: dict[Hashable, int] = {}
    for row, context in enumerate(contexts):
        first.setdefault(context, row)
    return values[list(first.values())]


def _known_means(names: Sequence[str], *values: np.ndarray) -> dict[str, float]:
    means = {name: float(numbers.mean()) for name, numbers in zip(names, values, strict=True)}
    return {name: mean for name, mean in means.items() if not np.isnan(mean)}


def empty_tally(samples: Sequence[Sample], given: bool, writes: bool, recovers: bool, position_bytes: float) -> Tally:
    """A tally of samples of which nothing is known yet.

    Args:
        samples: the samples.
        given: whether tokens are given and scored.
        writes: whether the model writes.
        recovers: whether what it wrote is scored as given tokens, too.
        position_bytes: as of [`Tally`].
    """
    size = len(samples)
    return Tally(
        [sample.references for sample in samples],
        [""] * size if writes else [],
        GivenTokens(size) if given else None,
        GivenTokens(size) if recovers else None,
        [[] for _ in samples],
        [sample.target_ids for sample in samples] if recovers else [],
        np.full((6, size), np.nan),
        [sample.metric for sample in samples],
        position_bytes,
    )


def note_costs(tally: Tally, rows: list[int], prompts: list[list[int]], memory: Any, seconds: float | None) -> None:
    """Note what a batch's rows have read, and where they were compressed, into how much and in how many seconds."""
    lengths = np.array([len(prompt) for prompt in prompts])
    slots: Any = 0 if memory is None else memory.num_slots.cpu().numpy()
    tally.used[2, rows] = lengths + slots
    if seconds is not None:
        tally.used[0, rows] = slots
        tally.used[1, rows] = slots * (memory.nbytes / max(1, int(slots.sum())))
        tally.used[3, rows] = seconds
        if not isinstance(memory.ratio, int):
            tally.used[5, rows] = memory.num_context_tokens.cpu().numpy()
