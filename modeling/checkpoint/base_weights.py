# SPDX-License-Identifier: Apache-2.0
"""A base model's own weights inside a compressor, and the way back to the base when they are left out."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, logging
from transformers.utils.hub import cached_file, extract_commit_hash, get_checkpoint_shard_files

from .fingerprints import all_weights, checksum, rounding, sample_text
from .gguf_files import gguf_arguments
from .pretrained_bases import cached_base

logger = logging.get_logger(__name__)

DECODER_BASE, ENCODER_BASE = "decoder", "encoder"
# Where a repository's files come from; the same for a checkpoint and for its base.
DOWNLOAD_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "token")
# Of what `from_pretrained` takes, what says which files of a repository are the model.
_PLACE_FIELDS = ("subfolder", "gguf_file")
_RECORD = "_context_compressor_base"
_HEAD = "lm_head.weight"


def shown_name(name: str | os.PathLike) -> str:
    """A model's name as a checkpoint records it: a Hub id as it is, of a folder the last part of its path."""
    return Path(name).resolve().name if os.path.isdir(name) else str(name)


def own_name(name: str) -> str:
    """A weight's name without the prefix that the backbone has inside the model with a head."""
    return name.removeprefix("model.")


def base_name(name: str) -> tuple[str, str] | None:
    """Return a weight's base and its name there; `None` for the method's own."""
    name = own_name(name)
    if name == _HEAD:
        return DECODER_BASE, name
    for prefix, base in (("language_model.", DECODER_BASE), ("encoder_model.", ENCODER_BASE)):
        if name.startswith(prefix) and ".lora_" not in name:
            return base, name.removeprefix(prefix).replace(".base_layer.", ".")
    return None


def own_modules(model: nn.Module) -> set[str]:
    """Paths of the modules that are the method's own or train, which are not quantized with the base."""
    own, frozen = set(), set()
    for name, parameter in model.named_parameters():
        path = name.rpartition(".")[0]
        if parameter.requires_grad or base_name(name) is None:
            own.add(path)
        else:
            frozen |= {path[:end] for end in (0, *(i for i, letter in enumerate(path) if letter == "."))}
    # A module with the base inside may hold a parameter of the method beside it.
    return own - frozen


def base_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """A base model's weights by their names in its backbone, and its LM head's."""
    head = model.get_output_embeddings()
    tensors = dict(model.base_model.state_dict())
    return tensors if head is None else {**tensors, _HEAD: head.weight}


