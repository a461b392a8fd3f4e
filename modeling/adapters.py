# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters on a language model that encoder and decoder may share.

The adapters are injected into the modules themselves, without wrapper classes, so that saving and loading stay plain.
Which of them is active is switched for the length of a call: `set_adapter` would take the other one's gradient away.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

ENCODER, DECODER = "encoder", "decoder"
OWN_ADAPTERS = (ENCODER, DECODER)
_LAYERS = "_context_compressor_lora_layers"


def lora_layers(model: nn.Module) -> list[nn.Module]:
    """All LoRA layers below `model` that hold one of this project's adapters."""
    owner, layers = model.__dict__.get(_LAYERS, (None, None))
    # A replica of `DataParallel` starts with its original's dictionary, and must not switch the original's layers.
    if owner is not model:
        layers = [m for m in model.modules() if any(name in getattr(m, "lora_A", ()) for name in OWN_ADAPTERS)]
        # Walking a whole model at every generated token would cost as much as the token.
        model.__dict__[_LAYERS] = (model, layers)
    return layers


def linear_module_names(model: nn.Module) -> list[str]:
    """Last parts of the names of all linear maps inside `model`, adapted or not, e.g. `["down_proj", "q_proj"]`."""
    inside_lora = ("base_layer", *OWN_ADAPTERS)
    names = set()
    for path, module in model.named_modules():
        name = path.rpartition(".")[2]
        if hasattr(module, "lora_A") or (isinstance(module, nn.Linear) and name not in inside_lora):
            names.add(name)
    return sorted(names)


def inject_lora(model: nn.Module, name: str, settings: dict[str, Any], exclude: Sequence[str] = ()) -> None:
    """Put a LoRA adapter called `name` into the linear maps of `model`, in float32.

    Args:
        model: the language model's backbone; it must not yet hold an adapter of that name.
        name: "encoder" or "decoder".
        settings: `rank`, `alpha`, `dropout`, `target_modules` as in [`CompressorConfig`].
        exclude: paths of modules that get none.

    Raises:
        ImportError: `peft` is not installed.
        ValueError: no module of the model has one of the target names.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ImportError("This checkpoint has LoRA adapters: install `peft` (pip install peft) to use it.") from error
    targets = settings["target_modules"]
    known = linear_module_names(model)
    if targets == "all-linear":
        targets = known
    missing = [target for target in targets if target not in known]
    if missing:
        raise ValueError(f"`target_modules` {missing} are not linear maps of {type(model).__name__}; it has {known}")
    config = LoraConfig(
        r=settings["rank"],
        lora_alpha=settings["alpha"],
        lora_dropout=settings["dropout"],
        target_modules=targets,
        exclude_modules=list(exclude) or None,
    )
    with warnings.catch_warnings():
        # A second adapter on a shared base is what is wanted here.
        warnings.filterwarnings("ignore", message="Already found a `peft_config` attribute")
        inject_adapter_in_model(config, model, adapter_name=name)
    model.__dict__.pop(_LAYERS, None)
    for parameter_name, parameter in model.named_parameters():
        if f".{name}." in parameter_name and "lora_" in parameter_name:
            parameter.data = parameter.data.float()
            # Without the mark, the backbone's own initialisation would overwrite the zeros of B.
            parameter._is_hf_initialized = True
    for layer in lora_layers(model):
        # Outside of any switch the backbone is the decoder.
        layer._active_adapter = [DECODER] if DECODER in layer.lora_A else []
        for part in ("lora_A", "lora_B"):
            for module in getattr(layer, part).values():
                module._is_hf_initialized = True


def initialize_lora(model: nn.Module, names: tuple[str, ...] = OWN_ADAPTERS) -> None:
    """Give the adapters their start values: A Kaiming-uniform, B zero."""
    for layer in lora_layers(model):
        for name in names:
            if name in layer.lora_A:
                layer.reset_lora_parameters(name, init_lora_weights=True)


def active_adapters(layers: list[nn.Module]) -> list[list[str]]:
    """What is active in each of `layers` now."""
    return [[active] if isinstance(active := layer._active_adapter, str) else list(active) for layer in layers]


@contextmanager
def _activated(layers: list[nn.Module], wanted: list[list[str]]) -> Iterator[None]:
    before = [(names, layer._disable_adapters) for layer, names in zip(layers, active_adapters(layers), strict=True)]
    for layer, names in zip(layers, wanted, strict=True):
        layer._active_adapter, layer._disable_adapters = names, False
    try:
        yield
    finally:
        for layer, (names, disabled) in zip(layers, before, strict=True):
            layer._active_adapter, layer._disable_adapters = names, disabled


def use_adapter(model: nn.Module, name: str | None) -> AbstractContextManager[None]:
    """Make `name` the only active adapter of this project inside `model`, for the length of a `with` block.

    Adapters that somebody else put there (e.g. `peft.get_peft_model` over the compressor) stay active, unless that
    somebody has switched them off. `None`: none of this project's adapters is active.
    """
    layers = lora_layers(model)
    active = active_adapters(layers)
    wanted = []
    for layer, names in zip(layers, active, strict=True):
        own = [name] if name is not None and name in layer.lora_A else []
        foreign = [] if layer._disable_adapters else [other for other in names if other not in OWN_ADAPTERS]
        wanted.append(own + foreign)
    is_switched = wanted == active and not any(layer._disable_adapters for layer in layers)
    return nullcontext() if is_switched else _activated(layers, wanted)


class PeftTargetMixin:
    """What a compressor does when `peft.get_peft_model` puts somebody else's adapter on it.

    PEFT leaves what trains already as it is, but saves its own adapter only: everything else is frozen.
    """

    @property
    def peft_config(self) -> dict[str, Any]:
        """The settings of the adapters that PEFT has put on this model, by name."""
        if "_peft_config" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__} has no adapters beside its own")
        return self.__dict__["_peft_config"]

    @peft_config.setter
    def peft_config(self, value: dict[str, Any]) -> None:
        self.__dict__["_peft_config"] = value
        for name, parameter in self.named_parameters():
            if not set(value) & set(name.split(".")):
                parameter.requires_grad_(False)

    @peft_config.deleter
    def peft_config(self) -> None:
        del self.__dict__["_peft_config"]


class CheckpointWithAdapters:
    """A gradient-checkpointing function that recomputes with the adapters that were active in the forward pass.

    Plain checkpointing recomputes a layer with whatever adapter is active during backward, which is silently wrong
    when encoder and decoder share their base. It is always non-reentrant: reentrant checkpointing would lose the
    gradients of a frozen base's adapters.

    Args:
        model: the model that is checkpointed.
    """

    def __init__(self, model: nn.Module):
        # An attribute, not a closure: a deep copy of the model must switch its own layers, not the original's.
        self.layers = [module for module in model.modules() if hasattr(module, "lora_A")]

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        active = active_adapters(self.layers)
        return checkpoint(
            function, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), _activated(self.layers, active))
        )


@torch.no_grad()
def merge_lora(model: nn.Module, name: str) -> None:
    """Add the adapter `name` to the weights it sits on and take all LoRA layers out of `model`."""
    for path, layer in [(path, module) for path, module in model.named_modules() if hasattr(module, "lora_A")]:
        if name in layer.lora_A:
            layer.merge(safe_merge=True, adapter_names=[name])
        parent, _, attribute = path.rpartition(".")
        setattr(model.get_submodule(parent), attribute, layer.get_base_layer())
    model.__dict__.pop(_LAYERS, None)
