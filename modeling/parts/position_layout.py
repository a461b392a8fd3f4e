# SPDX-License-Identifier: Apache-2.0
"""Position ids of context, memory and text tokens in the default, uniform and enhanced layouts (EPL, section 3)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...configuration.configuration_compressor import POSITION_LAYOUTS
from ...configuration.nearest_names import check_choice


def uniform_memory_ids(
    start_id: int, num_tokens: int, num_memory_tokens: int, device: torch.device | str | None = None
) -> Tensor:
    """Spread memory tokens evenly over the ids of the context tokens (EPL, Algorithm 1).

    Returns:
        A LongTensor `(num_memory_tokens,)`, ascending, within the context's ids, which run from `start_id`.
    """
    return _uniform_ids(start_id, num_tokens, num_memory_tokens, torch.arange(num_memory_tokens, device=device))


def _uniform_ids(
    start_id: int | Tensor, num_tokens: int | Tensor, num_memory_tokens: int | Tensor, steps: Tensor
) -> Tensor:
    """Ids of the memory tokens `steps` by Algorithm 1; all arguments broadcast.

    The algorithm's numbers are fractions with the denominator `2 * num_memory_tokens`, so they are rounded exactly,
    half to even: a floating-point `linspace` misses some ties.
    """
    # Lines 1 to 3: start + (r - 1) / 2 + j r with r = num_tokens / num_memory_tokens, over the common denominator.
    numerator = num_tokens - num_memory_tokens + 2 * num_tokens * steps + 2 * num_memory_tokens * start_id
    floor = numerator // (2 * num_memory_tokens)
    remainder = numerator - floor * (2 * num_memory_tokens)
    # Line 4: the remainder is compared with half of the denominator, and a tie goes to the even id.
    is_tie = remainder == num_memory_tokens
    round_up = (remainder > num_memory_tokens) | (is_tie & (floor % 2 == 1))
    return floor + round_up.long()


def encoder_memory_ids(lengths: Tensor, counts: Tensor, starts: Tensor, layout: str, width: int) -> Tensor:
    """Return the position ids of many chunks' memory tokens in the encoder, `(num_chunks, width)` (EPL, Tables 1 and
    12).

    Lengths are the context tokens of each chunk, `(num_chunks,)`, counts its memory tokens, behind which stand zeros,
    and starts the context tokens before it, which the default layout ignores.
    """
    steps = torch.arange(width, device=counts.device)
    lengths, counts, starts = lengths[:, None], counts[:, None], starts[:, None]
    uniform_ids = _uniform_ids(starts + 1, lengths, counts.clamp(min=1), steps)
    return (lengths + steps if layout == "default" else uniform_ids) * (steps < counts)


def encoder_position_ids(
    num_tokens: int,
    num_memory_tokens: int,
    layout: str,
    chunk_start: int = 0,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the position ids of one chunk and its memory tokens in the encoder (EPL, Tables 1 and 12).

    Args:
        num_tokens, num_memory_tokens: Context tokens of the chunk, and its memory tokens.
        layout: "default" (the chunk from 0, memory right after it), "uniform" or "enhanced" (the chunk's place in the
            whole context, counted from 1, memory spread over it).
        chunk_start: Context tokens before this chunk; ignored by the default layout.

    Returns:
        The context ids of shape `(num_tokens,)` and the memory ids of shape `(num_memory_tokens,)`, LongTensors.
    """
    check_choice("layout", layout, POSITION_LAYOUTS)
    first = 0 if layout == "default" else chunk_start + 1
    length, count, start = (torch.tensor([n], device=device) for n in (num_tokens, num_memory_tokens, chunk_start))
    context_ids = torch.arange(first, first + num_tokens, device=device)
    return context_ids, encoder_memory_ids(length, count, start, layout, num_memory_tokens)[0]


def decoder_position_ids(
    chunk_lengths: Sequence[int],
    memory_counts: Sequence[int],
    num_text_tokens: int,
    layout: str,
    carrier: str,
    task: str,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the position ids of all chunks' memory and of the text in the decoder (EPL, Tables 2, 3 and 13 to 15).

    Args:
        chunk_lengths, memory_counts: Context tokens of each chunk, in order, and memory tokens.
        num_text_tokens: Text tokens, the task token in front of them included.
        layout: "default" and "uniform" number the text on from the memory count; "enhanced" gives the memory and the
            text the ids of the context that they stand for.
        carrier: "embeddings" or "key_values"; key/values are rotated already and keep their encoder ids.
        task: "reconstruction" or "continuation"; question answering is a continuation.

    Returns:
        The memory ids of shape `(sum of memory_counts,)` and the text ids of shape `(num_text_tokens,)`, LongTensors.
    """
    check_choice("layout", layout, POSITION_LAYOUTS)
    check_choice("carrier", carrier, ("embeddings", "key_values"))
    check_choice("task", task, ("reconstruction", "continuation"))
    first_text_id = num_memory_tokens = sum(memory_counts)
    memory_ids, chunk_start = torch.arange(num_memory_tokens, device=device), 0
    encoded = [memory_ids[:0]]
    for length, count in zip(chunk_lengths, memory_counts, strict=True):
        encoded.append(encoder_position_ids(length, count, layout, chunk_start, device)[1])
        chunk_start += length
    if layout == "enhanced":
        first_text_id = 0 if task == "reconstruction" else chunk_start
    if layout == "enhanced" or carrier == "key_values":
        memory_ids = torch.cat(encoded)
    return memory_ids, torch.arange(first_text_id, first_text_id + num_text_tokens, device=device)


def moved_pairs(
    pairs: Sequence[tuple[Tensor, Tensor]], offsets: Tensor, inverse_frequencies: Tensor | None
) -> tuple[tuple[Tensor, Tensor], ...]:
    """Move keys with rotary positions to other positions: rotations add up, so `R(p + d) k = R(d) R(p) k`.

    Args:
        pairs: Keys and values of each layer, `(batch_size, num_heads, num_slots, head_dim)`. The halves of keys are
            rotated against each other (Llama's `rotate_half`), half types in float32.
        offsets: How far each row moves, integers `(batch_size,)`; or each key, `(batch_size, num_slots)` or
            `(batch_size, num_heads, num_slots)`.
        inverse_frequencies: Angle per position of each pair of channels, `(head_dim / 2,)`; `None`: keys stay.
    """
    if inverse_frequencies is None or not pairs:
        return tuple(pairs)
    offsets = offsets if offsets.dim() == 3 else offsets.reshape(len(offsets), 1, -1)
    # A float32 angle of a far position is off by more than float32 keys are; the host has float64 everywhere.
    angles = (offsets[..., None].cpu().double() * inverse_frequencies.cpu().double()).repeat(1, 1, 1, 2)
    keys = pairs[0][0]
    dtype = torch.promote_types(keys.dtype, torch.float32)
    cosine, sine = angles.cos().to(keys.device, dtype), angles.sin().to(keys.device, dtype)

    def rotated(keys: Tensor) -> Tensor:
        precise = keys.to(dtype)
        first, second = precise.chunk(2, dim=-1)
        return (precise * cosine + torch.cat([-second, first], dim=-1) * sine).to(keys.dtype)

    return tuple((rotated(keys), values) for keys, values in pairs)
