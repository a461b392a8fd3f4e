# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of contexts, where the encoder is another model than the decoder and reads other tokens."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ..parts.text_ids import encode

ENCODER_TOKENIZER = "encoder_tokenizer"


def encoders_tokenizer(
    base: str | os.PathLike,
    encoder: str | os.PathLike,
    base_loading: dict[str, Any],
    encoder_loading: dict[str, Any],
    is_needed: bool,
) -> PreTrainedTokenizerBase | None:
    """The encoder's tokenizer, if it has one and it makes other tokens than the base's, or is needed in any case."""
    tokenizer = _tokenizer(encoder, encoder_loading)
    if tokenizer is None or is_needed:
        return tokenizer
    other = _tokenizer(base, base_loading)
    probe = "The tokens of one text, 1 and 23."
    same = other is not None and other.get_vocab() == tokenizer.get_vocab() and other(probe) == tokenizer(probe)
    return None if same else tokenizer


def load_encoder_tokenizer(
    checkpoint: str | os.PathLike, subfolder: str, loading: dict[str, Any]
) -> PreTrainedTokenizerBase:
    """The tokenizer of contexts that a checkpoint carries."""
    inside = "/".join(filter(None, (loading.get("subfolder"), subfolder)))
    tokenizer = _tokenizer(checkpoint, {**loading, "subfolder": inside})
    if tokenizer is None:
        raise ValueError(f"{checkpoint} has no tokenizer in {inside!r}, where its configuration says it is")
    return tokenizer


def in_encoder_tokens(
    ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, encoder_tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    """The text that some of the decoder's tokens stand for, in tokens of the encoder, without special tokens."""
    return encode(encoder_tokenizer, tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def _tokenizer(name: str | os.PathLike, loading: dict[str, Any]) -> PreTrainedTokenizerBase | None:
    try:
        return AutoTokenizer.from_pretrained(name, **loading)
    except (OSError, ValueError):
        # A model without a tokenizer beside it, as in experiments with random weights.
        return None
