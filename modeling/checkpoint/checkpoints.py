# SPDX-License-Identifier: Apache-2.0
"""Loading a compressor's checkpoint, and saving one that loads anywhere.

A light checkpoint holds what differs from a named base model, and is merged with that base when it is loaded.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from ...configuration.configuration_compressor import CODE_VERSION, CONFIG_SCHEMA
from ..parts.lora import DECODER, OF_THE_DECODER, check_adapters, initialize_lora
from .base_weights import (
    DECODER_BASE,
    DOWNLOAD_ARGUMENTS,
    ENCODER_BASE,
    BaseRecord,
    base_entry,
    base_name,
    base_record,
    base_tensors,
    load_bases,
    merge,
    own_name,
    remember_base,
    shown_name,
    stored_weights,
)
from .encoder_tokenizer import load_encoder_tokenizer
from .fingerprints import checksum, weights_fingerprint
from .peft_adapters import adapter_and_model
from .pretrained_bases import find_base
from .remote_code import write_code_and_card

logger = logging.get_logger(__name__)

# What `from_pretrained` fetches a checkpoint's files with.
_FETCHING = (*DOWNLOAD_ARGUMENTS, "proxies", "revision", "subfolder")
# Arguments of `from_pretrained` that are also fields of every configuration.
_NOT_FIELDS = {"dtype", "quantization_config"}


def load_checkpoint(
    model_class: Any, load: Callable[..., Any], path: Any, places: dict[str, Any], args: Any, kwargs: dict[str, Any]
) -> Any:
    """Load a checkpoint by `load`, the library's `from_pretrained`; `places` are those of its bases."""
    if (plan := kwargs.get("tp_plan")) is not None:
        raise ValueError(f"compressors do not support tensor parallelism, got tp_plan={plan!r}: use `device_map`")
    if path is None:
        return load(None, *args, **kwargs)
    wants_info = kwargs.pop("output_loading_info", False)
    adapter_name = kwargs.pop("adapter_name", "default")
    adapter, name, adapter_source = adapter_and_model(path, kwargs)
    config = _stored_config(model_class, name, kwargs)
    if config.external_weights:
        model, info = load_light(model_class, load, name, config, places, kwargs)
    else:
        if any(place is not None for place in places.values()):
            logger.warning(f"{name} holds all its weights: the base model that was given is not used")
        model, info = load(name, *args, output_loading_info=True, **kwargs)
        # Other files than safetensors are not looked at.
        with suppress(OSError):
            name_as_stored(model, lambda: stored_weights(name, **fetching_arguments(kwargs)))
    # The library names no adapters among the missing keys; those that it offloads have no place either.
    may_offload = getattr(model, "hf_device_map", None) is not None
    missing = {key for key, parameter in model.named_parameters() if not may_offload and parameter.is_meta}
    missing |= set(info["missing_keys"])
    if isinstance(kwargs.get("config"), PreTrainedConfig):
        missing -= _started_adapter(model, missing)
    if missing:
        raise ValueError(
            f"{name} lacks {len(missing)} weights of {model_class.__name__}, the first is {min(missing)!r}; it was "
            "saved from another class or is incomplete"
        )
    model.apply_trainable_set()
    if model.config.encoder_tokenizer is not None:
        source = fetching_arguments(kwargs)
        model.encoder_tokenizer = load_encoder_tokenizer(name, model.config.encoder_tokenizer, source)
        model.base_model.take_from_tokenizer(model.encoder_tokenizer)
    # The folder may be gone when the model is saved.
    sums = {key: checksum(parameter) for key, parameter in model.named_parameters() if parameter.requires_grad}
    model.__dict__["_loaded_from"] = (shown_name(name), sums)
    if adapter is not None and not model._hf_peft_config_loaded:
        model.load_adapter(adapter, adapter_name, adapter_kwargs=adapter_source)
    return (model, info) if wants_info else model