def base_entry(
    model: PreTrainedModel, name: str | os.PathLike, hub_id: str | None, revision: str | None, loading: dict[str, Any]
) -> dict[str, str | None]:
    """Return a light checkpoint's record of a base: `repo_id` and `revision` on the Hub, `subfolder` if it is in one,
    `gguf_file` if it is one, `samples`, `dtype`, and sums of all `weights` in it and in narrower types."""
    is_folder = os.path.isdir(name)
    if not is_folder:
        fetching = {n: loading[n] for n in (*DOWNLOAD_ARGUMENTS, "subfolder") if n in loading}
        file = cached_file(name, loading.get("gguf_file") or "config.json", revision=revision, **fetching)
        # A branch moves on: what was loaded is a commit.
        revision = extract_commit_hash(file, None) or revision
    # Of a folder that is called a copy of a repository, only the weights are said to be the same, not the files.
    inside = {} if is_folder else {field: loading[field] for field in _PLACE_FIELDS if loading.get(field)}
    return {
        "repo_id": hub_id or (None if is_folder else str(name)),
        "revision": revision,
        **inside,
        "weights": {_name(kind): all_weights(model, kind) for kind in (model.dtype, *_narrower(model.dtype))},
        "samples": sample_text(model),
        "dtype": _name(model.dtype),
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _narrower(dtype: torch.dtype) -> set[torch.dtype]:
    return {torch.bfloat16, torch.float16} - {dtype}


def _checksums(tensor: Tensor) -> dict[torch.dtype, str]:
    """Checksums of a weight in its own type and in those that round it when it is cast; none if it has no sum."""
    own = checksum(tensor)
    if own is None:
        return {}
    rounded = {kind: checksum(tensor.detach().to(kind)) for kind in _narrower(tensor.dtype)}
    return {tensor.dtype: own, **{kind: digits for kind, digits in rounded.items() if digits is not None}}


class BaseRecord:
    """A record of a model's bases in memory: for each the entry of a light checkpoint, see [`base_entry`], and sums of
    the weights that are the bases' own."""

    def __init__(self, entries: Mapping[str, dict[str, str | None]], tensors: Iterable[tuple[str, Tensor]]):
        self.entries = {base: dict(entry) for base, entry in entries.items()}
        self.sums = {own_name(name): (tensor.dtype, _checksums(tensor)) for name, tensor in tensors}
        self._modules = {name.rpartition(".")[0] for name in self.sums}

    def without_base(self, state: Mapping[str, Tensor], trained: set[str]) -> dict[str, Tensor]:
        """The part of a state that differs from the bases: other parts, and base weights that train or changed."""
        return {name: tensor for name, tensor in state.items() if name in trained or not self._is_base(name, tensor)}

    def _is_base(self, name: str, tensor: Tensor) -> bool:
        name = own_name(name)
        if name not in self.sums:
            # A quantized map keeps its scales beside its weight.
            return any(name.startswith(f"{module}.weight.") for module in self._modules) or (
                name.endswith((".SCB", ".weight_format")) and name.rpartition(".")[0] in self._modules
            )
        dtype, totals = self.sums[name]
        if not totals or checksum(tensor) is None or tensor.dtype.itemsize == 1:
            # Frozen weights that are offloaded or quantized cannot be compared, nor have they trained.
            return True
        if tensor.dtype in totals:
            return checksum(tensor) == totals[tensor.dtype]
        # A wider type holds the base's values as they are, unless they have changed.
        narrowed = tensor.to(dtype)
        return checksum(narrowed) == totals[dtype] and checksum(narrowed.to(tensor.dtype)) == checksum(tensor)


def remember_base(model: PreTrainedModel, record: BaseRecord | None) -> None:
    """Keep a record with a model, or forget the one that it has."""
    model.base_model.__dict__[_RECORD] = record


def base_record(model: PreTrainedModel) -> BaseRecord | None:
    """The record that is kept with a model, or with the model that it is the backbone of."""
    return model.base_model.__dict__.get(_RECORD)


def stored_weights(name: str | os.PathLike, **download: Any) -> dict[str, Tensor]:
    """Return the weights in a checkpoint's own files, in one file or several."""
    file = cached_file(name, SAFE_WEIGHTS_NAME, _raise_exceptions_for_missing_entries=False, **download)
    if file is not None:
        return load_file(file)
    index = cached_file(name, SAFE_WEIGHTS_INDEX_NAME, **download)
    files, _ = get_checkpoint_shard_files(name, index, **download)
    return {key: tensor for file in files for key, tensor in load_file(file).items()}


def load_bases(
    config: PreTrainedConfig,
    entries: Mapping[str, dict[str, str | None]],
    places: Mapping[str, str | os.PathLike | None],
    checkpoint: str | os.PathLike,
    download: dict[str, Any],
) -> dict[str, dict[str, Tensor]]:
    """Fetch the bases that a light checkpoint names, check that they are the ones, and return the weights of each, see
    [`base_tensors`]."""
    weights = {}
    for base, entry in entries.items():
        argument = "base_model" if base == DECODER_BASE else "encoder_base_model"
        place = places.get(base) or entry["repo_id"]
        shown = f"{entry['repo_id']}, revision {entry['revision']}" if entry["repo_id"] else "a folder without a name"
        advice = f"point to a copy of it with from_pretrained(..., {argument}=FOLDER)"
        fetching = f"context_compressors.pretrained_base({str(place)!r})"
        if place is None:
            raise OSError(f"{checkpoint} leaves out the weights of its {base}'s base model, {shown}: {advice}")
        kept = None if entry.get("subfolder") else cached_base(place)
        inside = {}
        if kept is not None:
            place = kept
        elif not places.get(base):
            fields = {field: entry[field] for field in _PLACE_FIELDS if entry.get(field)}
            inside = {"revision": entry["revision"] or "main", **fields}
        wanted = config.decoder_config if base == DECODER_BASE else config.encoder_config
        try:
            loading = {**download, **inside, **gguf_arguments(inside.get("gguf_file"))}
            # In the type that it is stored in: fingerprints are taken from those values.
            if base == DECODER_BASE:
                model = AutoModelForCausalLM.from_pretrained(place, dtype="auto", **loading)
            else:
                # An encoder may be a base's first layers, which its configuration says.
                model = AutoModel.from_pretrained(place, config=wanted, dtype="auto", **loading)
        except OSError as error:
            raise OSError(
                f"{checkpoint} leaves out the weights of its {base}'s base model, {shown}, and {place} could not be "
                f"loaded: download it, where a network is, with {fetching}, which keeps it on this machine, let the "
                f"Hub be reached, or {advice} ({error})"
            ) from error
        _check_same_base(model, place, wanted, entry, shown)
        weights[base] = base_tensors(model)
    return weights


def _check_same_base(
    model: PreTrainedModel,
    place: str | os.PathLike,
    wanted: PreTrainedConfig,
    entry: dict[str, Any],
    shown: str,
) -> None:
    # The vocabulary may have been resized since; the fingerprint is of the base with its own.
    sizes = [(c.model_type, c.hidden_size, c.num_hidden_layers) for c in (model.config, wanted)]
    for field, own, expected in zip(("model_type", "hidden_size", "num_hidden_layers"), *sizes, strict=True):
        if own != expected:
            raise ValueError(f"{place} has {field} {own}, and the base model ({shown}) has {expected}")
    dtype, sums = getattr(torch, entry["dtype"]), entry["weights"]
    own, expected = all_weights(model, dtype), sums[entry["dtype"]]
    if own == expected:
        return
    casts = [kind for kind in _narrower(dtype) if all_weights(model, kind) == sums[_name(kind)]]
    cast = next((kind for kind in casts if all(p.to(kind).to(p.dtype).equal(p) for p in model.parameters())), None)
    error, is_rounding = rounding(model, entry["samples"], dtype)
    if cast is None and not is_rounding:
        raise ValueError(
            f"{place} is not the base model ({shown}): it has other weights, sum {own}, expected {expected}. Some "
            f"were compared: they are {error:.2%} off, which neither a cast nor a rounding explains; a fine-tuned "
            "base is another model"
        )
    logger.warning(
        f"{place} is nearly the base model ({shown}): its weights are {error:.2%} off, as after "
        f"{'a rounding' if cast is None else f'a cast to {_name(cast)}'}. The compressor works on them, perhaps "
        "slightly worse than on those that it was trained on"
    )


def merge(
    skeleton: PreTrainedModel,
    bases: Mapping[str, Mapping[str, Tensor]],
    stored: Mapping[str, Tensor],
    checkpoint: str | os.PathLike,
) -> tuple[dict[str, Tensor], set[str]]:
    """Return all weights of a compressor by the skeleton's names, those that its checkpoint stores and for the rest
    the bases' own, and the names of the bases'."""
    own = {own_name(name): tensor for name, tensor in stored.items()}
    merged, of_the_base = {}, set()
    # A tied head is the embedding table, whichever of the two places that comes from.
    tied = skeleton.all_tied_weights_keys
    for name, wanted in skeleton.state_dict().items():
        source = base_name(name)
        if own_name(name) in own:
            merged[name] = own.pop(own_name(name))
        elif name not in tied and source is not None:
            # An encoder that is no other model is the decoder's base once more.
            tensor = bases.get(source[0], bases[DECODER_BASE]).get(source[1])
            if tensor is None or tensor.shape != wanted.shape:
                shape = None if tensor is None else tuple(tensor.shape)
                raise ValueError(
                    f"{checkpoint} takes {source[1]} of shape {tuple(wanted.shape)} from its base, which has {shape}"
                )
            # Loading puts these very tensors into the model: encoder and decoder must not share one.
            merged[name] = tensor if source[0] in bases else tensor.clone()
            of_the_base.add(name)
    of_the_base |= {name for name, other in tied.items() if other in of_the_base}
    return {**merged, **own}, of_the_base


def share_weights(target: PreTrainedModel, source: nn.Module, copied: bool = False) -> None:
    """Put the parameters and buffers of `source`, or of its first layers, into `target`, whose linear maps may be
    inside LoRA layers."""
    modules = dict(target.named_modules())
    num_layers = target.config.num_hidden_layers
    for path, module in source.named_modules():
        layer = re.match(r"layers\.(\d+)(\.|$)", path)
        if layer and int(layer[1]) >= num_layers:
            continue
        # A LoRA layer keeps the map that it adapts in `base_layer`.
        destination: Any = modules.get(f"{path}.base_layer", modules[path])
        for name, parameter in module._parameters.items():
            wanted = destination._parameters.get(name)
            if parameter is not None and (wanted is None or wanted.shape != parameter.shape):
                shape = None if wanted is None else tuple(wanted.shape)
                raise ValueError(
                    f"{path}.{name} is {tuple(parameter.shape)} in the base and {shape} in the model of "
                    "`encoder_config`: take the base's own"
                )
            if copied and parameter is not None:
                parameter = nn.Parameter(parameter.detach().clone())
            destination._parameters[name] = parameter
        for name, buffer in module._buffers.items():
            destination._buffers[name] = buffer.clone() if copied and buffer is not None else buffer
