# SPDX-License-Identifier: Apache-2.0
"""What a server of the decoder alone takes in place of a prompt: slots and text as one sequence of embeddings."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from .lora import DECODER, merge_lora
from .prompting import message_ids
from .input_checks import check_memory, check_together

if TYPE_CHECKING:
    from .compressed_context import CompressedContext


@torch.no_grad()
def prompt_embeds(
    memory: CompressedContext,
    tokenizer: PreTrainedTokenizerBase,
    messages: str | Sequence[Mapping[str, str]],
    model: Any,
) -> Tensor:
    """Slots and text as the decoder reads them, `(num_places, hidden_size)`; see `CompressedContext.to_prompt_embeds`.

    Raises:
        ValueError: a memory or decoder that a server cannot take; the message says why.
    """
    backbone = model.base_model
    _check_servable(memory, model)
    ids = message_ids(model.config, tokenizer, messages)
    text = backbone.text_rows(torch.tensor([ids], device=model.device), None)
    check_together(text)
    memory = check_memory(memory, backbone, text.input_ids)
    memory.validate(finite=True)
    inputs, _ = backbone.first_inputs(text, None, memory, None)
    real = inputs["attention_mask"][0].bool()
    positions = inputs["position_ids"][0, real].tolist()
    if positions != list(range(len(positions))):
        raise ValueError(
            "servers number embeddings 0, 1, 2, ..., but under the position layout "
            f"{memory.position_layout!r} the first of this memory's {len(positions)} places are "
            f"{positions[:6]}: only contiguous positions can be served"
        )
    return inputs["inputs_embeds"][0, real]


def _check_servable(memory: CompressedContext, model: Any) -> None:
    if memory.batch_size != 1:
        raise ValueError(f"a prompt has one memory, this one has {memory.batch_size} rows: choose with `rows`")
    if model.config.is_encoder_decoder:
        raise ValueError(f"{type(model).__name__} reads a memory by cross-attention, which servers do not offer")
    if memory.carrier != "embeddings":
        raise ValueError(
            "this memory holds keys and values of every layer; servers take embeddings only, so it can be read by "
            f"{type(model).__name__} alone"
        )
    scale = getattr(model.get_input_embeddings(), "scalar_embed_scale", 1.0)
    if scale != 1.0:
        raise ValueError(
            f"the decoder {model.config.decoder_config.model_type!r} multiplies token embeddings by {scale:.4g}; "
            "servers do so with embeddings that they are given, and these would be multiplied twice"
        )


@torch.no_grad()
def decoder_language_model(model: Any) -> PreTrainedModel:
    """A compressor's decoder as a plain language model of its own architecture, for a server; see its method."""
    config = model.config
    if config.is_encoder_decoder:
        raise ValueError(f"{type(model).__name__} has no decoder that is a language model of its own")
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