def save_checkpoint(
    model: Any,
    save: Callable[..., Any],
    folder: str | os.PathLike,
    state_dict: dict[str, torch.Tensor] | None,
    save_dtype: torch.dtype | str | None,
    include_base: bool | None,
    kwargs: dict[str, Any],
) -> None:
    """Save a checkpoint by `save`, the library's `save_pretrained`."""
    dtype = getattr(torch, save_dtype, None) if isinstance(save_dtype, str) else save_dtype
    if save_dtype is not None and (not isinstance(dtype, torch.dtype) or not dtype.is_floating_point):
        raise ValueError(f"`save_dtype` must be a floating-point dtype or its name, got {save_dtype!r}")
    check_adapters(model)
    # A dictionary of its own: the library takes out what it has written.
    state = dict(model.state_dict() if state_dict is None else state_dict)
    parent, sums = model.__dict__.get("_loaded_from", (None, {}))
    if any(key in state and checksum(state[key]) != known for key, known in sums.items()):
        model.config.parent_model_name_or_path = parent
    model.config.auto_map = model.auto_map()
    model.config.code_version, model.config.config_schema = CODE_VERSION, CONFIG_SCHEMA
    record = base_to_leave_out(model, include_base)
    model.config.external_weights = None if record is None else record.entries
    if record is not None:
        state = record.without_base(state, {key for key, p in model.named_parameters() if p.requires_grad})
    if dtype is not None:
        state = {key: tensor.to(dtype) if tensor.is_floating_point() else tensor for key, tensor in state.items()}
        # A tied weight stays one: two copies would both be stored.
        tied = model.all_tied_weights_keys.items()
        state |= {key: state[source] for key, source in tied if key in state and source in state}
    is_changed = state_dict is not None or record is not None or dtype is not None
    with nullcontext() if record is None else without_quantizer(model):
        save(folder, state_dict=state if is_changed else None, **kwargs)
    if kwargs.get("is_main_process", True):
        write_code_and_card(_written_class(model), model.config, folder)
        if model.encoder_tokenizer is not None:
            model.encoder_tokenizer.save_pretrained(Path(folder) / model.config.encoder_tokenizer)


def link_base(model: Any, base: Any, encoder: Any, hub_id: str | None, loading: dict[str, Any]) -> None:
    """Note which weights of a model are its base's own."""
    _check_base_stays(model)
    revision = loading.get("revision")
    if hub_id is None and revision is None:
        base, hub_id, revision = find_base(base)
    language_model = AutoModelForCausalLM.from_pretrained(base, dtype="auto", **loading)
    entries = {DECODER_BASE: base_entry(language_model, base, hub_id, revision, loading)}
    bases = {DECODER_BASE: base_tensors(language_model)}
    if encoder is not None:
        encoder, encoder_id, encoder_revision = find_base(encoder)
        fetching = {name: loading[name] for name in DOWNLOAD_ARGUMENTS if name in loading}
        own_encoder = AutoModel.from_pretrained(encoder, config=model.config.encoder_config, dtype="auto", **fetching)
        entries[ENCODER_BASE] = base_entry(own_encoder, encoder, encoder_id, encoder_revision, fetching)
        bases[ENCODER_BASE] = base_tensors(own_encoder)
    same = []
    for key, tensor in model.state_dict().items():
        place = base_name(key)
        source = None if place is None else bases.get(place[0], bases[DECODER_BASE]).get(place[1])
        if source is not None and source.shape == tensor.shape and source.to(tensor).equal(tensor):
            same.append((key, tensor))
    if not same:
        raise ValueError(f"no weight of this model is one of {base}")
    model.config.base_model_name_or_path = hub_id or shown_name(base)
    model.config.base_model_revision = entries[DECODER_BASE]["revision"]
    remember_base(model, BaseRecord(entries, same))


def _started_adapter(model: Any, missing: set[str]) -> set[str]:
    """Give the decoder's adapter its start values where the caller's configuration has one and no file does, and
    return the names of its weights."""
    names = {key for key in missing if OF_THE_DECODER.search(key)}
    for key in names:
        path, _, own = key.rpartition(".")
        # The library leaves what it finds in no file without a place.
        empty = torch.empty_like(model.get_parameter(key), device=model.device, dtype=torch.float32)
        setattr(model.get_submodule(path), own, nn.Parameter(empty))
    if names:
        initialize_lora(model, (DECODER,))
    return names


def _stored_config(model_class: Any, name: str | os.PathLike, keywords: dict[str, Any]) -> PreTrainedConfig:
    config, rest = keywords.get("config"), {}
    if not isinstance(config, PreTrainedConfig):
        # The library's `from_pretrained` would make this class's configuration of any other one's fields.
        source = name if config is None else config
        config, rest = model_class.config_class.get_config_dict(source, **fetching_arguments(keywords))
    model_type = config.get("model_type") if isinstance(config, dict) else config.model_type
    own = model_class.config_class.model_type
    if model_type not in (None, own):
        raise ValueError(
            f"{name} is of the model type {model_type!r}, {model_class.__name__} loads {own!r}: a checkpoint loads "
            "with its own class or an Auto class, a base model with `from_base`"
        )
    return model_class.config_class.from_dict(config, **rest) if isinstance(config, dict) else config


