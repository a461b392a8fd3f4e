# SPDX-License-Identifier: Apache-2.0
"""PEFT's adapters: one on top of a compressor, or one of its base that a compressor's own starts from."""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from safetensors.torch import load_file
from transformers.integrations.peft import maybe_load_adapters
from transformers.utils import cached_file
from transformers.utils.loading_report import LoadStateDictInfo

from ..parts.lora import DECODER, SHARED, lora_layers

_SOURCE = {"cache_dir", "token", "local_files_only", "subfolder", "revision"}
# Fields of PEFT's that change what the maps compute, and their values where they do not.
_PLAIN = {"peft_type": "LORA", "bias": "none", "use_dora": False, "use_rslora": False, "fan_in_fan_out": False}
_ABSENT = ("modules_to_save", "rank_pattern", "alpha_pattern", "layers_to_transform", "layer_replication")


def adapter_and_model(name: str | os.PathLike, keywords: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """Return the place of an adapter, if `name` is one, its compressor, and arguments for fetching the adapter."""
    fetching = keywords.pop("adapter_kwargs", None) or {field: keywords[field] for field in _SOURCE & set(keywords)}
    adapter, model, fetching = maybe_load_adapters(name, keywords, **fetching)
    if adapter is not None and fetching.get("revision") == keywords.get("revision"):
        keywords.pop("revision", None)
    return adapter, model, fetching


def put_adapter_on(model: Any, adapter: str | os.PathLike, name: str, trains: bool, fetching: dict[str, Any]) -> Any:
    """Put one of PEFT's adapters on a compressor, beside its own; the library would take these for missing ones."""
    from peft import PeftConfig, inject_adapter_in_model, load_peft_weights, set_peft_model_state_dict

    config = PeftConfig.from_pretrained(adapter, **fetching)
    config.inference_mode = not trains
    inject_adapter_in_model(config, model, name)
    keys = set_peft_model_state_dict(model, load_peft_weights(adapter, str(model.device), **fetching), name)
    if unlike := [*keys.unexpected_keys, *(key for key in keys.missing_keys if f".{name}." in key)]:
        raise ValueError(f"the adapter {adapter} sits on other maps than it says, the first is {unlike[0]!r}")
    model._hf_peft_config_loaded = True
    model.train(model.training)
    return LoadStateDictInfo(set(), set(), set(), [], {}, set())


def peft_weight_names(backbone: Any, name: str) -> dict[str, torch.nn.Parameter]:
    """The weights of an adapter by the names that PEFT gives them in a model with a head."""
    return {
        f"base_model.model.{backbone.base_model_prefix}.{path}.{part}.weight": maps[name].weight
        for path, layer in lora_layers(backbone, [name])
        for part, maps in (("lora_A", layer.lora_A), ("lora_B", layer.lora_B))
    }


@torch.no_grad()
def load_peft_adapter(model: Any, adapter: str | os.PathLike, fetching: dict[str, Any]) -> None:
    """Let the adapter that `model` answers with, the shared one or its decoder's, start as one of PEFT's."""
    names = ("adapter_config.json", "adapter_model.safetensors")
    files = [cached_file(str(adapter), name, **fetching) for name in names]
    with open(files[0], encoding="utf-8") as file:
        stored = json.load(file)
    for field, value in {**_PLAIN, **dict.fromkeys(_ABSENT)}.items():
        if (stored.get(field) or None) != (value or None):
            raise ValueError(f"the adapter {adapter} is not plain LoRA: {field} is {stored[field]!r}, not {value!r}")
    name, settings = SHARED if model.config.shared_adapter else DECODER, model.config.decoder_lora
    if settings is None:
        raise ValueError(f"{type(model).__name__} has no adapter that could start as {adapter}: give `decoder_lora`")
    of_the_adapter, own = (stored["r"], stored["lora_alpha"]), (settings["rank"], settings["alpha"])
    if of_the_adapter != own:
        raise ValueError(f"the adapter {adapter} has rank and alpha {of_the_adapter}, and the compressor's own {own}")
    tensors, weights = load_file(files[1]), peft_weight_names(model.base_model.language_model, name)
    if unlike := sorted(tensors.keys() ^ weights.keys()):
        raise ValueError(f"the adapter {adapter} needs other `target_modules`: only one side has {unlike[0]!r}")
    for key, weight in weights.items():
        weight.copy_(tensors[key])
