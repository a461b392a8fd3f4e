# SPDX-License-Identifier: Apache-2.0
"""One pass of a base: masks in which every query sees a key, the type that it computes in, and modules in float32.

A pad in front of a row sees nothing. Some attention kernels return NaN for such a query, forward or backward, and the
NaN spreads: a masked key adds 0 times its value, and 0 times NaN is NaN. Where nothing follows a pass, as in training,
pads stand behind their row, and a causal pass needs no mask at all: kernels without masks are the fastest, too.

A base runs in its own half type although some of its own weights train, and are held in float32: a map's input and
weight must have one type. Adapters and method parts see to their types themselves.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.masking_utils import create_masks_for_generate
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from ...configuration.layer_shape import layer_kinds

# "cache" from version 5.24 on: the argument of its models and of `generate`, and the field of their outputs.
CACHE = next(field.name for field in fields(BaseModelOutputWithPast) if field.name in ("cache", "past_key_values"))
# Where a backbone keeps one weight that trains and one that stays frozen.
_WEIGHTS = "_context_compressor_trained_and_frozen"
# Implementations that take a mask with a value for every pair of places.
PAIRWISE_MASKS = ("eager", "sdpa")
# Implementations that compute pads, too.
_WITH_PADS = (*PAIRWISE_MASKS, "flex_attention")
# Their positions are biases, which they compute from a mask of two dimensions.
_ALIBI = ("bloom", "falcon", "mpt")
# The library remembers on the model that its layers have hooks for further outputs.
_HOOKED = "_output_capturing_hooks_installed"


def run_backbone(
    backbone: PreTrainedModel, is_full: bool = False, is_right_padded: bool = False, **inputs: Any
) -> Any:
    """One pass of a language model in which every query sees at least one key."""
    is_causal, mask = inputs.get("is_causal"), inputs.get("attention_mask")
    view = for_one_call(backbone, is_causal)
    config, has_mask = view.config, isinstance(mask, Tensor) and mask.dim() == 2
    # FlashAttention removes pads by their mask.
    needs_no_mask = config.model_type not in _ALIBI and config._attn_implementation in _WITH_PADS
    if not is_full and is_right_padded and has_mask and is_causal is not False and needs_no_mask:
        inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
    elif not is_full:
        inputs["attention_mask"] = seeing_mask(view, **inputs)
    return view(**inputs)


def for_one_call(backbone: PreTrainedModel, is_causal: bool | None = None) -> PreTrainedModel:
    """The backbone itself, or a view for one call where that call would change the backbone's settings.

    A view has the same layers, weights and hooks, so that other threads run them with other settings meanwhile. Its
    own are the configuration, in which the library notes `is_causal` for the length of a pass, and a rotary embedding
    whose frequencies follow the length of the sequence. Inside `torch.compile` it is always the backbone itself: what
    is noted there is part of the traced graph.
    """
    rotary: Any = getattr(backbone, "rotary_emb", None)
    kinds = getattr(rotary, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    follows = any(kind == "longrope" or "dynamic" in str(kind) for kind in kinds)
    if not (follows or is_causal is not None) or torch.compiler.is_compiling():
        return backbone
    if not isinstance(backbone, PreTrainedModel):
        return backbone
    if follows:
        maybe_install_capturing_hooks(backbone)
    view = object.__new__(type(backbone))
    members = dict(vars(backbone))
    for name, value in members.items():
        # What an instance has in place of its class's methods, as when weights are spread over devices.
        if isinstance(value, types.MethodType) and value.__self__ is backbone:
            members[name] = types.MethodType(value.__func__, view)
        elif isinstance(value, functools.partial) and value.args and value.args[0] is backbone:
            members[name] = functools.partial(value.func, view, *value.args[1:], **value.keywords)
    # Compiled for the shared model; and nobody asks a view for more than its states where no hooks are.
    view.__dict__.update(members, config=copy.copy(backbone.config), _compiled_call_impl=None, **{_HOOKED: True})
    if is_causal is not None:
        view.config.is_causal = is_causal
    if follows:
        rotary = copy.copy(rotary)
        rotary._buffers = {name: buffer.clone() for name, buffer in rotary._buffers.items()}
        view._modules = {**backbone._modules, "rotary_emb": rotary}
    return view


def copy_with_shared_weights(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of all modules and settings of a model on the same weights, for a call that changes settings."""
    # A replica of `DataParallel` has its weights as plain attributes, and they are no leaves.
    kept = [
        value
        for module in model.modules()
        for value in {**module._parameters, **module._buffers, **vars(module)}.values()
        if isinstance(value, Tensor)
    ]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in kept})


