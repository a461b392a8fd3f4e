# SPDX-License-Identifier: Apache-2.0
"""What the tests of slots and of attention are tried on."""

import pytest
from byte_tokenizers import byte_tokenizer
from transformers import LlamaConfig


@pytest.fixture(scope="module")
def tokenizer():
    """One token per byte, and BOS in front of a document."""
    names = {"bos_token": "<bos>", "eos_token": "<eos>"}
    return byte_tokenizer([*names.values()], **names)


@pytest.fixture(scope="module")
def llama(tokenizer):
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=1,
    )
