# SPDX-License-Identifier: Apache-2.0
"""Memories as safetensors files with a checksum over every byte."""

from __future__ import annotations

import hashlib
import json
import os
import re
import uuid
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from .carriers import PAIR_FIELDS

FORMAT = "context-compressors memory"
# 2: blocks of quantised memories are rotated.
FORMAT_VERSION = "2"
# A hundred times what a memory of the deepest models needs.
_MAX_HEADER_BYTES = 4 << 20
_ZERO_DIGEST = "0" * 64
_DIGEST_FIELD = re.compile(rb'"sha256":"([0-9a-f]{64})"')
# Fields that are tensors, those of every memory and those of some.
_ALWAYS = ("attention_mask", "position_ids", "num_context_tokens")
_SOMETIMES = ("embeddings", "scales", "inverse_frequencies", "question_fingerprints", *PAIR_FIELDS)


def text_source(place: str, text: str) -> str:
    """Return a text's place and the hash of its UTF-8, the form of a memory's `source`: "PLACE sha256:HEX"."""
    return f"{place} sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def file_parts(memory: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a `CompressedContext`, as [`write_memory_file`] takes them."""
    metadata = {"model_id": memory.model_id, "position_layout": memory.position_layout, "carrier": memory.carrier}
    if memory.source:
        metadata["source"] = memory.source
    if not isinstance(memory.ratio, Tensor):
        metadata["ratio"] = str(memory.ratio)
    tensors = {name: vars(memory)[name] for name in (*_ALWAYS, *_SOMETIMES, "ratio")}
    if memory.key_values is not None:
        metadata["num_layers"] = str(len(memory.key_values))
        for name, pairs in (("", memory.key_values), ("scales.", memory.scales or ())):
            for layer, (keys, values) in enumerate(pairs):
                tensors[f"{name}layers.{layer}.keys"], tensors[f"{name}layers.{layer}.values"] = keys, values
    return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}, metadata


def fields_of_file(tensors: dict[str, Tensor], metadata: dict[str, str]) -> dict[str, Any]:
    """The fields of the `CompressedContext` that [`file_parts`] took apart."""
    fields: dict[str, Any] = {name: tensors.get(name) for name in _SOMETIMES}
    fields |= {name: tensors[name] for name in _ALWAYS}
    if metadata["carrier"] == "key_values":
        layers = range(int(metadata["num_layers"]))
        for name, prefix in (("key_values", ""), ("scales", "scales.")):
            if name == "key_values" or "scales.layers.0.keys" in tensors:
                names = ((f"{prefix}layers.{i}.keys", f"{prefix}layers.{i}.values") for i in layers)
                # The first missing layer ends this, however many a header names.
                fields[name] = tuple((tensors[keys], tensors[values]) for keys, values in names)
    fields["ratio"] = tensors["ratio"] if "ratio" in tensors else int(metadata["ratio"])
    texts = {name: metadata[name] for name in ("model_id", "position_layout")}
    return {**fields, **texts, "source": metadata.get("source", "")}


def write_memory_file(path: str | os.PathLike, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write tensors and metadata to a safetensors file at once or not at all; `ValueError` for a path that is no
    file."""
    from safetensors.torch import save_file

    path = Path(path)
    _check_is_file(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Copies: safetensors refuses tensors that share storage, as keys and values cut from one tensor do.
    tensors = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
    }
    header = {**metadata, "format": FORMAT, "format_version": FORMAT_VERSION, "sha256": _ZERO_DIGEST}
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        # safetensors makes a file that its owner alone can read; this one follows the process's own rule (umask).
        temporary.touch()
        mode = temporary.stat().st_mode
        save_file(tensors, temporary, metadata=header)
        temporary.chmod(mode)
        with open(temporary, "r+b") as file:
            written = _read_header(file, path)
            header = json.loads(written)
            # safetensors leaves the metadata's order to chance: equal memories are equal files.
            header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
            header_bytes = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(len(written))
            file.seek(8)
            file.write(header_bytes)
            match = next(_DIGEST_FIELD.finditer(header_bytes))
            digest = _file_digest(file, header_bytes, match)
            file.seek(8 + match.start(1))
            file.write(digest.encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_memory_file(path: str | os.PathLike) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read tensors and metadata of a file of `write_memory_file` after checking every byte of it.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is no memory file, truncated, altered, or of a format version that this code does not
            know.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(path)
    _check_is_file(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no memory file {path}")
    with open(path, "rb") as file:
        header_bytes = _read_header(file, path)
        metadata = _checked_header(header_bytes, path)
        matches = list(_DIGEST_FIELD.finditer(header_bytes))
        if len(matches) != 1 or _file_digest(file, header_bytes, matches[0]) != matches[0][1].decode():
            raise ValueError(f"{path} was altered: its bytes do not fit the checksum in it")
    if metadata["format_version"] != FORMAT_VERSION:
        raise ValueError(f"{path} has format version {metadata['format_version']}, this code reads {FORMAT_VERSION}")
    try:
        return load_file(path), metadata
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        # Whoever alters a file may put the right checksum in it.
        raise ValueError(f"{path} is not a memory file: {error}") from error


def _check_is_file(path: Path) -> None:
    """Refuse what exists and is no file: a pipe would be waited for."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is a folder, a pipe or the like, not a memory file")


def _read_header(file: BinaryIO, path: Path) -> bytes:
    """The JSON header: a safetensors file starts with its length in eight bytes, little end first."""
    file_size = os.fstat(file.fileno()).st_size
    file.seek(0)
    header_size = int.from_bytes(file.read(8), "little")
    if file_size < 8 or header_size > file_size - 8:
        raise ValueError(f"{path} is truncated or not a memory file: its header does not fit in {file_size} bytes")
    if header_size > _MAX_HEADER_BYTES:
        raise ValueError(f"{path} is not a memory file: its header has {header_size} bytes, over {_MAX_HEADER_BYTES}")
    return file.read(header_size)


def _checked_header(header_bytes: bytes, path: Path) -> dict[str, str]:
    try:
        header = json.loads(header_bytes)
        metadata = header.pop("__metadata__")
        is_ours = metadata["format"] == FORMAT and {"format_version", "sha256"} <= metadata.keys()
        data_size = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise ValueError(f"{path} is not a memory file, or its header was altered") from error
    if not is_ours:
        raise ValueError(f"{path} is not a memory file: its format is {metadata['format']!r}, expected {FORMAT!r}")
    file_size, expected_size = path.stat().st_size, 8 + len(header_bytes) + data_size
    if file_size < expected_size:
        raise ValueError(f"{path} is truncated: it has {file_size} of {expected_size} bytes")
    return metadata


def _file_digest(file: BinaryIO, header_bytes: bytes, match: re.Match) -> str:
    """SHA-256 of the whole file with zeros where the digest stands."""
    file.seek(0)
    digest = hashlib.sha256(file.read(8))
    digest.update(header_bytes[: match.start(1)] + _ZERO_DIGEST.encode() + header_bytes[match.end(1) :])
    file.seek(8 + len(header_bytes))
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()
