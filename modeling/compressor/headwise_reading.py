# SPDX-License-Identifier: Apache-2.0
"""Heads that keep unlike numbers of key/values: how a model reads them, and the attention of a second reading.

Pairs lie beside the decoder's cache, which holds the text alone. Each key/value head of a row is one sequence for the
attention: its pairs and the text behind them, which its group of query heads reads.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..memory.compressed_context import CompressedContext, KeyValues
from ..memory.headwise_pairs import HeadwisePairs
from ..memory.key_value_memory import (
    KeyValueRecorder,
    ReadOnlyCache,
    cached_pairs,
    note_cached_pairs,
)
from ..parts.base_pass import CACHE, PAIRWISE_MASKS, copy_with_shared_weights, with_sight
from ..parts.packing import take_places
from .backbone import Chunks
from .modeling_compressor import CompressorModel

# Tokens of the piece before it that a piece starts with: what it goes on from (KVzip).
_OVERLAP = 8
_BY_HEADS = f"{__name__}.attend_by_heads"
# Of a batch, heads are read together where none keeps fewer pairs than this share of the fullest one's.
_LEAST_SHARE = 7 / 8


@dataclass
class HeadGroup:
    """Pairs of some of a layer's heads, which are read together.

    Args:
        heads: their numbers, `row * num_key_value_heads + head`.
        rows: their rows.
        keys, values: `(num_heads, 1, width, head_dim)`.
        is_real: `(num_heads, width)` bool, pairs in front of pads; `None` where there are no pads.
    """

    heads: Tensor | slice
    rows: Tensor | slice
    keys: Tensor
    values: Tensor
    is_real: Tensor | None


@dataclass
class PackedPairs:
    """Pairs of all of a layer's heads one behind another, for attention that takes lengths.

    Args:
        keys, values: `(num_pairs, head_dim)`, row by row and there head by head.
        counts: `(batch_size * num_heads,)`, pairs of each.
        most: the largest of these.
    """

    keys: Tensor
    values: Tensor
    counts: Tensor
    most: int


def pairs_by_head(memory: CompressedContext, is_packed: bool = False) -> list[list[Any]]:
    """Return each layer's pairs of a memory with `head_ids`, as groups of heads or, packed, as one `PackedPairs`.

    A single row's groups are views without a pad, a head each.
    """
    head_ids: Any = memory.head_ids
    pairs, num_heads = memory.key_values or (), head_ids.shape[2]
    # Those of padding slots stand behind all.
    heads = head_ids.long().where(memory.attention_mask[:, :, None].bool(), num_heads)
    heads = heads.transpose(1, 2).flatten(1)
    counts = heads.new_zeros(len(heads), num_heads + 1).scatter_add_(1, heads, torch.ones_like(heads))[:, :num_heads]
    order = heads.argsort(dim=1, stable=True)
    flat = [take_places(torch.stack([pair[side] for pair in pairs], dim=1).flatten(1, 3), order) for side in (0, 1)]
    # The one wait for the device.
    of_rows = counts.tolist()
    starts = [[0, *accumulate(row)] for row in of_rows]
    per_layer = num_heads // len(pairs)
    layers: list[list[Any]] = []
    for first in range(0, num_heads, per_layer):
        if is_packed:
            parts = [slice(row[first], row[first + per_layer]) for row in starts]
            keys, values = (torch.cat([states[row, part] for row, part in enumerate(parts)]) for states in flat)
            most = max(max(row[first : first + per_layer]) for row in of_rows)
            layers.append([PackedPairs(keys, values, counts[:, first : first + per_layer].flatten(), most)])
            continue
        places = [(row, head) for row in range(len(of_rows)) for head in range(first, first + per_layer)]
        if len(of_rows) == 1:
            bounds = [slice(*starts[0][head : head + 2]) for _, head in places]
            views = [[states[:, None, part] for states in flat] for part in bounds]
            layers.append(
                [HeadGroup(slice(i, i + 1), slice(None), keys, values, None) for i, (keys, values) in enumerate(views)]
            )
            continue
        groups: list[list[tuple[int, int]]] = []
        for row, head in sorted(places, key=lambda place: -of_rows[place[0]][place[1]]):
            if not groups or of_rows[row][head] < _LEAST_SHARE * of_rows[groups[-1][0][0]][groups[-1][0][1]]:
                groups.append([])
            groups[-1].append((row, head))
        layers.append([_group(group, first, per_layer, of_rows, starts, flat) for group in groups])
    return layers


def _group(
    group: list[tuple[int, int]],
    first: int,
    per_layer: int,
    counts: list[list[int]],
    starts: list[list[int]],
    flat: list[Tensor],
) -> HeadGroup:
    """Return the pairs of some `(row, head)` of a layer, whose first head is `first`."""
    device = flat[0].device
    widths = [counts[row][head] for row, head in group]
    rows = torch.tensor([row for row, _ in group], device=device)
    ranks = torch.arange(max(widths), device=device)
    is_real = ranks < torch.tensor(widths, device=device)[:, None]
    at = torch.tensor([starts[row][head] for row, head in group], device=device)[:, None] + ranks.where(is_real, 0)
    keys, values = (states[rows[:, None], at.clamp(max=states.shape[1] - 1)][:, None] for states in flat)
    heads = torch.tensor([row * per_layer + head - first for row, head in group], device=device)
    return HeadGroup(heads, rows, keys, values, None if min(widths) == max(widths) else is_real)


def attend_by_heads(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    pairs: tuple[list[Any], int] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend as the base does, to each head's own pairs in front of the text: an attention function of the library.

    Query, key and value `(batch_size, num_heads, num_tokens, head_dim)` and the mask are the text's. `pairs` are the
    layer's, and the first position that sees them; `None` for a text without a memory.
    """
    config: Any = module.config
    name = config.read_as._attn_implementation
    if pairs is None:
        return _attention(module, name)(module, query, key, value, attention_mask, **kwargs)
    groups, first_position = pairs
    if isinstance(groups[0], PackedPairs):
        read = partial(_read_by_lengths, partial(_attention(module, name), module), query, key, value)
        return read(groups[0], attention_mask, first_position, **kwargs), None
    if name not in PAIRWISE_MASKS:
        # Flex attention reads texts without a memory: pairs are masked by query.
        attention_mask = _dense_mask(attention_mask, query, key)
        name = "eager" if kwargs.get("softcap") or kwargs.get("s_aux") is not None else "sdpa"
    attention = _attention(module, name)
    (batch_size, num_heads), num_queries = key.shape[:2], query.shape[2]
    if attention_mask is None and num_queries > 1:
        # A first pass, whose causality is left to the kernel; a fixed cache has places behind it.
        key, value = key[:, :, :num_queries], value[:, :, :num_queries]
        attention_mask = key.new_ones(num_queries, num_queries, dtype=torch.bool).tril()[None, None]
    # A token behind text that it sees whole stands behind the opening.
    sees = None
    if attention_mask is not None or num_queries == key.shape[2]:
        sees = (kwargs["position_ids"] >= first_position).expand(batch_size, -1)
    queries = query.unflatten(1, (num_heads, -1)).flatten(0, 1)
    keys, values = key.flatten(0, 1)[:, None], value.flatten(0, 1)[:, None]
    outputs = []
    for group in groups:
        mask = None if attention_mask is None else attention_mask.expand(batch_size, -1, -1, -1)[group.rows]
        mask = _with_pairs(mask, group, None if sees is None else sees[group.rows], keys, is_added=name == "eager")
        both = (
            torch.cat([front, text[group.heads]], dim=2)
            for front, text in ((group.keys, keys), (group.values, values))
        )
        outputs.append(attention(module, queries[group.heads], *both, mask, **kwargs)[0])
    output = torch.cat(outputs)
    if isinstance(groups[0].heads, Tensor):
        order: Any = [group.heads for group in groups]
        output = output[torch.cat(order).argsort()]
    return output.unflatten(0, (batch_size, num_heads)).transpose(1, 2).flatten(2, 3), None


