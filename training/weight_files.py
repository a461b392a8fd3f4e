# SPDX-License-Identifier: Apache-2.0
"""Storing the weights of a finished run in a smaller floating-point type."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME


def store_weights_as(dtype: torch.dtype, folder: Path) -> None:
    """Rewrite the floating-point weights of a saved model in another type; the configuration stays as it is.

    `from_pretrained` reads them back in the type that the configuration names, so that a model that was trained in
    float32 still computes in float32.

    Args:
        dtype: what to store, e.g. `torch.bfloat16`.
        folder: a saved model, in one safetensors file or several.
    """
    total_size = 0
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
        total_size += sum(tensor.nbytes for tensor in tensors.values())
        save_file(tensors, path, metadata=metadata)
    index_path = folder / SAFE_WEIGHTS_INDEX_NAME
    if index_path.is_file():
        index = json.loads(index_path.read_text(encoding="utf-8"))
        index.setdefault("metadata", {})["total_size"] = total_size
        index_path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
