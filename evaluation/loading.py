# SPDX-License-Identifier: Apache-2.0
"""The models of a command line: compressors, language models, and adapters of PEFT on a language model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ..configuration.nearest_names import check_choice

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_DTYPES = ("auto", "float32", "bfloat16", "float16")


def load_model(
    name: str,
    *,
    base_model: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load a compressor, a language model, or a folder with an adapter that PEFT or TRL saved.

    Args:
        name: Hub id or folder.
        base_model: Hub id or folder of the base of a light checkpoint or of an adapter; where it says itself when
            `None`.
        dtype: "auto" (as saved), "float32", "bfloat16" or "float16".
        device: such as "cpu"; "auto" for a GPU if there is one.
        trust_remote_code: run the code that a Hub repository brings.

    Returns:
        The model; an adapter is merged into its base, in the base's type.

    Raises:
        ValueError: another dtype, or an adapter without the name of its base.
        ImportError: an adapter, and `peft` is not installed.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    # Importing the models registers them, so that our own checkpoints need no remote code.
    from .. import modeling  # noqa: F401
    from ..modeling.checkpoint.pretrained_bases import base_place, fetch_bases

    check_choice("dtype", dtype, _DTYPES)
    if Path(name, "adapter_config.json").is_file():
        model = _load_adapter(name, base_model, dtype)
    else:
        place = base_place(name)
        config = AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code)
        base = {} if base_model is None else {"base_model": base_place(base_model)}
        if base_model is None:
            fetch_bases(getattr(config, "external_weights", None))
        model = (AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM).from_pretrained(
            place, dtype=dtype, trust_remote_code=trust_remote_code, **base
        )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    return model.to(default if device == "auto" else device)


def _load_adapter(folder: str | os.PathLike[str], base_model: str | None, dtype: str) -> PreTrainedModel:
    try:
        from peft import PeftConfig, PeftModel
    except ImportError as error:
        raise ImportError(f"{folder} is an adapter: install `peft` (pip install peft) to load it") from error
    base_model = base_model or PeftConfig.from_pretrained(folder).base_model_name_or_path
    if not base_model:
        raise ValueError(f"the adapter in {folder} does not name its base: give it (--teacher-base or --base-model)")
    model = PeftModel.from_pretrained(load_model(base_model, dtype=dtype, device="cpu"), folder).merge_and_unload()
    model.name_or_path = os.fspath(folder)
    return model