def _attention(module: nn.Module, name: str) -> Any:
    """Return the attention function of the library that has this name."""
    if name == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward
    return ALL_ATTENTION_FUNCTIONS[name]


def _read_by_lengths(
    attention: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pairs: PackedPairs,
    mask: Tensor | None,
    first_position: int,
    **kwargs: Any,
) -> Tensor:
    """Read with FlashAttention over sequences of unlike lengths: each key/value head of a row is one, as of AdaKV and
    KVzip.

    `mask` has the text's real places, `(batch_size, num_tokens)`; pads get zeros.
    """
    num_queries, num_tokens = query.shape[2], key.shape[2]
    real = key.new_ones(len(key), num_tokens, dtype=torch.bool) if mask is None else mask[:, -num_tokens:].bool()
    if 1 < num_queries < num_tokens and not bool(real[:, num_queries:].any()):
        # A first pass; a fixed cache has places behind it.
        key, value, real = key[:, :, :num_queries], value[:, :, :num_queries], real[:, :num_queries]
        num_tokens = num_queries
    # A single token is no pad, and in a fixed cache not the last place.
    asks = real[:, -num_queries:] if num_queries > 1 else real.new_ones(len(real), 1)
    # Pairs lie outside a sliding window, in which text and slots fit.
    kwargs["sliding_window"] = None
    read = partial(_sequences, partial(attention, **kwargs), query, key, value)
    if num_queries == 1 < num_tokens:
        return read(pairs, asks, real)
    # A text may begin in front of the pairs, and does not see them there.
    in_front = asks & (kwargs["position_ids"] < first_position)
    output = read(pairs, asks & ~in_front, real)
    if bool(in_front.any()):
        none = PackedPairs(pairs.keys[:0], pairs.values[:0], torch.zeros_like(pairs.counts), 0)
        keys_in_front = functional.pad(in_front, (num_tokens - num_queries, 0))
        output = output + read(none, in_front, keys_in_front)
    return output


