# SPDX-License-Identifier: Apache-2.0
"""Models, one per method, and the parts that they share. Importing this registers them with the Auto classes."""

import importlib
import os
from typing import Any

import transformers
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, PreTrainedModel
from transformers.pipelines import PIPELINE_REGISTRY

from ..configuration.configuration_compressor import QUESTION_ANSWERING
from ..configuration.methods import METHODS, config_class
from ..configuration.nearest_names import check_choice
from .compressor.context_compression_qa import ContextCompressionQAPipeline
from .text_compressor import TextCompressionPipeline

for _config_class in map(config_class, METHODS):
    for _auto_class, _place in _config_class.auto_classes().items():
        if _auto_class == "AutoConfig":
            transformers.AutoConfig.register(_config_class.model_type, _config_class, exist_ok=True)
            continue
        _module, _name = _place.split(".")
        globals()[_name] = getattr(importlib.import_module(f".{_module}", __name__), _name)
        getattr(transformers, _auto_class).register(_config_class, globals()[_name], exist_ok=True)


def model_class(method: str, auto_class: str | None = None) -> type[PreTrainedModel]:
    """A method's class."""
    place = None if auto_class is None else config_class(method).auto_classes()[auto_class]
    return globals()[METHODS[method][2] if place is None else place.split(".")[1]]


def from_base(base: str | os.PathLike, *, method: str, **arguments: Any) -> Any:
    """Start a compressor from a pretrained language model; by the method's name what its class's `from_base` does.

    Args:
        base: Hub repository or folder of a language model.
        method: Its name in recipes, such as "mean_pooling" or "snap_kv".
        arguments: As of [`CompressorPreTrainedModel.from_base`]: fields of the method's configuration, and how the
            base is loaded.

    Returns:
        The compressor that generates, in evaluation mode.

    Raises:
        ValueError: an unknown method; a field, value or base that the method does not take.
    """
    check_choice("method", method, METHODS)
    return model_class(method).from_base(base, **arguments)


# For models that are loaded already; a checkpoint's folder brings its own.
PIPELINE_REGISTRY.register_pipeline(
    QUESTION_ANSWERING, ContextCompressionQAPipeline, pt_model=AutoModelForCausalLM, type="text"
)
PIPELINE_REGISTRY.register_pipeline(
    "text-compression", TextCompressionPipeline, pt_model=AutoModelForTokenClassification, type="text"
)
