# SPDX-License-Identifier: Apache-2.0
"""The models and tokenizers that a recipe names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    T5Config,
)

from ..configuration.methods import METHODS, config_class
from ..configuration.nearest_names import check_choice
from ..data.task_tokens import add_sentinel_tokens, add_task_tokens, check_task_tokens
from ..modeling import model_class
from ..modeling.checkpoint.gguf_files import gguf_arguments, gguf_tokenizer
from ..modeling.checkpoint.peft_adapters import load_peft_adapter
from ..modeling.checkpoint.pretrained_bases import base_place, fetch_bases, naming_broken, tokenizer_from_place
from .fields import ModelArguments

# Of a new compressor, where a recipe names none.
DEFAULT_METHOD = next(iter(METHODS))


def load_tokenizer(model_args: ModelArguments) -> PreTrainedTokenizerBase:
    """Load the tokenizer that the recipe names."""
    name = model_args.tokenizer or model_args.checkpoint or model_args.base
    if name is None:
        raise ValueError("give a tokenizer, a base or a checkpoint")
    if model_args.base_gguf_file is not None and name == model_args.base:
        tokenizer = gguf_tokenizer(name, model_args.base_gguf_file, revision="main")
    else:
        tokenizer = tokenizer_from_place(name)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def new_encoder_decoder(
    model_class: type[PreTrainedModel],
    model_config: Mapping[str, Any],
    fields: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    loading: Mapping[str, Any],
) -> PreTrainedModel:
    """Return an untrained DeCAL model for a tokenizer, which gets T5's sentinels where it has none."""
    for name in model_config:
        check_choice("field of T5Config in model_config:", name, [*T5Config().to_dict(), *T5Config.attribute_map])
    add_sentinel_tokens(tokenizer)
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = model_class.config_class(
        decoder_config={"vocab_size": len(tokenizer), **special, **model_config},
        bos_token_id=tokenizer.bos_token_id,
        decoder_start_token_id=tokenizer.bos_token_id,
        **fields,
    )
    return model_class._from_config(config, **loading)


def _language_model(name: str, what: str, model_args: ModelArguments, **kwargs: Any) -> PreTrainedModel:
    with naming_broken(f"the {what} {name}: config.json or model.safetensors"):
        return AutoModelForCausalLM.from_pretrained(
            base_place(name),
            dtype=model_args.dtype,
            attn_implementation=model_args.attn_implementation,
            **kwargs,
        )


def pretrained_language_model(model_args: ModelArguments) -> PreTrainedModel:
    """Load the base as a plain language model."""
    model = _language_model(str(model_args.base), "base", model_args, **gguf_arguments(model_args.base_gguf_file))
    # Adapters that are trained on it name it so.
    model.name_or_path = model.config.name_or_path = model_args.base
    return model


def teacher_language_model(model_args: ModelArguments) -> PreTrainedModel:
    """Load the teacher of distillation: a language model, or one with the adapter in a folder that PEFT saved."""
    folder = str(model_args.teacher)
    if not (Path(folder) / "adapter_config.json").is_file():
        return _language_model(folder, "teacher", model_args)
    from peft import PeftConfig

    base = PeftConfig.from_pretrained(folder).base_model_name_or_path
    own = gguf_arguments(model_args.base_gguf_file) if base == model_args.base else {}
    model = _language_model(str(base), "teacher", model_args, **own)
    model.load_adapter(folder)
    return model


