# SPDX-License-Identifier: Apache-2.0
"""Scores of a condition by sample; from these, the rows of a report with intervals, and the answers."""

import hashlib
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from .bootstrap import (
    Statistic,
    helps,
    mean_statistic,
    percentile_interval,
    perplexity_statistic,
    resampled_scores,
    wilson_interval,
)
from .metrics import (
    BertScorer,
    bleu_counts,
    bleu_of_counts,
    prefix_exact_match,
    rouge_lsum,
    rouge_scores,
    squad_scores,
    substring_accuracy,
    teacher_normalized,
)
from .report import EvaluationReport
from .rows import (
    BENCHMARK_SCORE,
    FULL_CONTEXT,
    MAIN_METRICS,
    NO_CONTEXT,
    RETENTION,
    EvaluationRow,
    SampleAnswers,
    alternative_condition,
    ratio_of,
)
from .samples import EvaluationDataset, Sample
from .settings import ALTERNATIVES, NUM_RESAMPLES

# Scores of a sample that are 0 or 100.
_SHARES = ("substring_accuracy", "exact_match")


class GivenTokens:
    """Likelihoods of given tokens, by sample."""

    def __init__(self, num_samples: int):
        self.nll, self.hits, self.counts = np.zeros((3, num_samples))

    def token_accuracy(self) -> Statistic:
        """Share of the tokens that were the likeliest in their place, 0 to 100."""
        return mean_statistic(100 * self.hits / self.counts, self.counts)

    def perplexity(self) -> Statistic:
        """Perplexity of the tokens."""
        return perplexity_statistic(self.nll, self.counts)


class Tally:
    """Scores of a condition on one task by sample, NaN where none, of given `targets` and of what was `recovered`."""

    def __init__(
        self,
        samples: Sequence[Sample],
        targets: GivenTokens | None = None,
        recovered: GivenTokens | None = None,
        position_bytes: float = math.nan,
    ):
        self.samples, self.targets, self.recovered = samples, targets, recovered
        self.position_bytes = position_bytes
        # What was written, as text and token ids.
        self.predictions: dict[int, str] = {}
        self.written_ids: dict[int, list[int]] = {}
        self.slots, self.memory_bytes, self.decoder_positions = np.full((3, len(samples)), np.nan)
        self.compress_seconds, self.answer_seconds = np.full((2, len(samples)), np.nan)

    def note_memory(self, rows: list[int], memory: Any, seconds: float) -> None:
        """Note the slots and bytes of rows' memories, and the seconds that each took."""
        slots = memory.num_slots.cpu().numpy()
        self.slots[rows] = slots
        self.memory_bytes[rows] = slots * (memory.nbytes / max(1, int(slots.sum())))
        self.compress_seconds[rows] = seconds

    def statistics(self, task: str, bert_scorer: BertScorer | None = None) -> dict[str, Statistic]:
        """The task's metrics."""
        metrics: dict[str, Statistic] = {}
        if task == "question_answering":
            if all(sample.metric is not None for sample in self.samples):
                metrics[BENCHMARK_SCORE] = mean_statistic(
                    [
                        sample.metric.score(self.predictions[row], sample.references)  # type: ignore[union-attr]
                        for row, sample in enumerate(self.samples)
                    ]
                )
            metrics |= self._means(squad_scores)
            metrics |= self._means(lambda *texts: {"substring_accuracy": substring_accuracy(*texts)})
            metrics |= self._means(rouge_scores)
            if self.targets is not None:
                metrics["answer_perplexity"] = self.targets.perplexity()
        elif task == "summarization":
            metrics |= self._means(rouge_scores)
            metrics |= self._means(lambda *texts: {"rougeLsum": rouge_lsum(*texts)})
        elif self.targets is not None:
            metrics |= {"token_accuracy": self.targets.token_accuracy(), "perplexity": self.targets.perplexity()}
            if self.recovered is not None:
                metrics |= self._restoration(self.recovered)
        if bert_scorer is not None and self.predictions:
            metrics |= self._means(lambda *texts: {"bert_score_f1": bert_scorer.score(*texts)})
        return metrics

    def _restoration(self, recovered: GivenTokens) -> dict[str, Statistic]:
        rows = list(enumerate(self.samples))
        counts = [bleu_counts(self.predictions[row], sample.references) for row, sample in rows]
        prefixes = [prefix_exact_match([self.written_ids[row]], [sample.target_ids]) for row, sample in rows]
        return {
            "bleu": Statistic(np.array(counts, dtype=np.float64), bleu_of_counts),
            **self._means(rouge_scores),
            "prefix_exact_match": mean_statistic(prefixes),
            "recovered_perplexity": recovered.perplexity(),
        }

    def _means(self, score: Callable[[list[str], list[list[str]]], dict[str, float]]) -> dict[str, Statistic]:
        """Statistics of scores that are means over samples, from a function of a list of samples."""
        by_sample = [score([self.predictions[row]], [s.references]) for row, s in enumerate(self.samples)]
        return {name: mean_statistic([scores[name] for scores in by_sample]) for name in by_sample[0]}

    def costs(self) -> dict[str, float]:
        """Mean slots and bytes of a context's memory, and decoder positions of a question; without those unknown."""
        first = self._first_of_contexts()
        means = {
            "slots": self.slots[first].mean(),
            "memory_bytes": self.memory_bytes[first].mean(),
            "decoder_positions": self.decoder_positions.mean(),
            "cache_bytes": self.decoder_positions.mean() * self.position_bytes,
        }
        return _known(means)

    def seconds(self) -> dict[str, float]:
        """Return the mean seconds to `compress` a context, where it was, and to `answer` a question."""
        compress = self.compress_seconds[self._first_of_contexts()].mean()
        return _known({"compress": compress, "answer": self.answer_seconds.mean()})

    def _first_of_contexts(self) -> list[int]:
        """Return the first sample of each context: one that is asked several times counts once."""
        first: dict[Hashable, int] = {}
        for row, sample in enumerate(self.samples):
            first.setdefault(tuple(sample.context_ids), row)
        return list(first.values())


