# SPDX-License-Identifier: Apache-2.0
"""Rows of a batch: which place slots and text take in them, and which rows of similar length go together.

Inside the backbone a row reads `[pads, slots, text]` where a cache goes on from it, since layers with a sliding window
count places and not positions, and elsewhere `[slots, text, pads]`. Text may be padded on either side; the states that
come out are aligned with it again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# So few that they are not worth another pass.
_FREE_PADS = 512


@dataclass
class PackedSequence:
    """A batch of `[pads, slots, text]` rows, or of `[slots, text, pads]`.

    Args:
        attention_mask: `(batch_size, num_slots + num_text_tokens)`, one for real places.
        order: Same shape; the place in `[slots, text]` that each place of a row is taken from. `None`: as it is.
        text_places: `(batch_size, num_text_tokens)`, the place whose state belongs to each text token.
        pad_in_front, is_full, pads_behind: As of [`pack`].
    """

    attention_mask: Tensor
    order: Tensor | None
    text_places: Tensor
    pad_in_front: bool = False
    is_full: bool = False
    pads_behind: bool = False

    def arrange(self, joined: Tensor) -> Tensor:
        """Bring `(batch_size, num_slots + num_text_tokens, ...)` from `[slots, text]` order into the rows' order."""
        if self.pad_in_front:
            joined = torch.nn.functional.pad(joined, (0,) * 2 * (joined.dim() - 2) + (1, 0))
        if self.order is None:
            return joined
        return take_places(joined, self.order)

    def text_states(self, states: Tensor) -> Tensor:
        """The states `(batch_size, num_text_tokens, hidden_size)` that belong to the text tokens."""
        if self.order is None:
            return states[:, states.shape[1] - self.text_places.shape[1] :]
        return take_places(states, self.text_places)

    def inputs(self, embeddings: Tensor, position_ids: Tensor) -> dict[str, Any]:
        """Arguments of [`run_backbone`] for `[slots, text]`, `(batch_size, num_slots + num_text_tokens, ...)` each."""
        return {
            "inputs_embeds": self.arrange(embeddings),
            "attention_mask": self.attention_mask,
            "position_ids": self.arrange(position_ids) * self.attention_mask,
            "is_full": self.is_full,
            "is_right_padded": self.pads_behind,
        }

    def cut_to_text(self, outputs: Any) -> None:
        """Leave of a backbone's outputs the states that belong to the text tokens."""
        outputs.last_hidden_state = self.text_states(outputs.last_hidden_state)
        if outputs.hidden_states is not None:
            outputs.hidden_states = tuple(
                # Of a selection of layers the others are `None`.
                None if states is None else self.text_states(states)
                for states in outputs.hidden_states
            )


def take_places(states: Tensor, places: Tensor, dim: int = 1) -> Tensor:
    """Return whole vectors of some places `(batch_size, num_taken)` in dimension `dim`, faster than
    `take_along_dim`."""
    shape, sizes = [1] * states.dim(), list(states.shape)
    shape[0], shape[dim] = places.shape
    sizes[dim] = places.shape[1]
    return states.gather(dim, places.reshape(shape).expand(sizes))


def pack(
    slot_mask: Tensor,
    text_mask: Tensor,
    moves_first: Tensor | None = None,
    pad_in_front: bool = False,
    is_full: bool = False,
    longest: int | None = None,
    pads_behind: bool = False,
) -> PackedSequence:
    """Order slots and text into rows, without a wait for the device.

    Text tokens that move in front of the slots (a BOS, the opening of a chat's user turn) are the first of their row.
    The last of them is followed by slots, so the state that predicts the next text token is the last slot's.

    Args:
        slot_mask, text_mask: `(batch_size, num_slots)` and `(batch_size, num_text_tokens)`.
        moves_first: bool, the text tokens that move in front of the slots.
        pad_in_front: whether one more pad stands in front of every row, see `reads_falling_ids_as_packed`.
        is_full: whether both masks are known to hold ones alone; rows in which nothing moves then stay as they are.
        longest: number of real places of the longest row, if known, which is then the rows' width.
        pads_behind: whether pads stand behind their rows, for passes that no cache goes on from.
    """
    if pad_in_front:
        slot_mask = torch.nn.functional.pad(slot_mask, (1, 0))
    joined_mask = torch.cat([slot_mask, text_mask], dim=1)
    num_slots = slot_mask.shape[1]
    if is_full and moves_first is None and not pad_in_front:
        places = torch.arange(joined_mask.shape[1], device=joined_mask.device)[num_slots:]
        return PackedSequence(joined_mask, None, places.expand(joined_mask.shape[0], -1), is_full=True)
    text_rank = torch.full_like(text_mask, 3)
    if moves_first is not None:
        text_rank = text_rank.masked_fill(moves_first, 1)
    rank = torch.cat([torch.full_like(slot_mask, 2), text_rank], dim=1)
    order = torch.where(joined_mask == 1, rank, 4 if pads_behind else 0).argsort(dim=1, stable=True)
    places = order.argsort(dim=1)
    text_places = places[:, num_slots:]
    if moves_first is not None:
        last_moved = moves_first & (moves_first.flip(1).cumsum(dim=1).flip(1) == 1)
        text_places = text_places + last_moved * slot_mask.sum(dim=1, keepdim=True)
    is_full = is_full and not pad_in_front
    if longest is not None:
        width = longest + pad_in_front
        spare = 0 if pads_behind else joined_mask.shape[1] - width
        order, text_places = order[:, spare : spare + width], (text_places - spare).clamp(0, width - 1)
    return PackedSequence(joined_mask.gather(1, order), order, text_places, pad_in_front, is_full, pads_behind)