def _sequences(
    attention: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pairs: PackedPairs,
    asks: Tensor,
    real: Tensor,
) -> Tensor:
    """Attend causally from the queries `asks` `(batch_size, num_queries)`, the last of `real` in their rows, to the
    pairs of their heads and to the tokens `real` `(batch_size, num_tokens)` of the text."""
    batch_size, num_heads, num_tokens, _ = key.shape
    asks, real = (mask.repeat_interleave(num_heads, dim=0) for mask in (asks, real))
    starts_q, starts_k = (
        functional.pad(lengths.cumsum(0), (1, 0)) for lengths in (asks.sum(1), pairs.counts + real.sum(1))
    )
    # What is left out goes behind all sequences.
    of_queries = (starts_q[:-1, None] + asks.cumsum(1) - 1).where(asks, asks.numel())
    of_text = (starts_k[:-1, None] + pairs.counts[:, None] + real.cumsum(1) - 1).where(
        real, len(pairs.keys) + real.numel()
    )
    moves = starts_k[:-1] - pairs.counts.cumsum(0) + pairs.counts
    of_pairs = torch.arange(len(pairs.keys), device=key.device)
    of_pairs = of_pairs + moves.repeat_interleave(pairs.counts, output_size=len(of_pairs))

    def packed(states: Tensor, places: Tensor) -> Tensor:
        return states.new_zeros(states.shape[0] + 1, *states.shape[1:]).index_copy(0, places, states)

    def with_text(front: Tensor, text: Tensor) -> Tensor:
        text = text.flatten(0, 1).masked_fill(~real[:, :, None], 0).flatten(0, 1)
        return packed(torch.cat([front, text]), torch.cat([of_pairs, of_text.flatten()]))[None, None]

    queries = query.unflatten(1, (num_heads, -1)).flatten(0, 1).transpose(1, 2)
    # The kernel writes nothing to what is left out, no gradient either.
    queries = packed(queries.masked_fill(~asks[:, :, None, None], 0).flatten(0, 1), of_queries.flatten())
    output = attention(
        queries.transpose(0, 1)[None],
        with_text(pairs.keys, key),
        with_text(pairs.values, value),
        None,
        cu_seq_lens_q=starts_q.int(),
        cu_seq_lens_k=starts_k.int(),
        max_length_q=asks.shape[1],
        max_length_k=pairs.most + num_tokens,
    )[0][0]
    output = output[of_queries].masked_fill(~asks[:, :, None, None], 0)
    return output.unflatten(0, (batch_size, num_heads)).transpose(1, 2).flatten(2, 3)


def _dense_mask(mask: Any, query: Tensor, key: Tensor) -> Tensor:
    """Return flex attention's mask as `(batch_size or 1, 1, num_queries, num_tokens)` bool."""
    num_queries, num_tokens = query.shape[2], key.shape[2]
    if mask is None or isinstance(mask, Tensor):
        return query.new_ones(num_queries, num_tokens, dtype=torch.bool).tril(num_tokens - num_queries)[None, None]
    from torch.nn.attention.flex_attention import create_mask

    return with_sight(create_mask(mask.mask_mod, len(query), 1, num_queries, num_tokens, query.device))


def _with_pairs(
    mask: Tensor | None, group: HeadGroup, sees: Tensor | None, text: Tensor, is_added: bool
) -> Tensor | None:
    """Put a group's pairs in front of a text's mask, `(num_heads, 1, num_queries, width + num_tokens)`; `None`: all
    are seen.

    `sees` has the queries that see the pairs, `(num_heads or 1, num_queries)` bool; `None`: all do. `text` is any
    tensor with as many tokens as the text in its third dimension; with `is_added` masks are added to scores.
    """
    if mask is None and sees is None and group.is_real is None:
        return None
    num_heads, _, width, _ = group.keys.shape
    front = text.new_ones(num_heads, 1, 1, width, dtype=torch.bool)
    if group.is_real is not None:
        front = front & group.is_real[:, None, None]
    if sees is not None:
        front = front & sees[:, None, :, None]
    if mask is None:
        mask = text.new_ones(1, 1, 1, text.shape[2], dtype=torch.bool)
    if is_added and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=text.dtype).masked_fill(~mask, torch.finfo(text.dtype).min)
    if mask.is_floating_point():
        front = torch.zeros_like(front, dtype=mask.dtype).masked_fill(~front, torch.finfo(mask.dtype).min)
    return torch.cat([front.expand(-1, -1, mask.shape[2], -1), mask.expand(num_heads, -1, -1, -1)], dim=3)


