# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters on a language model that encoder and decoder may share.

The adapters are injected into the modules themselves, without wrapper classes, so that saving and loading stay plain.
Which of them is active is switched for the length of a call and in its thread alone: `set_adapter` would take the
other one's gradient away, and a name kept on the shared layers would be read by every other call.
"""

import functools
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

ENCODER, DECODER = "encoder", "decoder"
# One that is active whatever the backbone is at the moment.
SHARED = "shared"
OWN_ADAPTERS = (ENCODER, DECODER, SHARED)
# In the names of the decoder's adapter; a base may have a module `decoder` of its own.
OF_THE_DECODER = re.compile(rf"\.lora_[AB]\.{DECODER}\.")
PASSES = "_context_compressor_passes"


class Passes(threading.local):
    """The adapters, or maps in place of the base's, of this thread's pass; `None` where it makes none.

    Not a `ContextVar`: `torch.compile` can trace this one, if the attribute that it writes is there before.
    """

    def __init__(self) -> None:
        # In each thread that looks.
        self.names: Any = None

    def __reduce__(self) -> tuple[type, tuple]:
        # A copied model has its own.
        return type(self), ()


class AdaptedByPass:
    """A LoRA layer whose active adapters are those of the thread's own pass, and outside of one those of PEFT."""

    passes: Passes
    adapted_class: type
    _active_adapter: str | list[str]
    _disable_adapters: bool
    # PEFT's own.
    merged_adapters: list[str]
    active_adapters: list[str]
    lora_A: Any  # noqa: N815
    lora_B: Any  # noqa: N815
    lora_dropout: Any
    lora_variant: Any
    lora_bias: dict[str, bool]
    scaling: dict[str, float]
    base_layer: Any
    unmerge: Any
    delete_adapter: Any

    @property
    def active_adapter(self) -> str | list[str]:
        names = self.passes.names
        return self._active_adapter if names is None else [name for name in names if name not in self.merged_adapters]

    @property
    def disable_adapters(self) -> bool:
        return self.passes.names is None and self._disable_adapters

    @property
    def merged(self) -> bool:
        # Of a pass's adapters this project's own are never merged.
        return self.passes.names is None and bool(self.merged_adapters)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return W x + s B A x, with the scale and the sum inside the last product."""
        names = [] if self.disable_adapters else [name for name in self.active_adapters if name in self.lora_A]
        if args or kwargs or self.merged or not all(self._is_plain(name, x) for name in names):
            return super().forward(x, *args, **kwargs)  # type: ignore[misc]
        result = self.base_layer(x)
        rows = result.flatten(0, -2)
        for name in names:
            low = self.lora_A[name](self.lora_dropout[name](x)).flatten(0, -2)
            rows = torch.addmm(rows, low, self.lora_B[name].weight.t(), alpha=self.scaling[name])
        return rows.view_as(result)

    def _is_plain(self, name: str, x: torch.Tensor) -> bool:
        is_cast = torch.is_autocast_enabled(x.device.type) or x.dtype == self.lora_A[name].weight.dtype
        is_variant = name in self.lora_variant or self.lora_bias[name]
        up = self.lora_B[name]
        # Weights that are offloaded or sharded are there in the map's own forward alone.
        is_there = type(up) is nn.Linear and not up._forward_pre_hooks and not hasattr(up, "_hf_hook")
        return is_cast and is_there and self.adapted_class.__name__ == "Linear" and not is_variant

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        names = self.active_adapters if adapter_names is None else adapter_names
        super().merge(safe_merge, [name for name in names if name not in OWN_ADAPTERS])  # type: ignore[misc]

    def enable_adapters(self, enabled: bool) -> None:
        if not enabled and self.merged:
            self.unmerge()
        super().enable_adapters(enabled)  # type: ignore[misc]

    def unload_and_optionally_merge_module(self, merge: bool, safe_merge: bool, adapter_names: Any) -> Any:
        """Return the layer with this project's own adapters, in whose place PEFT would put the bare map."""
        if merge:
            self.merge(safe_merge, adapter_names)
        foreign = [name for name in self.lora_A if name not in OWN_ADAPTERS]
        self._active_adapter = _of_the_decoder(self)
        for name in foreign:
            self.delete_adapter(name)
        self.merged_adapters.clear()
        return self

    def __reduce__(self) -> tuple:
        return _new_layer, (self.adapted_class,), self.__dict__