def load_compressor(
    model_args: ModelArguments,
    tokenizer: PreTrainedTokenizerBase,
    auto_class: str | None = None,
) -> PreTrainedModel:
    """Load the compressor to train, by `auto_class`: a checkpoint to go on from, or a new one on a base.

    The tokenizer gets the method's task tokens, whose ids a new compressor takes.
    """
    check_start(model_args)
    method = _method(model_args)
    kind = model_class(method, auto_class)
    if not kind.config_class.is_trained:
        raise ValueError(
            f"the method {method} trains nothing: {kind.__name__}.from_base(base) is the whole compressor"
        )
    loading: dict[str, Any] = {"dtype": model_args.dtype}
    if model_args.attn_implementation is not None:
        loading["attn_implementation"] = model_args.attn_implementation
    if model_args.checkpoint is not None:
        return _load_checkpoint(kind, model_args, tokenizer, loading)
    fields = dict(model_args.method_config or {})
    if model_args.model_config is not None:
        return new_encoder_decoder(kind, model_args.model_config, fields, tokenizer, loading)
    if model_args.base_gguf_file is not None:
        loading["gguf_file"] = model_args.base_gguf_file
    if model_args.encoder is not None:
        loading["encoder"] = base_place(model_args.encoder)
    if model_args.adapter is not None:
        loading["adapter"] = model_args.adapter
    # With its default decoder a configuration tells which task tokens the method has; their ids are ours to give.
    fields["task_token_ids"] = add_task_tokens(tokenizer, tuple(kind.config_class(**fields).task_token_ids))
    with naming_broken(f"the base {model_args.base}: config.json or model.safetensors"):
        return kind.from_base(base_place(model_args.base), **loading, **fields)


def _load_checkpoint(
    kind: type[PreTrainedModel], model_args: ModelArguments, tokenizer: Any, loading: dict[str, Any]
) -> PreTrainedModel:
    name = str(model_args.checkpoint)
    if model_args.checkpoint_config:
        loading["config"] = changed_config(kind.config_class.from_pretrained(name), model_args.checkpoint_config)
    stored, _ = PreTrainedConfig.get_config_dict(name)
    fetch_bases(stored.get("external_weights"))
    with naming_broken(f"the checkpoint {name}: config.json or model.safetensors"):
        model = kind.from_pretrained(name, **loading)
    if model_args.adapter is not None:
        load_peft_adapter(model, model_args.adapter, {})
    check_task_tokens(tokenizer, model.config.task_token_ids)
    return model


def check_start(model_args: ModelArguments) -> None:
    """Raise `ValueError` unless the fields that name a compressor's method and start go together."""
    if model_args.method is not None:
        check_choice("method", model_args.method, METHODS)
    starts = [name for name in ("base", "checkpoint", "model_config") if vars(model_args)[name] is not None]
    named = config_class(model_args.method or DEFAULT_METHOD)
    if len(starts) != 1 or (starts == ["model_config"] and not named.is_encoder_decoder):
        raise ValueError(
            "give either base (a new compressor) or checkpoint (one to go on from), or model_config (a new one of an "
            f"encoder-decoder method), got {starts}"
        )
    if model_args.checkpoint is not None and model_args.method_config:
        raise ValueError("method_config is fixed by the checkpoint: leave it out, or give checkpoint_config")


def changed_config(config: PreTrainedConfig, changes: Mapping[str, Any]) -> PreTrainedConfig:
    """Return a copy of a checkpoint's configuration with other values of some fields, also in `decoder_config`."""
    fields = config.to_dict()
    for name, value in changes.items():
        check_choice(f"field of {type(config).__name__}:", name, sorted(fields))
        is_nested = name in config.sub_configs and isinstance(value, Mapping)
        fields[name] = {**fields[name], **value} if is_nested else value
    changed = type(config).from_dict(fields)
    changed.name_or_path = config.name_or_path
    return changed


def _method(model_args: ModelArguments) -> str:
    """The recipe's method, which must be the checkpoint's; where it names none, the checkpoint's own."""
    if model_args.checkpoint is None:
        return model_args.method or DEFAULT_METHOD
    fields, _ = PreTrainedConfig.get_config_dict(model_args.checkpoint)
    method = fields.get("model_type", "").removesuffix("_compressor")
    if method not in METHODS:
        raise ValueError(
            f"{model_args.checkpoint} is no checkpoint of a compressor, its model type is "
            f"{fields.get('model_type')!r}: give it as base"
        )
    return method
