# SPDX-License-Identifier: Apache-2.0
"""Saving a compressor as a folder that loads anywhere, loading it, and uploading it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from ...configuration.versions import CODE_VERSION, CONFIG_SCHEMA
from ..parts.lora import DECODER, OF_THE_DECODER, check_adapters, initialize_lora
from .base_weights import DECODER_BASE, ENCODER_BASE, stored_weights
from .encoder_tokenizer import load_encoder_tokenizer
from .light_checkpoints import (
    base_to_leave_out,
    fetching_arguments,
    load_light,
    name_as_stored,
    note_parent,
    remember_start,
    without_quantizer,
)
from .peft_adapters import adapter_and_model
from .remote_code import write_code_and_card

logger = logging.get_logger(__name__)


def load_checkpoint(
    model_class: Any,
    load: Callable[..., Any],
    name: str | os.PathLike | None,
    base_model: str | os.PathLike | None,
    encoder_base_model: str | os.PathLike | None,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
) -> Any:
    """A checkpoint's model; arguments, result and errors as `CompressorPreTrainedModel.from_pretrained`."""
    wants_info = keywords.pop("output_loading_info", False)
    places = {DECODER_BASE: base_model, ENCODER_BASE: encoder_base_model}
    adapter, adapter_name = None, keywords.pop("adapter_name", "default")
    adapter_source: dict[str, Any] = {}
    if name is not None:
        adapter, name, adapter_source = adapter_and_model(name, keywords)
    config = None if name is None else _stored_config(model_class, name, keywords)
    if name is not None and config is not None and config.external_weights:
        model, info = load_light(model_class, load, name, config, places, keywords)
    else:
        if base_model is not None or encoder_base_model is not None:
            logger.warning(f"{name} holds all its weights: the base model that was given is not used")
        model, info = load(name, *arguments, output_loading_info=True, **keywords)
        if name is not None:
            variant = keywords.get("variant")
            # Other files than safetensors are not looked at.
            with suppress(OSError):
                name_as_stored(model, lambda: stored_weights(name, variant, **fetching_arguments(keywords)))
    started = _started_adapter(model, name, keywords)
    # The library names no adapters among the missing keys; those that it offloads have no place either.
    is_whole = getattr(model, "hf_device_map", None) is None
    unplaced = {key for key, parameter in model.named_parameters() if is_whole and parameter.is_meta}
    missing = sorted(unplaced.union(info["missing_keys"]) - started)
    if missing:
        raise ValueError(
            f"{name} lacks {len(missing)} weights of {model_class.__name__}, the first is {missing[0]!r}; it was "
            "saved from another class or is incomplete"
        )
    model.apply_trainable_set()
    if name is not None and model.config.encoder_tokenizer is not None:
        model.encoder_tokenizer = load_encoder_tokenizer(name, model.config.encoder_tokenizer, keywords)
        model.base_model.take_from_tokenizer(model.encoder_tokenizer)
    if name is not None:
        remember_start(model, name)
    if adapter is not None and not model._hf_peft_config_loaded:
        model.load_adapter(adapter, adapter_name, adapter_kwargs=adapter_source)
    return (model, info) if wants_info else model


def _started_adapter(model: Any, name: str | os.PathLike | None, keywords: dict[str, Any]) -> set[str]:
    """Start the decoder's adapter where the given configuration has one that the stored one has not.

    Returns:
        the names of its weights, which no file has.
    """
    wanted = model.config.decoder_adapter
    if name is None or wanted is None or not isinstance(keywords.get("config"), PreTrainedConfig):
        return set()
    stored = type(model.config).from_pretrained(name, **fetching_arguments(keywords))
    if stored.decoder_adapter is not None:
        return set()
    names = {key for key, _ in model.named_parameters() if OF_THE_DECODER.search(key)}
    for key in names:
        path, _, own = key.rpartition(".")
        # The library leaves what it finds in no file without a place.
        empty = torch.empty_like(model.get_parameter(key), device=model.device, dtype=torch.float32)
        setattr(model.get_submodule(path), own, nn.Parameter(empty))
    initialize_lora(model, (DECODER,))
    return names


