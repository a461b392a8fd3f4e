# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of one token a byte."""

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def byte_tokenizer(
    before: Sequence[str] = (), behind: Sequence[str] = (), backwards: bool = False, **special: Any
) -> PreTrainedTokenizerFast:
    """One token a byte, with other tokens before and behind them; special ones that are none of these come last."""
    tokens = [*before, *sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=backwards), *behind]
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)
