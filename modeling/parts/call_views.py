# SPDX-License-Identifier: Apache-2.0
"""Views of a backbone with settings for one call, while other threads run the same weights with other settings."""

from __future__ import annotations

import copy
import functools
import types
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

# The library remembers on the model that its layers have hooks for further outputs.
_HOOKED = "_output_capturing_hooks_installed"


def for_one_call(backbone: PreTrainedModel, is_causal: bool | None = None) -> PreTrainedModel:
    """The backbone itself, or a view for one call where that call would change the backbone's settings.

    A view has the same layers, weights and hooks. Its own are the configuration, in which the library notes
    `is_causal` for the length of a pass, and a rotary embedding whose frequencies follow the length of the sequence.
    Inside `torch.compile` it is always the backbone itself: what is noted there is part of the traced graph.
    """
    rotary: Any = getattr(backbone, "rotary_emb", None)
    follows = _follows_length(rotary)
    if not (follows or is_causal is not None) or torch.compiler.is_compiling():
        return backbone
    if not isinstance(backbone, PreTrainedModel):
        return backbone
    if follows:
        from transformers.utils.output_capturing import maybe_install_capturing_hooks

        maybe_install_capturing_hooks(backbone)
    view = object.__new__(type(backbone))
    members = {name: _bound_to(view, value, backbone) for name, value in vars(backbone).items()}
    # Compiled for the shared model; and nobody asks a view for more than its states where no hooks are.
    view.__dict__.update(members, config=copy.copy(backbone.config), _compiled_call_impl=None, **{_HOOKED: True})
    if is_causal is not None:
        view.config.is_causal = is_causal
    if follows:
        rotary = copy.copy(rotary)
        rotary._buffers = {name: buffer.clone() for name, buffer in rotary._buffers.items()}
        view._modules = {**backbone._modules, "rotary_emb": rotary}
    return view


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of all modules and settings of a model on the same weights, for a call that changes settings."""
    # A replica of `DataParallel` has its weights as plain attributes, and they are no leaves.
    kept = [
        value
        for module in model.modules()
        for value in {**module._parameters, **module._buffers, **vars(module)}.values()
        if isinstance(value, Tensor)
    ]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in kept})


def _follows_length(rotary: nn.Module | None) -> bool:
    kinds = getattr(rotary, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any(kind == "longrope" or "dynamic" in str(kind) for kind in kinds)


def _bound_to(view: nn.Module, value: Any, module: nn.Module) -> Any:
    """What an instance has in place of its class's methods, as when weights are spread over devices, for the view."""
    if isinstance(value, types.MethodType) and value.__self__ is module:
        return types.MethodType(value.__func__, view)
    if isinstance(value, functools.partial) and value.args and value.args[0] is module:
        return functools.partial(value.func, view, *value.args[1:], **value.keywords)
    return value
