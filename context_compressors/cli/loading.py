# SPDX-License-Identifier: Apache-2.0
"""The models of a command line: compressors, language models, and adapters of PEFT on a language model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..modeling.compressor.context_compression_qa import ContextCompressionQAPipeline


def load_pipeline(arguments: argparse.Namespace, ratios: Sequence[int | None] = ()) -> ContextCompressionQAPipeline:
    """Load the compressor that a command's arguments name, after a look at the ratios that it is asked for."""
    check_ratios(arguments.model, ratios)
    model, tokenizer = load_compressor(arguments.model, arguments.device, arguments.dtype, arguments.base_model)
    return model.question_answering(tokenizer)


def load_compressor(
    name: str, device: str = "auto", dtype: str = "auto", base_model: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a compressor and its tokenizer for inference, from a folder or a Hub id with an optional `@REVISION`.

    `ValueError` where there is none, or one of another method. Words such as "[LM]" in a text are characters.
    """
    from ..modeling.checkpoint.pretrained_bases import load_from_place, tokenizer_from_place
    from ..modeling.parts.text_ids import text_tokenizer

    place, revision = _revision_of(name)
    _fields_of_compressor(name)
    model = load_from_place(place, base_model=base_model, revision=revision, dtype=dtype)
    tokenizer = tokenizer_from_place(place, revision=revision)
    model = model.to(default_device() if device == "auto" else device).eval()
    return model, text_tokenizer(tokenizer) if model.config.task_token_ids else tokenizer


def check_ratios(name: str, ratios: Sequence[int | None]) -> None:
    """Refuse a `--ratio` that a compressor does not have, before its weights are loaded; `None` is its own."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from ..configuration.field_checks import ratio_tuple

    fields = _fields_of_compressor(name)
    trained = sorted(ratio_tuple(fields["compression_ratios"]))
    for ratio in ratios:
        if CONFIG_MAPPING[fields["model_type"]].is_trained and ratio not in (*trained, None):
            raise ValueError(f"--ratio {ratio}: {name} was trained for the ratios {trained}")


def _revision_of(name: str) -> tuple[str, str | None]:
    """Split `ORG/NAME@REVISION` into a model's name and revision; a folder has no revision."""
    if Path(name).exists():
        return name, None
    place, _, revision = name.partition("@")
    return place, revision or None


def _fields_of_compressor(name: str) -> dict[str, Any]:
    from transformers import PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from .. import modeling  # noqa: F401  (makes the Auto classes know this package's methods)
    from ..modeling.checkpoint.pretrained_bases import naming_broken

    place, revision = _revision_of(name)
    try:
        with naming_broken(f"the model {name}: config.json"):
            fields, _ = PreTrainedConfig.get_config_dict(place, revision=revision)
    except OSError as error:
        raise ValueError(f"there is no model {name!r}: {error}") from error
    if "model_type" not in fields:
        raise ValueError(f"there is no model {name!r}: its config.json cannot be read, or names no `model_type`")
    if "compression_ratios" not in fields:
        raise ValueError(f"{name} is a model of type {fields['model_type']!r}, not a context compressor")
    if fields["model_type"] not in CONFIG_MAPPING:
        raise ValueError(f"{name} has the unknown method {fields['model_type']!r}: load it with its own code")
    return fields


def load_model(
    name: str, *, base_model: str | None = None, dtype: str = "auto", device: str = "auto"
) -> PreTrainedModel:
    """Load a compressor, a language model, or an adapter of PEFT or TRL, merged into its base (`base_model`)."""
    from .. import modeling  # noqa: F401  (makes the Auto classes know this package's methods)
    from ..modeling.checkpoint.pretrained_bases import load_from_place

    if Path(name, "adapter_config.json").is_file():
        model = _load_adapter(name, base_model, dtype)
    else:
        model = load_from_place(name, base_model=base_model, dtype=dtype)
    return model.to(default_device() if device == "auto" else device)


def load_retriever(name: str, dtype: str = "auto", device: str = "auto") -> PreTrainedModel:
    """Load a checkpoint that makes vectors of queries and documents, for inference."""
    from transformers import AutoModelForTextEncoding

    from .. import modeling  # noqa: F401  (makes the Auto classes know this package's methods)
    from ..configuration.configuration_compressor import CompressorConfig
    from ..modeling.checkpoint.pretrained_bases import naming_broken

    with naming_broken(f"the model {name}: config.json or model.safetensors"):
        model = AutoModelForTextEncoding.from_pretrained(name, dtype=dtype)
    if not isinstance(model.config, CompressorConfig):
        raise ValueError(f"{name} must be a checkpoint that ranks texts by vectors, got a {type(model).__name__}")
    return model.to(default_device() if device == "auto" else device).eval()


def _load_adapter(folder: str, base_model: str | None, dtype: str) -> PreTrainedModel:
    from peft import PeftConfig, PeftModel

    from ..modeling.checkpoint.pretrained_bases import naming_broken

    with naming_broken(f"the adapter {folder}: adapter_config.json or adapter_model.safetensors"):
        base_model = base_model or PeftConfig.from_pretrained(folder).base_model_name_or_path
        if not base_model:
            raise ValueError(f"the adapter in {folder} does not name its base: give it (--base-model)")
        base = load_model(base_model, dtype=dtype, device="cpu")
        model = PeftModel.from_pretrained(base, folder).merge_and_unload()
    model.name_or_path = folder
    return model


def default_device() -> str:
    """Return the device of a model when none is named: an accelerator, such as "cuda", or "cpu"."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type
