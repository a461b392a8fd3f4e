# SPDX-License-Identifier: Apache-2.0
"""The base of every compressor: starting from a base model, and what trains."""

from __future__ import annotations

import copy
import inspect
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers import initialization as init
from transformers.utils import logging

from ...configuration.configuration_compressor import CompressorConfig
from ...configuration.nearest_names import nearest
from ..checkpoint.base_weights import (
    DECODER_BASE,
    DOWNLOAD_ARGUMENTS,
    ENCODER_BASE,
    BaseRecord,
    base_entry,
    base_name,
    base_record,
    own_modules,
    own_name,
    remember_base,
    share_weights,
    shown_name,
)
from ..checkpoint.checkpoints import link_base, load_checkpoint, save_checkpoint
from ..checkpoint.encoder_tokenizer import ENCODER_TOKENIZER, encoders_tokenizer
from ..checkpoint.gguf_files import gguf_arguments
from ..checkpoint.peft_adapters import load_peft_adapter, put_adapter_on
from ..checkpoint.pretrained_bases import find_base
from ..memory.compressed_context import CompressedContext
from ..memory.key_value_memory import keep_caches_under_checkpointing
from ..parts.base_pass import embedding_scale, note_trained_weights
from ..parts.lora import (
    DECODER,
    ENCODER,
    AdaptedByPass,
    CheckpointWithAdapters,
    check_adapters,
    initialize_lora,
    merge_lora,
)
from .serving import prompt_embeds

logger = logging.get_logger(__name__)

# Arguments for loading a base that do not belong to another model that encodes.
_OF_THE_BASE_ALONE = ("revision", "subfolder", "gguf_file")
# What `from_base` hands to the base model's `from_pretrained`; everything else is a field of the configuration.
_LOADING_ARGUMENTS = (*DOWNLOAD_ARGUMENTS, *_OF_THE_BASE_ALONE, "attn_implementation", "device_map", "dtype")
# Fields that `from_base` finds out itself.
_FIELDS_OF_THE_BASE = {
    *("decoder_config", "base_model_name_or_path", "base_model_revision"),
    *("encoder_name_or_path", "encoder_revision", "encoder_tokenizer"),
}


