# SPDX-License-Identifier: Apache-2.0
"""Running a base in its own half type although some of its own weights train, and are held in float32.

A map's input and weight must have one type. Adapters and method parts see to their types themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_WEIGHTS = "_context_compressor_trained_and_frozen"


def note_trained_weights(backbone: nn.Module) -> None:
    """Keep in mind one map with a weight of the base's own that trains, and one that stays frozen."""
    examples: dict[bool, tuple[nn.Module, str]] = {}
    for path, module in backbone.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point() and ".lora_" not in path:
                examples.setdefault(parameter.requires_grad, (module, name))
    # Where they are, not the weights themselves: loading puts others in their place.
    backbone.__dict__[_WEIGHTS] = (examples[True], examples[False]) if len(examples) == 2 else None


def trained_base_weights(model: Any) -> list[str]:
    """Return the names of the base weights that train in a compressor's `...ForCausalLM`."""
    parts = model.base_model.language_model, model.get_output_embeddings()
    weights = [entry for part in parts for entry in part.named_parameters() if ".lora_" not in entry[0]]
    return [name for name, weight in weights if weight.requires_grad]


def weights_of(module: nn.Module) -> Iterator[Tensor]:
    """The module's parameters, also where it is a replica of `DataParallel`, whose weights are none to torch."""
    for part in module.modules():
        weights = part.__dict__.get("_former_parameters") or part._parameters
        yield from (weight for weight in weights.values() if weight is not None)


def in_base_precision(backbone: nn.Module) -> AbstractContextManager[Any]:
    """Autocast to the type of the backbone's frozen weights inside this block, if those that train have another."""
    weights = backbone.__dict__.get(_WEIGHTS)
    if weights is None:
        return nullcontext()
    trained, frozen = (getattr(module, name) for module, name in weights)
    if trained.dtype == frozen.dtype or torch.is_autocast_enabled(frozen.device.type):
        return nullcontext()
    # Autocast's cache of cast weights is one for all threads: one made without gradients would serve a training step.
    return torch.autocast(frozen.device.type, dtype=frozen.dtype, cache_enabled=False)


def embedding_scale(table: nn.Module) -> float:
    """Return the number that a table of token embeddings multiplies its rows with, as Gemma's does."""
    return getattr(table, "scalar_embed_scale", 1.0)


def as_head_takes(head: nn.Module, states: Tensor) -> Tensor:
    """Return hidden states in the type of an LM head's weight, which may train or be frozen apart from the
    backbone."""
    weight: Any = getattr(head, "weight", None)
    # A quantized map sees to it by itself.
    is_plain = weight is not None and weight.is_floating_point() and weight.dtype.itemsize > 1
    return states if not is_plain or torch.is_autocast_enabled(states.device.type) else states.to(weight.dtype)


def head_logits(head: nn.Module, states: Tensor) -> Tensor:
    """Return logits `(..., vocab_size)` of hidden states `(..., hidden_size)`.

    States are multiplied as rows: torch would multiply a slice, such as the last ones of each text, by frozen weights
    text by text, which on a CPU in bfloat16 takes many times as long.
    """
    logits = head(as_head_takes(head, states.reshape(-1, states.shape[-1])))
    return logits.view(*states.shape[:-1], logits.shape[-1])


class Float32Linear(nn.Linear):
    """`nn.Linear` in float32, also where autocast would take a smaller type."""

    def forward(self, inputs: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        with torch.autocast(inputs.device.type, enabled=False):
            return functional.linear(inputs.float(), self.weight.float(), bias)


def perceptron(in_features: int, out_features: int) -> tuple[nn.Module, nn.Module, nn.Module]:
    """Return the modules of a perceptron of two layers, the second one from `out_features` to itself, in float32."""
    return Float32Linear(in_features, out_features), nn.GELU(), Float32Linear(out_features, out_features)


class Float32LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` in float32."""

    def forward(self, inputs: Tensor) -> Tensor:
        return functional.layer_norm(
            inputs.float(), self.normalized_shape, self.weight.float(), self.bias.float(), self.eps
        )


class Float32RMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` in float32."""

    def forward(self, inputs: Tensor) -> Tensor:
        return functional.rms_norm(inputs.float(), self.normalized_shape, self.weight.float(), self.eps)
