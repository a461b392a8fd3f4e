# SPDX-License-Identifier: Apache-2.0
"""From what conditions scored by sample to the rows of a report, with intervals, and the answers beside them."""

import hashlib
import math
from collections.abc import Mapping, Sequence

import numpy as np

from .answer_kinds import ANSWER_KINDS, answer_kind
from .benchmark_metrics import BENCHMARK_SCORE
from .bert_score import BertScorer
from .bootstrap import Statistic, helps, in_own_order, percentile_interval, resampled_scores
from .metrics import teacher_normalized
from .report import EvaluationReport
from .rows import (
    FULL_CONTEXT,
    MAIN_METRICS,
    NO_CONTEXT,
    RETENTION,
    EvaluationRow,
    SampleAnswers,
    alternative_condition,
)
from .samples import EvaluationDataset, Sample
from .settings import ALTERNATIVES, NUM_RESAMPLES
from .tallies import Tally


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
    samples: Sequence[Sample],
    tallies: Mapping[str, Tally],
    seed: int = 0,
    num_resamples: int = NUM_RESAMPLES,
    bert_scorer: BertScorer | None = None,
) -> None:
    """Add a row for each condition, and each sample's answers, to a report.

    Args:
        report: gets them.
        dataset: what was scored.
        task: what was asked.
        samples: in the order of the tallies.
        tallies: condition -> what it scored.
        seed: drew the samples, and draws the resamples.
        num_resamples: of the bootstrap.
        bert_scorer: also gives everything that was written a BERTScore.
    """
    documents = [sample.document for sample in samples]
    # Of one document there may be several windows.
    contexts = [tuple(sample.context_ids) for sample in samples]
    statistics = {name: tally.statistics(task, bert_scorer) for name, tally in tallies.items()}
    flat = {(name, metric): found for name, metrics in statistics.items() for metric, found in metrics.items()}
    main = BENCHMARK_SCORE if BENCHMARK_SCORE in next(iter(statistics.values())) else MAIN_METRICS[task]
    kinds = _rows_of_kinds(samples) if task == "question_answering" else {}
    for name, metrics in statistics.items():
        flat |= {(name, f"{main}/{kind}"): _only(metrics[main], rows) for kind, rows in kinds.items()}
    resampled = resampled_scores(flat, documents, num_resamples, seed)
    _keep_resamples(report, dataset, task, seed, resampled)
    num_documents = len(set(documents))

    def interval(scores: np.ndarray, num_documents: int = num_documents) -> tuple[float, float]:
        # Of one document nothing can be told.
        return percentile_interval(scores) if num_documents > 1 else (math.nan, math.nan)

    bounds = [statistics[name][main].score() for name in (FULL_CONTEXT, NO_CONTEXT) if name in statistics]
    has_worth = len(bounds) == 2 and helps(main, *bounds)
    for name, tally in tallies.items():
        intervals = {metric: interval(resampled[name, metric]) for metric in statistics[name]}
        kept = None
        if has_worth and name not in (NO_CONTEXT, FULL_CONTEXT):
            conditions = (name, FULL_CONTEXT, NO_CONTEXT)
            kept = 100 * float(teacher_normalized(*(statistics[name][main].score() for name in conditions)))
            intervals[RETENTION] = interval(100 * teacher_normalized(*(resampled[name, main] for name in conditions)))
        report.add(
            EvaluationRow(
                dataset.name,
                dataset.domain,
                task,
                name,
                {metric: statistic.score() for metric, statistic in statistics[name].items()},
                len(samples),
                seed,
                sum(sample.truncated for sample in samples),
                num_documents,
                intervals,
                kept,
                tally.costs(contexts),
                tally.seconds(contexts),
                {
                    kind: {
                        "num_samples": len(rows),
                        "num_documents": number,
                        main: flat[name, f"{main}/{kind}"].score(),
                        "interval": interval(resampled[name, f"{main}/{kind}"], number),
                    }
                    for kind, rows in kinds.items()
                    for number in [len({documents[row] for row in rows})]
                },
                {
                    other: {
                        "metric": main,
                        "difference": statistics[name][main].score() - statistics[other][main].score(),
                        "interval": interval(resampled[name, main] - resampled[other, main]),
                    }
                    for other in _same_positions(name)
                    if other in statistics
                },
            )
        )
    report.answers += _answers(dataset.name, task, samples, tallies, statistics)


def add_resamples(
    report: EvaluationReport,
    dataset: EvaluationDataset,
    task: str,
    samples: Sequence[Sample],
    tallies: Mapping[str, Tally],
    seed: int = 0,
    num_resamples: int = NUM_RESAMPLES,
) -> None:
    """Add what the averages' intervals are made of, of a data set and task whose rows a report has already.

    Args:
        report, dataset, task, samples, tallies, seed, num_resamples: as in `add_results`.
    """
    statistics = {(name, metric): s for name, tally in tallies.items() for metric, s in tally.statistics(task).items()}
    main = {key: s for key, s in statistics.items() if key[1] in (BENCHMARK_SCORE, MAIN_METRICS[task])}
    documents = [sample.document for sample in samples]
    _keep_resamples(report, dataset, task, seed, resampled_scores(main, documents, num_resamples, seed))


def _keep_resamples(
    report: EvaluationReport,
    dataset: EvaluationDataset,
    task: str,
    seed: int,
    resampled: Mapping[tuple[str, str], np.ndarray],
) -> None:
    for (name, metric), scores in resampled.items():
        if metric in (BENCHMARK_SCORE, MAIN_METRICS[task]):
            report.resamples[dataset.name, task, name, seed, metric] = in_own_order(scores, dataset.name, seed)


def _rows_of_kinds(samples: Sequence[Sample]) -> dict[str, list[int]]:
    """Kind of answer -> the samples that ask for one; kinds that nothing asks for are left out."""
    found = [answer_kind(sample.references[0]) for sample in samples]
    rows = {kind: [row for row, own in enumerate(found) if own == kind] for kind in ANSWER_KINDS}
    return {kind: places for kind, places in rows.items() if places}


def _only(statistic: Statistic, rows: Sequence[int]) -> Statistic:
    """The statistic of some samples alone; the others add nothing to its sums."""
    values = np.zeros_like(statistic.values)
    values[rows] = statistic.values[rows]
    return Statistic(values, statistic.of_sums)


def _same_positions(condition: str) -> list[str]:
    """The alternatives that fill as many positions as a ratio's slots."""
    name, _, ratio = condition.partition("=")
    return [alternative_condition(kind, ratio) for kind in ALTERNATIVES if name == "ratio"]


def _answers(
    dataset: str,
    task: str,
    samples: Sequence[Sample],
    tallies: Mapping[str, Tally],
    statistics: Mapping[str, Mapping[str, Statistic]],
) -> list[SampleAnswers]:
    scores = {
        name: {metric: statistic.by_sample() for metric, statistic in found.items()}
        for name, found in statistics.items()
    }
    return [
        SampleAnswers(
            dataset,
            task,
            sample.id,
            sample.document,
            sample.question,
            sample.references,
            {name: tally.predictions[row] for name, tally in tallies.items() if tally.predictions},
            {name: {metric: values[row] for metric, values in found.items()} for name, found in scores.items()},
        )
        for row, sample in enumerate(samples)
    ]
