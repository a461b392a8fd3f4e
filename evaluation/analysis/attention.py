# SPDX-License-Identifier: Apache-2.0
"""Attention from memory tokens to the context, by layer."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...modeling.parts.call_views import twin
from ...modeling.parts.text_ids import text_tokenizer
from .one_chunk import one_chunk


def has_memory_tokens(backbone: PreTrainedModel) -> bool:
    """Return True for an encoder that reads memory tokens, as GMSA's does in one ablation."""
    return getattr(backbone, "memory_embeddings", None) is not None


def context_tokenizer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A tokenizer for a compressor's documents: the encoder's own where it has one, else the one saved with it."""
    return text_tokenizer(getattr(model, "encoder_tokenizer", None) or tokenizer)


def attention_of_ids(model: PreTrainedModel, ids: Sequence[int], ratio: int | None = None) -> torch.Tensor:
    """How much the memory tokens of a document attend to its tokens, on average over the heads.

    Args:
        model: a compressor whose encoder reads memory tokens behind the context.
        ids: the document's, of one chunk at most.
        ratio: context tokens per memory token; the checkpoint's default when `None`.

    Returns:
        Float32 `(num_layers, num_memory_tokens, num_context_tokens)`, on the CPU. A row sums up to less than 1: the
        rest went to the memory tokens themselves.

    Raises:
        ValueError: a method without memory tokens, or a document that is empty or longer than a chunk.

    Source: EPL, section 5.2, Figures 6 and 7 (there summed over the heads).
    """
    backbone = model.base_model
    if not has_memory_tokens(backbone):
        raise ValueError(f"{type(model).__name__} has no memory tokens in its encoder whose attention could be drawn")
    layers = attention_by_head(backbone, torch.tensor([list(ids)], device=backbone.device), ratio=ratio)
    return torch.stack([weights[0].float().mean(dim=0).cpu() for weights in layers])


def memory_token_shares(backbone: Any, input_ids: Tensor, ratio: int | None = None) -> Tensor:
    """How the last layer's attention from each memory token, a mean over the heads, is divided among a context.

    Args:
        backbone: as in `attention_by_head`.
        input_ids: one context `(1, num_tokens)` of at most one chunk.
        ratio: one of the checkpoint's; its default if not given.

    Returns:
        Float32 `(num_memory_tokens, num_tokens)`, in sum 1 for a memory token.
    """
    attention = attention_by_head(backbone, input_ids, ratio=ratio)[-1][0].float().mean(dim=0)
    return attention / attention.sum(dim=1, keepdim=True)


@torch.no_grad()
def attention_by_head(
    backbone: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    ratio: int | None = None,
) -> tuple[Tensor, ...]:
    """How much each memory token attends to each context token, by layer (EPL, Figures 6 and 7).

    Args:
        backbone: a compressor's whose encoder reads memory tokens.
        input_ids: contexts `(batch_size, num_tokens)` of at most one chunk.
        attention_mask: their mask.
        ratio: one of the checkpoint's; its default if not given.

    Returns:
        For each layer `(batch_size, num_heads, num_memory_tokens, num_tokens)`; context tokens stand left-aligned,
        and pads have zero.

    Raises:
        ValueError: a context of several chunks, or no context tokens at all; as `compress` besides.
    """
    chunks, chunk_ratio = one_chunk(backbone, input_ids, attention_mask, ratio, "attention is drawn")
    # Only this implementation gives its weights away.
    alone = twin(backbone)
    alone.encoder_backbone.set_attn_implementation("eager")
    (rows,) = alone.memory_rows(chunks, [chunk_ratio])
    attentions = alone.encoder_outputs(**rows.inputs, output_attentions=True).attentions
    memory_mask = rows.groups[0][1]
    lengths = chunks.attention_mask.sum(dim=1)
    # A row is [context, memory tokens, pads].
    columns = torch.arange(max(chunks.lengths), device=lengths.device)
    is_real = (columns < lengths[:, None])[:, None, None] & memory_mask.bool()[:, None, :, None]
    of_tokens = (weights[..., : len(columns)] for weights in attentions)
    return tuple(
        weights.take_along_dim(rows.places[:, None, :, None], dim=2).masked_fill(~is_real, 0) for weights in of_tokens
    )
