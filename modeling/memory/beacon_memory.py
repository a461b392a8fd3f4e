# SPDX-License-Identifier: Apache-2.0
"""Windows of a context with a beacon behind every group of tokens, and the keys and values that stay of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..parts.packing import take_places
from ..parts.position_layout import moved_pairs
from .compressed_context import KeyValues


@dataclass
class BeaconWindow:
    """One window of each row, `[group, beacon, group, beacon, ...]`; pads stand behind.

    Args:
        sources: `(batch_size, num_places)`, the context token at each place; at beacons and pads any.
        attention_mask, is_beacon: same shape.
        beacons: `(num_beacons,)`, the places of all beacons in the flattened batch.
        tokens: `(batch_size, num_tokens)`, the places of the context tokens, one behind the other.
        kept: `(batch_size, num_kept)`, on the host: the places whose keys and values stay; behind a row's own, any.
        num_kept, num_places: each row's own.
    """

    sources: Tensor
    attention_mask: Tensor
    is_beacon: Tensor
    beacons: Tensor
    tokens: Tensor
    kept: Tensor
    num_kept: list[int]
    num_places: list[int]


def beacon_window(
    starts: Sequence[int],
    lengths: Sequence[int],
    ratios: Sequence[int | None],
    num_sinks: int,
    device: torch.device,
) -> BeaconWindow:
    """Return the next window of each row.

    Args:
        starts, lengths: context tokens in front of each row's window, and its own; 0 for a row that has ended.
        ratios: its tokens for each beacon; `None` for a window without beacons, of which nothing stays.
        num_sinks: first tokens of the window that stay, in front of its beacons.
    """
    tokens, beacons, kept = [], [], []
    for num_tokens, ratio in zip(lengths, ratios, strict=True):
        order, group = torch.arange(num_tokens), ratio or num_tokens + 1
        count = num_tokens // group + (ratio is not None and num_tokens % group > 0)
        places = order + order // group
        sinks = places[: num_sinks if ratio else 0]
        ends = ((torch.arange(count) + 1) * (group + 1)).clamp(max=num_tokens + count) - 1
        tokens.append(places)
        beacons.append(ends)
        kept.append(torch.cat([sinks, ends]))
    sizes = [len(row) + len(ends) for row, ends in zip(tokens, beacons, strict=True)]
    width = max(sizes)
    sources = torch.zeros(len(sizes), width, dtype=torch.long)
    is_beacon = torch.zeros(len(sizes), width, dtype=torch.bool)
    for row, (start, places, ends) in enumerate(zip(starts, tokens, beacons, strict=True)):
        sources[row, places] = start + torch.arange(len(places))
        is_beacon[row, ends] = True
    return BeaconWindow(
        sources=sources.to(device),
        attention_mask=(torch.arange(width) < torch.tensor(sizes)[:, None]).long().to(device),
        is_beacon=is_beacon.to(device),
        beacons=torch.cat([row * width + ends for row, ends in enumerate(beacons)]).to(device),
        tokens=pad_sequence(tokens, batch_first=True).to(device),
        kept=pad_sequence(kept, batch_first=True),
        num_kept=[len(row) for row in kept],
        num_places=sizes,
    )


@dataclass
class BeaconMemory:
    """Keys and values that stay of the windows so far, with keys as they are before their rotation.

    Args:
        key_values: for each layer keys and values `(batch_size, num_heads, num_slots, head_dim)`, left-aligned.
        num_slots: each row's own.
        inverse_frequencies: of the base's rotary positions, `(head_dim / 2,)`; `None` where keys have none.
    """

    key_values: KeyValues
    num_slots: list[int]
    inverse_frequencies: Tensor | None

    @property
    def width(self) -> int:
        """Slots of the longest row."""
        return self.key_values[0][0].shape[2]

    def numbered(self) -> KeyValues:
        """Keys and values with the keys rotated at 0, 1, ..., one behind the other."""
        if not self.width:
            return self.key_values
        return moved_pairs(self.key_values, torch.arange(self.width)[None], self.inverse_frequencies)

    def with_window(self, key_values: KeyValues, position_ids: Tensor, num_kept: Sequence[int]) -> BeaconMemory:
        """Return the memory with `num_kept` keys and values of one more window behind it, rotated at
        `position_ids`."""
        width, added = self.width, max(num_kept)
        new = moved_pairs(key_values, -position_ids, self.inverse_frequencies) if added else key_values
        num_slots = [old + count for old, count in zip(self.num_slots, num_kept, strict=True)]
        pairs: list[Any] = [
            tuple(torch.cat([old, own], dim=2) for old, own in zip(*layer, strict=True))
            for layer in zip(self.key_values, new, strict=True)
        ]
        if max(num_slots) < width + added or min(num_slots) < max(num_slots):
            numbers = ((self.num_slots, width), (num_kept, added))
            is_slot = [torch.arange(size) < torch.tensor(counts)[:, None] for counts, size in numbers]
            order = torch.cat(is_slot, dim=1).long().argsort(dim=1, stable=True, descending=True)[:, : max(num_slots)]
            order = order.to(pairs[0][0].device)
            pairs = [tuple(take_places(part, order, dim=2) for part in layer) for layer in pairs]
        return replace(self, key_values=tuple(pairs), num_slots=num_slots)

    def latest(self, num_sinks: int, max_slots: int) -> BeaconMemory:
        """The sinks and the latest of the others, at most so many slots in all; rows are of one length."""
        if self.width <= max_slots:
            return self
        first = self.width - max_slots + num_sinks
        pairs: Any = tuple(
            tuple(torch.cat([part[:, :, :num_sinks], part[:, :, first:]], dim=2) for part in layer)
            for layer in self.key_values
        )
        return replace(self, key_values=pairs, num_slots=[max_slots] * len(self.num_slots))
