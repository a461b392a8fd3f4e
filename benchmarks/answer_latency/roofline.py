# SPDX-License-Identifier: Apache-2.0
"""What an answer costs at the least: operations by GMSA's Appendix G, and bytes of weights and cache to move."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from context_compressors.configuration.layer_shape import LayerShape
from context_compressors.evaluation.flops import compression_flops


@dataclass(frozen=True)
class Hardware:
    """What a device can do at the most.

    Args:
        flops_per_second: dense matrix products in a 16-bit type.
        bytes_per_second: memory bandwidth.
    """

    flops_per_second: float
    bytes_per_second: float


# The makers' numbers for the SXM boards, without sparsity, by the beginning of the device's name: other boards of the
# family (H100 NVL, H100 PCIe, A100 40GB) have other limits.
_HARDWARE = {
    "NVIDIA H200": Hardware(989e12, 4.8e12),
    "NVIDIA H100 80GB HBM3": Hardware(989e12, 3.35e12),
    "NVIDIA H20": Hardware(148e12, 4.0e12),
    "NVIDIA A100-SXM4-80GB": Hardware(312e12, 2.04e12),
    "NVIDIA A800-SXM4-80GB": Hardware(312e12, 2.04e12),
}


def hardware_of(device: torch.device, dtype: torch.dtype) -> Hardware | None:
    """The limits of a GPU that is known here, in a 16-bit type; `None` for all else."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    name = torch.cuda.get_device_name(device)
    return next((limits for known, limits in _HARDWARE.items() if name.startswith(known)), None)


@dataclass(frozen=True)
class ForwardPass:
    """One pass of a model over a batch.

    Args:
        flops: operations.
        weight_bytes: weights that are read.
        cache_bytes: keys and values that are read or written.
        future_flops: of the operations, those between a token and later ones, which a causal kernel leaves out.
    """

    flops: int
    weight_bytes: int
    cache_bytes: int = 0
    future_flops: int = 0

    def least_seconds(self, hardware: Hardware) -> float:
        """Time that either the operations or the bytes take at the least."""
        needed, moved = self.flops - self.future_flops, self.weight_bytes + self.cache_bytes
        return max(needed / hardware.flops_per_second, moved / hardware.bytes_per_second)


def summary(passes: Iterable[ForwardPass], hardware: Hardware | None) -> dict[str, Any]:
    """The sums of passes that follow each other, and their least time where the hardware is known."""
    passes = list(passes)
    return {
        "flops": sum(one.flops for one in passes),
        "weight_bytes": sum(one.weight_bytes for one in passes),
        "cache_bytes": sum(one.cache_bytes for one in passes),
        "least_seconds": None if hardware is None else sum(one.least_seconds(hardware) for one in passes),
    }


def module_bytes(module: nn.Module, without: nn.Module | None = None) -> int:
    """Bytes of a module's parameters but for those of another one, each counted once."""
    left_out = set() if without is None else {id(parameter) for parameter in without.parameters()}
    return sum(p.numel() * p.element_size() for p in module.parameters() if id(p) not in left_out)


def answer_passes(
    config: PreTrainedConfig,
    weight_bytes: int,
    element_size: int,
    batch_size: int,
    prefill: int,
    num_cached: int,
    new_tokens: int,
) -> list[ForwardPass]:
    """The passes of writing an answer with a key/value cache: over the prompt, and then over one token each.

    Args:
        config: the decoder's configuration.
        weight_bytes: what every pass reads: the layers and the LM head.
        element_size: bytes of a number in the cache.
        batch_size: rows.
        prefill: tokens or slots of a row that the first pass runs over.
        num_cached: places in the cache before it.
        new_tokens: tokens to write.
    """
    shape, layers = LayerShape.from_config(config), config.num_hidden_layers
    place = 2 * layers * shape.num_key_value_heads * shape.head_dim * element_size
    passes = []
    for step in range(new_tokens):
        length, past = (prefill, num_cached) if step == 0 else (1, num_cached + prefill + step - 1)
        flops, future = (batch_size * layers * n for n in (shape.flops(length, past), shape.future_flops(length)))
        passes.append(ForwardPass(flops, weight_bytes, batch_size * place * (past + length), future))
    return passes


def compression_pass(compressor: PreTrainedModel, batch_size: int, num_tokens: int, ratio: int) -> ForwardPass:
    """The pass of a compressor over contexts: its encoder's layers, and what makes slots of their states."""
    model, config = compressor.base_model, compressor.config
    weights = module_bytes(model, without=model.language_model)
    if model.encoder_model is not None:
        weights -= module_bytes(model.encoder_model.get_input_embeddings())
    elif getattr(config, "encoder_type", "language_model") == "language_model":
        weights += module_bytes(model.language_model, without=model.get_input_embeddings())
    # Memory tokens behind the context, and blocks over slots alone, are too few to count here.
    encoder = config.get_encoder_config()
    future = encoder.num_hidden_layers * LayerShape.from_config(encoder).future_flops(num_tokens)
    is_read = getattr(config, "encoder_type", "language_model") == "language_model"
    flops = batch_size * compression_flops(config, num_tokens, ratio)
    return ForwardPass(flops, weights, future_flops=batch_size * future if is_read else 0)
