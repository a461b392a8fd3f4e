# SPDX-License-Identifier: Apache-2.0
"""Contexts as long as the encoder of a compressor reads them, which its configuration says in the encoder's tokens."""

import logging
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import replace

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..modeling.checkpoint.encoder_tokenizer import in_encoder_tokens
from ..modeling.parts.prompting import context_opening
from ..modeling.parts.text_ids import context_start_ids
from .samples import EvaluationDataset, Sample, SampleBuilder
from .settings import WRITTEN_TASKS

logger = logging.getLogger(__name__)


def context_limit(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ratios: Sequence[int | str]
) -> int | None:
    """Most of the decoder's tokens that a context may have, beside the tokens that every context starts with.

    Args:
        model: a compressor.
        tokenizer: the decoder's.
        ratios: those that contexts are compressed at.

    Returns:
        Number of tokens; `None` for no limit, and where an encoder with a tokenizer of its own reads other tokens.

    Raises:
        ValueError: no token is left.
    """
    lowest = lowest_ratio(model, ratios)
    limit = model.config.max_context_tokens(lowest)
    if limit is None or _encoder_tokenizer(model) is not None:
        return None
    num_start = len(context_opening(model.config, tokenizer))
    if limit <= num_start:
        raise ValueError(
            f"the encoder reads contexts of {limit} tokens at most at ratio {lowest}, of which {num_start} are "
            "start tokens: take a higher ratio"
        )
    return limit - num_start


def lowest_ratio(model: PreTrainedModel, ratios: Sequence[int | str]) -> int:
    """The lowest ratio that contexts may be compressed at; "auto" may take any of the checkpoint's."""
    own = model.config.compression_ratios
    return min(int(number) for ratio in ratios for number in (own if ratio == "auto" else [ratio]))


def within_encoder_tokens(
    model: PreTrainedModel,
    builder: SampleBuilder,
    ratios: Sequence[int | str],
    work: Iterable[tuple[EvaluationDataset, str, Sequence[Sample]]],
) -> list[tuple[EvaluationDataset, str, Sequence[Sample]]]:
    """Cut contexts that are too long in the tokens of an encoder with a tokenizer of its own.

    Args:
        model: a compressor.
        builder: what the samples were made by.
        ratios: those that contexts are compressed at.
        work: data set, task and samples.

    Returns:
        The same; samples that are cut say so.

    Raises:
        ValueError: with the first context that does not fit, where contexts may not be cut or nothing of it fits.
    """
    own = _encoder_tokenizer(model)
    limit = None if own is None else model.config.max_context_tokens(lowest_ratio(model, ratios))
    if limit is None:
        return list(work)
    num_start = len(context_start_ids(own))

    def num_tokens(sample: Sample) -> int:
        return num_start + len(in_encoder_tokens(sample.context_ids, builder.tokenizer, own))

    def fitted(dataset: EvaluationDataset, task: str, sample: Sample) -> Sample:
        length = num_tokens(sample)
        if length <= limit:
            return sample
        prefix = builder.prefix_ids if task in WRITTEN_TASKS else []

        def cut(kept: int) -> Sample:
            return replace(builder, max_context_tokens=len(prefix) + kept).fit(task, sample, dataset.name)

        longest = len(sample.context_ids) - len(prefix)
        kept = 0
        if builder.truncate_context:
            kept = bisect_left(range(1, longest), True, key=lambda kept: num_tokens(cut(kept)) > limit)
        # Elsewhere cut, a text may have a token more.
        while kept and num_tokens(cut(kept)) > limit:
            kept -= 1
        if not kept:
            advice = "shorten its prefix" if builder.truncate_context else "allow truncation (--truncate-context)"
            raise ValueError(
                f"data set {dataset.name!r}, {task}: a context of {len(sample.context_ids)} tokens has {length} of "
                f"the encoder's own, which reads {limit} at ratio {lowest_ratio(model, ratios)}; {advice}"
            )
        return cut(kept)

    fitting: list[tuple[EvaluationDataset, str, Sequence[Sample]]] = []
    for dataset, task, samples in work:
        fitting.append((dataset, task, [fitted(dataset, task, sample) for sample in samples]))
        more = sum(sample.truncated for sample in fitting[-1][2]) - sum(sample.truncated for sample in samples)
        if more:
            logger.warning("%s, %s: %d contexts cut to what the encoder reads", dataset.name, task, more)
    return fitting


def _encoder_tokenizer(model: PreTrainedModel) -> PreTrainedTokenizerBase | None:
    return getattr(model, "encoder_tokenizer", None)
