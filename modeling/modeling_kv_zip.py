# SPDX-License-Identifier: Apache-2.0
"""KVzip: what a second reading of the context attends to (https://arxiv.org/abs/2505.23416)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ..configuration.configuration_kv_zip import KVZipConfig
from .compressor.backbone import slot_counts
from .compressor.causal_lm import CompressorForCausalLM
from .compressor.chunking import Chunks
from .compressor.input_checks import TokenRows
from .compressor.key_value_selection import KeyValueSelectionModel, ReadContext
from .memory.compressed_context import CompressedContext, KeyValues
from .memory.headwise_memory import gather_pairs, note_head_masks, num_places, read_by_heads, spread_pairs
from .memory.key_value_memory import ReadOnlyCache, filled_cache
from .parts.call_views import twin

# Tokens of the piece before it that a piece starts with: what it goes on from (section 3.4).
_OVERLAP = 8


class KVZipModel(KeyValueSelectionModel):
    r"""
    Keeps the keys and values that the base attends to most when it reads the context a second time.

    Args:
        config ([`KVZipConfig`]): the configuration.
    """

    config_class = KVZipConfig
    # Each head of a memory has a mask of its own.
    _supports_flash_attn = False
    _supports_flex_attn = False

    def __init__(self, config: KVZipConfig):
        super().__init__(config)
        if config.head_budgets == "shared":
            for layer in self.language_model.layers:
                layer.self_attn.register_forward_pre_hook(read_by_heads, with_kwargs=True)
        self.post_init()

    # --- which pairs stay ---

    def _read(self, chunks: Chunks, question: TokenRows | None) -> ReadContext:
        read = super()._read(chunks, question)
        return replace(read, scores=self._scores(read, chunks))

    def priorities(self, read: ReadContext, num_slots: Tensor, num_question_tokens: Tensor | None) -> Sequence[Tensor]:
        return read.scores

    def _scores(self, read: ReadContext, chunks: Chunks) -> tuple[Tensor, ...]:
        """Equation 2: S_l,h,i = max over repeated tokens and the query heads of h of their attention to i.

        Args:
            read: the contexts behind which they are read again.
            chunks: these contexts.

        Returns:
            For each layer `(batch_size, num_key_value_heads, num_places)`.
        """
        scores = [keys.new_zeros(keys.shape[:3], dtype=torch.float32) for keys, _ in read.key_values]
        # A twin of its own: other threads use the model's layers without these hooks, and with another attention.
        reader, repeats = twin(self), chunks.attention_mask[:, :0]
        reader.language_model.set_attn_implementation("eager")
        hooks = [
            layer.self_attn.register_forward_hook(partial(_take_highest, scores[index], lambda: repeats))
            for index, layer in enumerate(reader.language_model.layers)
        ]
        lengths = read.is_context.sum(dim=1, keepdim=True)
        for start in range(0, max(chunks.lengths), self.config.repeat_size):
            piece = slice(max(0, start - _OVERLAP), start + self.config.repeat_size)
            # A row that has ended has no further piece.
            repeats = chunks.attention_mask[:, piece].bool() & (lengths > start)
            reader.encoder_outputs(
                chunks.input_ids[:, piece],
                attention_mask=torch.cat([read.is_context, repeats], dim=1).long(),
                position_ids=lengths + torch.arange(repeats.shape[1], device=repeats.device),
                past_key_values=ReadOnlyCache(read.key_values),
            )
        for hook in hooks:
            hook.remove()
        return tuple(scores)

    @torch.no_grad()
    def encode(
        self, chunks: Chunks, ratios: Sequence[int | Tensor], question: TokenRows | None = None
    ) -> list[KeyValues]:
        if self.config.head_budgets == "uniform":
            return super().encode(chunks, ratios, question)
        # Section 3.3: the pairs of the highest scores stay, whatever layer and head they are of.
        read = self._read(chunks, question)
        found = [self._shared(read, read.key_values, chunks, ratio) for ratio in ratios]
        chunks.head_ids = [head_ids for _, head_ids in found]
        return [pairs for pairs, _ in found]

    @torch.no_grad()
    def kept_tokens(self, chunks: Chunks, ratio: int | Tensor) -> Sequence[Tensor]:
        """See [`KeyValueSelectionModel.kept_tokens`]; with shared budgets the tokens of the pairs that stand in each
        layer's place of the memory, which may be another layer's."""
        if self.config.head_budgets == "uniform":
            return super().kept_tokens(chunks, ratio)
        read = self._read(chunks, None)
        tokens = [read.position_ids[:, None, :, None].expand(*keys.shape[:3], 1) for keys, _ in read.key_values]
        pairs, _ = self._shared(read, tuple(zip(tokens, tokens, strict=True)), chunks, ratio)
        return [of_layer[..., 0] for of_layer, _ in pairs]

    def _shared(
        self, read: ReadContext, key_values: KeyValues, chunks: Chunks, ratio: int | Tensor
    ) -> tuple[KeyValues, Tensor]:
        """Of `key_values` what stays, see `gather_pairs`."""
        scores = torch.stack(read.scores, dim=1).flatten(1, 2)
        counts = slot_counts(self.config, chunks.lengths, ratio)
        num_kept = torch.tensor(counts, device=scores.device) * scores.shape[1]
        return gather_pairs(key_values, highest(scores, read.is_context, num_kept), counts)

    # --- how they are read ---

    def cache_of_slots(self, memory: CompressedContext, is_full: bool, cache: Cache | None, use_cache: bool) -> Cache:
        if memory.head_ids is None:
            return super().cache_of_slots(memory, is_full, cache, use_cache)
        is_fixed = cache is not None and cache.is_compileable
        pairs, masks = spread_pairs(memory, is_fixed or self._has_unlike_layers)
        cache = filled_cache(pairs, cache, use_cache)
        note_head_masks(cache, masks)
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

    @property
    def _has_unlike_layers(self) -> bool:
        # The library makes a mask for each kind of layers, as long as the first of its kind.
        return len(set(getattr(self.config.decoder_config, "layer_types", None) or ())) > 1


def _take_highest(
    scores: Tensor, repeats: Callable[[], Tensor], attention: nn.Module, args: tuple, output: tuple[Tensor, ...]
) -> None:
    """A forward hook of an attention layer: raise `scores` to the attention of the tokens that are read again."""
    weights = output[1][..., : scores.shape[2]] * repeats()[:, None, :, None]
    highest_of_heads = weights.amax(dim=2).unflatten(1, (scores.shape[1], -1)).amax(dim=2)
    torch.maximum(scores, highest_of_heads.float(), out=scores)


def highest(scores: Tensor, is_context: Tensor, num_kept: Tensor) -> Tensor:
    """The `num_kept` pairs of highest score in each row, of all heads together; of equal ones the first.

    Args:
        scores: `(batch_size, num_heads, num_places)`.
        is_context: `(batch_size, num_places)` bool, places that may stay.
        num_kept: `(batch_size,)`.

    Returns:
        `(batch_size, num_heads, num_places)` bool.
    """
    together = scores.masked_fill(~is_context[:, None], -torch.inf).flatten(1)
    rank = together.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return (rank < num_kept[:, None]).view_as(scores)


class KVZipForCausalLM(CompressorForCausalLM):
    r"""
    [`KVZipModel`] with the decoder's LM head.

    Args:
        config ([`KVZipConfig`]): the configuration.
    """

    model_class = KVZipModel
