# SPDX-License-Identifier: Apache-2.0
"""Maps of attention that some places of a pass have for themselves, beside those of a base that stays as it is.

The base's own maps ask, in the thread's own pass, which places of their output another map makes. Nothing of the pass
is kept in a module.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from transformers import initialization as init

from .lora import PASSES, Passes, activated

# What the attention of a base calls its maps.
_NAMES = {"query": ("q_proj",), "key": ("k_proj",), "value": ("v_proj",), "output": ("o_proj", "out_proj", "dense")}
# The thread's pass: the places in its flattened batch, and the maps of their own.
_PASS = Passes()


class BeaconLinear(nn.Linear):
    """A map whose weight is float32, and which computes in the type of its input."""

    def forward(self, inputs: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(inputs.dtype)
        # A copy in every case: for few rows the last bit depends on where a weight lies, and a file puts it elsewhere.
        return functional.linear(inputs, self.weight.to(inputs.dtype, copy=True), bias)


class BeaconMaps(nn.ModuleList):
    """For each layer of a base, maps as large as its own, by "query", "key", "value" and "output".

    Args:
        backbone: the base.
        names: which maps. The last layer has no query and no output: they act on states that nothing reads.

    Raises:
        ValueError: a base whose attention does not have these maps, one for each.
    """

    def __init__(self, backbone: nn.Module, names: Sequence[str]):
        super().__init__()
        layers = attention_maps(backbone, names)
        for number, layer in enumerate(layers):
            is_last = number == len(layers) - 1
            own = {name: linear for name, linear in layer.items() if name in ("key", "value") or not is_last}
            maps = {
                name: BeaconLinear(linear.in_features, linear.out_features, bias=linear.bias is not None)
                for name, linear in own.items()
            }
            self.append(nn.ModuleDict(maps))

    def copy_from(self, backbone: nn.Module, names: Sequence[str]) -> None:
        """Start as the base's own maps."""
        maps: Any = self
        for own, layer in zip(maps, attention_maps(backbone, names), strict=True):
            for name, beacon in own.items():
                for part, parameter in beacon.named_parameters():
                    init.copy_(parameter, getattr(layer[name], part))

    def at(self, places: Tensor, backbone: nn.Module, names: Sequence[str]) -> AbstractContextManager[None]:
        """Inside this block these maps stand in for the base's own, at some places and in this thread.

        Args:
            places: of the pass's batch, flattened to `(batch_size * num_places, ...)`, each once.
            backbone: the base.
            names: which maps.
        """
        for number, layer in enumerate(attention_maps(backbone, names, with_adapters=True)):
            for name, linear in layer.items():
                # Where a quantizer or PEFT has put another module in the base's, it has none yet.
                if not any(isinstance(hook, _Beacons) for hook in linear._forward_hooks.values()):
                    linear.register_forward_hook(_Beacons(number, name))
        return activated(_PASS, (places, self))


# Gradient checkpointing recomputes a pass with what was active in it, as with adapters.
setattr(BeaconMaps, PASSES, (_PASS, None))


class _Beacons:
    """A hook of one map of the base: replaces its output at the pass's places."""

    def __init__(self, layer: int, name: str):
        self.layer, self.name = layer, name

    def __call__(self, linear: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        if _PASS.names is None:
            return None
        places, maps = _PASS.names
        if self.name not in maps[self.layer]:
            return None
        own = maps[self.layer][self.name](inputs[0].flatten(0, 1)[places])
        return output.flatten(0, 1).index_copy(0, places, own.to(output.dtype)).view_as(output)


def attention_maps(backbone: nn.Module, names: Sequence[str], with_adapters: bool = False) -> list[dict[str, Any]]:
    """The maps of each layer's attention by what they are called here, `with_adapters` around them or without.

    Raises:
        ValueError: the base does not have them, one for each.
    """
    layers = []
    for module in backbone.modules():
        if not all(hasattr(module, name) for name in ("q_proj", "k_proj", "v_proj")):
            continue
        found = {name: next((getattr(module, n) for n in _NAMES[name] if hasattr(module, n)), None) for name in names}
        layers.append({name: m if with_adapters else getattr(m, "base_layer", m) for name, m in found.items()})
    config: Any = backbone.config
    if len(layers) != config.num_hidden_layers or any(linear is None for layer in layers for linear in layer.values()):
        raise ValueError(
            f"beacons have their own {', '.join(names)} maps, and the attention of a base of type "
            f"{config.model_type!r} has no such maps of its own in each layer (such as q_proj, k_proj and v_proj)"
        )
    return layers
