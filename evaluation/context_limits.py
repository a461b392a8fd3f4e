# SPDX-License-Identifier: Apache-2.0
"""How long a context may be for the encoder of a compressor to read it."""

import logging
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.sources import context_start_ids
from ..modeling.checkpoint.encoder_tokenizer import in_encoder_tokens
from .samples import EvaluationDataset, Sample, SampleBuilder

logger = logging.getLogger(__name__)

# Longer than any context: what fits it has no limit.
_ENDLESS = 2**40


def encoder_limit(model: PreTrainedModel, ratio: int) -> int | None:
    """Most tokens that a compressor's encoder reads, start tokens included.

    Args:
        model: a compressor.
        ratio: context tokens per slot; a lower ratio may need more positions.

    Returns:
        Number of the encoder's tokens, `None` for no limit.
    """
    if _fits(model, _ENDLESS, ratio):
        return None
    return bisect_left(range(1, _ENDLESS), True, key=lambda num_tokens: not _fits(model, num_tokens, ratio))


def _fits(model: PreTrainedModel, num_tokens: int, ratio: int) -> bool:
    """Whether a context has its positions in the encoder, and its memory tokens."""
    config, backbone = model.config, model.base_model
    longest_chunk = num_tokens if config.chunk_size is None else min(config.chunk_size, num_tokens)
    num_appended = 0
    if getattr(backbone, "memory_embeddings", None) is not None:
        num_appended = int(backbone.memory_counts(torch.tensor(longest_chunk), ratio))
    # Copies of one token never run out.
    if num_appended > getattr(config, "num_memory_tokens", num_appended):
        return False
    limit = getattr(config.get_encoder_config(), "max_position_embeddings", None)
    if limit is None or getattr(config, "encoder_type", None) == "embeddings":
        return True
    # Chunks start anew at 0, with appended tokens behind them; or they count on from 1, and appended tokens share
    # the positions of their chunk.
    return (longest_chunk + num_appended if config.position_layout == "default" else num_tokens + 1) <= limit


def context_limit(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ratios: Sequence[int]) -> int | None:
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
    limit = encoder_limit(model, min(ratios))
    if limit is None or _encoder_tokenizer(model) is not None:
        return None
    num_start = len(context_start_ids(tokenizer))
    if limit <= num_start:
        raise ValueError(
            f"the encoder reads contexts of {limit} tokens at most at ratio {min(ratios)}, of which {num_start} are "
            "start tokens: take a higher ratio"
        )
    return limit - num_start


def within_encoder_tokens(
    model: PreTrainedModel,
    builder: SampleBuilder,
    ratios: Sequence[int],
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
    limit = None if own is None else encoder_limit(model, min(ratios))
    if limit is None:
        return list(work)
    num_start = len(context_start_ids(own))

    def num_tokens(sample: Sample) -> int:
        return num_start + len(in_encoder_tokens(sample.context_ids, builder.tokenizer, own))

    def fitted(dataset: EvaluationDataset, task: str, sample: Sample) -> Sample:
        length = num_tokens(sample)
        if length <= limit:
            return sample
        prefix = builder.prefix_ids if task in ("question_answering", "summarisation") else []

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
                f"the encoder's own, which reads {limit} at ratio {min(ratios)}; {advice}"
            )
        return cut(kept)

    fitting = []
    for dataset, task, samples in work:
        fitting.append((dataset, task, [fitted(dataset, task, sample) for sample in samples]))
        more = sum(sample.truncated for sample in fitting[-1][2]) - sum(sample.truncated for sample in samples)
        if more:
            logger.warning("%s, %s: %d contexts cut to what the encoder reads", dataset.name, task, more)
    return fitting


def _encoder_tokenizer(model: PreTrainedModel) -> PreTrainedTokenizerBase | None:
    return getattr(model, "encoder_tokenizer", None)
