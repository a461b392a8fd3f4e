# SPDX-License-Identifier: Apache-2.0
"""Memories in 8, 4 and 2 bits: blocks of a slot, rotated, as integers with one scale each.

    (1)  y = H (s * x)               of each block x of up to 128 neighbours; H of Hadamard, s fixed signs
    (2)  q = floor(y / step)         held to the -2^(b-1) .. 2^(b-1) - 1 of b bits
    (3)  x^ = scale s * H (q + 1/2)  with the scale for which <x, x^> = |x|^2

Rotated, any block's values are about normal and none of its channels is large, so that one step fits all (QuaRot,
https://arxiv.org/abs/2404.00456): in 4 and 2 bits that which rounds a normal best (Max, "Quantizing for minimum
distortion", 1960). Products with (3) are right on average, which attention is made of (TurboQuant,
https://arxiv.org/abs/2504.19874). In "int2" keys have 4 bits: rounding them moves the answers most.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Bits of keys, and of values and embeddings.
QUANTIZATIONS = {"int8": (8, 8), "int4": (4, 4), "int2": (4, 2)}
_DTYPES = {8: torch.int8, 4: torch.uint8, 2: torch.int16}
_BITS = {dtype: bits for bits, dtype in _DTYPES.items()}
_NAMES = {bits: name for name, (_, bits) in QUANTIZATIONS.items()}
# In standard deviations.
_STEPS = {4: 0.3352, 2: 0.9957}
_LARGEST_BLOCK = 128
# The first 128 binary digits of pi's fraction.
_SIGNS = 0x243F6A8885A308D313198A2E03707344


def quantization_of(dtype: torch.dtype) -> str | None:
    """The form that values or embeddings of this type are in, `None` for floating-point ones."""
    return _NAMES.get(_BITS.get(dtype, 0))


def dtype_of_keys(dtype: torch.dtype) -> torch.dtype:
    """The type of the keys beside values of this type."""
    name = quantization_of(dtype)
    return dtype if name is None else _DTYPES[QUANTIZATIONS[name][0]]


def item_dtype(bits: int) -> torch.dtype:
    """The type of integers that hold values of so many bits."""
    return _DTYPES[bits]


def values_per_item(bits: int) -> int:
    """Values that stand in one integer."""
    return _DTYPES[bits].itemsize * 8 // bits


def width_of(tensor: Tensor) -> int:
    """Values in the last dimension."""
    bits = _BITS.get(tensor.dtype)
    return tensor.shape[-1] * (1 if bits is None else values_per_item(bits))


def num_blocks(width: int) -> int:
    """Blocks of so many values: of 128 if that divides it, or else of the next smaller power of two that does."""
    return width // math.gcd(width, _LARGEST_BLOCK)


def quantize_tensor(tensor: Tensor, mask: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return a carrier tensor as integers and scales, without gradients; zeros at padding slots.

    Args:
        tensor: `(batch_size, num_slots, width)` or `(batch_size, num_heads, num_slots, width)`.
        mask: `(batch_size, num_slots)`.
        bits: 8, 4 or 2.

    Returns:
        Of 8 bits int8, of 4 uint8 with two values in each, of 2 int16 with eight values in each, the first in the
        lowest bits, all from 0 on; and the float16 scales `(..., num_slots, num_blocks)`.
    """
    per_item, half, width = values_per_item(bits), 1 << (bits - 1), tensor.shape[-1]
    if width % per_item:
        raise ValueError(f"{bits} bits keep {per_item} values in each integer, which {width} values do not fill")
    real = mask.reshape(len(mask), *[1] * (tensor.dim() - 3), -1, 1).bool()
    states = tensor.detach().float().where(real, 0)
    blocks = _rotated(states.unflatten(-1, (num_blocks(width), -1)))
    if bits == 8:
        steps = blocks.abs().amax(dim=-1, keepdim=True) / (half - 0.5)
    else:
        steps = blocks.square().mean(dim=-1, keepdim=True).sqrt() * _STEPS[bits]
    integers = (blocks / steps.where(steps > 0, 1)).floor().clamp(-half, half - 1)
    products = ((integers + 0.5) * blocks).sum(dim=-1)
    scales = (blocks.square().sum(dim=-1) / products.where(products > 0, 1)).half()
    if scales.isinf().any():
        raise ValueError(f"the memory holds {states.abs().max().item():.4g}, too large for float16 scales")
    codes = (integers + half).to(torch.int32).flatten(-2).unflatten(-1, (-1, per_item))
    items = (codes << _shifts(bits, codes.device)).sum(dim=-1, dtype=torch.int32)
    return items.where(real, 0).to(_DTYPES[bits]), scales


def dequantize_tensor(items: Tensor, scales: Tensor) -> Tensor:
    """Return the float32 values that the items and scales of `quantize_tensor` stand for."""
    bits = _BITS[items.dtype]
    codes = items.to(torch.int32)[..., None] >> _shifts(bits, items.device) & (1 << bits) - 1
    levels = codes.flatten(-2).float() - ((1 << (bits - 1)) - 0.5)
    blocks = levels.unflatten(-1, (scales.shape[-1], -1)) * scales.float()[..., None]
    return _rotated(blocks, is_back=True).flatten(-2)


def _shifts(bits: int, device: torch.device) -> Tensor:
    return torch.arange(values_per_item(bits), device=device, dtype=torch.int32) * bits


def _rotated(blocks: Tensor, is_back: bool = False) -> Tensor:
    """Blocks `(..., size)` after the rotation of (1), or after its inverse."""
    size = blocks.shape[-1]
    signs = blocks.new_tensor([1 - 2 * (_SIGNS >> (127 - place) & 1) for place in range(size)])
    hadamard = blocks.new_ones(1, 1)
    while len(hadamard) < size:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    hadamard = hadamard * size**-0.5
    return (blocks @ hadamard) * signs if is_back else (blocks * signs) @ hadamard
