# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of one token a byte, and the shape of tiny language models that read them."""

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

# The chat template of small instruct models.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ bos_token + message['role'] + '\n' + message['content'] + eos_token + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ bos_token + 'assistant\n' }}{% endif %}"
)
# Two layers, 32 wide, whose four heads share two of keys and values.
SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def byte_tokenizer(
    before: Sequence[str] = (), behind: Sequence[str] = (), backwards: bool = False, **special: Any
) -> PreTrainedTokenizerFast:
    """One token a byte, with other tokens before and behind them; special ones that are none of these come last."""
    tokens = [*before, *sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=backwards), *behind]
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def tiny_llama(tokenizer: PreTrainedTokenizerFast, **fields: Any) -> LlamaConfig:
    """Of one layer, 16 wide, with the tokenizer's vocabulary and special tokens."""
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaConfig(**{"vocab_size": len(tokenizer), **ids, **shape, **fields})
