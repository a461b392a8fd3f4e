# SPDX-License-Identifier: Apache-2.0
"""What a server of the decoder alone takes in place of a prompt: slots and text as one sequence of embeddings."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from ..memory.served_memory import check_served_form, served_slots
from ..parts.lora import DECODER, check_adapters, merge_lora
from ..parts.prompting import message_ids
from .validation import check_text_and_memory

if TYPE_CHECKING:
    from ..memory.compressed_context import CompressedContext


@torch.no_grad()
def prompt_embeds(
    memory: CompressedContext,
    tokenizer: PreTrainedTokenizerBase | None,
    messages: str | Sequence[Mapping[str, str]] | None,
    model: Any,
) -> Tensor:
    """Slots and text as the decoder reads them, `(num_places, hidden_size)`; see `CompressedContext.to_prompt_embeds`.

    Raises:
        ValueError: a memory or decoder that a server cannot take; the message says why.
    """
    check_decoder_served(model)
    slots = served_slots(memory)
    if messages is None:
        return slots
    backbone = model.base_model
    ids = message_ids(model.config, tokenizer, messages)
    text = backbone.text_rows(torch.tensor([ids], device=model.device), None)
    memory, is_full, _ = check_text_and_memory(text, memory, backbone)
    inputs, _ = backbone.first_inputs(text, None, memory, None, is_full)
    return inputs["inputs_embeds"][0, inputs["attention_mask"][0].bool()]


def check_decoder_served(model: Any) -> None:
    """Raise `ValueError` if no server of the decoder alone can read this compressor's memories; it says why."""
    config = model.config
    if config.is_encoder_decoder:
        raise ValueError(f"{type(model).__name__} reads a memory by cross-attention, which servers do not offer")
    check_served_form(config.carrier, config.position_layout)
    scale = getattr(model.get_input_embeddings(), "scalar_embed_scale", 1.0)
    if scale != 1.0:
        raise ValueError(
            f"the decoder {config.decoder_config.model_type!r} multiplies token embeddings by {scale:.4g}; "
            "servers do so with embeddings that they are given, and these would be multiplied twice"
        )


@torch.no_grad()
def decoder_language_model(model: Any) -> PreTrainedModel:
    """A compressor's decoder as a plain language model of its own architecture, for a server; see its method."""
    config = model.config
    if config.is_encoder_decoder:
        raise ValueError(f"{type(model).__name__} has no decoder that is a language model of its own")
    check_adapters(model)
    # Copies: the encoder's adapters may sit on the same weights, and stay there.
    decoder = copy.deepcopy(model.base_model.language_model)
    merge_lora(decoder, DECODER)
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(copy.deepcopy(config.decoder_config))
    setattr(plain, plain.base_model_prefix, decoder)
    plain.set_output_embeddings(copy.deepcopy(model.get_output_embeddings()))
    plain.tie_weights()
    plain.generation_config = copy.deepcopy(model.generation_config)
    plain.requires_grad_(False)
    return plain.to(model.dtype).eval()
