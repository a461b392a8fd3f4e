# SPDX-License-Identifier: Apache-2.0
"""The name that the installed version of transformers has for a cache of keys and values."""

from __future__ import annotations

from dataclasses import fields

from transformers.modeling_outputs import BaseModelOutputWithPast

# "cache" from version 5.24 on: the argument of its models and of `generate`, and the field of their outputs.
CACHE = next(field.name for field in fields(BaseModelOutputWithPast) if field.name in ("cache", "past_key_values"))
