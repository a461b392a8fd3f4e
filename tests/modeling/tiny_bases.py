# SPDX-License-Identifier: Apache-2.0
"""The tiny language models that methods are tried on, and token ids for them."""

import string
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3NextConfig,
    SmolLM3Config,
)

VOCAB_SIZE, HIDDEN_SIZE = 128, 32
PAD, BOS, EOS = 0, 1, 2
AE, LM = VOCAB_SIZE, VOCAB_SIZE + 1
TASK_TOKENS = {"[AE]": AE, "[LM]": LM}

# Sliding windows are shorter than the tests' sequences; the logits' caps are low enough to bend them.
BASES: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "qwen2": (Qwen2Config, {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": (Qwen3Config, {"head_dim": 12}),
    "mistral": (MistralConfig, {"sliding_window": 8}),
    "gemma2": (
        Gemma2Config,
        {"sliding_window": 8, "head_dim": 12, "query_pre_attn_scalar": 12, "final_logit_softcapping": 2.0},
    ),
}
# Every second layer has full attention, the others a state of fixed size.
_HYBRID = {
    **{"linear_conv_kernel_dim": 3, "linear_key_head_dim": 6, "linear_value_head_dim": 8},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "head_dim": 16},
    "layer_types": ["linear_attention", "full_attention"],
}
# Those of `test_new_bases.py`, outside of the matrix.
NEW_BASES: dict[str, tuple[type, dict[str, Any]]] = {
    "qwen3_5": (Qwen3_5TextConfig, _HYBRID),
    "qwen3_next": (Qwen3NextConfig, {**_HYBRID, "mlp_only_layers": [0, 1]}),
    "gemma3": (
        Gemma3TextConfig,
        {
            **{"head_dim": 12, "query_pre_attn_scalar": 12, "sliding_window": 256},
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    # Its second layer has no positions.
    "smollm3": (SmolLM3Config, {"no_rope_layers": [1, 0]}),
}
# transformers has no sdpa for Gemma 2, whose attention scores are capped.
BACKBONES = [
    (name, attention) for name in BASES for attention in ("eager", "sdpa") if (name, attention) != ("gemma2", "sdpa")
]
# The two that differ most: masks, windows, norms, caps, scaled embeddings.
FAR_APART = [("llama", "sdpa"), ("gemma2", "eager")]


def base_config(architecture: str = "llama", **fields: Any) -> Any:
    """Configuration of a tiny language model."""
    config_class, own_fields = {**BASES, **NEW_BASES}[architecture]
    return config_class(
        **{
            "vocab_size": VOCAB_SIZE,
            "hidden_size": HIDDEN_SIZE,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "pad_token_id": PAD,
            "bos_token_id": BOS,
            "eos_token_id": EOS,
            "tie_word_embeddings": False,
            # Far from zero, so that positions, masks and adapters matter.
            "initializer_range": 0.3,
            **own_fields,
            **fields,
        }
    )


def ids_of(length: int, seed: int = 0, most: int = VOCAB_SIZE) -> torch.Tensor:
    """A row of ordinary token ids, (1, length)."""
    return torch.randint(5, most, (1, length), generator=torch.Generator().manual_seed(seed))


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of the tiny models' vocabulary: one token a character, BOS in front of what it encodes."""
    characters = [*string.ascii_letters, *string.digits, *string.punctuation, " ", "\n"]
    names = ["<pad>", "<s>", "</s>", *characters]
    names += [f"<unused_{index}>" for index in range(VOCAB_SIZE - len(names))]
    backend = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<pad>"
    )
