# SPDX-License-Identifier: Apache-2.0
"""Heads that keep unlike numbers of key/values: how a model reads them, and what a second reading attends to."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from .compressed_context import CompressedContext, KeyValues
from .headwise_memory import note_head_masks, num_places, read_by_heads, spread_pairs
from .headwise_pairs import HeadwisePairs
from .key_value_memory import ReadOnlyCache, filled_cache, key_value_shape
from .call_views import twin
from .chunking import Chunks, Slots
from .modeling_compressor import CompressorModel

# Tokens of the piece before it that a piece starts with: what it goes on from (KVzip).
_OVERLAP = 8


class HeadwiseModel(CompressorModel):
    """A compressor that reads memories with `head_ids`: each head of its language model its own pairs."""

    # Each head has a mask of its own.
    _supports_flash_attn = False
    _supports_flex_attn = False

    # Where contexts start; text in front of it does not see them.
    first_slot_position = 0
    _reads_by_heads = False

    def read_by_heads(self) -> None:
        """Let the language model's layers read memories with `head_ids`; for the end of `__init__`."""
        self._reads_by_heads = True
        layers = getattr(self.language_model, "layers", ())
        if not layers or not all(hasattr(layer, "self_attn") for layer in layers):
            raise ValueError(
                f"{type(self).__name__} reads in each layer's `self_attn`, which {type(self.language_model).__name__} "
                "lacks: take another base"
            )
        for layer in layers:
            layer.self_attn.register_forward_pre_hook(read_by_heads, with_kwargs=True)

    def cache_of_slots(self, memory: CompressedContext, is_full: bool, cache: Cache | None, use_cache: bool) -> Cache:
        if memory.head_ids is None:
            return super().cache_of_slots(memory, is_full, cache, use_cache)
        is_fixed = cache is not None and cache.is_compileable
        pairs, masks = spread_pairs(memory, is_fixed or self._has_unlike_layers)
        cache = filled_cache(pairs, cache, use_cache)
        note_head_masks(cache, masks, self.first_slot_position)
        return cache

    def cached_slot_mask(self, memory: CompressedContext) -> Tensor:
        if memory.head_ids is None:
            return super().cached_slot_mask(memory)
        # As long as the first layer's; each head has a mask of its own.
        return memory.attention_mask.new_ones(len(memory), num_places(memory))

    def num_places(self, memory: CompressedContext | None) -> int:
        if memory is None or memory.head_ids is None:
            return super().num_places(memory)
        return num_places(memory)

    def _room(self, num_chunks: int, num_slots: int) -> HeadwisePairs:
        """Pairs of any values."""
        shape = key_value_shape(self.config.decoder_config)
        return HeadwisePairs.empty(num_chunks, num_slots, shape, self.dtype, self.device)

    def _no_slots(self, num_chunks: int) -> Slots:
        return self._room(num_chunks, 0) if self._reads_by_heads else super()._no_slots(num_chunks)

    @property
    def _has_unlike_layers(self) -> bool:
        # The library makes a mask for each kind of layers, as long as the first of its kind.
        return len(set(getattr(self.config.decoder_config, "layer_types", None) or ())) > 1

    @torch.no_grad()
    def repeated_attention(
        self, key_values: KeyValues, mask: Tensor, next_positions: Tensor, chunks: Chunks, repeat_size: int
    ) -> tuple[Tensor, ...]:
        """What a second reading of contexts attends to in the first (KVzip).

        Args:
            key_values: of the first reading, for each layer `(num_chunks, num_heads, num_places, head_dim)`.
            mask: `(num_chunks, num_places)`, one for context tokens.
            next_positions: `(num_chunks,)`, positions behind the contexts.
            chunks: the contexts.
            repeat_size: tokens that are read again in one pass; each pass but the first starts with the last few
                tokens of the one before it.

        Returns:
            For each layer `(num_chunks, num_key_value_heads, num_places)` in float32: the highest attention that any
            repeated token pays to a place, in any query head of the key/value head.
        """
        scores = [keys.new_zeros(keys.shape[:3], dtype=torch.float32) for keys, _ in key_values]
        # A twin of its own: other threads use the model's layers without these hooks, and with another attention.
        # Without dropout, too.
        reader, repeats = twin(self).eval(), mask[:, :0]
        reader.language_model.set_attn_implementation("eager")
        for index, layer in enumerate(reader.language_model.layers):
            layer.self_attn.register_forward_hook(partial(_take_highest, scores[index], lambda: repeats))
        for start in range(0, max(chunks.lengths), repeat_size):
            piece = slice(max(0, start - _OVERLAP), start + repeat_size)
            # A row that has ended has no further piece.
            repeats = chunks.attention_mask[:, piece] * (chunks.attention_mask.sum(dim=1, keepdim=True) > start)
            reader.encoder_outputs(
                chunks.input_ids[:, piece],
                attention_mask=torch.cat([mask, repeats], dim=1),
                position_ids=next_positions[:, None] + torch.arange(repeats.shape[1], device=repeats.device),
                cache=ReadOnlyCache(key_values),
            )
        return tuple(scores)


def _take_highest(
    scores: Tensor, repeats: Callable[[], Tensor], attention: nn.Module, args: tuple, output: tuple[Tensor, ...]
) -> None:
    """A forward hook of an attention layer: raise `scores` to the attention of the tokens that are read again."""
    weights = output[1][..., : scores.shape[2]] * repeats()[:, None, :, None]
    highest_of_heads = weights.amax(dim=2).unflatten(1, (scores.shape[1], -1)).amax(dim=2)
    torch.maximum(scores, highest_of_heads.float(), out=scores)
