"""Starting from a base model, saving with code, loading, and the fingerprint of a model."""

from __future__ import annotations

import copy
import difflib
import hashlib
import inspect
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from .adapters import initialize_lora
from .remote_code import write_card, write_code

# What `from_base` hands to the base model's `from_pretrained`; everything else is a field of the configuration.
_LOADING_ARGUMENTS = (
    "attn_implementation",
    "cache_dir",
    "device_map",
    "dtype",
    "force_download",
    "local_files_only",
    "revision",
    "subfolder",
    "token",
)


class CheckpointMixin:
    """`from_base`, `save_pretrained` and `from_pretrained` of every compressor."""

    @classmethod
    def from_base(cls, base: str | os.PathLike, **fields: Any):
        """Start a compressor from a pretrained language model.

        Args:
            base: Hub repository or folder of a causal language model.
            fields: Fields of the method's configuration, and arguments for loading the base: `dtype`,
                `attn_implementation`, `device_map`, `revision`, `token`, `cache_dir`, `local_files_only`, `subfolder`.

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
        config = cls.config_class(
            decoder_config=AutoConfig.from_pretrained(base, **source),
            # Where a folder lies on this machine is nobody else's business.
            base_model_name_or_path=Path(base).resolve().name if os.path.isdir(base) else str(base),
            base_model_revision=loading.get("revision"),
            **fields,
        )
        language_model = AutoModelForCausalLM.from_pretrained(base, **loading)
        _check_base(language_model)
        config.decoder_config = language_model.config
        config.decoder_config.name_or_path = config.base_model_name_or_path
        config._attn_implementation = language_model.config._attn_implementation
        with torch.device("meta"):
            model = cls(config)
        model._adopt(language_model)
        return model.eval()

    @classmethod
    def _check_fields(cls, fields: dict[str, Any]) -> None:
        known = set()
        for base in cls.config_class.__mro__:
            if base.__module__.rpartition(".")[2].startswith("configuration_"):
                known |= set(inspect.signature(base.__init__).parameters)
        known -= {"self", "kwargs", "decoder_config", "base_model_name_or_path", "base_model_revision"}
        for name in fields:
            if name not in known:
                nearest = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {nearest[0]!r}?" if nearest else f"; it has {sorted(known)}"
                raise ValueError(f"{cls.config_class.__name__} has no field {name!r}{hint}")

    @torch.no_grad()
    def _adopt(self, language_model: nn.Module) -> None:
        """Take over a language model's tensors (not copies of them), and give start values to everything else."""
        backbone = getattr(self, "model", self)
        source = language_model.base_model
        device, dtype = language_model.device, language_model.dtype
        _take_tensors(backbone.language_model, source)
        if backbone.encoder_model is not None:
            _take_tensors(backbone.encoder_model, copy.deepcopy(source))
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
        self.config.dtype = dtype
        self.generation_config = copy.deepcopy(
            getattr(language_model, "generation_config", None) or GenerationConfig()
        )

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike | None, *args: Any, **kwargs: Any):
        """Load a checkpoint; arguments as `transformers.PreTrainedModel.from_pretrained`.

        Raises:
            ValueError: weights are missing from the checkpoint, so that parts of the model would be random.
        """
        wants_info = kwargs.pop("output_loading_info", False)
        model, info = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        missing = sorted(info["missing_keys"])
        if missing:
            raise ValueError(
                f"{pretrained_model_name_or_path} lacks {len(missing)} weights of {cls.__name__}, the first is "
                f"{missing[0]!r}; it was saved from another class or is incomplete"
            )
        model.apply_trainable_set()
        return (model, info) if wants_info else model

    def save_pretrained(
        self,
        save_directory: str | os.PathLike,
        is_main_process: bool = True,
        state_dict: dict[str, torch.Tensor] | None = None,
        push_to_hub: bool = False,
        save_dtype: torch.dtype | str | None = None,
        **kwargs: Any,
    ) -> None:
        """Save a folder that loads anywhere: safetensors, configuration, generation configuration, code and card.

        Args:
            save_directory: The folder.
            is_main_process: Whether this process writes, when several train together.
            state_dict: Weights to save in place of the model's own.
            push_to_hub: Upload the folder, too, to the repository `repo_id` (by default the folder's name).
            save_dtype: Floating-point type to store all weights in; as they are held if not given, so that a training
                run resumes exactly.
            kwargs: As in `transformers.PreTrainedModel.save_pretrained`.
        """
        repo_arguments = {
            name: kwargs.pop(name) for name in ("repo_id", "commit_message", "private", "create_pr") if name in kwargs
        }
        self.config.auto_map = type(self.config).default_auto_map()
        if save_dtype is not None:
            dtype = getattr(torch, save_dtype, None) if isinstance(save_dtype, str) else save_dtype
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
                raise ValueError(f"`save_dtype` must be a floating-point dtype or its name, got {save_dtype!r}")
            state_dict = self.state_dict() if state_dict is None else state_dict
            state_dict = {k: v.to(dtype) if v.is_floating_point() else v for k, v in state_dict.items()}
        super().save_pretrained(save_directory, is_main_process=is_main_process, state_dict=state_dict, **kwargs)
        if is_main_process:
            write_code(_written_class(self), type(self.config), save_directory)
            write_card(self.config, save_directory)
        if push_to_hub:
            repo_id = repo_arguments.pop("repo_id", os.path.basename(os.path.abspath(save_directory)))
            self.push_to_hub(repo_id, token=kwargs.get("token"), save_dtype=save_dtype, **repo_arguments)

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
            max_shard_size, save_dtype: As in `save_pretrained`.
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
            self.save_pretrained(folder, max_shard_size=max_shard_size, save_dtype=save_dtype)
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
    def is_remote_code(cls) -> bool:
        # The library would copy the code without making it flat; `save_pretrained` writes it itself.
        return False