def reads_falling_ids_as_packed(config: Any, batch_size: int) -> bool:
    """Return whether the attention would take one row whose position ids fall somewhere for several packed rows.

    FlashAttention does so for a batch of one row without a pad: it drops a mask of ones, and then looks at the ids. A
    pad in front of the row keeps the mask.
    """
    return batch_size == 1 and "flash" in (config._attn_implementation or "")


def through_first(input_ids: Tensor, text_mask: Tensor, pattern: Sequence[int]) -> Tensor:
    """Mark the text tokens up to the end of the first occurrence of the ids `pattern`, `(batch_size, num_text_tokens)`
    bool; none in a row that does not hold them."""
    if input_ids.shape[1] < len(pattern):
        return torch.zeros_like(input_ids, dtype=torch.bool)
    # A pad may have the id of a token that is looked for.
    ids = right_padded(input_ids.masked_fill(text_mask == 0, -1), text_mask)
    starts = (ids.unfold(1, len(pattern), 1) == torch.tensor(pattern, device=ids.device)).all(dim=2)
    num_tokens = (starts.int().argmax(dim=1, keepdim=True) + len(pattern)) * starts.any(dim=1, keepdim=True)
    return (text_mask.cumsum(dim=1) <= num_tokens) & text_mask.bool()


def text_positions(text_mask: Tensor) -> Tensor:
    """Positions of text tokens among themselves, `(batch_size, num_text_tokens)`: pads do not count."""
    return (text_mask.cumsum(dim=1) - 1).clamp(min=0)


def left_padded(tensor: Tensor, mask: Tensor) -> Tensor:
    """Move the pads of `(batch_size, length)` rows to the left."""
    return tensor.gather(1, mask.argsort(dim=1, stable=True))


def right_padded(tensor: Tensor, mask: Tensor) -> Tensor:
    """Move the pads of `(batch_size, length)` rows to the right."""
    return tensor.gather(1, mask.argsort(dim=1, stable=True, descending=True))


def length_batches(
    lengths: Sequence[int],
    batch_size: int | None = None,
    batch_tokens: int | None = None,
    most_padding: float = math.inf,
    counts: Sequence[int] | None = None,
    in_order: bool = False,
) -> list[list[int]]:
    """Cut rows into batches by length, the longest first, and return the rows of each: what does not fit is found at
    once.

    Args:
        lengths: tokens of each row.
        batch_size: rows in a batch at most.
        batch_tokens: tokens in a batch at most, pads included; a longer row is a batch of its own.
        most_padding: pads in a batch for each token at most, but for 512 pads, which take no time.
        counts: for how many rows each stands; those of one are never parted, and may alone be more than `batch_size`.
        in_order: whether batches are of neighbours.
    """
    order = range(len(lengths)) if in_order else sorted(range(len(lengths)), key=lambda row: -lengths[row])
    batches: list[list[int]] = []
    size = longest = total = 0
    for row in order:
        count = 1 if counts is None else counts[row]
        if batches:
            size, longest, total = size + count, max(longest, lengths[row]), total + count * lengths[row]
            padded = size * longest
            is_full = size > (batch_size or size) or padded > (batch_tokens or padded)
            if not is_full and padded - total <= max(_FREE_PADS, most_padding * total):
                batches[-1].append(row)
                continue
        batches.append([row])
        size, longest, total = count, lengths[row], count * lengths[row]
    return [sorted(batch) for batch in batches]
