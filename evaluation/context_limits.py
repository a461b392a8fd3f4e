# SPDX-License-Identifier: Apache-2.0
"""How long a context may be for the encoder of a compressor to read it."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..modeling.encoder_tokenizer import in_encoder_tokens
from ..training.data import context_start_ids
from .samples import EvaluationDataset, Sample

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


def check_encoder_tokens(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ratios: Sequence[int],
    work: Iterable[tuple[EvaluationDataset, str, Sequence[Sample]]],
) -> None:
    """Refuse contexts that are too long in the tokens of an encoder with a tokenizer of its own.

    Args:
        model: a compressor.
        tokenizer: the decoder's.
        ratios: those that contexts are compressed at.
        work: data set, task and samples.

    Raises:
        ValueError: with the first context that does not fit.
    """
    own = _encoder_tokenizer(model)
    limit = None if own is None else encoder_limit(model, min(ratios))
    if limit is None:
        return
    num_start = len(context_start_ids(own))
    for dataset, task, samples in work:
        for sample in samples:
            length = num_start + len(in_encoder_tokens(sample.context_ids, tokenizer, own))
            if length > limit:
                raise ValueError(
                    f"data set {dataset.name!r}, {task}: a context of {len(sample.context_ids)} tokens has {length} "
                    f"of the encoder's own, which reads {limit} at ratio {min(ratios)}: lower max_context_tokens "
                    "(--max-context-tokens) and allow truncation (--truncate-context)"
                )


def _encoder_tokenizer(model: PreTrainedModel) -> PreTrainedTokenizerBase | None:
    return getattr(model, "encoder_tokenizer", None)
