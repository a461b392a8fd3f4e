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
from .compressor.backbone import slot_counts
from .compressor.causal_lm import CompressorForCausalLM
from .compressor.chunking import Chunks, Slots, first_places, join
from .compressor.memory_token_compressor import MemoryRows, MemoryTokenModel
from .compressor.validation import TokenRows, check_ratios, check_together
from .memory.compressed_context import CompressedContext, KeyValues
from .memory.key_value_memory import check_sliding_window, sliding_window
from .parts.attention_masks import PAIRWISE_MASKS, mask_for
from .parts.packing import PackedSequence, text_positions
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


class _StartsFromVisionToo:
    """What backbone and head have in common."""

    base_auto_class: Any = LanguageOrVisionLanguageModel
    # Checkpoints are then always whole: light ones name a language model, and no vision-language model.
    trains_base: Any = property(lambda self: self.config.vision_language_config is not None)


class VoCoModel(_StartsFromVisionToo, MemoryTokenModel):
    r"""
    VoCo-LLaMA: a language model reads a context and copies of one learned token behind it, and then the text from the
    copies' keys and values of every layer, with the same weights.

    On a vision-language model the context is made by its processor: token ids with places for image tokens, and
    `pixel_values`, which `compress`, `forward` and `generate` take beside the context.

    In training `forward` reads context and text in one masked pass, as the paper does, where the attention takes such
    a mask (eager, sdpa); it is the same computation as `compress`, and `forward` with that memory.
    """

    config_class = VoCoConfig

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

    def beside_contexts(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Take out images: `pixel_values`, and what the base's processor gives beside it."""
        if self.image_model is None:
            if arguments.get("pixel_values") is not None:
                raise ValueError("`pixel_values` were given, and the base of this checkpoint does not read images")
            return {}
        known = inspect.signature(self.image_model.get_image_features).parameters.keys() - {"kwargs"}
        images = {name: arguments.pop(name) for name in list(arguments) if name in known}
        return {name: value for name, value in images.items() if value is not None}

    def text_rows(self, input_ids: Tensor, attention_mask: Tensor | None) -> TokenRows:
        """A text for [`check_together`]; images stand in the context."""
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
        """What is read of a context, `(num_chunks, num_tokens, hidden_size)`; `images` as `compress` takes them."""
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
        joined, _ = join(ids[:, :, None], counts, chunks.chunks_per_row)
        return joined[:, :, 0] if isinstance(joined, Tensor) else slot_mask

    def text_position_offset(self, memory: CompressedContext, input_ids: Tensor, text_mask: Tensor | None) -> Tensor:
        """Position of each row's first text token, `(batch_size,)`; arguments as [`CompressorModel`]'s."""
        return self._text_start(memory.num_context_tokens, memory.num_slots)

    def _text_start(self, num_context_tokens: Tensor, num_slots: Tensor) -> Tensor:
        return num_context_tokens if self.config.position_layout == "enhanced" else num_context_tokens + num_slots

    # --- compress, then read ---

    def encode(self, chunks: Chunks, ratios: Sequence[int | Tensor], **images: Any) -> Sequence[Slots]:
        return super().encode(replace(chunks, inputs_embeds=self.context_embeddings(chunks, **images)), ratios)

    def read_memory(self, rows: MemoryRows) -> list[KeyValues]:
        # The VoCo tokens' activations are the cache that stands for the context.
        return self.token_key_values(rows)

    # --- both in one pass ---

    def joint_inputs(
        self,
        text: TokenRows,
        context: TokenRows,
        ratio: int | str | Tensor | None,
        position_ids: Tensor | None,
        offset: Tensor | None,
        beside: dict[str, Any],
    ) -> tuple[dict[str, Any], PackedSequence] | None:
        """See [`CompressorModel.joint_inputs`]: in training, `[contexts, VoCo tokens, text]` and the paper's mask."""
        is_pairwise = self.language_model.config._attn_implementation in PAIRWISE_MASKS
        if not self.training or not is_pairwise or len(text.input_ids) != len(context.input_ids):
            return None
        check_together(context, text)
        device, num_text = text.input_ids.device, text.input_ids.shape[1]
        chunks = self.chunks_of(context)
        chunk_ratio: Any = check_ratios([ratio], self.config.compression_ratios, context.input_ids, False)[0]
        if isinstance(chunk_ratio, Tensor):
            chunk_ratio = chunk_ratio.repeat_interleave(chunks.chunks_per_row)
        counts = slot_counts(self.config, chunks.lengths, chunk_ratio)
        self.check_places(chunks.lengths, counts)
        mask = _joined(chunks.attention_mask, first_places(counts, device), text.attention_mask)
        if offset is None:
            num_slots = torch.tensor(counts, device=device).view(-1, chunks.chunks_per_row).sum(dim=1)
            offset = self._text_start(context.attention_mask.sum(dim=1), num_slots)
        text_ids = text_positions(text.attention_mask) if position_ids is None else position_ids
        positions = _joined(
            chunks.position_ids - self._first_id,
            self.memory_token_ids(chunks, torch.tensor(counts, device=device), max(counts)),
            text_ids.expand_as(text.input_ids) + offset[:, None],
        )
        embeddings = self.context_embeddings(chunks, **beside)
        tokens = self.memory_vectors(max(counts)).to(embeddings.dtype).expand(len(counts), -1, -1)
        embeddings = _joined(embeddings, tokens, self._embed_text(text.input_ids))
        visible, near = _who_sees_whom(chunks, counts, mask, num_text, self.config.decoder_config)
        inputs = {
            "inputs_embeds": embeddings,
            "attention_mask": mask_for(self.language_model.config, visible, near, embeddings.dtype),
            "position_ids": positions * mask,
        }
        places = torch.arange(mask.shape[1] - num_text, mask.shape[1], device=device)
        return inputs, PackedSequence(mask, None, places.expand(len(mask), -1))


def _joined(of_contexts: Tensor, of_memory: Tensor, of_text: Tensor) -> Tensor:
    """`[contexts, VoCo tokens, text]` in one row: the contexts of all its chunks, then the tokens of all of them."""
    parts = [part for part in (of_contexts, of_memory) if part.numel()]
    return torch.cat([*(part.reshape(len(of_text), -1, *part.shape[2:]) for part in parts), of_text], dim=1)


def _who_sees_whom(
    chunks: Chunks, counts: Sequence[int], mask: Tensor, num_text: int, config: Any
) -> tuple[Tensor, Tensor]:
    """The paper's mask (EPL, Figure 8) of rows `[contexts, VoCo tokens, text]`.

    A context and its VoCo tokens are causal. Behind them nothing sees the context, nor what stands in it in front of
    an image, BOS and a system prompt: only VoCo tokens, and what comes after them.

    Args:
        chunks: the contexts.
        counts: VoCo tokens of each chunk.
        mask: `(batch_size, num_places)`, one for real places.
        num_text: places of the text.
        config: the language model's.

    Returns:
        Two masks `(batch_size, num_places, num_places)` bool, for layers that see everything and for those with a
        sliding window.

    Raises:
        ValueError: VoCo tokens and text do not fit into the base's sliding window.
    """
    device, per_row, length, width = mask.device, chunks.chunks_per_row, chunks.input_ids.shape[1], max(counts)
    in_row = torch.arange(per_row, device=device)
    # Which chunk a place belongs to; the text to none.
    chunk = torch.cat([in_row.repeat_interleave(length), in_row.repeat_interleave(width)])
    chunk = torch.nn.functional.pad(chunk, (0, num_text), value=-1)
    place = torch.arange(len(chunk), device=device)
    is_text = (chunk < 0)[:, None]
    may_see = torch.where(is_text, place >= per_row * length, chunk[:, None] == chunk) & (place <= place[:, None])
    visible = mask.bool()[:, None] & may_see
    window = sliding_window(config)
    if window is None:
        return visible, visible
    num_slots = max(sum(counts[first : first + per_row]) for first in range(0, len(counts), per_row))
    check_sliding_window(config, num_slots, num_text)
    lengths = torch.tensor(chunks.lengths, device=device)[:, None]
    in_chunk = torch.arange(length, device=device).expand(len(counts), -1)
    behind = lengths + torch.arange(width, device=device)
    place = _joined(in_chunk, behind, mask.new_zeros(len(mask), num_text))
    # Text in front of which a cache stands sees all of that.
    return visible, visible & (is_text | (place[:, :, None] - place[:, None] < window))


class VoCoForCausalLM(_StartsFromVisionToo, CompressorForCausalLM):
    """[`VoCoModel`] with the decoder's LM head."""

    model_class = VoCoModel
