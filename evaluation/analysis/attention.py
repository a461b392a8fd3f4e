# SPDX-License-Identifier: Apache-2.0
"""Attention from memory tokens to the context, by layer."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...modeling.parts.prompting import document_ids, text_tokenizer


def memory_attention(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, ratio: int | None = None
) -> torch.Tensor:
    """How much the memory tokens of a document attend to its tokens, on average over the heads.

    Args:
        model: a compressor whose encoder reads memory tokens behind the context.
        tokenizer: the tokenizer saved with it.
        text: the document, of one chunk at most.
        ratio: context tokens per memory token; the checkpoint's first when `None`.

    Returns:
        Float32 `(num_layers, num_memory_tokens, num_context_tokens)`, on the CPU. A row sums up to less than 1: the
        rest went to the memory tokens themselves.

    Raises:
        ValueError: a method without memory tokens, or a document that is empty or longer than a chunk.

    Source: EPL, section 5.2, Figures 6 and 7 (there summed over the heads).
    """
    return attention_of_ids(model, document_ids(model.config, context_tokenizer(model, tokenizer), text), ratio)


def has_memory_tokens(backbone: PreTrainedModel) -> bool:
    """Whether a compressor's encoder reads memory tokens, whose attention can be had; GMSA's does in one ablation."""
    return getattr(backbone, "memory_embeddings", None) is not None


def context_tokenizer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A tokenizer for a compressor's documents: the encoder's own where it has one, else the one saved with it."""
    return text_tokenizer(getattr(model, "encoder_tokenizer", None) or tokenizer)


def attention_of_ids(model: PreTrainedModel, ids: Sequence[int], ratio: int | None = None) -> torch.Tensor:
    """`memory_attention` of a document's token ids."""
    backbone = model.base_model
    if not has_memory_tokens(backbone):
        raise ValueError(f"{type(model).__name__} has no memory tokens in its encoder whose attention could be drawn")
    layers = backbone.memory_attention(torch.tensor([list(ids)], device=backbone.device), ratio=ratio)
    return torch.stack([weights[0].float().mean(dim=0).cpu() for weights in layers])