def _check_base(language_model: nn.Module) -> None:
    """Refuse a base that could not be taken over whole; what is left behind would silently change its output."""
    name = type(language_model).__name__
    devices = {str(tensor.device) for tensor in language_model.state_dict().values()}
    if len(devices) > 1 or "meta" in devices:
        raise ValueError(
            f"`from_base` needs the whole base on one device, `device_map` put it on {sorted(devices)} (meta is "
            "offloaded); save the compressor and load it with `from_pretrained(..., device_map=...)` instead"
        )
    if getattr(language_model.get_output_embeddings(), "bias", None) is not None:
        raise ValueError(f"the LM head of {name} has a bias, which compressors do not support")
    for field in ("logit_scale", "logits_scaling"):
        if getattr(language_model.config, field, None) not in (None, 1, 1.0):
            raise ValueError(f"{name} scales its logits (`{field}`), which compressors do not support")


def _take_tensors(target: nn.Module, source: nn.Module) -> None:
    """Put the parameters and buffers of `source` into `target`, whose linear maps may be inside LoRA layers."""
    modules = dict(target.named_modules())
    for path, module in source.named_modules():
        if path not in modules:
            raise ValueError(f"the base has {path!r}, which the model of `encoder_config` lacks: take the base's own")
        # A LoRA layer keeps the map that it adapts in `base_layer`.
        destination = getattr(modules[path], "base_layer", modules[path])
        for name, parameter in module._parameters.items():
            wanted = destination._parameters.get(name)
            if parameter is not None and (wanted is None or wanted.shape != parameter.shape):
                shape = None if wanted is None else tuple(wanted.shape)
                raise ValueError(
                    f"{path}.{name} is {tuple(parameter.shape)} in the base and {shape} in the model of "
                    "`encoder_config`: take the base's own"
                )
            destination._parameters[name] = parameter
        for name, buffer in module._buffers.items():
            destination._buffers[name] = buffer


def fingerprint(model: nn.Module) -> str:
    """Sixteen hexadecimal digits from a few values of every parameter, the same in float32 and bfloat16.

    Args:
        model: the model; parameters are read in the order of their names.
    """
    digest = hashlib.sha256()
    parts = []
    for name, parameter in sorted(model.named_parameters(), key=lambda item: item[0]):
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        if parameter.is_meta:
            raise ValueError(f"{name} is offloaded, so this model cannot name its memories: load it whole")
        flat = _whole(parameter.detach()).reshape(-1)
        stride = max(1, flat.numel() // 8)
        parts.append(flat[::stride][:8].to(torch.bfloat16).float())
    if parts:
        digest.update(torch.cat([part.cpu() for part in parts]).numpy().tobytes())
    return digest.hexdigest()[:16]


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, gathered where FSDP has shared it out among processes."""
    if torch.distributed.is_available():
        from torch.distributed.tensor import DTensor

        if isinstance(tensor, DTensor):
            return tensor.full_tensor()
    return tensor


def _written_class(model: nn.Module) -> type:
    """The class that somebody wrote: FSDP gives a model that it shares out one of its own, derived from that."""
    if torch.distributed.is_available():
        from torch.distributed.fsdp import FSDPModule

        return next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
    return type(model)
