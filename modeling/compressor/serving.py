# SPDX-License-Identifier: Apache-2.0
"""Servers of the decoder alone: prompts of embeddings, and the decoder as a folder, whole or as an adapter."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..checkpoint.base_weights import DECODER_BASE, base_name, base_record
from ..checkpoint.peft_adapters import peft_weight_names
from ..memory.memory_validation import check_served_form
from ..parts.base_pass import embedding_scale
from ..parts.lora import DECODER, SHARED
from ..parts.text_ids import message_ids
from .validation import fitted_text_and_memory

if TYPE_CHECKING:
    from ..memory.compressed_context import CompressedContext


@torch.no_grad()
def prompt_embeds(
    memory: CompressedContext,
    tokenizer: PreTrainedTokenizerBase | None,
    messages: str | Sequence[Mapping[str, str]] | None,
    model: Any,
) -> Tensor:
    """Return slots and text as the decoder reads them, `(num_places, hidden_size)`."""
    check_decoder_served(model)
    slots = memory.served_slots()
    if messages is None:
        return slots
    backbone = model.base_model
    ids = message_ids(model.config, tokenizer, messages)
    text = backbone.text_rows(torch.tensor([ids], device=model.device), None)
    memory, is_full, _ = fitted_text_and_memory(text, memory, backbone)
    inputs, _ = backbone.first_inputs(text, None, memory, None, is_full)
    return inputs["inputs_embeds"][0, inputs["attention_mask"][0].bool()]


def check_decoder_served(model: Any) -> None:
    """Raise `ValueError` if no server of the decoder alone can read this compressor's memories; it says why."""
    config = model.config
    if config.is_encoder_decoder:
        raise ValueError(f"{type(model).__name__} reads a memory by cross-attention, which servers do not offer")
    check_served_form(config.carrier, config.position_layout)
    scale = embedding_scale(model.get_input_embeddings())
    if scale != 1.0:
        raise ValueError(
            f"the decoder {config.decoder_config.model_type!r} multiplies token embeddings by {scale:.4g}; "
            "servers do so with embeddings that they are given, and these would be multiplied twice"
        )


def export_decoder(
    model: Any, tokenizer: PreTrainedTokenizerBase, folder: str | os.PathLike, form: str = "merged"
) -> None:
    """Write the decoder into a new or empty folder, for a server that reads prompts of embeddings, such as vLLM.

    Args:
        model: the compressor.
        tokenizer: the one saved with it.
        folder: where to write.
        form: "merged", a plain language model with the decoder's adapters in its weights, and its tokenizer without
            the compressor's task tokens; or "lora", the adapters alone in PEFT's format, for a server of the base.
    """
    # An adapter also answers from whole texts, whatever the form of the memories.
    if form == "merged" or model.config.is_encoder_decoder:
        check_decoder_served(model)
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not an empty folder")
    if form == "lora":
        _save_adapter(model, folder)
        return
    model.decoder_language_model().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _take_out_tokens(folder, model.config.task_token_ids)


def is_untouched_base(model: Any) -> bool:
    """Return whether the decoder is known to be the unchanged base; `False` for a full checkpoint."""
    record = base_record(model)
    if record is None or model.config.decoder_lora is not None:
        return False
    return not any(_is_decoder(name) for name in record.without_base(model.state_dict(), _trained(model)))


def _is_decoder(name: str) -> bool:
    place = base_name(name)
    return place is not None and place[0] == DECODER_BASE


def _trained(model: Any) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def _save_adapter(model: Any, folder: Path) -> None:
    from peft import LoraConfig

    config, base = model.config, model.config.base_model_name_or_path
    if config.decoder_lora is None:
        only = f"serve its base, {base}, as it is" if is_untouched_base(model) else "write it whole (merged)"
        raise ValueError(f"the decoder of this {type(model).__name__} has no adapters: {only}")
    if own := sorted(name for name in _trained(model) if _is_decoder(name)):
        raise ValueError(
            f"beside its adapters the decoder has weights of its own that have trained, the first is {own[0]!r}: "
            "write it whole (merged)"
        )
    backbone = model.base_model.language_model
    if config.shared_adapter and config.decoder_adapter is not None:
        raise ValueError("the decoder reads with two adapters, one of them shared: write it whole (merged)")
    name = SHARED if config.shared_adapter else DECODER
    parameters = peft_weight_names(backbone, name)
    weights = {key: weight.detach().cpu().contiguous() for key, weight in parameters.items()}
    settings = config.decoder_lora
    adapter = LoraConfig(
        r=settings["rank"],
        lora_alpha=settings["alpha"],
        lora_dropout=settings["dropout"],
        target_modules=sorted({key.split(".")[-3] for key in weights}),
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        revision=config.base_model_revision,
        inference_mode=True,
    )
    folder.mkdir(parents=True, exist_ok=True)
    adapter.save_pretrained(folder)
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _take_out_tokens(folder: Path, names: Collection[str]) -> None:
    """Take the task tokens out of a tokenizer's files: the decoder's table has no rows for them."""
    for path in folder.glob("tokenizer*.json"):
        fields = json.loads(path.read_text(encoding="utf-8"))
        for key in ("added_tokens", "extra_special_tokens"):
            if key in fields:
                tokens = [(token["content"] if isinstance(token, dict) else token, token) for token in fields[key]]
                fields[key] = [token for name, token in tokens if name not in names]
        path.write_text(json.dumps(fields, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
