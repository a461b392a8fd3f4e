# SPDX-License-Identifier: Apache-2.0
"""Loading a compressor's checkpoint, saving one that loads anywhere, and uploading it.

A light checkpoint holds what differs from a named base model, and is merged with that base when it is loaded.
"""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
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


class CheckpointedModel(PreTrainedModel):
    """Loading, saving and uploading of every compressor."""

    config_class: Any
    # Whether all of the base trains: checkpoints are then always whole.
    trains_base = False
    # Makes the tokens of contexts, where the encoder reads others than the decoder; else `None`.
    encoder_tokenizer: PreTrainedTokenizerBase | None = None

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike | None,
        *args: Any,
        base_model: str | os.PathLike | None = None,
        encoder_base_model: str | os.PathLike | None = None,
        **kwargs: Any,
    ) -> Self:
        """Load a checkpoint; arguments as `transformers.PreTrainedModel.from_pretrained`, and two more.

        A light checkpoint names its base model, whose weights are fetched and checked, and its own take their places;
        type, devices, attention and quantization are those asked for here.

        Args:
            pretrained_model_name_or_path: Hub repository or folder.
            args: As in `transformers`.
            base_model: Hub repository or folder of a light checkpoint's base, if not where the checkpoint says.
            encoder_base_model: That of the model that its encoder started from, if it is another one.
            kwargs: As in `transformers`.

        Raises:
            ValueError: the checkpoint is of another method, weights are missing from it, the base is another model
                than the one that the checkpoint was made on, or a `tp_plan`.
            OSError: the checkpoint, or the base that a light one names, cannot be had.
        """
        if (plan := kwargs.get("tp_plan")) is not None:
            raise ValueError(f"compressors do not support tensor parallelism, got tp_plan={plan!r}: use `device_map`")
        if pretrained_model_name_or_path is None:
            return super().from_pretrained(None, *args, **kwargs)
        places = {DECODER_BASE: base_model, ENCODER_BASE: encoder_base_model}
        wants_info = kwargs.pop("output_loading_info", False)
        adapter_name = kwargs.pop("adapter_name", "default")
        adapter, name, adapter_source = adapter_and_model(pretrained_model_name_or_path, kwargs)
        config = _stored_config(cls, name, kwargs)
        if config.external_weights:
            model, info = load_light(cls, super().from_pretrained, name, config, places, kwargs)
        else:
            if any(place is not None for place in places.values()):
                logger.warning(f"{name} holds all its weights: the base model that was given is not used")
            model, info = super().from_pretrained(name, *args, output_loading_info=True, **kwargs)
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
                f"{name} lacks {len(missing)} weights of {cls.__name__}, the first is {min(missing)!r}; it was saved "
                "from another class or is incomplete"
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
        return (model, info) if wants_info else model  # type: ignore[return-value]  # as in transformers

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load as in torch; frozen weights of the base, which light checkpoints leave out, do not count as missing."""
        result, record = super().load_state_dict(state_dict, strict=strict, assign=assign), base_record(self)
        if record is not None:
            trained = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
            missing = [key for key in result.missing_keys if key in trained or own_name(key) not in record.sums]
            result = result._replace(missing_keys=missing)
        return result

    def save_pretrained(
        self,
        save_directory: str | os.PathLike,
        *,
        state_dict: dict[str, torch.Tensor] | None = None,
        push_to_hub: bool = False,
        save_dtype: torch.dtype | str | None = None,
        include_base: bool | None = None,
        **kwargs: Any,
    ) -> None:
        """Save a folder that loads anywhere: safetensors, configuration, generation configuration, code and card.

        A model that started from a base on the Hub is saved light: what differs from the base (the method's parts,
        adapters, base weights that have trained), and the base's name, revision and fingerprint. One that started from
        a folder is saved whole, since nobody else has that folder.

        Args:
            save_directory: The folder.
            state_dict: Weights to save in place of the model's own.
            push_to_hub: Not supported; see the method `push_to_hub`.
            save_dtype: Floating-point type to store all weights in; as they are held if not given, so that a training
                run resumes exactly.
            include_base: Whether to store the base's weights, too. `False` also leaves out those of a base in a
                folder, which must then be given as `base_model` when the checkpoint is loaded.
            kwargs: As in `transformers.PreTrainedModel.save_pretrained`.

        Raises:
            ValueError: the base cannot be left out.
        """
        if push_to_hub:
            raise ValueError("`push_to_hub=True` is not supported: call `model.push_to_hub(repo_id)`")
        dtype = getattr(torch, save_dtype, None) if isinstance(save_dtype, str) else save_dtype
        if save_dtype is not None and (not isinstance(dtype, torch.dtype) or not dtype.is_floating_point):
            raise ValueError(f"`save_dtype` must be a floating-point dtype or its name, got {save_dtype!r}")
        check_adapters(self)
        # A dictionary of its own: the library takes out what it has written.
        state = dict(self.state_dict() if state_dict is None else state_dict)
        parent, sums = self.__dict__.get("_loaded_from", (None, {}))
        if any(key in state and checksum(state[key]) != known for key, known in sums.items()):
            self.config.parent_model_name_or_path = parent
        self.config.auto_map = self.auto_map()
        self.config.code_version, self.config.config_schema = CODE_VERSION, CONFIG_SCHEMA
        record = base_to_leave_out(self, include_base)
        self.config.external_weights = None if record is None else record.entries
        if record is not None:
            state = record.without_base(state, {key for key, p in self.named_parameters() if p.requires_grad})
        if dtype is not None:
            state = {key: tensor.to(dtype) if tensor.is_floating_point() else tensor for key, tensor in state.items()}
            # A tied weight stays one: two copies would both be stored.
            tied = self.all_tied_weights_keys.items()
            state |= {key: state[source] for key, source in tied if key in state and source in state}
        is_changed = state_dict is not None or record is not None or dtype is not None
        with nullcontext() if record is None else without_quantizer(self):
            super().save_pretrained(save_directory, state_dict=state if is_changed else None, **kwargs)
        if kwargs.get("is_main_process", True):
            write_code_and_card(_written_class(self), self.config, save_directory)
            if self.encoder_tokenizer is not None:
                self.encoder_tokenizer.save_pretrained(Path(save_directory) / self.config.encoder_tokenizer)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        token: str | bool | None = None,
        private: bool | None = None,
        revision: str | None = None,
        max_shard_size: int | str = "50GB",
        save_dtype: torch.dtype | str | None = None,
        include_base: bool | None = None,
        **commit: Any,
    ) -> str:
        """Upload what `save_pretrained` writes, and return the commit's address; the repository's own card stays.

        Args:
            repo_id, revision: Repository on the Hub and branch; they are made if they do not exist.
            token: Access token; the stored one if not given.
            private: Whether a new repository is private.
            max_shard_size, save_dtype, include_base: As in `save_pretrained`.
            commit: `commit_message`, `commit_description` and `create_pr` of `huggingface_hub.HfApi.upload_folder`.
        """
        from huggingface_hub import HfApi

        api = HfApi(token=token)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            options: dict[str, Any] = {"save_dtype": save_dtype, "include_base": include_base}
            self.save_pretrained(folder, max_shard_size=max_shard_size, **options)
            # The library's `push_to_hub` would put an empty template in the place of either card.
            has_card = api.file_exists(repo_id, "README.md", revision=revision)
            commit = {"commit_message": f"Upload {type(self).__name__}", **commit}
            options = {"revision": revision, "ignore_patterns": ["README.md"] if has_card else None, **commit}
            return str(api.upload_folder(repo_id=repo_id, folder_path=folder, **options))

    def link_base(
        self,
        base: str | os.PathLike,
        encoder: str | os.PathLike | None = None,
        hub_id: str | None = None,
        **loading: Any,
    ) -> None:
        """Find out which weights are a base model's own, so that `save_pretrained` can leave them out.

        For a model that was loaded from a whole checkpoint; others know it.

        Args:
            base, encoder: Hub repository or folder of the base, and of another model that the encoder started from.
            hub_id: Repository of the base, where `base` is a folder with a copy of it.
            loading: `revision`, `token`, `cache_dir` or `local_files_only`.

        Raises:
            ValueError: no weight is the base's, or the method trains all of its base.
        """
        _check_base_stays(self)
        revision = loading.get("revision")
        if hub_id is None and revision is None:
            base, hub_id, revision = find_base(base)
        language_model = AutoModelForCausalLM.from_pretrained(base, dtype="auto", **loading)
        entries = {DECODER_BASE: base_entry(language_model, base, hub_id, revision, loading)}
        bases = {DECODER_BASE: base_tensors(language_model)}
        if encoder is not None:
            encoder, encoder_id, encoder_revision = find_base(encoder)
            fetching = {name: loading[name] for name in DOWNLOAD_ARGUMENTS if name in loading}
            own_encoder = AutoModel.from_pretrained(
                encoder, config=self.config.encoder_config, dtype="auto", **fetching
            )
            entries[ENCODER_BASE] = base_entry(own_encoder, encoder, encoder_id, encoder_revision, fetching)
            bases[ENCODER_BASE] = base_tensors(own_encoder)
        same = []
        for key, tensor in self.state_dict().items():
            place = base_name(key)
            source = None if place is None else bases.get(place[0], bases[DECODER_BASE]).get(place[1])
            if source is not None and source.shape == tensor.shape and source.to(tensor).equal(tensor):
                same.append((key, tensor))
        if not same:
            raise ValueError(f"no weight of this model is one of {base}")
        self.config.base_model_name_or_path = hub_id or shown_name(base)
        self.config.base_model_revision = entries[DECODER_BASE]["revision"]
        remember_base(self, BaseRecord(entries, same))

    @classmethod
    def auto_map(cls) -> dict[str, str]:
        """The `auto_map` of checkpoints of this class."""
        return cls.config_class.default_auto_map()

    @classmethod
    def is_remote_code(cls) -> bool:
        # The library would copy the code without making it flat; `save_pretrained` writes it itself.
        return False


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
    arguments = {key: value for key, value in arguments.items() if key not in ("config", *_FETCHING)}
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
