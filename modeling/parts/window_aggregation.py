# SPDX-License-Identifier: Apache-2.0
"""Token vectors into slots, window by window: what ComprExIT's transport and its ablations have in common."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .float32_layers import Float32LayerNorm, Float32Linear


class WindowAggregation(nn.Module):
    """Makes one slot of every r tokens; a subclass says which tokens of a window a slot is made of.

    Windows start at a row's first token and are whole multiples of r, the last one of a row short, so that
    ceil(n / r) slots come of n tokens, and neither padding nor other rows bear on them.
    """

    def window_length(self, ratio: int) -> int:
        """Tokens of a window, a multiple of `ratio`; here one slot alone."""
        return ratio

    def weights(self, tokens: Tensor, mask: Tensor, ratio: int) -> Tensor:
        """How much of each token goes into each slot of its window.

        Args:
            tokens: `(batch_size, num_windows, num_tokens, hidden_size)`, float32, zero at pads.
            mask: `(batch_size, num_windows, num_tokens)`, bool.
            ratio: tokens per slot; it divides `num_tokens`.

        Returns:
            `(batch_size, num_windows, num_tokens, num_slots)`; zero at pads.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say what its slots are made of")

    def aggregate(self, weights: Tensor, tokens: Tensor) -> Tensor:
        """Slots `(batch_size, num_windows, num_slots, hidden_size)` from the weights."""
        return weights.transpose(-1, -2) @ tokens

    def forward(self, vectors: Tensor, mask: Tensor, ratio: int) -> tuple[Tensor, Tensor]:
        """Slots of all windows.

        Args:
            vectors: `(batch_size, num_tokens, hidden_size)`, left-aligned.
            mask: `(batch_size, num_tokens)`, bool.
            ratio: tokens per slot.

        Returns:
            Slots `(batch_size, num_slots, hidden_size)`, left-aligned, whatever stands at padding slots, and their
            mask `(batch_size, num_slots)`.
        """
        tokens, token_mask = self.windows(vectors, mask, ratio)
        slots = self.aggregate(self.weights(tokens, token_mask, ratio), tokens)
        slot_mask = _slot_mask(mask, ratio)
        return slots.flatten(1, 2)[:, : slot_mask.shape[1]], slot_mask

    def allocation(self, vectors: Tensor, mask: Tensor, ratio: int) -> Tensor:
        """What each slot is made of: weights that sum up to 1, `(batch_size, num_slots, num_tokens)`; as `forward`."""
        tokens, token_mask = self.windows(vectors, mask, ratio)
        weights = self.weights(tokens, token_mask, ratio).transpose(-1, -2)
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
        batch_size, num_windows, num_slots, num_tokens = weights.shape
        spread = weights.new_zeros(batch_size, num_windows, num_slots, num_windows, num_tokens)
        index = torch.arange(num_windows, device=weights.device)
        spread[:, index, :, index] = weights.transpose(0, 1)
        return spread.flatten(3).flatten(1, 2)[:, : _slot_mask(mask, ratio).shape[1], : mask.shape[1]]

    def windows(self, vectors: Tensor, mask: Tensor, ratio: int) -> tuple[Tensor, Tensor]:
        """Cut rows into windows: tokens `(batch_size, num_windows, window_length, hidden_size)` and their mask."""
        num_tokens = vectors.shape[1]
        # A window is never longer than the longest row, up to a whole slot.
        length = min(self.window_length(ratio), -(-num_tokens // ratio) * ratio)
        num_windows = -(-num_tokens // length)
        pad = num_windows * length - num_tokens
        # Filled rather than multiplied: what stands at a pad may be anything.
        tokens = vectors.float().masked_fill(~mask[:, :, None], 0)
        tokens = nn.functional.pad(tokens, (0, 0, 0, pad)).unflatten(1, (num_windows, length))
        return tokens, nn.functional.pad(mask, (0, pad)).unflatten(1, (num_windows, length))


class WindowMean(WindowAggregation):
    """The mean of r neighbouring tokens (ComprExIT, Figure 8)."""

    def weights(self, tokens: Tensor, mask: Tensor, ratio: int) -> Tensor:
        weights = mask / mask.sum(dim=-1, keepdim=True).clamp(min=1)
        return weights.to(tokens.dtype)[..., None]


class WindowAttention(WindowAggregation):
    """The mean of r neighbouring tokens attends to them (ComprExIT, Table 3, "w/o Coordinated Allocation").

    As in the authors' code one LayerNorm serves both sides: the query is a map of the normed tokens' mean, the keys
    are maps of the normed tokens; a slot is the weighted mean of the tokens themselves.

    Args:
        hidden_size: width of the tokens.
        attention_size: width of queries and keys.
    """

    def __init__(self, hidden_size: int, attention_size: int):
        super().__init__()
        self.norm = Float32LayerNorm(hidden_size)
        self.query = Float32Linear(hidden_size, attention_size)
        self.key = Float32Linear(hidden_size, attention_size)
        self.scale = attention_size**-0.5

    def weights(self, tokens: Tensor, mask: Tensor, ratio: int) -> Tensor:
        normed = self.norm(tokens)
        scores = self.key(normed) @ self.query(_mean(normed, mask))[..., None] * self.scale
        return masked_softmax(scores[..., 0], mask)[..., None]


def masked_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """Softmax over the last dimension where `mask` is true, zero elsewhere, and zero throughout where nothing is."""
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return scores.softmax(dim=-1) * mask


def _mean(tokens: Tensor, mask: Tensor) -> Tensor:
    """Mean of each window's real tokens, `(batch_size, num_windows, hidden_size)`; zero where a window has none."""
    return (tokens * mask[..., None]).sum(dim=2) / mask.sum(dim=2).clamp(min=1)[..., None]


def _slot_mask(mask: Tensor, ratio: int) -> Tensor:
    counts = (mask.sum(dim=1) + ratio - 1) // ratio
    num_slots = -(-mask.shape[1] // ratio)
    return (torch.arange(num_slots, device=mask.device) < counts[:, None]).long()