@functools.cache
def _adapted_by_pass(layer_class: Any) -> Any:
    members = {"__module__": layer_class.__module__, "adapted_class": layer_class}
    return type(layer_class.__name__, (AdaptedByPass, layer_class), members)


def _new_layer(layer_class: Any) -> Any:
    """An empty layer for pickling and copying, which cannot find a class that was made here by its name."""
    layer_class = _adapted_by_pass(layer_class)
    return layer_class.__new__(layer_class)


def _of_the_decoder(layer: Any) -> list[str]:
    """Outside of any pass the backbone is the decoder."""
    return [own for own in (DECODER, SHARED) if own in layer.lora_A]


def lora_layers(model: nn.Module, names: Sequence[str] = OWN_ADAPTERS) -> list[tuple[str, Any]]:
    """Return path and module of each LoRA layer below `model` that holds one of some adapters."""
    layers: list[tuple[str, Any]] = [(path, m) for path, m in model.named_modules() if hasattr(m, "lora_A")]
    return [(path, layer) for path, layer in layers if not layer.lora_A.keys().isdisjoint(names)]


def check_adapters(model: nn.Module) -> None:
    """Refuse a model with adapters that are not its own."""
    names = [name.partition(".lora_A.")[2].partition(".")[0] for name, _ in model.named_parameters()]
    if foreign := sorted({name for name in names if name} - set(OWN_ADAPTERS)):
        raise ValueError(
            f"the model holds the adapters {foreign}, which are not its own: save them with the PEFT model's "
            "`save_pretrained`, or take them out with its `merge_and_unload` or `unload` first"
        )


def linear_maps(model: nn.Module) -> list[tuple[str, str]]:
    """Return path and name, its last part, of each linear map inside `model`, adapted or not."""
    adapted = {path for path, _ in lora_layers(model)}
    maps = [(path, path.rpartition(".")[2], module) for path, module in model.named_modules()]
    inside_lora = ("base_layer", *OWN_ADAPTERS)
    return [
        (path, name)
        for path, name, module in maps
        if path in adapted or (isinstance(module, nn.Linear) and name not in inside_lora)
    ]


def inject_lora(model: nn.Module, name: str, settings: dict[str, Any], exclude: Sequence[str] = ()) -> None:
    """Put a LoRA adapter called `name` into the linear maps of `model`, in float32."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ImportError("This checkpoint has LoRA adapters: install `peft` (pip install peft) to use it.") from error
    maps = linear_maps(model)
    known = sorted({map_name for _, map_name in maps})
    targets = known if settings["target_modules"] == "all-linear" else settings["target_modules"]
    if missing := [target for target in targets if target not in known]:
        raise ValueError(f"`target_modules` {missing} are not linear maps of {type(model).__name__}; it has {known}")
    config = LoraConfig(
        r=settings["rank"],
        lora_alpha=settings["alpha"],
        lora_dropout=settings["dropout"],
        target_modules=[f"base.{path}" for path, map_name in maps if map_name in targets and path not in exclude],
    )
    # In a module without a configuration, by which PEFT would look for maps of experts under the same names.
    inject_adapter_in_model(config, nn.ModuleDict({"base": model}), adapter_name=name)
    for parameter_name, parameter in model.named_parameters():
        if f".{name}." in parameter_name and "lora_" in parameter_name:
            parameter.data = parameter.data.float()
            # Without the mark, the backbone's own initialisation would overwrite the zeros of B.
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers' own mark
    layers = [layer for _, layer in lora_layers(model)]
    passes = Passes()
    setattr(model, PASSES, (passes, layers[0]))
    for layer in layers:
        if not isinstance(layer, AdaptedByPass):
            kind: Any = type(layer)
            layer.__class__ = _adapted_by_pass(kind)
        layer.passes = passes
        layer._active_adapter = _of_the_decoder(layer)
        for module in (*layer.lora_A.values(), *layer.lora_B.values()):
            module._is_hf_initialized = True


def initialize_lora(model: nn.Module, names: tuple[str, ...] = OWN_ADAPTERS) -> None:
    """Give the adapters their start values: A Kaiming-uniform, B zero."""
    for _, layer in lora_layers(model):
        for name in names:
            if name in layer.lora_A:
                layer.reset_lora_parameters(name, init_lora_weights=True)


@contextmanager
def activated(passes: Passes, names: Any) -> Iterator[None]:
    """Inside this block the thread's pass has these."""
    before, passes.names = passes.names, names
    try:
        yield
    finally:
        passes.names = before