def _with_cached_pairs(attention: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Give [`attend_by_heads`] the pairs that lie beside the cache, and a recorder what an attention layer reads: a
    forward pre-hook of the layer."""
    cache: Any = kwargs.get(CACHE)
    layer: int = attention.layer_idx  # type: ignore[assignment]
    if isinstance(cache, KeyValueRecorder):
        cache.note_input(layer, kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])
    if (pairs := cached_pairs(cache)) is not None:
        layers, first_position = pairs
        kwargs["pairs"] = (layers[layer], first_position)
    return args, kwargs


class HeadwiseModel(CompressorModel):
    """A compressor that reads memories with `head_ids`: each head of its language model its own pairs."""

    # Where contexts start; text in front of it does not see them.
    first_slot_position = 0
    _reads_by_heads = False

    def read_by_heads(self) -> None:
        """Let the language model's layers read memories with `head_ids`; for the end of `__init__`."""
        modules = dict(self.language_model.named_modules())
        paths = [f"layers.{number}.self_attn" for number in range(self.config.num_hidden_layers)]
        if not modules.keys() >= set(paths):
            raise ValueError(
                f"heads of a base of type {self.config.decoder_config.model_type!r} cannot read pairs of their own: "
                "it has no `layers` with a `self_attn` each; take another base, or slots that are embeddings"
            )
        self._reads_by_heads = True
        AttentionInterface.register(_BY_HEADS, attend_by_heads)
        # The layers alone: masks, and what a user sets, follow the model's own configuration.
        config = copy.copy(self.language_model.config)
        config._attn_implementation_internal = _BY_HEADS
        config.read_as = self.language_model.config
        for attention in (modules[path] for path in paths):
            attention.config = config
            attention.register_forward_pre_hook(_with_cached_pairs, with_kwargs=True)

    def cache_of_slots(self, memory: CompressedContext, is_full: bool, cache: Cache | None, use_cache: bool) -> Cache:
        if memory.head_ids is None:
            return super().cache_of_slots(memory, is_full, cache, use_cache)
        if cache is None and use_cache:
            cache = DynamicCache()
        elif cache is None:
            cache = ReadOnlyCache(
                tuple((keys[:, :, :0], values[:, :, :0]) for keys, values in memory.key_values or ())
            )
        is_packed = "flash" in (self.language_model.config._attn_implementation or "")
        note_cached_pairs(cache, (pairs_by_head(memory, is_packed), self.first_slot_position))
        return cache

    def cached_slot_mask(self, memory: CompressedContext) -> Tensor:
        mask = super().cached_slot_mask(memory)
        return mask if memory.head_ids is None else mask[:, :0]

    def num_places(self, memory: CompressedContext | None) -> int:
        return 0 if memory is None or memory.head_ids is not None else super().num_places(memory)

    def _no_slots(self, num_chunks: int) -> Any:
        pairs: Any = super()._no_slots(num_chunks)
        if not self._reads_by_heads:
            return pairs
        of_pairs = pairs[0][0].new_empty(num_chunks, 0, len(pairs) * pairs[0][0].shape[1])
        return HeadwisePairs(pairs, of_pairs.to(torch.int16), of_pairs.to(torch.uint8))

    # Dynamo would trace the copying of all modules, for minutes.
    @torch.compiler.disable
    @torch.no_grad()
    def repeated_attention(
        self, key_values: KeyValues, mask: Tensor, next_positions: Tensor, chunks: Chunks, repeat_size: int
    ) -> tuple[Tensor, ...]:
        """Read contexts a second time, and return the attention that is paid to the first reading (KVzip).

        Args:
            key_values, mask: of the first reading; `(num_chunks, num_places)`, one for context tokens.
            next_positions: `(num_chunks,)`, positions behind the contexts.
            repeat_size: tokens of one pass, which starts with the last few tokens of the pass before it.

        Returns:
            For each layer `(num_chunks, num_key_value_heads, num_places)` in float32: the highest attention that any
            repeated token pays to a place, in any query head of the key/value head.
        """
        scores = [keys.new_zeros(keys.shape[:3], dtype=torch.float32) for keys, _ in key_values]
        # A twin of its own: other threads use the model's layers without these hooks, and with another attention.
        # Without dropout, too.
        reader, repeats = copy_with_shared_weights(self).eval(), mask[:, :0]
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
    """Raise `scores` to the attention of the tokens that are read again: a forward hook of an attention layer."""
    weights = output[1][..., : scores.shape[2]] * repeats()[:, None, :, None]
    highest_of_heads = weights.amax(dim=2).unflatten(1, (scores.shape[1], -1)).amax(dim=2)
    torch.maximum(scores, highest_of_heads.float(), out=scores)
