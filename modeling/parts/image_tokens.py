# SPDX-License-Identifier: Apache-2.0
"""Images in a context: the part of a vision-language model that makes image tokens, and their places in the text."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.utils import logging

logger = logging.get_logger(__name__)

# Of whose shapes a tiny model is in the tests.
CHECKED_VISION_LANGUAGE_MODELS = ("llava", "smolvlm")


class LanguageOrVisionLanguageModel:
    """Loads a base: a vision-language model where it is one, or else a causal language model."""

    @staticmethod
    def from_pretrained(name: Any, **loading: Any) -> PreTrainedModel:
        """As the library's Auto classes."""
        files = ("cache_dir", "force_download", "gguf_file", "local_files_only", "revision", "subfolder", "token")
        config = AutoConfig.from_pretrained(name, **{field: loading[field] for field in files if field in loading})
        has_images = hasattr(config, "vision_config")
        return (AutoModelForImageTextToText if has_images else AutoModelForCausalLM).from_pretrained(name, **loading)


def image_part(config: Any, language_model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A vision-language model that holds everything but its language model, which somebody else holds.

    Args:
        config: the vision-language model's.
        language_model: the language model, which it knows without holding it a second time.
        dtype: floating-point type of its weights.
    """
    if config.model_type not in CHECKED_VISION_LANGUAGE_MODELS:
        logger.warning_once(
            f"{config.model_type!r} is not among the vision-language models that compressors are tested on, "
            f"{list(CHECKED_VISION_LANGUAGE_MODELS)}: its language model may read image tokens in ways of its own"
        )
    model = AutoModel.from_config(config, dtype=dtype)
    decoder = model.get_decoder()
    for name, child in list(model.named_children()):
        if child is decoder:
            delattr(model, name)
            model.__dict__[name] = language_model
    return model


def share_images(target: PreTrainedModel, source: PreTrainedModel) -> None:
    """Put the modules and weights of a vision-language model, all but its language model, into an `image_part`."""
    for name, child in source.named_children():
        if name in target._modules:
            setattr(target, name, child)
    target._parameters.update(source._parameters)


def image_arguments(model: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Take what belongs to images out of a call's arguments: `pixel_values` and what a processor gives beside it.

    Args:
        model: an `image_part`; `None` where contexts are text.
        arguments: the call's keywords, from which these are taken.

    Raises:
        ValueError: images, and no model for them.
    """
    if model is None:
        if arguments.get("pixel_values") is not None:
            raise ValueError("`pixel_values` were given, and the base of this checkpoint has no part that sees images")
        return {}
    known = inspect.signature(model.get_image_features).parameters
    images = {name: arguments.pop(name) for name in list(arguments) if name in known and name != "kwargs"}
    return {name: value for name, value in images.items() if value is not None}


def image_tokens(model: Any, images: Mapping[str, Any]) -> Tensor | None:
    """The image tokens of all images, `(num_image_tokens, hidden_size)`; `None` where there are no images.

    Args:
        model: an `image_part`.
        images: `pixel_values` and what belongs to them, in the form of the base's processor.
    """
    if images.get("pixel_values") is None:
        return None
    features = model.get_image_features(**images, return_dict=True).pooler_output
    return torch.cat([tokens.reshape(-1, tokens.shape[-1]) for tokens in features])


def with_image_tokens(embeddings: Tensor, is_image: Tensor, tokens: Tensor | None) -> Tensor:
    """Embeddings of a context with image tokens at their places.

    Args:
        embeddings: `(num_rows, num_places, hidden_size)`.
        is_image: `(num_rows, num_places)` bool.
        tokens: `(num_image_tokens, hidden_size)`, of all rows in order; `None` for none.

    Raises:
        ValueError: there are more or fewer of them than places.
    """
    places, given = int(is_image.sum()), 0 if tokens is None else len(tokens)
    if places != given:
        raise ValueError(
            f"the contexts have places for {places} image tokens, and `pixel_values` make {given}: take both from one "
            "call of the base's processor"
        )
    if tokens is None:
        return embeddings
    return embeddings.masked_scatter(is_image[:, :, None], tokens.to(embeddings))


def image_span(is_image: Tensor) -> tuple[Tensor, Tensor]:
    """From where to where image tokens stand in each row.

    Args:
        is_image: `(num_rows, num_places)` bool.

    Returns:
        The place of the first one and the number of places up to the last one, `(num_rows,)`; 0 where there is none.
    """
    if not is_image.shape[1]:
        return (is_image.new_zeros(len(is_image), dtype=torch.long),) * 2
    first = is_image.int().argmax(dim=1)
    last = is_image.shape[1] - is_image.flip(1).int().argmax(dim=1)
    has_any = is_image.any(dim=1)
    return first * has_any, (last - first) * has_any
