# SPDX-License-Identifier: Apache-2.0
"""Weights of finished runs: storing them in a smaller floating-point type, and averaging those of several."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME


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


def average_weights(folders: Sequence[Path], target: Path, shares: Sequence[float] | None = None) -> None:
    """Put the weighted mean of several saved models of one shape into one of them, e.g. of the stages of a training.

    Args:
        folders: saved models, each in one safetensors file.
        target: a saved model of the same shape, whose weights are replaced and whose storage type is kept.
        shares: how much each model counts; all alike when `None`.

    Raises:
        ValueError: no models, another number of shares, shares that do not add up to more than zero, or models with
            different weights or, where these are light, different bases.
    """
    shares = [1.0] * len(folders) if shares is None else list(shares)
    if not folders or len(shares) != len(folders) or sum(shares) <= 0:
        raise ValueError(f"give one share for each model, together above 0, got {len(folders)} models and {shares}")
    models = [load_file(folder / SAFE_WEIGHTS_NAME) for folder in folders]
    kept = load_file(target / SAFE_WEIGHTS_NAME)
    shapes = {name: tensor.shape for name, tensor in kept.items()}
    for folder, model in zip(folders, models, strict=True):
        if {name: tensor.shape for name, tensor in model.items()} != shapes:
            raise ValueError(f"{folder} does not have the weights of {target}, by name and shape")
        if _left_out(folder) != _left_out(target):
            raise ValueError(f"{folder} leaves out the weights of another base model than {target}")
    total = sum(shares)
    for name, tensor in kept.items():
        if tensor.is_floating_point():
            mean: Any = sum(share / total * model[name].double() for share, model in zip(shares, models, strict=True))
            kept[name] = mean.to(tensor.dtype)
    save_file(kept, target / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})


def _left_out(folder: Path) -> dict | None:
    """What a light checkpoint records of its bases; `None` for a whole one."""
    return json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8")).get("external_weights")
