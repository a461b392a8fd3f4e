# SPDX-License-Identifier: Apache-2.0
"""Configurations of well-known language models and of methods on them, for counting and timing without weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..configuration.methods import METHODS, config_class, methods_on
from ..configuration.nearest_names import check_choice, nearest

if TYPE_CHECKING:
    from transformers import AutoConfig, PreTrainedConfig

_SHAPES: dict[str, dict[str, Any]] = {
    "llama-2-7b": {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
    },
    "llama-3.2-1b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "qwen2-7b": {
        "model_type": "qwen2",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
    },
    "qwen3-8b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
    },
    "t5-v1.1-large": {
        "model_type": "t5",
        "vocab_size": 32128,
        "d_model": 1024,
        "d_kv": 64,
        "d_ff": 2816,
        "num_layers": 24,
        "num_heads": 16,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
    },
}
SHAPE_NAMES = tuple(_SHAPES)


def _auto_config() -> type[AutoConfig]:
    """`AutoConfig` with this package's methods; imported late, since the names above are asked for without it."""
    from transformers import AutoConfig

    from .. import modeling  # noqa: F401

    return AutoConfig


def named_config(name: str) -> PreTrainedConfig:
    """A new configuration of a well-known shape, such as "llama-2-7b"."""
    if name not in _SHAPES:
        raise ValueError(f"there is no shape {name!r}{nearest(name, SHAPE_NAMES)}")
    fields = dict(_SHAPES[name])
    return _auto_config().for_model(fields.pop("model_type"), **fields)


def config_of(name: str) -> PreTrainedConfig:
    """The configuration of a named shape, of a folder, or of a model on the Hub."""
    if name in _SHAPES or not ("/" in name or Path(name).is_dir()):
        return named_config(name)
    from ..modeling.checkpoint.pretrained_bases import base_place

    try:
        return _auto_config().from_pretrained(base_place(name))
    except (OSError, ValueError) as error:
        raise ValueError(f"there is no model configuration in {name!r}: {error}") from error


def method_config(method: str, base: PreTrainedConfig, ratios: Sequence[int], **fields: Any) -> PreTrainedConfig:
    """A method's configuration on a base, with further `fields` of it."""
    check_choice("method", method, METHODS)
    if method not in methods_on(base):
        raise ValueError(f"{method} does not go with a base of type {base.model_type!r}; {methods_on(base)} do")
    return config_class(method)(decoder_config=base, compression_ratios=list(ratios), **fields)