def _known(means: Mapping[str, float]) -> dict[str, float]:
    return {name: float(mean) for name, mean in means.items() if not np.isnan(mean)}


def samples_digest(samples: Sequence[Sample]) -> str:
    """Sixteen hexadecimal digits that two evaluations have in common when they score the same samples."""
    digest = hashlib.sha256()
    for sample in samples:
        read = sample.head_ids, sample.context_ids, sample.passages, sample.prompt_ids, sample.target_ids
        digest.update(repr((*read, sample.references, sample.max_new_tokens, sample.metric)).encode())
    return digest.hexdigest()[:16]


def add_results(
    report: EvaluationReport,
    dataset: EvaluationDataset,
    task: str,
    tallies: Mapping[str, Tally],
    seed: int = 0,
    num_resamples: int = NUM_RESAMPLES,
    bert_scorer: BertScorer | None = None,
) -> None:
    """Add a row for each condition, and each sample's answers, to a report."""
    samples = next(iter(tallies.values())).samples
    documents = [sample.document for sample in samples]
    num_documents = len(set(documents))
    statistics = {name: tally.statistics(task, bert_scorer) for name, tally in tallies.items()}
    flat = {(name, metric): statistic for name, metrics in statistics.items() for metric, statistic in metrics.items()}
    main = BENCHMARK_SCORE if BENCHMARK_SCORE in next(iter(statistics.values())) else MAIN_METRICS[task]
    resampled = resampled_scores(flat, documents, num_resamples, seed)

    def interval(scores: np.ndarray) -> tuple[float, float]:
        # A single document says nothing about others.
        return percentile_interval(scores) if num_documents > 1 else (math.nan, math.nan)

    bounds = [statistics[name][main].score() for name in (FULL_CONTEXT, NO_CONTEXT) if name in statistics]
    has_worth = len(bounds) == 2 and helps(main, *bounds)
    for name, tally in tallies.items():
        scores = {metric: statistic.score() for metric, statistic in statistics[name].items()}
        intervals = {metric: interval(resampled[name, metric]) for metric in scores}
        for metric in _SHARES:
            # Resamples of what is always right or always wrong do not differ.
            if scores.get(metric) in (0, 100) and num_documents > 1:
                intervals[metric] = wilson_interval(num_documents if scores[metric] else 0, num_documents)
        kept = None
        if has_worth and name not in (NO_CONTEXT, FULL_CONTEXT):
            conditions = (name, FULL_CONTEXT, NO_CONTEXT)
            kept = 100 * float(teacher_normalized(*(statistics[condition][main].score() for condition in conditions)))
            shares = teacher_normalized(*(resampled[condition, main] for condition in conditions))
            intervals[RETENTION] = interval(100 * shares)
        ratio = ratio_of(name)
        same_positions = [] if ratio is None else [alternative_condition(kind, ratio) for kind in ALTERNATIVES]
        differences = {
            other: {
                "metric": main,
                "difference": scores[main] - statistics[other][main].score(),
                "interval": interval(resampled[name, main] - resampled[other, main]),
            }
            for other in same_positions
            if other in statistics
        }
        report.rows.append(
            EvaluationRow(
                dataset.name,
                dataset.domain,
                task,
                name,
                scores,
                len(samples),
                sum(sample.truncated for sample in samples),
                num_documents,
                intervals,
                kept,
                tally.costs(),
                tally.seconds(),
                differences,
            )
        )
    report.answers += _answers(dataset.name, task, tallies, statistics)


def _answers(
    dataset: str, task: str, tallies: Mapping[str, Tally], statistics: Mapping[str, Mapping[str, Statistic]]
) -> list[SampleAnswers]:
    scores = {
        name: {metric: statistic.by_sample() for metric, statistic in metrics.items()}
        for name, metrics in statistics.items()
    }
    samples = next(iter(tallies.values())).samples
    return [
        SampleAnswers(
            dataset,
            task,
            sample.id,
            sample.document,
            sample.question,
            sample.references,
            {name: tally.predictions[row] for name, tally in tallies.items() if tally.predictions},
            {name: {metric: values[row] for metric, values in metrics.items()} for name, metrics in scores.items()},
        )
        for row, sample in enumerate(samples)
    ]
