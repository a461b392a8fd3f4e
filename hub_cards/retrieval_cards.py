# SPDX-License-Identifier: Apache-2.0
"""Cards of checkpoints that rank documents: their use, and their scores beside BM25's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import EvalResult

from .card_records import RetrievalScore, TrainingRecord
from .cards import (
    NOT_MEASURED,
    card_metadata,
    checkpoint_facts,
    every,
    fill_template,
    method_name,
    method_text,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# What benchmarks/decal/retrieval.py ranks.
_COLLECTION = "SciFact"


def retrieval_card(
    config: PreTrainedConfig,
    training: TrainingRecord,
    scores: Sequence[RetrievalScore],
    limits: Sequence[str],
    *,
    model_id: str,
    summary: str | None = None,
    scores_note: str | None = None,
    license: str = "apache-2.0",
    language: str | Sequence[str] = "en",
) -> str:
    """Write the card of a compressor that ranks documents by several vectors each.

    Args:
        config: the configuration of a checkpoint that `AutoModelForTextEncoding` loads.
        training: how the checkpoint was made.
        scores: its rankings, each beside BM25's.
        limits: what it cannot do, one sentence each; never empty.
        model_id: repository or folder that the snippet loads.
        summary: what it is, in a sentence or two; made from the configuration when `None`.
        scores_note: how the scores were measured, in sentences under their table.
        license: licence of the weights, as the Hub writes it.
        language: ISO 639-1 code or codes.

    Returns:
        the text of `README.md`, which starts with YAML metadata.

    Raises:
        ValueError: no limits are named, or a score's ratio is none of the checkpoint's.
    """
    ratios = tuple(config.compression_ratios)
    for score in scores:
        if score.ratio not in ratios:
            raise ValueError(f"the score on {score.dataset!r} has ratio {score.ratio}; the checkpoint has {ratios}")
    metadata = card_metadata(model_id, training, [], license, language)
    metadata.pipeline_tag = "feature-extraction"
    metadata.tags = ["context-compression", "late-interaction", method_name(config).replace(" ", "-")]
    metadata.eval_results = [
        EvalResult(
            task_type="text-retrieval",
            task_name="Text retrieval",
            dataset_type=score.dataset.lower().replace(" ", "_"),
            dataset_name=score.dataset,
            metric_type="ndcg_at_10",
            metric_name=f"nDCG@10, ratio {score.ratio}",
            metric_value=round(score.ndcg_at_10, 4),
        )
        for score in scores
    ] or None
    return fill_template(
        "retrieval_template.md",
        metadata,
        training,
        retrieval_table(scores),
        scores_note,
        limits,
        model_id=model_id,
        summary=summary
        or (
            f"A retrieval model ({method_name(config)}): queries and documents become one vector for "
            f"{every(ratios)}, compared by Chamfer similarity (MaxSim)."
        ),
        facts=checkpoint_facts(config, is_encoder=True),
        ratio=str(ratios[0]),
        method=method_text(config.model_type),
    )


def retrieval_table(scores: Sequence[RetrievalScore]) -> str:
    """A Markdown table of rankings, each beside BM25's.

    Args:
        scores: the rows, in order.
    """
    if not scores:
        return NOT_MEASURED
    lines = ["| data | ratio | nDCG@10 | BM25 | index, times smaller |", "| --- | ---: | ---: | ---: | ---: |"]
    for score in scores:
        numbers = [score.ndcg_at_10, score.bm25, score.storage_saving]
        cells = [score.dataset, str(score.ratio), *("–" if n is None else f"{n:.1f}" for n in numbers)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def retrieval_scores(path: Path, name: str) -> tuple[list[RetrievalScore], str]:
    """A checkpoint's rows of a result file of `benchmarks/decal/retrieval.py`, and how they were measured.

    Args:
        path: the file.
        name: the checkpoint's folder, without where it is.

    Returns:
        The scores, and a sentence for under their table.

    Raises:
        ValueError: there is no such file, it is another one, or it has no row of the checkpoint.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path}: benchmarks/decal/retrieval.py writes it")
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        rows, settings = results["rows"], results["settings"]
        floor = next((row["ndcg_at_10"] for row in rows if row["model"] == "BM25"), None)
        own = [row for row in rows if row["model"] == name]
        scores = [
            RetrievalScore(_COLLECTION, row["document_ratio"], row["ndcg_at_10"], floor, row["storage_saving"])
            for row in own
        ]
        lengths = settings["max_query_tokens"], settings["max_document_tokens"]
        queries = sorted({row["queries"] for row in own})
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a result file of benchmarks/decal/retrieval.py: {error!r}") from error
    ratios = [score.ratio for score in scores]
    if len(set(ratios)) < len(ratios):
        raise ValueError(f"{path} has several checkpoints of the name {name!r}: rename their folders")
    if not own:
        models = list(dict.fromkeys(row["model"] for row in rows))
        raise ValueError(f"{path} has no row of {name!r}; it has {models}")
    note = (
        f"{', '.join(f'{number:,}' for number in queries)} test queries of at most {lengths[0]} tokens, documents of "
        f"at most {lengths[1]}, each scored with every query; both sides at one ratio."
    )
    return scores, note
