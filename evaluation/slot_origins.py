# SPDX-License-Identifier: Apache-2.0
"""Shares of tokens and layers in the slots of a document."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..modeling.compressor.backbone import Chunks, CompressorBackbone, cut
from ..modeling.compressor.validation import check_context_length, measure_rows, resolve_ratios
from ..modeling.parts.base_pass import copy_with_shared_weights
from ..modeling.parts.text_ids import text_tokenizer

PLAN, ATTENTION, WINDOWS, KEPT = "plan", "attention", "windows", "kept"


def context_tokenizer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A tokenizer for a compressor's documents: the encoder's own where it has one, else the one saved with it."""
    return text_tokenizer(model.encoder_tokenizer or tokenizer)


def one_chunk(
    backbone: CompressorBackbone, input_ids: Tensor, attention_mask: Tensor | None, ratio: int | None
) -> tuple[Chunks, int | Tensor]:
    """Contexts `(batch_size, num_tokens)`, each as one chunk, and the ratio that they are compressed at."""
    config, context = backbone.config, backbone.context_rows(input_ids, attention_mask)
    measure_rows(context)
    ratios = resolve_ratios([ratio], config.compression_ratios, input_ids, False)
    chunks = cut(context.input_ids, context.attention_mask, context.lengths, config.chunk_size, config.position_layout)
    if chunks.chunks_per_row > 1 or not max(chunks.lengths):
        raise ValueError(
            f"slots are shown of a context of 1 to {config.chunk_size or 'any number of'} tokens (one chunk), "
            f"got {max(context.lengths)}"
        )
    check_context_length(config, int(chunks.position_ids.max()) + 1)
    return chunks, ratios[0]


@torch.no_grad()
def information_flow(
    backbone: Any, input_ids: Tensor, attention_mask: Tensor | None = None, ratio: int | None = None
) -> tuple[Tensor | None, Tensor]:
    """Return the shares of layers and of tokens in the slots of one chunk (ComprExIT, Figures 3 to 5 and 7).

    Returns:
        `(batch_size, num_tokens, num_states)`, the share of each layer in a token's anchor (alpha of equation 6,
        `None` without a gate), and `(batch_size, num_slots, num_tokens)`, that of each token in a slot; 0 at pads.
    """
    chunks, chunk_ratio = one_chunk(backbone, input_ids, attention_mask, ratio)

    def anchors_and_weights(hidden_states: Sequence[Tensor]) -> Tensor:
        if backbone.layer_gate is None:
            return backbone.anchors(hidden_states)
        return torch.cat(backbone.layer_gate(hidden_states), dim=-1)

    width = backbone.config.get_encoder_config().hidden_size
    anchors, weights = backbone.reduce_layers(anchors_and_weights, chunks).tensor_split([width], dim=-1)
    mask = chunks.attention_mask.bool()
    layer_weights = None if backbone.layer_gate is None else weights * mask[:, :, None]
    return layer_weights, backbone.transmission.allocation(anchors, mask, chunk_ratio)


@torch.no_grad()
def attention_by_head(
    backbone: Any, input_ids: Tensor, attention_mask: Tensor | None = None, ratio: int | None = None
) -> tuple[Tensor, ...]:
    """Return the attention of each memory token to each context token, by layer (EPL, Figures 6 and 7).

    Returns:
        For each layer `(batch_size, num_heads, num_memory_tokens, num_tokens)`, zero at pads. The rest of a row's sum
        of 1 went to the memory tokens.
    """
    chunks, chunk_ratio = one_chunk(backbone, input_ids, attention_mask, ratio)
    # Only this implementation gives its weights away.
    alone = copy_with_shared_weights(backbone)
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


@dataclass(frozen=True)
class SlotOrigins:
    """Shares of a document's tokens in its slots.

    Args:
        kind: "plan" of transport, "attention" of memory tokens in the last layer, "windows" of tokens whose mean a
            slot is, or "kept", tokens whose keys and values a slot holds.
        chunks: for each chunk of the document `(num_slots, num_tokens)`; the shares of a slot sum up to 1.
    """

    kind: str
    chunks: tuple[Tensor, ...]

    def strongest(self, most: int) -> list[list[tuple[int, float]]]:
        """Return the places of each slot's tokens in the document and their weights, in the order of the text."""
        strongest, first = [], 0
        for weights in self.chunks:
            for slot in weights:
                values, places = slot.topk(min(most, len(slot)))
                pairs = zip((places + first).tolist(), values.tolist(), strict=True)
                strongest.append(sorted(pair for pair in pairs if pair[1] >= 0.01 * float(values[0])))
            first += weights.shape[1]
        return strongest


@torch.inference_mode()
def slot_origins(model: PreTrainedModel, ids: Sequence[int], ratio: int | None = None) -> SlotOrigins | None:
    """Return the shares of a document's token ids in the slots of a compressor; `None` of methods without such."""
    kind = model.base_model.slot_origin
    if kind is None:
        return None
    size = model.config.chunk_size or max(1, len(ids))
    parts = [ids[start : start + size] for start in range(0, max(1, len(ids)), size)]
    rows = (torch.tensor([list(part)], device=model.device) for part in parts)
    return SlotOrigins(kind, tuple(slot_weights(model.base_model, kind, row, ratio).float().cpu() for row in rows))


def slot_weights(backbone: Any, kind: str, input_ids: Tensor, ratio: int | None) -> Tensor:
    """Return the shares of one chunk's tokens in its slots, `(num_slots, num_tokens)`."""
    if kind == PLAN:
        return information_flow(backbone, input_ids, ratio=ratio)[1][0]
    if kind == ATTENTION:
        attention = attention_by_head(backbone, input_ids, ratio=ratio)[-1][0].float().mean(dim=0)
        return attention / attention.sum(dim=1, keepdim=True)
    chunks, chunk_ratio = one_chunk(backbone, input_ids, None, ratio)
    num_tokens = input_ids.shape[1]
    if kind == KEPT:
        heads = torch.cat([places.flatten(0, 1) for places in backbone.kept_tokens(chunks, chunk_ratio)])
        return functional.one_hot(heads, num_tokens).float().mean(dim=0)
    window = torch.arange(num_tokens) // int(chunk_ratio)
    shares = functional.one_hot(window, -(-num_tokens // int(chunk_ratio))).T.float()
    return shares / shares.sum(dim=1, keepdim=True)
