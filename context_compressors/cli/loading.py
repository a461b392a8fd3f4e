# SPDX-License-Identifier: Apache-2.0
"""A compressor and its tokenizer, as a command line names them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .arguments import check_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load_compressor(
    name: str,
    revision: str | None = None,
    trust_remote_code: bool = False,
    device: str = "auto",
    dtype: str = "auto",
    base_model: str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a compressor and its tokenizer for inference; where texts say "[LM]" or such, these are characters.

    Args:
        name: Hub id or folder.
        revision: branch, tag or commit on the Hub.
        trust_remote_code: allow a checkpoint of a method that this package does not have to run its own code.
        device: where to put it; "auto" takes an accelerator if there is one.
        dtype: "auto" (as saved), "float32", "bfloat16" or "float16".
        base_model: where the base of a light checkpoint is, Hub id or folder, if not where the checkpoint says.

    Raises:
        ValueError: no such device or checkpoint, no compressor, or one whose code is not trusted.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from ..modeling.checkpoint.pretrained_bases import base_place, fetch_bases
    from ..modeling.parts.prompting import text_tokenizer

    check_device(device)
    from .. import modeling  # noqa: F401  (makes the Auto classes know this package's methods)

    try:
        fields, _ = PreTrainedConfig.get_config_dict(name, revision=revision)
    except OSError as error:
        raise ValueError(f"there is no model {name!r}: {error}") from error
    method = fields.get("model_type")
    if "compression_ratios" not in fields:
        raise ValueError(f"{name} is a model of type {method!r}, not a context compressor")
    # This package's own methods run this package's code, whatever the checkpoint brings along.
    is_ours = method in CONFIG_MAPPING
    if not is_ours and not trust_remote_code:
        raise ValueError(f"{name} has a method of its own, {method!r}: read its code, then pass --trust-remote-code")
    options = {"revision": revision, "trust_remote_code": not is_ours}
    auto_class = AutoModelForSeq2SeqLM if fields.get("is_encoder_decoder") else AutoModelForCausalLM
    base = {} if base_model is None else {"base_model": base_place(base_model)}
    if base_model is None:
        fetch_bases(fields.get("external_weights"))
    model = auto_class.from_pretrained(name, dtype=dtype, **options, **base)
    if device == "auto":
        device = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(name, **options)
    return model.to(device).eval(), text_tokenizer(tokenizer) if model.config.task_token_ids else tokenizer
