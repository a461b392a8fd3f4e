# SPDX-License-Identifier: Apache-2.0
"""Which layers and which tokens ComprExIT's slots are made of."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .one_chunk import one_chunk


@dataclass
class InformationFlow:
    """What slots are made of.

    Args:
        layer_weights: `(batch_size, num_tokens, num_states)`, how much of each layer is in a token's anchor (alpha of
            equation 6); `None` without a gate.
        allocation: `(batch_size, num_slots, num_tokens)`, how much of each token is in a slot; in sum 1 for a slot.
    """

    layer_weights: Tensor | None
    allocation: Tensor


def has_information_flow(backbone: PreTrainedModel) -> bool:
    """Whether a compressor's slots are weighted means of what its gate makes of tokens."""
    return hasattr(backbone, "transmission")


@torch.no_grad()
def information_flow(
    backbone: Any, input_ids: Tensor, attention_mask: Tensor | None = None, ratio: int | None = None
) -> InformationFlow:
    """Which layers and which tokens the slots are made of (ComprExIT, Figures 3 to 5 and 7).

    Args:
        backbone: a compressor's that has it, see `has_information_flow`.
        input_ids: contexts `(batch_size, num_tokens)` of at most one chunk.
        attention_mask: their mask.
        ratio: one of the checkpoint's; its default if not given.

    Returns:
        The weights; tokens and slots stand left-aligned, and pads have zero.

    Raises:
        ValueError: a context of several chunks, or no context tokens at all; as `compress` besides.
    """
    chunks, chunk_ratio = one_chunk(backbone, input_ids, attention_mask, ratio, "the flow of information is shown")

    def anchors_and_weights(hidden_states: Sequence[Tensor]) -> Tensor:
        if backbone.layer_gate is None:
            return backbone.anchors(hidden_states)
        return torch.cat(backbone.layer_gate(hidden_states), dim=-1)

    width = backbone.config.get_encoder_config().hidden_size
    anchors, weights = backbone.reduce_layers(anchors_and_weights, chunks).tensor_split([width], dim=-1)
    mask = chunks.attention_mask.bool()
    return InformationFlow(
        layer_weights=None if backbone.layer_gate is None else weights * mask[:, :, None],
        allocation=backbone.transmission.allocation(anchors, mask, chunk_ratio),
    )
