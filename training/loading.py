# SPDX-License-Identifier: Apache-2.0
"""The tokenizer and the model that a recipe names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
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
from ..modeling.checkpoint.pretrained_bases import base_place, fetch_bases, naming_broken, tokenizer_from_place
from .arguments import ModelArguments
from .resume import changed_config

# Of a new compressor, where a recipe names none.
DEFAULT_METHOD = next(iter(METHODS))


def load_tokenizer(model_args: ModelArguments) -> PreTrainedTokenizerBase:
    """Load the tokenizer that the recipe names."""
    name = model_args.tokenizer or model_args.checkpoint or model_args.base
    if name is None:
        raise ValueError("give a tokenizer, a base or a checkpoint")
    if model_args.base_gguf_file is not None and name == model_args.base:
        _check_gguf_file(model_args)
        tokenizer = gguf_tokenizer(name, model_args.base_gguf_file, revision=model_args.base_revision or "main")
    else:
        # A tokenizer or checkpoint of its own is no revision of the base.
        revision = model_args.base_revision if name == model_args.base else None
        tokenizer = tokenizer_from_place(name, revision=revision)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _check_model_fields(fields: Mapping[str, Any]) -> None:
    """Raise `ValueError` naming the nearest right one when `model_config` has a field that T5 does not have."""
    config = T5Config()
    plain = config.to_dict()
    for name in fields:
        if hasattr(config, str(name)):
            continue
        # Some are read, and kept as other fields: what is not is kept as it is.
        found = T5Config(**{str(name): fields[name]}).to_dict()
        if {key: value for key, value in found.items() if key != name} == plain:
            known = [key for key in (*plain, *T5Config.attribute_map) if not key.startswith("_")]
            check_choice("field of T5Config in model_config:", name, known)


def new_encoder_decoder(
    model_class: type[PreTrainedModel],
    model_config: Mapping[str, Any],
    fields: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    loading: Mapping[str, Any],
) -> PreTrainedModel:
    """A DeCAL model that has not been trained, for a tokenizer, which gets T5's sentinels where it has none.

    Args:
        model_class: [`DeCALForConditionalGeneration`].
        model_config: fields of its `T5Config`.
        fields: other fields of its configuration.
        tokenizer: its ids are the model's; the decoder starts with BOS, or with the pad where there is none, as in T5.
        loading: `dtype` and `attn_implementation`.
    """
    _check_model_fields(model_config)
    add_sentinel_tokens(tokenizer)
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = model_class.config_class(
        decoder_config={"vocab_size": len(tokenizer), **special, **model_config},
        bos_token_id=tokenizer.bos_token_id,
        decoder_start_token_id=tokenizer.bos_token_id,
        **fields,
    )
    return model_class._from_config(config, **loading)


def pretrained_language_model(model_args: ModelArguments) -> PreTrainedModel:
    if model_args.base is None:
        raise ValueError("give a base: folder or Hub id of the language model to start from")
    _check_gguf_file(model_args)
    with naming_broken(f"the base {model_args.base}: config.json or model.safetensors"):
        model = AutoModelForCausalLM.from_pretrained(
            model_args.base if model_args.base_revision else base_place(model_args.base),
            revision=model_args.base_revision or "main",
            dtype=getattr(torch, model_args.dtype),
            attn_implementation=model_args.attn_implementation,
            **gguf_arguments(model_args.base_gguf_file),
        )
    # Adapters that are trained on it name it so.
    model.name_or_path = model.config.name_or_path = model_args.base
    return model


def teacher_language_model(model_args: ModelArguments) -> PreTrainedModel:
    """The teacher of distillation: a language model, or one with the adapter in a folder that PEFT or TRL saved."""
    folder = model_args.teacher if (Path(model_args.teacher or "") / "adapter_config.json").is_file() else None
    name = model_args.teacher
    if folder is not None:
        from peft import PeftConfig

        name = PeftConfig.from_pretrained(folder).base_model_name_or_path
    with naming_broken(f"the teacher {name}: config.json or model.safetensors"):
        model = AutoModelForCausalLM.from_pretrained(
            base_place(name),
            dtype=getattr(torch, model_args.dtype),
            attn_implementation=model_args.attn_implementation,
        )
    if folder is not None:
        model.load_adapter(folder)
    return model


def load_compressor(
    model_args: ModelArguments,
    tokenizer: PreTrainedTokenizerBase | None = None,
    auto_class: str | None = None,
) -> PreTrainedModel:
    """The compressor to train: a checkpoint to go on from, or a new one on a base.

    Args:
        model_args: names the method and where the weights come from.
        tokenizer: gets the method's task tokens, whose ids a new compressor takes; a checkpoint's must be in it. The
            ids behind the base's vocabulary are taken when `None`.
        auto_class: the Auto class that loads what is built; the one that generates when `None`.

    Raises:
        ValueError: fields that do not go together, a checkpoint of another method, or a tokenizer that does not know
            the checkpoint's task tokens.
    """
    check_start(model_args)
    fields = dict(model_args.method_config or {})
    kind = model_class(_method(model_args), auto_class)
    if not kind.config_class.is_trained:
        raise ValueError(
            f"the method {_method(model_args)} trains nothing: {kind.__name__}.from_base(base) is the whole compressor"
        )
    loading = {"dtype": getattr(torch, model_args.dtype), "attn_implementation": model_args.attn_implementation}
    loading = {name: value for name, value in loading.items() if value is not None}
    if model_args.checkpoint is not None:
        if model_args.checkpoint_config:
            config = kind.config_class.from_pretrained(model_args.checkpoint)
            loading["config"] = changed_config(config, model_args.checkpoint_config)
        if model_args.checkpoint_base is not None:
            loading["base_model"] = base_place(model_args.checkpoint_base)
        else:
            stored, _ = PreTrainedConfig.get_config_dict(model_args.checkpoint)
            fetch_bases(stored.get("external_weights"))
        with naming_broken(f"the checkpoint {model_args.checkpoint}: config.json or model.safetensors"):
            model = kind.from_pretrained(model_args.checkpoint, **loading)
        if tokenizer is not None:
            check_task_tokens(tokenizer, model.config.task_token_ids)
        return model
    if model_args.model_config is not None:
        return new_encoder_decoder(kind, model_args.model_config, fields, tokenizer, loading)
    if model_args.base_revision is not None:
        loading["revision"] = model_args.base_revision
    _check_gguf_file(model_args)
    if model_args.base_gguf_file is not None:
        loading["gguf_file"] = model_args.base_gguf_file
    base, encoder = model_args.base, model_args.encoder
    if encoder is not None:
        loading["encoder"] = encoder if model_args.encoder_revision else base_place(encoder)
        loading["encoder_revision"] = model_args.encoder_revision
    if model_args.adapter is not None:
        loading["adapter"] = model_args.adapter
    if tokenizer is not None:
        # With its default decoder a configuration tells which task tokens the method has; their ids are ours to give.
        names = tuple(kind.config_class(**fields).task_token_ids)
        fields["task_token_ids"] = add_task_tokens(tokenizer, names)
    with naming_broken(f"the base {base}: config.json or model.safetensors"):
        return kind.from_base(base if model_args.base_revision else base_place(base), **loading, **fields)


def check_start(model_args: ModelArguments) -> None:
    """Check that the fields that name a compressor's method and start go together; nothing is read.

    Raises:
        ValueError: they do not.
    """
    if model_args.method is not None:
        check_choice("method", model_args.method, METHODS)
    given = [name for name in ("base", "checkpoint", "model_config") if getattr(model_args, name) is not None]
    named = config_class(model_args.method or DEFAULT_METHOD)
    if len(given) != 1 or (given == ["model_config"] and not named.is_encoder_decoder):
        raise ValueError(
            "give either base (a new compressor) or checkpoint (one to go on from), or model_config (a new one of an "
            f"encoder-decoder method), got {given}"
        )
    for name in ("base_revision", "base_gguf_file", "encoder", "encoder_revision", "adapter"):
        if model_args.base is None and getattr(model_args, name) is not None:
            raise ValueError(f"{name} goes with base (a new compressor): leave it out, or null, beside {given[0]}")
    if model_args.checkpoint is not None and model_args.method_config:
        raise ValueError("method_config is fixed by the checkpoint: leave it out, or give checkpoint_config")
    if model_args.checkpoint is None and model_args.checkpoint_config:
        raise ValueError("checkpoint_config goes with a checkpoint; of a new compressor give method_config")
    if model_args.checkpoint is None and model_args.checkpoint_base:
        raise ValueError("checkpoint_base goes with a checkpoint; a new compressor starts from its base")


def _check_gguf_file(model_args: ModelArguments) -> None:
    """Raise `ValueError` when a local `base` does not hold its `base_gguf_file`."""
    base, file = Path(model_args.base or ""), model_args.base_gguf_file
    if file is not None and base.is_dir() and not (base / file).is_file():
        found = sorted(path.name for path in base.glob("*.gguf"))
        raise ValueError(f"base_gguf_file {file!r} is not in {base}, which has {found or 'no GGUF file'}")


def _method(model_args: ModelArguments) -> str:
    """The recipe's method, which must be the checkpoint's; where it names none, the checkpoint's own."""
    if model_args.checkpoint is None:
        return model_args.method or DEFAULT_METHOD
    fields, _ = PreTrainedConfig.get_config_dict(model_args.checkpoint)
    found = fields.get("model_type", "").removesuffix("_compressor")
    if found not in METHODS:
        raise ValueError(
            f"{model_args.checkpoint} is no checkpoint of a compressor, its model type is "
            f"{fields.get('model_type')!r}: give it as base"
        )
    if model_args.method not in (None, found):
        raise ValueError(
            f"the checkpoint {model_args.checkpoint} is of the method {found}, the recipe's method is "
            f"{model_args.method}: leave the method out, or start from a base"
        )
    return found
