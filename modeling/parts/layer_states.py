# SPDX-License-Identifier: Apache-2.0
"""The hidden states of all layers of a causal language model, a segment of the context at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from .attention_masks import run_backbone
from .base_precision import weights_of
from .cache_name import CACHE

Reduction = Callable[[Sequence[Tensor]], Tensor]


def reduce_layer_states(
    backbone: PreTrainedModel,
    reduce: Reduction,
    input_ids: Tensor,
    attention_mask: Tensor,
    position_ids: Tensor,
    segment_length: int | None = None,
    is_full: bool = False,
) -> Tensor:
    """Run the backbone and reduce each token's states across the layers.

    With a `segment_length`, the backbone reads so many tokens at a time behind a key/value cache, and the states of a
    segment are gone before the next one is read; the backbone must be causal. A frozen backbone keeps nothing for a
    backward pass but the states themselves.

    Args:
        backbone: a causal language model without its head.
        reduce: takes the embeddings and the states behind each layer (the last one after the final norm), each
            `(batch_size, num_segment_tokens, hidden_size)`, and returns `(batch_size, num_segment_tokens, width)`.
        input_ids: `(batch_size, num_tokens)`, right-padded, at least one column.
        attention_mask: same shape.
        position_ids: same shape.
        segment_length: tokens read at a time; `None` for all, which gradients need.
        is_full: whether there are no pads.

    Returns:
        `(batch_size, num_tokens, width)`.
    """
    num_tokens = input_ids.shape[1]
    inputs = {"input_ids": input_ids, "position_ids": position_ids}
    if segment_length is None or num_tokens <= segment_length:
        return _reduced(backbone, reduce, inputs, attention_mask=attention_mask, use_cache=False, is_full=is_full)
    cache = DynamicCache(config=backbone.config)
    reduced = []
    for start in range(0, num_tokens, segment_length):
        stop = min(start + segment_length, num_tokens)
        segment = {name: tensor[:, start:stop] for name, tensor in inputs.items()}
        settings = {"attention_mask": attention_mask[:, :stop], CACHE: cache, "use_cache": True, "is_full": is_full}
        reduced.append(_reduced(backbone, reduce, segment, **settings))
    return torch.cat(reduced, dim=1)


def _reduced(backbone: PreTrainedModel, reduce: Reduction, inputs: dict[str, Tensor], **settings: Any) -> Tensor:
    # A function of its own: a name in the loop would keep a segment's states while the next one is read.
    # Under gradient checkpointing even frozen embeddings require gradients, which nobody would use.
    trains = any(weight.requires_grad for weight in weights_of(backbone))
    with torch.set_grad_enabled(torch.is_grad_enabled() and trains):
        settings |= {**inputs, "is_right_padded": True, "output_hidden_states": True}
        hidden_states = run_backbone(backbone, **settings).hidden_states
    return reduce(hidden_states)
