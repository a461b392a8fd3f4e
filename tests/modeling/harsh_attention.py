# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for attention kernels that give NaN, in value and gradient, for a query that sees nothing.

Some kernels of GPUs do so; torch's for CPUs gives zeros. `BLIND` counts such queries.
"""

from collections import Counter

import torch
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AttentionInterface, masking_utils

BLIND = Counter()
_sdpa, _softmax = functional.scaled_dot_product_attention, functional.softmax


class _Spoil(torch.autograd.Function):
    """A tensor with NaN in some rows, in value and gradient."""

    @staticmethod
    def forward(ctx, tensor, rows):
        ctx.save_for_backward(rows)
        return tensor.masked_fill(rows, torch.nan)

    @staticmethod
    def backward(ctx, gradient):
        (rows,) = ctx.saved_tensors
        return gradient.masked_fill(rows, torch.nan), None


def _spoiled(output, is_blind, implementation):
    with _disable_current_modes():  # what counts the waits of a pass does not count this one
        count = int(is_blind.sum())
    if not count:
        return output
    BLIND[implementation] += count
    return _Spoil.apply(output, is_blind.expand(*output.shape[:-1], 1))


def harsh_sdpa(query, key, value, attn_mask=None, *args, **kwargs):
    output = _sdpa(query, key, value, attn_mask, *args, **kwargs)
    if attn_mask is None or torch.compiler.is_compiling():
        return output
    lowest = torch.finfo(attn_mask.dtype).min / 2 if attn_mask.is_floating_point() else None
    is_blind = ~attn_mask.any(-1, keepdim=True) if lowest is None else (attn_mask < lowest).all(-1, keepdim=True)
    return _spoiled(output, is_blind, "sdpa")


def harsh_softmax(input, dim=None, *args, **kwargs):
    output = _softmax(input, dim, *args, **kwargs)
    # Scores of eager attention have four dimensions.
    if input.dim() != 4 or torch.compiler.is_compiling():
        return output
    is_blind = (input < torch.finfo(input.dtype).min / 2).all(dim, keepdim=True)
    return _spoiled(output, is_blind, "eager")


def harsh_flex(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """Flex attention without its kernel, which takes minutes to compile on a CPU."""
    mask = attention_mask
    if mask is not None and not isinstance(mask, torch.Tensor):
        shape = (len(query), 1, query.shape[2], key.shape[2])
        mask = create_mask(attention_mask.mask_mod, *shape, device=query.device)
    groups = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
    is_causal = mask is None and query.shape[2] > 1
    output = _sdpa(query, key, value, mask, scale=scaling, is_causal=is_causal)
    if mask is not None:
        output = _spoiled(output, ~mask.any(-1, keepdim=True), "flex_attention")
    return output.transpose(1, 2).contiguous(), None


def eager_block_mask(*args, **kwargs):
    """Make flex attention's mask without the compiler, which takes seconds for each one."""
    return create_block_mask(*args, **{**kwargs, "_compile": False})


def install(monkeypatch):
    """Put the stand-ins in the kernels' place."""
    BLIND.clear()
    monkeypatch.setattr(functional, "scaled_dot_product_attention", harsh_sdpa)
    monkeypatch.setattr(functional, "softmax", harsh_softmax)
    monkeypatch.setitem(AttentionInterface._global_mapping, "flex_attention", harsh_flex)
    monkeypatch.setattr(masking_utils, "create_block_mask", eager_block_mask)
