# SPDX-License-Identifier: Apache-2.0
"""Light checkpoints: what differs from a named base model, merged with that base when it is loaded."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

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
from .fingerprints import weights_fingerprint
from .pretrained_bases import find_base

# Of two configurations' sources: what `from_pretrained` fetches a checkpoint's files with.
_FETCHING = (*DOWNLOAD_ARGUMENTS, "proxies", "revision", "subfolder")
# Arguments of `from_pretrained` that are also fields of every configuration.
_NOT_FIELDS = {"dtype", "quantization_config"}


def fetching_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Those arguments of `from_pretrained` that say where files come from."""
    return {name: arguments[name] for name in _FETCHING if arguments.get(name) is not None}


def load_light(
    model_class: type[PreTrainedModel],
    load: Any,
    name: str | os.PathLike,
    config: PreTrainedConfig,
    places: dict[str, str | os.PathLike | None],
    arguments: dict[str, Any],
) -> tuple[Any, dict[str, Any]]:
    """Fetch bases and difference, and hand both to the library's `from_pretrained` as one checkpoint.

    Returns:
        the model, and what the library tells of its loading.
    """
    fetching = fetching_arguments(arguments)
    arguments = {key: value for key, value in arguments.items() if key not in ("config", *_FETCHING)}
    # All weights are handed over: the library has no file to look for.
    variant = arguments.pop("variant", None)
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
    stored = stored_weights(name, variant, **fetching) if config.is_trained else {}
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


def link_base(
    model: PreTrainedModel,
    base: str | os.PathLike,
    encoder: str | os.PathLike | None,
    hub_id: str | None,
    loading: dict[str, Any],
) -> None:
    """Record which weights are a base model's own; arguments and errors as `CompressorPreTrainedModel.link_base`."""
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


def _check_base_stays(model: PreTrainedModel) -> None:
    if model.trains_base:
        raise ValueError(f"{type(model).__name__} trains all of its base: its checkpoints are always whole")


def base_to_leave_out(model: PreTrainedModel, include_base: bool | None) -> BaseRecord | None:
    """What a light checkpoint leaves out; `None` for a whole one."""
    record = base_record(model)
    if include_base or (include_base is None and not (record and record.is_on_the_hub)):
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
    quantizer, settings = model.__dict__.pop("hf_quantizer", None), getattr(model.config, "quantization_config", None)
    if settings is not None:
        del model.config.quantization_config
    try:
        yield
    finally:
        if quantizer is not None:
            model.hf_quantizer = quantizer
        if settings is not None:
            model.config.quantization_config = settings
