# SPDX-License-Identifier: Apache-2.0
"""Memories in 8 and 4 bits: integers, symmetric around zero, with float16 scales.

Embeddings and values have their scales by slot, keys by channel: a few channels of the keys are large in every token,
none of the values (KIVI, https://arxiv.org/abs/2402.02750, section 3.1). "int8" has one scale for all that a slot, or
a channel, holds; "int4" one for every 32 neighbours of it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

QUANTIZATIONS = ("int8", "int4")
_DTYPES = {torch.int8: "int8", torch.uint8: "int4"}
_LARGEST = {"int8": 127, "int4": 7}
# Neighbours that share a scale; for "int8" all of them: no slot is as wide, and no row as long.
GROUP_SIZES = {"int8": 1 << 40, "int4": 32}


def quantization_of(dtype: torch.dtype) -> str | None:
    """ "int8" or "int4" for the type of a quantised carrier, `None` for another one."""
    return _DTYPES.get(dtype)


def width_of(tensor: Tensor) -> int:
    """Values in the last dimension; a byte of "int4" holds two."""
    return tensor.shape[-1] * (2 if tensor.dtype == torch.uint8 else 1)


def scales_shape(tensor: Tensor, is_keys: bool) -> tuple[int, ...]:
    """Shape of the scales of a quantised carrier tensor.

    Args:
        tensor: `(batch_size, num_slots, width)` or `(batch_size, num_heads, num_slots, head_dim)`, int8 or uint8.
        is_keys: whether its scales go by channel, `(batch_size, num_heads, num_groups, head_dim)`, and not by slot,
            `(..., num_slots, num_groups)`.
    """
    group_size, width = GROUP_SIZES[_DTYPES[tensor.dtype]], width_of(tensor)
    *outer, num_slots, _ = tensor.shape
    return (*outer, -(-num_slots // group_size), width) if is_keys else (*outer, num_slots, -(-width // group_size))


def quantize_tensor(tensor: Tensor, mask: Tensor, quantization: str, is_keys: bool) -> tuple[Tensor, Tensor]:
    """A carrier tensor as integers and scales, without gradients; padding slots become zeros and count for no scale.

    Args:
        tensor: `(batch_size, num_slots, width)` or `(batch_size, num_heads, num_slots, head_dim)`.
        mask: `(batch_size, num_slots)`.
        quantization: "int8" or "int4".
        is_keys: whether scales go by channel and not by slot.

    Returns:
        Integers: int8 of the same shape; or uint8, half as wide, two neighbours in each byte, the first in its lower
        half, 8 added to both. And the float16 scales, see `scales_shape`.

    Raises:
        ValueError: "int4" and an odd width, or values too large for a float16 scale.
    """
    if quantization == "int4" and tensor.shape[-1] % 2:
        raise ValueError(f"'int4' keeps two values in a byte and needs an even width, got {tensor.shape[-1]}")
    largest, real = _LARGEST[quantization], mask.reshape(len(mask), *[1] * (tensor.dim() - 3), -1, 1).bool()
    states = tensor.detach().float().where(real, 0)
    states = states.mT if is_keys else states
    size = states.shape[-1]
    group_size = min(GROUP_SIZES[quantization], max(size, 1))
    groups = pad(states, (0, -size % group_size)).unflatten(-1, (-1, group_size))
    scales = (groups.abs().amax(dim=-1, keepdim=True) / largest).half()
    if scales.isinf().any():
        raise ValueError(
            f"the memory holds values up to {states.abs().max().item():.4g}, {quantization!r} ends at "
            f"{torch.finfo(torch.float16).max * largest:.4g}"
        )
    # A scale that float16 rounds to zero stands for values that are none either.
    integers = (groups / scales.float().where(scales > 0, 1)).round().clamp(-largest, largest).to(torch.int8)
    integers, scales = integers.flatten(-2)[..., :size], scales[..., 0]
    if is_keys:
        integers, scales = integers.mT.contiguous(), scales.mT.contiguous()
    if quantization == "int4":
        halves = (integers + 8).to(torch.uint8)
        integers = halves[..., ::2] | halves[..., 1::2] << 4
    return integers, scales


def dequantize_tensor(integers: Tensor, scales: Tensor, is_keys: bool) -> Tensor:
    """The float32 values that `quantize_tensor` stands for.

    Args:
        integers: as it returned them.
        scales: likewise.
        is_keys: as there.
    """
    group_size = GROUP_SIZES[_DTYPES[integers.dtype]]
    if integers.dtype == torch.uint8:
        integers = torch.stack([integers & 15, integers >> 4], dim=-1).flatten(-2).to(torch.int8) - 8
    dim = -2 if is_keys else -1
    scales = scales.float()
    if scales.shape[dim] > 1:
        scales = scales.repeat_interleave(group_size, dim=dim).narrow(dim, 0, integers.shape[dim])
    return integers * scales


def zero_of(dtype: torch.dtype) -> int:
    """What stands for zeros in a carrier of this type."""
    return 0x88 if dtype == torch.uint8 else 0