def _written_class(model: nn.Module) -> type:
    """The class that somebody wrote: FSDP gives a model that it shares out one of its own, derived from that."""
    if torch.distributed.is_available():
        from torch.distributed.fsdp import FSDPModule

        return next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
    return type(model)


# --- light checkpoints ---


def fetching_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that say where files come from."""
    return {name: arguments[name] for name in _FETCHING if arguments.get(name) is not None}


def load_light(
    model_class: type[PreTrainedModel],
    load: Any,
    name: str | os.PathLike,
    config: PreTrainedConfig,
    places: dict[str, str | os.PathLike | None],
    arguments: dict[str, Any],
) -> tuple[Any, dict[str, Any]]:
    """Fetch bases and difference, and hand both to the library's `from_pretrained` as one checkpoint; return the model
    and what the library tells of its loading."""
    fetching = fetching_arguments(arguments)
    arguments = {key: value for key, value in arguments.items() if key not in ("config", "commit_hash", *_FETCHING)}
    config = copy.deepcopy(config)
    for field in set(arguments) & set(config.to_dict()) - _NOT_FIELDS:
        setattr(config, field, arguments.pop(field))
    devices = arguments.get("device_map")
    if isinstance(devices, dict) and "disk" in devices.values():
        raise ValueError(f"{name} is light, and only whole checkpoints stay on disk: save it with its base first")
    entries = config.external_weights
    bases = load_bases(
        config, entries, places, name, {key: fetching[key] for key in DOWNLOAD_ARGUMENTS if key in fetching}
    )
    with torch.device("meta"):
        skeleton = model_class(copy.deepcopy(config))
    # Where nothing trains, all weights are the bases'.
    stored = stored_weights(name, **fetching) if config.is_trained else {}
    state, of_the_base = merge(skeleton, bases, stored, name)
    # A state's own type would be that of its first weight, which may be one that trains.
    dtype = arguments.pop("torch_dtype", None) or arguments.pop("dtype", None)
    arguments["dtype"] = config.dtype if dtype in (None, "auto") else dtype
    model, info = load(None, config=config, state_dict=state, output_loading_info=True, **arguments)
    model.config.name_or_path = model.name_or_path = str(name)
    if model.can_generate():
        # A backbone's checkpoint has none.
        with suppress(OSError):
            model.generation_config = GenerationConfig.from_pretrained(name, **fetching)
    own = [(key, tensor) for key, tensor in model.state_dict().items() if key in of_the_base]
    remember_base(model, BaseRecord(entries, own))
    name_as_stored(model, lambda: state)
    return model, info


def name_as_stored(model: PreTrainedModel, load_stored: Callable[[], Mapping[str, torch.Tensor]]) -> None:
    """Keep the fingerprint of the weights as they are stored: a float16 copy has another."""
    parameters = list(model.parameters())
    if not any(p.dtype == torch.float16 for p in parameters) or any(p.is_meta for p in parameters):
        return
    stored = {own_name(key): tensor for key, tensor in load_stored().items()}
    backbone = model.base_model
    backbone._stored_fingerprints = {weights_fingerprint(backbone): weights_fingerprint(backbone, stored=stored)}


def _check_base_stays(model: PreTrainedModel) -> None:
    if model.trains_base:
        raise ValueError(f"{type(model).__name__} trains all of its base: its checkpoints are always whole")


def base_to_leave_out(model: PreTrainedModel, include_base: bool | None) -> BaseRecord | None:
    """Return the base that a light checkpoint leaves out; `None` for a full one."""
    record = base_record(model)
    is_on_the_hub = record is not None and all(entry["repo_id"] is not None for entry in record.entries.values())
    if include_base or (include_base is None and not is_on_the_hub):
        return None
    _check_base_stays(model)
    if record is None:
        raise ValueError(
            "nothing tells which weights are the base's: this model was loaded whole, or its adapters are merged; "
            "name the base with `link_base`, or save it whole"
        )
    return record


@contextmanager
def without_quantizer(model: Any) -> Iterator[None]:
    """Save what is not quantized as if nothing were: the library would ask the quantizer for the weights instead."""
    quantizer, settings = vars(model).pop("hf_quantizer", None), vars(model.config).pop("quantization_config", None)
    try:
        yield
    finally:
        if quantizer is not None:
            model.hf_quantizer = quantizer
        if settings is not None:
            model.config.quantization_config = settings
