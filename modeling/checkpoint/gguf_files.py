# SPDX-License-Identifier: Apache-2.0
"""Base models in GGUF files, read as ordinary ones: every weight is dequantised, so that it trains and saves."""

from __future__ import annotations

import mmap
import os
import struct
from typing import Any

import transformers
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

# Names in GGUF files of pre-tokenizers that part digits from each other and then split as GPT-2 does.
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell")


def gguf_arguments(gguf_file: str | None) -> dict[str, Any]:
    """Return arguments of a model's `from_pretrained` that dequantise a GGUF file's weights; none for `None`."""
    if gguf_file is None:
        return {}
    # Libraries without this class know no other way than to dequantise.
    settings = getattr(transformers, "GgufConfig", None)
    return {"gguf_file": gguf_file} | ({} if settings is None else {"quantization_config": settings(dequantize=True)})


def gguf_tokenizer(name: str | os.PathLike, gguf_file: str, **loading: Any) -> PreTrainedTokenizerBase:
    """The tokenizer in a GGUF file, splitting texts as the file says.

    transformers reads the pre-tokenizers of SmolLM and some others as GPT-2's, which keeps numbers together, so that
    numbers would become tokens that the model has not seen.
    """
    from tokenizers import pre_tokenizers

    tokenizer = AutoTokenizer.from_pretrained(name, gguf_file=gguf_file, **loading)
    if _pre_tokenizer(cached_file(name, gguf_file, **loading)) in _SINGLE_DIGITS:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
            ]
        )
    return tokenizer


def _pre_tokenizer(path: str) -> str | None:
    """The name that a GGUF file has for its pre-tokenizer."""
    key = b"tokenizer.ggml.pre"
    # A reader of all metadata takes ten seconds over a vocabulary. Keys and texts stand behind their length.
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        offset = data.find(struct.pack("<Q", len(key)) + key)
        if offset < 0:
            return None
        start = offset + 8 + len(key)
        kind, length = struct.unpack_from("<IQ", data, start)
        is_text = kind == 8
        return data[start + 12 : start + 12 + length].decode() if is_text else None
