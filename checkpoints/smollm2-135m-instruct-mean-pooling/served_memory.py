# SPDX-License-Identifier: Apache-2.0
"""A memory as a server of the decoder alone takes it: slots, and text behind them, as embeddings."""

from __future__ import annotations

import base64
import io
from typing import Any

import torch
from torch import Tensor

from .memory_validation import check_memory_fields


def check_served_form(carrier: str, position_layout: str) -> None:
    """Raise `ValueError` if a server of the decoder alone cannot read memories of this form; it says why."""
    if carrier != "embeddings":
        raise ValueError(
            "servers take embeddings only, and memories of this kind are keys and values of every layer: their own "
            "compressor alone can read them"
        )
    if position_layout == "enhanced":
        raise ValueError(
            "servers number embeddings 0, 1, 2, ..., and under the position layout 'enhanced' slots stand where their "
            "tokens stood: only contiguous positions can be served"
        )


def served_slots(memory: Any) -> Tensor:
    """The slots of a memory of one row, `(num_slots, hidden_size)`, for a server of the decoder alone.

    Raises:
        ValueError: several rows, values that are not finite, or a form that servers cannot read.
    """
    if memory.batch_size != 1:
        raise ValueError(f"a prompt has one memory, this one has {memory.batch_size} rows: choose with `rows`")
    check_served_form(memory.carrier, memory.position_layout)
    memory = memory.dequantize() if memory.quantization else memory
    check_memory_fields(memory, finite=True)
    return memory.embeddings[0, memory.attention_mask[0].bool()]


def prompt_of(memory: Any, tokenizer: Any, messages: Any, model: Any, encoding: str | None) -> Tensor | str:
    """See `CompressedContext.to_prompt_embeds`."""
    if encoding not in (None, "base64"):
        raise ValueError(f"encoding must be None or 'base64', got {encoding!r}")
    if messages is not None and tokenizer is None:
        raise ValueError("a text needs the tokenizer that was saved with the checkpoint, got None")
    if model is None:
        model = None if memory.maker is None else memory.maker()
    if model is None and messages is not None:
        name = f"; it is {memory.model_id}" if memory.model_id else ""
        raise ValueError(
            "a memory holds no embeddings for text, and the compressor that made this one is not known here: "
            f"name it, to_prompt_embeds(tokenizer, messages, model){name}"
        )
    embeds = served_slots(memory) if model is None else model.prompt_embeds(memory, tokenizer, messages)
    if encoding is None:
        return embeds
    file = io.BytesIO()
    # A copy: `torch.save` writes the whole storage that a slice is taken from.
    torch.save(embeds.detach().cpu().contiguous().clone(), file)
    return base64.b64encode(file.getvalue()).decode("ascii")
