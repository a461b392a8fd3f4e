# SPDX-License-Identifier: Apache-2.0
"""Starting a compressor from pretrained language models."""

from __future__ import annotations

import inspect
import os
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel

from ...configuration.nearest_names import nearest
from .base_weights import (
    DECODER_BASE,
    DOWNLOAD_ARGUMENTS,
    ENCODER_BASE,
    BaseRecord,
    base_entry,
    base_name,
    remember_base,
    shown_name,
)
from .encoder_tokenizer import ENCODER_TOKENIZER, encoders_tokenizer
from .gguf_files import gguf_arguments
from .peft_adapters import load_peft_adapter
from .pretrained_bases import find_base

# What `from_base` hands to the base model's `from_pretrained`; everything else is a field of the configuration.
_LOADING_ARGUMENTS = (
    "attn_implementation",
    "cache_dir",
    "device_map",
    "dtype",
    "force_download",
    "gguf_file",
    "local_files_only",
    "revision",
    "subfolder",
    "token",
)
# Those that belong to the base alone, and not to another model that encodes.
_OF_THE_BASE_ALONE = ("revision", "subfolder", "gguf_file")
# What `from_base` finds out itself.
_FIELDS_OF_THE_BASE = (
    "decoder_config",
    "base_model_name_or_path",
    "base_model_revision",
    "encoder_name_or_path",
    "encoder_revision",
    "encoder_tokenizer",
)


def start_from_base(
    model_class: Any,
    base: str | os.PathLike,
    encoder: str | os.PathLike | None,
    encoder_revision: str | None,
    hub_id: str | None,
    adapter: str | os.PathLike | None,
    fields: dict[str, Any],
) -> PreTrainedModel:
    """A new compressor of a class; arguments, result and errors as `CompressorPreTrainedModel.from_base`."""
    loading = {name: fields.pop(name) for name in _LOADING_ARGUMENTS if name in fields}
    _check_fields(model_class.config_class, fields)
    source = {name: loading[name] for name in loading if name not in ("dtype", "attn_implementation", "device_map")}
    gguf_file = loading.pop("gguf_file", None)
    encoder_source = {name: source[name] for name in source if name not in _OF_THE_BASE_ALONE}
    revision, encoder_id = loading.get("revision"), None
    if hub_id is None and not any(source.get(name) for name in _OF_THE_BASE_ALONE):
        base, hub_id, revision = find_base(base)
    if encoder is not None:
        encoder_source |= {} if encoder_revision is None else {"revision": encoder_revision}
        if encoder_revision is None:
            encoder, encoder_id, encoder_revision = find_base(encoder)
        fields["encoder_config"] = AutoConfig.from_pretrained(encoder, **encoder_source)
        fields |= {
            "encoder_name_or_path": encoder_id or shown_name(encoder),
            "encoder_revision": encoder_revision,
        }
    config = model_class.config_class(
        decoder_config=AutoConfig.from_pretrained(base, **source),
        base_model_name_or_path=hub_id or shown_name(base),
        base_model_revision=revision,
        **fields,
    )
    language_model = model_class.base_auto_class.from_pretrained(base, **loading, **gguf_arguments(gguf_file))
    _check_base(language_model)
    entries = {DECODER_BASE: base_entry(language_model, base, hub_id, revision, source)}
    config.base_model_revision = entries[DECODER_BASE]["revision"]
    config.decoder_config = language_model.config.get_text_config()
    config._attn_implementation = language_model.config._attn_implementation
    own_encoder = None
    for field in config.sub_configs:
        of_the_encoder = config.encoder_name_or_path if field == "encoder_config" else None
        _name_parts(getattr(config, field), of_the_encoder or config.base_model_name_or_path)
    if encoder is not None:
        model_loading = {name: value for name, value in loading.items() if name not in source}
        own_encoder = AutoModel.from_pretrained(
            encoder, config=config.encoder_config, **{**model_loading, **encoder_source}
        )
        entries[ENCODER_BASE] = base_entry(own_encoder, encoder, encoder_id, encoder_revision, encoder_source)
        config.encoder_revision = entries[ENCODER_BASE]["revision"]
    with torch.device("meta"):
        model = model_class(config)
    model.load_base_weights(language_model, own_encoder)
    if adapter is not None:
        load_peft_adapter(model, adapter, {name: source[name] for name in DOWNLOAD_ARGUMENTS if name in source})
    if not model.trains_base:
        tensors = [(key, tensor) for key, tensor in model.state_dict().items() if base_name(key) is not None]
        remember_base(model, BaseRecord(entries, tensors))
    if encoder is not None:
        is_needed = model.base_model.needs_encoder_tokenizer
        model.encoder_tokenizer = encoders_tokenizer(base, encoder, source, encoder_source, is_needed)
        config.encoder_tokenizer = None if model.encoder_tokenizer is None else ENCODER_TOKENIZER
        if model.encoder_tokenizer is not None:
            model.base_model.take_from_tokenizer(model.encoder_tokenizer)
    return model.eval()


def _name_parts(config: PreTrainedConfig | None, name: str | None) -> None:
    """Give a configuration, and those inside it, the name that checkpoints show in place of a folder."""
    if config is not None:
        config.name_or_path = name
        for field in config.sub_configs:
            _name_parts(getattr(config, field, None), name)


def _check_fields(config_class: Any, fields: dict[str, Any]) -> None:
    known = set()
    for base in config_class.__mro__:
        if base.__module__.rpartition(".")[2].startswith("configuration_"):
            known |= set(inspect.signature(base.__init__).parameters)
    known -= {"self", "kwargs", *_FIELDS_OF_THE_BASE}
    for name in fields:
        if name not in known:
            raise ValueError(f"{config_class.__name__} has no field {name!r}{nearest(name, known)}")


def _check_base(language_model: PreTrainedModel) -> None:
    """Refuse a base that a compressor cannot hold whole: what it lacked would silently change its output."""
    name = type(language_model).__name__
    devices = {str(tensor.device) for tensor in language_model.state_dict().values()}
    if len(devices) > 1 or "meta" in devices:
        raise ValueError(
            f"`from_base` needs the whole base on one device, `device_map` put it on {sorted(devices)} (meta is "
            "offloaded); save the compressor and load it with `from_pretrained(..., device_map=...)` instead"
        )
    if getattr(language_model, "hf_quantizer", None) is not None:
        raise ValueError(
            "the base is quantized: start from the unquantized one, save the compressor, and quantize it with "
            "`from_pretrained(..., quantization_config=...)`"
        )
    if getattr(language_model.get_output_embeddings(), "bias", None) is not None:
        raise ValueError(f"the LM head of {name} has a bias, which compressors do not support")
    for field in ("logit_scale", "logits_scaling", "lm_head_multiplier", "logits_soft_cap"):
        if getattr(language_model.config, field, None) not in (None, 1, 1.0):
            raise ValueError(f"{name} scales or caps its logits (`{field}`), which compressors do not support")