def _stored_config(model_class: Any, name: str | os.PathLike, kwargs: dict[str, Any]) -> PreTrainedConfig:
    given = kwargs.get("config")
    if isinstance(given, PreTrainedConfig):
        _check_model_type(model_class, name, given.model_type)
        return given
    # The library's `from_pretrained` would make this class's configuration of any other one's fields.
    source = name if given is None else given
    fields, rest = model_class.config_class.get_config_dict(source, **fetching_arguments(kwargs))
    _check_model_type(model_class, name, fields.get("model_type"))
    return model_class.config_class.from_dict(fields, **rest)


def _check_model_type(model_class: Any, name: str | os.PathLike, found: str | None) -> None:
    own = model_class.config_class.model_type
    if found not in (None, own):
        raise ValueError(
            f"{name} is of the model type {found!r}, {model_class.__name__} loads {own!r}: a checkpoint loads with "
            "its own class or an Auto class, a base model with `from_base`"
        )


def save_checkpoint(
    model: Any,
    save: Callable[..., None],
    save_directory: str | os.PathLike,
    is_main_process: bool,
    state_dict: dict[str, torch.Tensor] | None,
    save_dtype: torch.dtype | str | None,
    include_base: bool | None,
    arguments: dict[str, Any],
) -> None:
    """Write a checkpoint's folder; arguments and errors as `CompressorPreTrainedModel.save_pretrained`."""
    dtype = _storage_type(save_dtype)
    refuse_links_out(save_directory, None if model.encoder_tokenizer is None else model.config.encoder_tokenizer)
    check_adapters(model)
    # A dictionary of its own: the library takes out what it has written.
    state = dict(model.state_dict() if state_dict is None else state_dict)
    note_parent(model, state)
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
    with nullcontext() if record is None else without_quantizer(model):
        save(
            save_directory,
            is_main_process=is_main_process,
            state_dict=None if state_dict is None and record is None and dtype is None else state,
            **arguments,
        )
    if is_main_process:
        write_code_and_card(_written_class(model), model.config, save_directory)
        if model.encoder_tokenizer is not None:
            model.encoder_tokenizer.save_pretrained(Path(save_directory) / model.config.encoder_tokenizer)


def refuse_links_out(folder: str | os.PathLike, subfolder: str | None = None) -> None:
    """Refuse a folder with a link to a file outside of it, which saving would write through.

    A snapshot in the cache of the Hub is made of such links: its files are shared by all revisions.

    Raises:
        ValueError: with the first such link.
    """
    folder = Path(folder)
    files = [path for path in folder.glob("*") if not path.is_dir()]
    files += [] if subfolder is None else [folder / subfolder, *(folder / subfolder).glob("*")]
    for path in sorted(files):
        # `Path.resolve` raises where a link leads to itself.
        target = Path(os.path.realpath(path))
        if not target.is_relative_to(os.path.realpath(folder)):
            raise ValueError(f"{path} is a link out of the folder, and saving would write to {target}")


def upload_checkpoint(
    model: PreTrainedModel,
    repo_id: str,
    saving: dict[str, Any],
    *,
    commit_message: str | None = None,
    commit_description: str | None = None,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    tags: list[str] | None = None,
) -> str:
    """Save and upload; arguments and result as `CompressorPreTrainedModel.push_to_hub`, `saving` for saving."""
    from huggingface_hub import HfApi, ModelCard

    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision is not None and not create_pr:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, **saving)
        card_path = Path(folder) / "README.md"
        # The library's `push_to_hub` would put an empty template in its place.
        if api.file_exists(repo_id, card_path.name, revision=revision):
            card_path.unlink()
        elif tags:
            card = ModelCard.load(card_path)
            card.data.tags = list(dict.fromkeys([*card.data.tags, *tags]))
            card.save(card_path)
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            commit_message=commit_message or f"Upload {type(model).__name__}",
            commit_description=commit_description,
            revision=revision,
            create_pr=create_pr,
        )
    return str(commit)


def _storage_type(name: torch.dtype | str | None) -> torch.dtype | None:
    dtype = getattr(torch, name, None) if isinstance(name, str) else name
    if name is not None and (not isinstance(dtype, torch.dtype) or not dtype.is_floating_point):
        raise ValueError(f"`save_dtype` must be a floating-point dtype or its name, got {name!r}")
    return dtype


def _written_class(model: nn.Module) -> type:
    """The class that somebody wrote: FSDP gives a model that it shares out one of its own, derived from that."""
    if torch.distributed.is_available():
        from torch.distributed.fsdp import FSDPModule

        return next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
    return type(model)