def use_adapter(model: nn.Module, name: str | None) -> AbstractContextManager[None]:
    """Activate `name`, and a shared adapter, alone of this project's in `model`, in this thread and a `with` block.

    Adapters of somebody else (e.g. `peft.get_peft_model` over the compressor) stay active, unless they were switched
    off. `None`: none of this project's adapters is active.
    """
    noted: Any = vars(model).get(PASSES)
    if noted is None:
        return nullcontext()
    passes, layer = noted
    foreign: list[str] = []
    if not layer._disable_adapters:
        # PEFT switches all layers together, also those that have no adapter of the name.
        active = layer._active_adapter
        foreign = [other for other in ([active] if isinstance(active, str) else active) if other not in OWN_ADAPTERS]
    # Some of PEFT's adapters scale what the base's map gives, and this project's own are none of that.
    return activated(passes, foreign if name is None else [*foreign, name, SHARED])


class CheckpointWithAdapters:
    """A gradient-checkpointing function that recomputes with the adapters that were active in the forward pass.

    Plain checkpointing recomputes a layer with whatever adapter is active during backward, which is silently wrong
    when encoder and decoder share their base. It is always non-reentrant: reentrant checkpointing would lose the
    gradients of a frozen base's adapters.
    """

    def __init__(self, model: nn.Module, checkpoint: Callable[..., Any]):
        self.checkpoint = checkpoint
        # An attribute, not a closure: a deep copy of the model must switch its own layers, not the original's.
        marks = (getattr(module, PASSES, None) for module in model.modules())
        self.passes = [mark[0] for mark in marks if mark is not None]

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        if torch.compiler.is_compiling():
            # What is recomputed is the traced pass, whose adapters are fixed.
            return self.checkpoint(function, *args, use_reentrant=False)
        active = [(passes, passes.names) for passes in self.passes]
        return self.checkpoint(
            function, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), _all_activated(active))
        )


@contextmanager
def _all_activated(active: Sequence[tuple[Passes, list[str] | None]]) -> Iterator[None]:
    # Backward may run in a thread of autograd's own.
    with ExitStack() as stack:
        for passes, names in active:
            stack.enter_context(activated(passes, names))
        yield


@torch.no_grad()
def merge_lora(model: nn.Module, name: str) -> None:
    """Add the adapter `name`, and one that is shared, to the weights it sits on, and take all LoRA layers out."""
    for path, layer in lora_layers(model):
        if names := [own for own in (name, SHARED) if own in layer.lora_A]:
            layer.adapted_class.merge(layer, safe_merge=True, adapter_names=names)
        parent, _, attribute = path.rpartition(".")
        setattr(model.get_submodule(parent), attribute, layer.get_base_layer())
    vars(model).pop(PASSES, None)
