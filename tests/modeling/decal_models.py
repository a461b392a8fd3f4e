# SPDX-License-Identifier: Apache-2.0
"""Tiny DeCAL models in every setting."""

import pytest
import torch
from parameters import disturb

from context_compressors import DeCALConfig, DeCALForConditionalGeneration

VOCAB_SIZE, START, EOS = 128, 0, 1
T5_FIELDS = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 16,
    "relative_attention_max_distance": 20,
    "decoder_start_token_id": START,
    "eos_token_id": EOS,
    "dropout_rate": 0.0,
}
CCPROXY = {"latent_placement": "appended", "latent_pooling": False, "encoder_attention": "causal"}
SETTINGS = {
    "decal": {},
    "no_pooling": {"latent_pooling": False},
    "appended": {"latent_placement": "appended"},
    "ccproxy": CCPROXY,
    "attention_pooling": {"compression": "attention_pooling"},
    "baseline": {"compression": "none", "compression_ratios": 1},
}
GREEDY = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}


def build(
    setting="decal", attention="sdpa", seed=0, decoder_config=None, model_class=DeCALForConditionalGeneration, **fields
):
    """A tiny model in evaluation mode, with nothing at a start value that could hide a mistake."""
    torch.manual_seed(seed)
    fields = {"compression_ratios": (2, 3, 8), **SETTINGS[setting], **fields}
    config = DeCALConfig(decoder_config={**T5_FIELDS, **(decoder_config or {})}, **fields)
    config._attn_implementation = attention
    return disturb(model_class(config)).eval()


def raises(*parts):
    return pytest.raises(ValueError, match="(?s)" + ".*".join(parts))
