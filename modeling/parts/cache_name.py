# SPDX-License-Identifier: Apache-2.0
"""What the installed version of transformers calls a cache of keys and values."""

from __future__ import annotations

from dataclasses import fields

from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast

# "cache" from version 5.24 on: the argument of its models and of `generate`, and the field of their outputs.
CACHE = next(field.name for field in fields(BaseModelOutputWithPast) if field.name in ("cache", "past_key_values"))


def one_cache(cache: Cache | None, past_key_values: Cache | None) -> Cache | None:
    """The cache of a call that may name it in either way."""
    if cache is not None and past_key_values is not None:
        raise ValueError("`past_key_values` is an older name of `cache`: give one of them")
    cache = past_key_values if cache is None else cache
    if cache is not None and not isinstance(cache, Cache):
        raise TypeError(f"`cache` must be a transformers.Cache, got {type(cache).__name__}")
    return cache