def seeing_mask(
    backbone: PreTrainedModel,
    attention_mask: Any = None,
    input_ids: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    **inputs: Any,
) -> Any:
    """Return the mask of a pass as the backbone would make it, with queries that see nothing seeing something.

    It is returned as it is where it has four dimensions already, and where the attention removes pads
    (FlashAttention).
    """
    config, cache = backbone.config, inputs.get(CACHE)
    states: Any = input_ids if inputs_embeds is None else inputs_embeds
    implementation = config._attn_implementation
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2 or config.model_type in _ALIBI:
        return attention_mask
    if implementation not in _WITH_PADS:
        return attention_mask
    notes_causality = torch.compiler.is_compiling() and inputs.get("is_causal") is not None
    earlier = getattr(config, "is_causal", None)
    if notes_causality:
        config.is_causal = inputs["is_causal"]
    if inputs_embeds is None:
        # Only shape, type and device are read.
        weight = backbone.get_input_embeddings().weight
        inputs_embeds = weight.new_empty((), device=states.device).expand(*states.shape, weight.shape[1])
    offset = 0 if cache is None else cache.get_seq_length()
    masks = create_masks_for_generate(config, inputs_embeds, attention_mask, cache)
    if notes_causality and earlier is None:
        # It would hold for the passes that follow, too.
        del config.is_causal
    elif notes_causality:
        config.is_causal = earlier
    if isinstance(masks, dict):
        return {kind: with_sight(mask, offset) for kind, mask in masks.items()}
    return attention_mask if masks is None else with_sight(masks, offset)


def with_sight(mask: Any, offset: int | Tensor = 0) -> Any:
    """A mask whose queries that see nothing see all keys, or with flex attention themselves.

    Args:
        mask: `(batch_size, num_heads, num_queries, num_keys)`, bool or added to the scores, or flex attention's.
    """
    if isinstance(mask, Tensor) and mask.dim() == 4:
        if mask.is_floating_point():
            return mask.masked_fill((mask < 0).all(dim=-1, keepdim=True), 0)
        return mask | ~mask.any(dim=-1, keepdim=True)
    if mask is None or isinstance(mask, Tensor):
        return mask
    from torch.nn.attention.flex_attention import create_block_mask, or_masks

    def itself(batch_index: Tensor, head_index: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key == query + offset

    num_rows, _, num_queries, num_keys = mask.shape
    device = mask.kv_num_blocks.device
    return create_block_mask(or_masks(mask.mask_mod, itself), num_rows, None, num_queries, num_keys, device)


def mask_for(config: Any, visible: Tensor, near: Tensor, dtype: torch.dtype) -> Tensor | dict[str, Tensor]:
    """Return a mask `(num_rows, num_places, num_places)` of visible places in the form that a backbone takes.

    `near` is that of layers with a sliding window, the same where there are none.
    """
    full, near = (_attention_bias(mask, config, dtype) for mask in (visible, near))
    return {"full_attention": full, "sliding_attention": near} if layer_kinds(config) else near


def _attention_bias(visible: Tensor, config: Any, dtype: torch.dtype) -> Tensor:
    """`(batch_size, 1, num_places, num_places)` in the form that the attention implementation takes."""
    visible = with_sight(visible[:, None])
    if config._attn_implementation == "sdpa":
        return visible
    zero = torch.zeros((), dtype=dtype, device=visible.device)
    return torch.where(visible, zero, torch.finfo(dtype).min)


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
