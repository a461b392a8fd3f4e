# SPDX-License-Identifier: Apache-2.0
"""Starting from a base model, saving with code, loading, and the fingerprint of a model."""

from __future__ import annotations

import copy
import difflib
import inspect
import os
import tempfile
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from .versions import CODE_VERSION, CONFIG_SCHEMA
from .lora import initialize_lora
from .base_cache import find_base
from .base_weights import DECODER_BASE, ENCODER_BASE, base_entry, stored_weights
from .checkpoint_card import write_first_card
from .encoder_tokenizer import ENCODER_TOKENIZER, different_tokenizer, load_encoder_tokenizer
from .gguf_files import gguf_arguments
from .light_checkpoints import LightCheckpointMixin, fetching_arguments, shown_name, without_quantizer
from .remote_code import refuse_links_out, write_code
from .taking_over import check_base, take_tensors

logger = logging.get_logger(__name__)

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


class CheckpointMixin(LightCheckpointMixin):
    """`from_base`, `save_pretrained` and `from_pretrained` of every compressor."""

    # Makes the tokens of contexts, where the encoder reads others than the decoder; else `None`.
    encoder_tokenizer: PreTrainedTokenizerBase | None = None
    # Loads what `from_base` starts from.
    base_auto_class: type = AutoModelForCausalLM

    @classmethod
    def from_base(
        cls,
        base: str | os.PathLike,
        encoder: str | os.PathLike | None = None,
        encoder_revision: str | None = None,
        hub_id: str | None = None,
        **fields: Any,
    ):
        """Start a compressor from a pretrained language model.

        Args:
            base: Hub repository or folder of a causal language model. A base that `pretrained_base` has fetched is
                taken from its cache.
            encoder: Hub repository or folder of another language model that encodes, of any width and family, for
                methods that take an encoder of its own. If it has another tokenizer, contexts are tokenized with that,
                which is then `encoder_tokenizer` of the model and part of its checkpoints.
            encoder_revision: Revision of `encoder`.
            hub_id: Repository of the base, where `base` is a folder with a copy of it, or with a GGUF file that was
                made of it: checkpoints then name it, and leave out its weights.
            fields: Fields of the method's configuration, and arguments for loading the base: `dtype`,
                `attn_implementation`, `device_map`, `revision`, `token`, `cache_dir`, `local_files_only`, `subfolder`,
                and `gguf_file`, a GGUF file in the repository or folder, whose weights are dequantised.

        Returns:
            The compressor in evaluation mode: the base's weights, held once, and its own parts at their start values.

        Raises:
            ValueError: a field that the configuration does not have, a value that it does not allow, a base whose
                logits are more than its LM head's weight (a bias, a scale), or one on several devices or offloaded.
        """
        loading = {name: fields.pop(name) for name in _LOADING_ARGUMENTS if name in fields}
        cls._check_fields(fields)
        source = {
            name: loading[name] for name in loading if name not in ("dtype", "attn_implementation", "device_map")
        }
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
        config = cls.config_class(
            decoder_config=AutoConfig.from_pretrained(base, **source),
            base_model_name_or_path=hub_id or shown_name(base),
            base_model_revision=revision,
            **fields,
        )
        language_model = cls.base_auto_class.from_pretrained(base, **loading, **gguf_arguments(gguf_file))
        check_base(language_model)
        entries = {DECODER_BASE: base_entry(language_model, base, hub_id, revision, source)}
        config.base_model_revision = entries[DECODER_BASE]["revision"]
        config.decoder_config = language_model.config
        config.decoder_config.name_or_path = config.base_model_name_or_path
        config._attn_implementation = language_model.config._attn_implementation
        own_encoder = None
        if config.encoder_config is not None:
            config.encoder_config.name_or_path = config.encoder_name_or_path or config.base_model_name_or_path
        if encoder is not None:
            model_loading = {name: value for name, value in loading.items() if name not in source}
            own_encoder = AutoModel.from_pretrained(
                encoder, config=config.encoder_config, **{**model_loading, **encoder_source}
            )
            entries[ENCODER_BASE] = base_entry(own_encoder, encoder, encoder_id, encoder_revision, encoder_source)
            config.encoder_revision = entries[ENCODER_BASE]["revision"]
        with torch.device("meta"):
            model = cls(config)
        model._adopt(language_model, own_encoder)
        model._remember_base(entries)
        if encoder is not None:
            model.encoder_tokenizer = different_tokenizer(base, encoder, source, encoder_source)
            config.encoder_tokenizer = None if model.encoder_tokenizer is None else ENCODER_TOKENIZER
        return model.eval()

    @classmethod
    def _check_fields(cls, fields: dict[str, Any]) -> None:
        known = set()
        for base in cls.config_class.__mro__:
            if base.__module__.rpartition(".")[2].startswith("configuration_"):
                known |= set(inspect.signature(base.__init__).parameters)
        known -= {"self", "kwargs", *_FIELDS_OF_THE_BASE}
        if "quantization_config" in fields:
            raise ValueError(
                "a compressor starts from an unquantized base: leave `quantization_config` out, save the compressor, "
                "and give it to `from_pretrained`"
            )
        for name in fields:
            if name not in known:
                nearest = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {nearest[0]!r}?" if nearest else f"; it has {sorted(known)}"
                raise ValueError(f"{cls.config_class.__name__} has no field {name!r}{hint}")

    @torch.no_grad()
    def _adopt(self, language_model: nn.Module, own_encoder: nn.Module | None = None) -> None:
        """Take over a language model's tensors (not copies of them), and give start values to everything else.

        An encoder with weights of its own takes over those of `own_encoder`, or copies of the language model's.
        """
        backbone = getattr(self, "model", self)
        source = language_model.base_model
        device, dtype = language_model.device, language_model.dtype
        take_tensors(backbone.language_model, source)
        if backbone.encoder_model is not None:
            take_tensors(backbone.encoder_model, source if own_encoder is None else own_encoder, own_encoder is None)
        if hasattr(self, "lm_head"):
            self.lm_head.weight = language_model.get_output_embeddings().weight
        # In the order of the modules: a seed must give the same start values in every process.
        fresh: dict[str, None] = {}
        for path, module in list(self.named_modules()):
            for name, parameter in list(module.named_parameters(recurse=False)):
                if parameter.is_meta:
                    setattr(
                        module, name, nn.Parameter(torch.empty_like(parameter, device=device, dtype=torch.float32))
                    )
                    fresh[path] = None
        for path in fresh:
            if ".lora_" not in path:
                # The backbone knows its own parts' start values.
                backbone._init_weights(self.get_submodule(path))
        initialize_lora(self)
        self.tie_weights()
        self.apply_trainable_set()
        for parameter in self.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        backbone.start_from_base()
        self.config.dtype = dtype
        self.generation_config = copy.deepcopy(
            getattr(language_model, "generation_config", None) or GenerationConfig()
        )

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike | None,
        *args: Any,
        base_model: str | os.PathLike | None = None,
        encoder_base_model: str | os.PathLike | None = None,
        **kwargs: Any,
    ):
        """Load a checkpoint; arguments as `transformers.PreTrainedModel.from_pretrained`, and two more.

        A light checkpoint names its base model, whose weights are fetched and checked, and its own are laid over them;
        type, devices, attention and quantization are those asked for here.

        Args:
            pretrained_model_name_or_path: Hub repository or folder.
            args: As in `transformers`.
            base_model: Where a light checkpoint's base is, Hub repository or folder, if not where the checkpoint says.
            encoder_base_model: Where the model that its encoder started from is, if that is another one.
            kwargs: As in `transformers`.

        Raises:
            ValueError: the checkpoint is of another method, weights are missing from it, so that parts of the model
                would be random, or the base is another model than the one that the checkpoint was made on.
            OSError: the checkpoint, or the base that a light one names, cannot be had.
        """
        wants_info = kwargs.pop("output_loading_info", False)
        name, places = pretrained_model_name_or_path, {DECODER_BASE: base_model, ENCODER_BASE: encoder_base_model}
        config = None if name is None else cls._stored_config(name, kwargs)
        if config is not None and config.external_weights:
            model, info = cls._load_light(super().from_pretrained, name, config, places, kwargs)
        else:
            if base_model is not None or encoder_base_model is not None:
                logger.warning(f"{name} holds all its weights: the base model that was given is not used")
            model, info = super().from_pretrained(name, *args, output_loading_info=True, **kwargs)
            if name is not None:
                # Other files than safetensors are not looked at.
                with suppress(OSError):
                    model._name_as_stored(lambda: stored_weights(name, **fetching_arguments(kwargs)))
        missing = sorted(info["missing_keys"])
        if missing:
            raise ValueError(
                f"{pretrained_model_name_or_path} lacks {len(missing)} weights of {cls.__name__}, the first is "
                f"{missing[0]!r}; it was saved from another class or is incomplete"
            )
        model.apply_trainable_set()
        if model.config.encoder_tokenizer is not None:
            source = pretrained_model_name_or_path
            model.encoder_tokenizer = load_encoder_tokenizer(source, model.config.encoder_tokenizer, kwargs)
        if name is not None:
            model._remember_start(name)
        return (model, info) if wants_info else model

    @classmethod
    def _stored_config(cls, name: str | os.PathLike, kwargs: dict[str, Any]) -> PreTrainedConfig:
        given = kwargs.get("config")
        if isinstance(given, PreTrainedConfig):
            cls._check_model_type(name, given.model_type)
            return given
        # The library's `from_pretrained` would make this class's configuration of any other one's fields.
        source = name if given is None else given
        fields, rest = cls.config_class.get_config_dict(source, **fetching_arguments(kwargs))
        cls._check_model_type(name, fields.get("model_type"))
        return cls.config_class.from_dict(fields, **rest)

    @classmethod
    def _check_model_type(cls, name: str | os.PathLike, found: str | None) -> None:
        own = cls.config_class.model_type
        if found not in (None, own):
            raise ValueError(
                f"{name} is of the model type {found!r}, {cls.__name__} loads {own!r}: a checkpoint loads with its "
                "own class or an Auto class, a base model with `from_base`"
            )

    def save_pretrained(
        self,
        save_directory: str | os.PathLike,
        is_main_process: bool = True,
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
            is_main_process: Whether this process writes, when several train together.
            state_dict: Weights to save in place of the model's own.
            push_to_hub: Upload the folder, too, to the repository `repo_id` (by default the folder's name).
            save_dtype: Floating-point type to store all weights in; as they are held if not given, so that a training
                run resumes exactly.
            include_base: Whether to store the base's weights, too. `False` also leaves out those of a base in a
                folder, which must then be given as `base_model` when the checkpoint is loaded.
            kwargs: As in `transformers.PreTrainedModel.save_pretrained`.

        Raises:
            ValueError: the folder holds a link to a file outside of it, or the base cannot be left out.
        """
        repo_arguments = {
            name: kwargs.pop(name) for name in ("repo_id", "commit_message", "private", "create_pr") if name in kwargs
        }
        dtype = _storage_type(save_dtype)
        refuse_links_out(save_directory, None if self.encoder_tokenizer is None else self.config.encoder_tokenizer)
        self._check_adapters()
        state = self.state_dict() if state_dict is None else state_dict
        self._note_parent(state)
        self.config.auto_map = self.auto_map()
        self.config.code_version, self.config.config_schema = CODE_VERSION, CONFIG_SCHEMA
        record = self._base_to_leave_out(include_base)
        self.config.external_weights = None if record is None else record.entries
        if record is not None:
            state = record.without_base(state, {key for key, p in self.named_parameters() if p.requires_grad})
        if dtype is not None:
            state = {key: tensor.to(dtype) if tensor.is_floating_point() else tensor for key, tensor in state.items()}
            # A tied weight stays one: two copies would both be stored.
            tied = self.all_tied_weights_keys.items()
            state |= {key: state[source] for key, source in tied if key in state and source in state}
        with nullcontext() if record is None else without_quantizer(self):
            super().save_pretrained(
                save_directory,
                is_main_process=is_main_process,
                state_dict=None if state_dict is None and record is None and dtype is None else state,
                **kwargs,
            )
        if is_main_process:
            write_code(_written_class(self), type(self.config), save_directory)
            write_first_card(self.config, save_directory)
            if self.encoder_tokenizer is not None:
                self.encoder_tokenizer.save_pretrained(Path(save_directory) / self.config.encoder_tokenizer)
        if push_to_hub:
            repo_id = repo_arguments.pop("repo_id", os.path.basename(os.path.abspath(save_directory)))
            self.push_to_hub(
                repo_id, token=kwargs.get("token"), save_dtype=save_dtype, include_base=include_base, **repo_arguments
            )

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str | None = None,
        commit_description: str | None = None,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        max_shard_size: int | str = "50GB",
        save_dtype: torch.dtype | str | None = None,
        include_base: bool | None = None,
        tags: list[str] | None = None,
    ) -> str:
        """Upload what `save_pretrained` writes; a card that the repository already has is left as it is.

        Args:
            repo_id: Repository on the Hub; it is made if it does not exist.
            commit_message, commit_description: Of the commit.
            private: Whether a new repository is private.
            token: Access token; the stored one if not given.
            revision: Branch; it is made if it does not exist.
            create_pr: Open a pull request instead of writing to the branch.
            max_shard_size, save_dtype, include_base: As in `save_pretrained`.
            tags: More tags for a new card.

        Returns:
            Address of the commit.
        """
        from huggingface_hub import HfApi, ModelCard

        api = HfApi(token=token)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None and not create_pr:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(
                folder, max_shard_size=max_shard_size, save_dtype=save_dtype, include_base=include_base
            )
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
                commit_message=commit_message or f"Upload {type(self).__name__}",
                commit_description=commit_description,
                revision=revision,
                create_pr=create_pr,
            )
        return str(commit)

    @classmethod
    def auto_map(cls) -> dict[str, str]:
        """The `auto_map` of checkpoints of this class."""
        return cls.config_class.default_auto_map()

    @classmethod
    def is_remote_code(cls) -> bool:
        # The library would copy the code without making it flat; `save_pretrained` writes it itself.
        return False


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