class CompressorPreTrainedModel(PreTrainedModel):
    """A compressor's backbone, or a model that has one as `model`: start from a base, and what trains.

    The base stays in its own type, and what trains is float32. Subclasses whose base trains as a whole say so.
    """

    config_class: type[CompressorConfig] = CompressorConfig
    # Tokens of contexts that are read in one pass, so that long ones take no more memory; in training all are. `None`:
    # 8,192, and 16,384 on an accelerator.
    tokens_at_once: int | None = None
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    # Whether all of the base trains: checkpoints are then always whole.
    trains_base = False
    # Makes the tokens of contexts, where the encoder reads others than the decoder; else `None`.
    encoder_tokenizer: PreTrainedTokenizerBase | None = None
    # Loads what `from_base` starts from.
    base_auto_class: Any = AutoModelForCausalLM
    # Answers questions; its module sets it, here as in a checkpoint's own code.
    pipeline_class: Any
    # Whether what trains is float32 whatever type the rest has.
    trains_in_float32 = True

    @property
    def method_parameters(self) -> Sequence[str]:
        """Patterns of the parameters that train unless the configuration says otherwise."""
        return (r".",)

    # --- from a base ---

    @classmethod
    def from_base(
        cls,
        base: str | os.PathLike,
        encoder: str | os.PathLike | None = None,
        encoder_revision: str | None = None,
        hub_id: str | None = None,
        adapter: str | os.PathLike | None = None,
        **fields: Any,
    ) -> Self:
        """Start a compressor from a pretrained language model.

        Args:
            base: Hub repository or folder of a causal language model. A base that `pretrained_base` has fetched is
                taken from its cache.
            encoder: Hub repository or folder of another language model that encodes, of any width and family. If it
                has another tokenizer, contexts are tokenized with that, which is then `encoder_tokenizer` of the model
                and part of its checkpoints.
            encoder_revision: Revision of `encoder`.
            hub_id: Repository of the base, where `base` is a folder with a copy of it, or with a GGUF file that was
                made of it: checkpoints then name it, and leave out its weights.
            adapter: Hub repository or folder of a LoRA adapter that PEFT has trained on the base, as which the
                decoder's adapter, or a shared one, starts.
            fields: Fields of the method's configuration, and arguments for loading the base: `dtype`,
                `attn_implementation`, `device_map`, `revision`, `token`, `cache_dir`, `local_files_only`, `subfolder`,
                and `gguf_file`, whose weights are dequantised.

        Returns:
            The compressor in evaluation mode: the base's weights, held once, and its own parts at their start values.

        Raises:
            ValueError: an unknown field, a value that it does not allow, a base whose logits are more than its LM
                head's weight (a bias, a scale), or one on several devices or offloaded, or an `adapter` that does not
                fit.
        """
        loading = {name: fields.pop(name) for name in _LOADING_ARGUMENTS if name in fields}
        _check_fields(cls.config_class, fields)
        download = {name: loading.pop(name) for name in DOWNLOAD_ARGUMENTS if name in loading}
        source = download | {name: loading.pop(name) for name in _OF_THE_BASE_ALONE if name in loading}
        revision, own_encoder, encoder_id = source.get("revision"), None, None
        if hub_id is None and not any(source.get(name) for name in _OF_THE_BASE_ALONE):
            base, hub_id, revision = find_base(base)
        if encoder is not None:
            encoder_source = download | ({} if encoder_revision is None else {"revision": encoder_revision})
            if encoder_revision is None:
                encoder, encoder_id, encoder_revision = find_base(encoder)
            fields["encoder_config"] = AutoConfig.from_pretrained(encoder, **encoder_source)
            fields["encoder_name_or_path"] = encoder_id or shown_name(encoder)
            fields["encoder_revision"] = encoder_revision
        config = cls.config_class(
            decoder_config=AutoConfig.from_pretrained(base, **source),
            base_model_name_or_path=hub_id or shown_name(base),
            base_model_revision=revision,
            **fields,
        )
        reading = {**source, **loading, **gguf_arguments(source.get("gguf_file"))}
        language_model = cls.base_auto_class.from_pretrained(base, **reading)
        _check_base(language_model)
        entries = {DECODER_BASE: base_entry(language_model, base, hub_id, revision, source)}
        config.base_model_revision = entries[DECODER_BASE]["revision"]
        config.decoder_config = language_model.config.get_text_config()
        config._attn_implementation = language_model.config._attn_implementation
        for field in config.sub_configs:
            of_the_encoder = config.encoder_name_or_path if field == "encoder_config" else None
            _name_parts(getattr(config, field), of_the_encoder or config.base_model_name_or_path)
        if encoder is not None:
            own_encoder = AutoModel.from_pretrained(encoder, config=config.encoder_config, **loading, **encoder_source)
            entries[ENCODER_BASE] = base_entry(own_encoder, encoder, encoder_id, encoder_revision, encoder_source)
            config.encoder_revision = entries[ENCODER_BASE]["revision"]
        with torch.device("meta"):
            model = cls(config)
        model.load_base_weights(language_model, own_encoder)
        if adapter is not None:
            load_peft_adapter(model, adapter, download)
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

    @torch.no_grad()
    def load_base_weights(self, base: PreTrainedModel, encoder: PreTrainedModel | None = None) -> None:
        """Take the tensors of a pretrained model (not copies of them), and give start values to everything else."""
        backbone = self.base_model
        source = base.base_model
        device, dtype = base.device, base.dtype
        backbone.take_base(source)
        if backbone.encoder_model is not None:
            share_weights(backbone.encoder_model, encoder or source, copied=encoder is None)
        if self.get_output_embeddings() is not None:
            self.get_output_embeddings().weight = base.get_output_embeddings().weight
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
        self.generation_config = copy.deepcopy(base.generation_config)

    # Whether `take_from_tokenizer` takes anything.
    needs_encoder_tokenizer = False

    def take_from_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Take what the method needs to know of the tokenizer of an encoder of its own; by default nothing."""

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            init.normal_(module.weight, std=self.config.decoder_config.initializer_range)
            if module.bias is not None:
                init.zeros_(module.bias)

    @staticmethod
    def _init_like_embeddings(parameter: nn.Parameter, backbone: PreTrainedModel) -> None:
        """N(mean, std), two scalars of the backbone's whole table of token embeddings (the code of EPL's authors)."""
        table = backbone.get_input_embeddings()
        weight = table.weight.float() * embedding_scale(table)
        drawn = torch.randn_like(parameter, dtype=torch.float32)
        init.copy_(parameter, weight.mean() + drawn * weight.std())

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """As in transformers; an encoder of its own that reads the decoder's tokens gets as many."""
        before = self.get_input_embeddings().num_embeddings
        table = super().resize_token_embeddings(*args, **kwargs)
        config = self.config.encoder_config
        if config is not None and self.config.encoder_tokenizer is None and config.vocab_size == before:
            self.base_model.encoder_model.resize_token_embeddings(table.num_embeddings)
            config.vocab_size = table.num_embeddings
        return table

    # --- what trains ---

    def post_init(self) -> None:
        super().post_init()
        self.apply_trainable_set()
        if not self.trains_in_float32:
            return
        # What trains is loaded in float32 whatever type the rest is loaded in; the backbone names most of its parts.
        names = [name for name, parameter in self.named_parameters() if parameter.requires_grad]
        names = [name for name in names if not self._keep_in_fp32_modules_strict & set(name.split("."))]
        self._keep_in_fp32_modules_strict |= {f"^{re.escape(name)}$" for name in names}
        if getattr(self.config, "quantization_config", None) is not None:
            # The library's quantizers leave these as they are.
            self._keep_in_fp32_modules |= {re.escape(path) for path in own_modules(self)}

    @classmethod
    def _from_config(cls, config: Any, **kwargs: Any) -> Any:
        model = super()._from_config(config, **kwargs)
        if cls.trains_in_float32:
            # As `from_pretrained` leaves them.
            kept = set(model.base_model._keep_in_fp32_modules_strict)
            for name, parameter in model.named_parameters():
                if parameter.requires_grad or kept & set(name.split(".")):
                    parameter.data = parameter.data.float()
        return model

    def apply_trainable_set(self) -> None:
        """Let the parameters train that `config.trainable_parameters`, or else the method, names; freeze the rest."""
        chosen, of_the_stage = self.config.trainable_parameters, self.config.stage_parameters
        usual = self.base_model.method_parameters if of_the_stage is None else of_the_stage
        patterns = [re.compile(pattern) for pattern in (usual if chosen is None else chosen)]
        matched = set()
        for name, parameter in self.named_parameters():
            hits = [pattern.pattern for pattern in patterns if pattern.search(name)]
            matched.update(hits)
            parameter.requires_grad_(bool(hits) and parameter.is_floating_point())
        unused = [] if chosen is None else [pattern for pattern in chosen if pattern not in matched]
        if chosen is None and of_the_stage and not matched:
            raise ValueError(
                f"`training_stage` {self.config.training_stage!r} trains query, key and value maps, and a decoder of "
                f"type {self.config.decoder_config.model_type!r} has none of the known names: name its own in "
                "`trainable_parameters`"
            )
        # The backbone alone has no LM head, so the whole set is only known to the model that has everything.
        if unused and self.get_output_embeddings() is not None:
            raise ValueError(f"`trainable_parameters` {unused} match no parameter of {type(self).__name__}")
        for module in self.modules() if self.trains_in_float32 else ():
            if isinstance(module, PreTrainedModel) and not isinstance(module, CompressorPreTrainedModel):
                note_trained_weights(module)

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point type of the base; what trains beside a frozen base is float32."""
        return self.get_input_embeddings().weight.dtype

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Callable[..., Any] = checkpoint, **kwargs: Any
    ) -> None:
        with_adapters = CheckpointWithAdapters(self, gradient_checkpointing_func)
        super()._set_gradient_checkpointing(enable, with_adapters, **kwargs)
        if self.config.carrier == "key_values":
            keep_caches_under_checkpointing(self, enable)

    @property
    def peft_config(self) -> dict[str, Any]:
        """The settings of the adapters that `peft.get_peft_model` has put on this model, by name.

        PEFT leaves what trains already as it is, but saves its own adapter only: all else is frozen when it comes.
        """
        if "_peft_config" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__} has no adapters beside its own")
        return self.__dict__["_peft_config"]

    @peft_config.setter
    def peft_config(self, value: dict[str, Any]) -> None:
        if any(isinstance(m, AdaptedByPass) and path.endswith(".base_layer") for path, m in self.named_modules()):
            kinds = sorted({config.peft_type.value for config in value.values()})
            raise ValueError(f"{type(self).__name__} has LoRA of its own, and takes no other adapters, got {kinds}")
        self.__dict__["_peft_config"] = value
        for name, parameter in self.named_parameters():
            if not set(value) & set(name.split(".")):
                parameter.requires_grad_(False)

    @peft_config.deleter
    def peft_config(self) -> None:
        del self.__dict__["_peft_config"]
        self.apply_trainable_set()

    def load_adapter(
        self,
        peft_model_id: str | os.PathLike,
        adapter_name: str = "default",
        *args: Any,
        is_trainable: bool = False,
        adapter_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Put an adapter that PEFT has saved on this model, as in `transformers`, beside its own."""
        return put_adapter_on(self, peft_model_id, adapter_name, is_trainable, adapter_kwargs or {})

    def merge_adapters(self) -> None:
        """Add the adapters to the weights they sit on, so that inference needs no `peft`.

        A shared base becomes two models, one for the encoder and one for the decoder, which takes twice the memory; a
        warning says so. With a `shared_adapter` alone it stays one. What else trains goes on training.
        """
        backbone, config = self.base_model, self.config
        check_adapters(self)
        if config.encoder_lora is not None or config.decoder_lora is not None:
            if getattr(config, "quantization_config", None) is not None:
                raise ValueError("adapters cannot be merged into quantized weights: load the model unquantized")
            # Most weights are the base's no more.
            remember_base(self, None)
            is_one_model = config.shared_adapter and config.decoder_adapter is None
            if config.has_encoder and backbone.encoder_model is None and not is_one_model:
                logger.warning("merge_adapters: encoder and decoder become two copies of the base, twice the memory")
                backbone.encoder_model = copy.deepcopy(backbone.language_model)
                config.encoder_config = copy.deepcopy(config.decoder_config)
            if backbone.encoder_model is not None:
                merge_lora(backbone.encoder_model, ENCODER)
            merge_lora(backbone.language_model, DECODER)
            config.encoder_lora = config.decoder_lora = None
            config.shared_adapter = False
            if config.trainable_parameters is not None:
                names = [f"model.{name}" if self is backbone else name for name, _ in self.named_parameters()]
                # None left is an empty list: `None` would be the method's own set.
                config.trainable_parameters = [
                    pattern
                    for pattern in config.trainable_parameters
                    if any(re.search(pattern, name) for name in names)
                ]
        self.apply_trainable_set()

    # --- checkpoints ---

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
        places = {DECODER_BASE: base_model, ENCODER_BASE: encoder_base_model}
        return load_checkpoint(cls, super().from_pretrained, pretrained_model_name_or_path, places, args, kwargs)

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
        save_checkpoint(self, super().save_pretrained, save_directory, state_dict, save_dtype, include_base, kwargs)

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
        link_base(self, base, encoder, hub_id, loading)

    @classmethod
    def auto_map(cls) -> dict[str, str]:
        """The `auto_map` of checkpoints of this class."""
        return cls.config_class.default_auto_map()

    @classmethod
    def is_remote_code(cls) -> bool:
        # The library would copy the code without making it flat; `save_pretrained` writes it itself.
        return False

    # --- answers ---

    def question_answering(self, tokenizer: PreTrainedTokenizerBase, **kwargs: Any) -> Any:
        """Return the [`ContextCompressionQAPipeline`] of this model, on its device; arguments as of that class."""
        if getattr(self, "hf_device_map", None) is None:
            kwargs.setdefault("device", self.device)
        return self.pipeline_class(model=self, tokenizer=tokenizer, **kwargs)

    def prompt_embeds(
        self,
        memory: CompressedContext,
        tokenizer: PreTrainedTokenizerBase | None,
        messages: str | Sequence[Mapping[str, str]] | None,
    ) -> Tensor:
        """Memory and text as one prompt of embeddings; see [`CompressedContext.to_prompt_embeds`]."""
        return prompt_embeds(memory, tokenizer, messages, self)


def _name_parts(config: PreTrainedConfig | None, name: str | None) -> None:
    """Give a configuration, and those inside it, the name that checkpoints show in place of a folder."""
    if config is not None:
        config.name_or_path = name
        for field in config.sub_configs:
            _name_parts(vars(config).get(field), name)


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
