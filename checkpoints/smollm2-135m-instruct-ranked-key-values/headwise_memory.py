# SPDX-License-Identifier: Apache-2.0
"""How a memory of heads that keep unlike numbers of key/values is read.

`CompressedContext.head_ids` says of which head each pair is. Before they are read they go back to their heads: each
layer gets as many places as its fullest head needs, and a mask for each head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from .attention_masks import with_sight
from .cache_name import CACHE
from .packing import take_places
from .compressed_context import CompressedContext, KeyValues
from .key_value_memory import KeyValueRecorder

_HEAD_MASKS = "_context_compressor_head_masks"
_WIDTHS = "_layer_widths"


class InputRecorder(KeyValueRecorder):
    """A recorder to which layers with `read_by_heads` also show what their attention reads.

    Args:
        places: as of [`KeyValueRecorder`].
        take: called with a layer's number and what its attention reads, `(batch_size, num_places, hidden_size)`,
            without gradients; what it returns is in `inputs`, in the order of the layers.
    """

    def __init__(self, places: Tensor, take: Callable[[int, Tensor], Tensor]):
        super().__init__(places)
        self._take = take
        self.inputs: list[Tensor] = []

    def note_input(self, layer: int, states: Tensor) -> None:
        """Show it what a layer reads."""
        # Gradient checkpointing comes by a second time.
        if self._is_open:
            self.inputs.append(self._take(layer, states.detach()))


def num_places(memory: CompressedContext) -> int:
    """Places that the first layer of a decoder's cache needs for a memory: those of the fullest head of all layers.

    Args:
        memory: with `head_ids`. It remembers the answer, which waits for the device.
    """
    return max(_layer_widths(memory))


def _layer_widths(memory: CompressedContext) -> list[int]:
    """Places of each layer's fullest head, at least one."""
    widths = getattr(memory, _WIDTHS, None)
    if widths is None:
        of_heads = _sorted_pairs(memory)[1].amax(dim=0)
        widths = of_heads.unflatten(0, (len(memory.key_values or ()), -1)).amax(dim=1).clamp(min=1).tolist()
        setattr(memory, _WIDTHS, widths)
    return widths


def spread_pairs(memory: CompressedContext, is_uniform: bool = False) -> tuple[KeyValues, list[Tensor]]:
    """A memory's pairs by head, as a decoder reads them.

    Args:
        memory: with `head_ids`.
        is_uniform: whether all layers get as many places as the fullest needs; otherwise the first one alone does,
            which tells the library how long the cache is.

    Returns:
        For each layer keys and values `(batch_size, num_heads, width, head_dim)`, right-aligned, and a mask
        `(batch_size, num_heads, width)` bool of those that are there.
    """
    pairs = memory.key_values or ()
    order, counts = _sorted_pairs(memory)
    starts = (counts.cumsum(dim=1) - counts).unflatten(1, (len(pairs), -1))
    by_layer, masks, spread = counts.unflatten(1, (len(pairs), -1)), [], []
    flat = [torch.stack([pair[side] for pair in pairs], dim=1).flatten(1, 3) for side in (0, 1)]
    for layer, width in enumerate(_layer_widths(memory)):
        width = num_places(memory) if is_uniform or not layer else width
        ranks = torch.arange(width, device=order.device) - (width - by_layer[:, layer, :, None])
        is_real = ranks >= 0
        at = (starts[:, layer, :, None] + ranks).where(is_real, 0)
        chosen = order.gather(1, at.flatten(1)) if order.shape[1] else at.flatten(1)
        both = []
        for states in flat:
            taken = take_places(states, chosen) if order.shape[1] else states.new_zeros(*chosen.shape, states.shape[2])
            both.append(taken.view(*at.shape, -1).masked_fill(~is_real[..., None], 0))
        spread.append((both[0], both[1]))
        masks.append(is_real)
    return tuple(spread), masks


def _sorted_pairs(memory: CompressedContext) -> tuple[Tensor, Tensor]:
    """The order that brings the pairs of each row head behind head, `(batch_size, num_pairs)`, and their numbers."""
    if memory.head_ids is None:
        raise ValueError("the memory's heads have their own places: it has no `head_ids`")
    num_heads = memory.head_ids.shape[2]
    # Those of padding slots stand behind all.
    heads = memory.head_ids.long().where(memory.attention_mask[:, :, None].bool(), num_heads)
    heads = heads.transpose(1, 2).flatten(1)
    counts = heads.new_zeros(len(heads), num_heads + 1).scatter_add_(1, heads, torch.ones_like(heads))
    return heads.argsort(dim=1, stable=True), counts[:, :num_heads]


def note_head_masks(cache: Cache, masks: Sequence[Tensor], first_position: int = 0) -> None:
    """Keep with a cache, which starts with a memory, what each head of each layer has of it.

    Args:
        cache: of the memory.
        masks: of `spread_pairs`.
        first_position: what stands in front of it, such as the opening of a chat, does not see the memory.
    """
    setattr(cache, _HEAD_MASKS, (list(masks), first_position))


def forget_head_masks(cache: Cache | None) -> None:
    """Take back what `note_head_masks` keeps with a cache."""
    if getattr(cache, _HEAD_MASKS, None) is not None:
        setattr(cache, _HEAD_MASKS, None)


def read_by_heads(attention: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    """A forward pre-hook of an attention layer: of a cache with `note_head_masks` each head reads its own slots, and
    an [`InputRecorder`] sees what the layer reads."""
    cache: Any = kwargs.get(CACHE)
    states = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    layer: int = attention.layer_idx  # type: ignore[assignment]
    if isinstance(cache, InputRecorder):
        cache.note_input(layer, states)
    noted = getattr(cache, _HEAD_MASKS, None)
    if noted is None:
        return None
    masks, first_position = noted
    slots = masks[layer]
    num_queries = states.shape[1]
    text: Any = kwargs.get("attention_mask")
    if cache.is_compileable:
        # All layers are as long as the mask.
        text = text[..., slots.shape[2] :]
    else:
        num_text = cache.get_seq_length(layer) - slots.shape[2] + num_queries
        if text is None:
            text = slots.new_ones(num_queries, num_text).tril(num_text - num_queries)[None, None]
        text = text[..., text.shape[-1] - num_text :]
    # The query heads of a key/value head read the same places.
    config: Any = attention.config
    slots = slots.repeat_interleave(config.num_attention_heads // slots.shape[1], dim=1)
    slots = slots[:, :, None].expand(-1, -1, num_queries, -1)
    if first_position:
        slots = slots & (kwargs["position_ids"] >= first_position)[:, None, :, None]
    if text.is_floating_point():
        slots = torch.zeros_like(slots, dtype=text.dtype).masked_fill(~slots, torch.finfo(text.dtype).min)
    text = text.expand(*slots.shape[:3], -1)
    mask = torch.cat([slots, text], dim=3)
    return args, {**kwargs, "attention_mask": mask if num_queries == 1 else with_sight(mask)}
