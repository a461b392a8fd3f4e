# SPDX-License-Identifier: Apache-2.0
"""VoCo-LLaMA: copies of one token behind a text or an image, whose keys and values stand for it
(https://arxiv.org/abs/2406.12275), with EPL's position layouts (Figure 8)."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from ..configuration.configuration_voco import VoCoConfig
from .compressor.backbone import Chunks, Slots, join
from .compressor.causal_lm import CompressorForCausalLM
from .compressor.memory_token_compressor import MemoryRows, MemoryTokenModel
from .compressor.validation import TokenRows
from .memory.compressed_context import CompressedContext, KeyValues
from .parts.position_layout import encoder_memory_ids

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


def image_span(is_image: Tensor) -> tuple[Tensor, Tensor]:
    """Return the place of each row's first image token and the places up to its last one, `(num_rows,)`; 0 for none.

    Args:
        is_image: `(num_rows, num_places)` bool.
    """
    first = is_image.int().argmax(dim=1)
    last = is_image.shape[1] - is_image.flip(1).int().argmax(dim=1)
    has_any = is_image.any(dim=1)
    return first * has_any, (last - first) * has_any


class VoCoModel(MemoryTokenModel):
    r"""
    VoCo-LLaMA: a language model reads a context and copies of one learned token behind it, and then the text from the
    copies' keys and values of every layer, with the same weights.

    On a vision-language model the context is made by its processor: token ids with places for image tokens, and
    `pixel_values`, which `compress`, `forward` and `generate` take beside the context.

    The paper trains on both in one pass, whose mask hides the context from what stands behind the VoCo tokens. Here
    the text reads their keys and values alone, which is the same computation.
    """

    config_class = VoCoConfig
    base_auto_class = LanguageOrVisionLanguageModel
    # Checkpoints are then always whole: light ones name a language model, and no vision-language model.
    trains_base: Any = property(lambda self: self.config.vision_language_config is not None)

    def __init__(self, config: VoCoConfig):
        super().__init__(config)
        self.image_model: Any = None
        if config.vision_language_config is not None:
            self.image_model = self._without_language_model(config.vision_language_config)
        self.post_init()

    def _without_language_model(self, config: PreTrainedConfig) -> PreTrainedModel:
        """A vision-language model that knows this one's language model, and holds everything else itself."""
        if config.model_type not in CHECKED_VISION_LANGUAGE_MODELS:
            logger.warning_once(
                f"{config.model_type!r} is not among the vision-language models that compressors are tested on, "
                f"{list(CHECKED_VISION_LANGUAGE_MODELS)}: its language model may read image tokens in ways of its own"
            )
        model = AutoModel.from_config(config, dtype=torch.get_default_dtype())
        name = next(name for name, child in model.named_children() if child is model.get_decoder())
        delattr(model, name)
        model.__dict__[name] = self.language_model
        return model

    def take_base(self, source: Any) -> None:
        """Take the language model of a vision-language model, and what makes its image tokens."""
        if self.image_model is None:
            super().take_base(source)
            return
        super().take_base(source.get_decoder())
        for name, child in source.named_children():
            if name in self.image_model._modules:
                self.image_model.add_module(name, child)
        self.image_model._parameters.update(source._parameters)

    # --- contexts with images ---

    def extra_inputs(self, arguments: dict[str, Any], text: Any = None) -> dict[str, Any]:
        """Take out images: `pixel_values`, and what the base's processor gives beside it."""
        if self.image_model is None:
            return {}
        known = inspect.signature(self.image_model.get_image_features).parameters.keys() - {"kwargs"}
        images = {name: arguments.pop(name) for name in list(arguments) if name in known}
        return {name: value for name, value in images.items() if value is not None}

    def text_rows(self, input_ids: Tensor, attention_mask: Tensor | None) -> TokenRows:
        """A text for [`measure_rows`]; images stand in the context."""
        if self.image_model is not None and bool((input_ids == self._image_token_id).any()):
            raise ValueError(
                f"`input_ids` hold image tokens (id {self._image_token_id}): images are compressed, so that they and "
                "their `pixel_values` belong to the context"
            )
        return super().text_rows(input_ids, attention_mask)

    @property
    def _image_token_id(self) -> int:
        return self.config.vision_language_config.image_token_id

    def _is_image(self, chunks: Chunks) -> Tensor:
        return (chunks.input_ids == self._image_token_id) & chunks.attention_mask.bool()

    def context_embeddings(self, chunks: Chunks, **images: Any) -> Tensor:
        """Return the embeddings of a context, `(num_chunks, num_tokens, hidden_size)`; `images` as `compress` takes
        them."""
        embeddings = self.get_input_embeddings()(chunks.input_ids)
        if self.image_model is None:
            return embeddings
        is_image, tokens = self._is_image(chunks), embeddings[0, :0]
        if images.get("pixel_values") is not None:
            features = self.image_model.get_image_features(**images, return_dict=True).pooler_output
            # (num_image_tokens, hidden_size), of all images in order.
            tokens = torch.cat([of_image.reshape(-1, of_image.shape[-1]) for of_image in features])
        if int(is_image.sum()) != len(tokens):
            raise ValueError(
                f"the contexts have places for {int(is_image.sum())} image tokens, and `pixel_values` make "
                f"{len(tokens)}: take both from one call of the base's processor"
            )
        return embeddings.masked_scatter(is_image[:, :, None], tokens.to(embeddings))

    # --- positions (EPL, Figure 8): context 0 ... n - 1, VoCo tokens behind it or spread over it, then the text ---

    @property
    def _first_id(self) -> int:
        # The family's layouts of EPL count from 1, VoCo's from 0.
        return 0 if self.config.position_layout == "default" else 1

    def memory_token_ids(self, chunks: Chunks, counts: Tensor, width: int) -> Tensor:
        """See [`MemoryTokenModel.memory_token_ids`]; an image's VoCo tokens share the ids of the image alone."""
        layout, starts = self.config.position_layout, chunks.starts - self._first_id
        lengths = torch.tensor(chunks.lengths, device=counts.device)
        if layout != "default" and self.image_model is not None:
            first, span = image_span(self._is_image(chunks))
            starts, lengths = starts + first, torch.where(span > 0, span, lengths)
        return encoder_memory_ids(lengths, counts, starts, layout, width)

    def memory_rows(self, chunks: Chunks, ratios: Sequence[int | Tensor]) -> Any:
        """See [`MemoryTokenModel.memory_rows`]."""
        return super().memory_rows(replace(chunks, position_ids=chunks.position_ids - self._first_id), ratios)

    def slot_positions(self, slot_mask: Tensor, chunks: Chunks, counts: Sequence[int]) -> Tensor:
        """The keys' positions, `(batch_size, num_slots)`."""
        ids = self.memory_token_ids(chunks, torch.tensor(counts, device=slot_mask.device), max(counts))
        joined: Any = join(ids[:, :, None], counts, chunks.chunks_per_row)[0]
        return joined[:, :, 0]

    def text_position_offset(self, memory: CompressedContext, input_ids: Tensor, text_mask: Tensor | None) -> Tensor:
        """Return the position of each row's first text token, `(batch_size,)`."""
        is_enhanced = self.config.position_layout == "enhanced"
        return memory.num_context_tokens if is_enhanced else memory.num_context_tokens + memory.num_slots

    # --- compress, then read ---

    def encode(self, chunks: Chunks, ratios: Sequence[int | Tensor], **images: Any) -> Sequence[Slots]:
        return super().encode(replace(chunks, inputs_embeds=self.context_embeddings(chunks, **images)), ratios)

    def read_memory(self, rows: MemoryRows) -> list[KeyValues]:
        # The VoCo tokens' activations are the cache that stands for the context.
        return self.token_key_values(rows)


class VoCoForCausalLM(CompressorForCausalLM):
    """[`VoCoModel`] with the decoder's LM head."""

    model_class = VoCoModel
    base_auto_class = VoCoModel.base_auto_class
    trains_base = VoCoModel.trains_base
