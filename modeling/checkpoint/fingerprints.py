# SPDX-License-Identifier: Apache-2.0
"""Names for weights and settings: fingerprints, samples, and an exact checksum.

A fingerprint is the same in float32 and bfloat16. Samples tell a rounded copy of a model apart from another one.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..parts.lora import OF_THE_DECODER

_PARAMETERS, _RUNS, _RUN = 16, 2, 16
# Relative error of the coarsest rounding that is taken for one. Mean over the matrices of SmolLM2-135M and two small
# Llamas: 8 bits 0.005 to 0.009, 5 bits 0.038 to 0.046, 4 bits 0.078 to 0.16, 3 bits 0.16 to 0.24.
_MOST_ROUNDED = 0.2
# What a rounding leaves lies on a grid of so many steps at most, in each run of neighbours:
# 8 bits as far as float32 tells, 5 bits as far as bfloat16 does.
_FINE, _COARSE, _OFF, _OFF_A_STEP = 255, 31, 0.02, 3 * 2.0**-9
# Root mean square of what a rounding takes away, in steps: 0.29 where all of a step is alike. A fine-tuned model is
# moved off the grid by less than that, or by more.
_TAKEN = (0.12, 0.5)
# Values that are summed at once: few enough for a processor's cache.
_CHUNK = 1 << 20
# Fields that change neither slots nor how they are read: where weights come from, what trains, how texts are worded,
# how fast and in what type it computes, when a text ends.
_IGNORED_FOR_MEMORIES = {
    *("base_model_name_or_path", "base_model_revision", "encoder_name_or_path", "encoder_revision"),
    *("encoder_tokenizer", "compression_ratios", "trainable_parameters", "training_stage"),
    *("prompts", "prompt_format", "context_prefix", "bos_before_text"),
    *("eos_token_id", "pad_token_id"),
    *("external_weights", "parent_model_name_or_path", "measured_chunks", "code_version", "config_schema"),
    *("auto_map", "custom_pipelines", "architectures", "model_type", "transformers_version"),
    "segment_windows",
    # Stored by earlier versions.
    "restores_context_start",
    *("use_cache", "dtype", "torch_dtype", "quantization_config"),
    *("output_hidden_states", "output_attentions", "return_dict"),
}
# Of these, what changes answers.
_IGNORED_FOR_ANSWERS = _IGNORED_FOR_MEMORIES - {
    *("prompts", "prompt_format", "context_prefix", "bos_before_text", "eos_token_id"),
}


def weights_fingerprint(model: Any, of_answers: bool = False, stored: Mapping[str, Tensor] | None = None) -> str:
    """Sixteen hexadecimal digits from every value of every parameter, the same in float32 and bfloat16.

    Not in float16, which rounds float32's values to others before they are bfloat16's.
    """
    digest = hashlib.sha256()
    is_reader = not of_answers and model.config.has_frozen_memories
    weights: dict[torch.device, Tensor] = {}
    for name, parameter in sorted(model.named_parameters()):
        if is_reader and OF_THE_DECODER.search(name):
            continue
        owner, _, own = name.rpartition(".")
        module = model.get_submodule(owner)
        with at_hand(module):
            values = full_tensor(module.get_parameter(own).detach())
        source = (stored or {}).get(name)
        if source is not None and source.shape == values.shape and source.to(values).equal(values):
            values = source.to(values.device)
        if values.device not in weights:
            weights[values.device] = _weights(values.device)
        sums = [_weighted_sum(chunk, weights[values.device]) for chunk in values.reshape(-1).split(_CHUNK)]
        digest.update(f"{name}{tuple(parameter.shape)}{torch.stack(sums).tolist() if sums else []}".encode())
    return digest.hexdigest()[:16]


def at_hand(module: nn.Module) -> AbstractContextManager[Any]:
    """Inside this block a module's own parameters have their values, also those that accelerate has offloaded."""
    if not any(parameter.is_meta for parameter in module.parameters(recurse=False)):
        return nullcontext()
    from accelerate.utils import align_module_device

    return align_module_device(module)


def _weights(device: torch.device) -> Tensor:
    # Odd, so that no changed bit is lost; different, so that exchanged rows are not the same sum.
    return torch.arange(1, _CHUNK // 2, 2, device=device)


def _weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """The sum, modulo 2**64, of bfloat16 values as words of eight bytes, each times its weight."""
    values = values.to(torch.bfloat16)
    if len(values) % 4:
        values = nn.functional.pad(values, (0, -len(values) % 4))
    elif values.storage_offset() % 4:
        values = values.clone()
    words = values.view(torch.int64)
    return (words * weights[: len(words)]).sum()


def settings_fingerprint(config: PreTrainedConfig, of_answers: bool = False) -> str:
    """Eight hexadecimal digits from every field of a configuration that changes slots or how they are read.

    Fields with the values that their class gives them do not count: one that a later version adds changes no name.
    """
    settings = _settings(config, _IGNORED_FOR_ANSWERS if of_answers else _IGNORED_FOR_MEMORIES)
    if not of_answers and (config.has_frozen_memories or config.shared_adapter):
        settings.pop("decoder_lora", None)
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _settings(config: PreTrainedConfig, ignored: set[str]) -> dict[str, Any]:
    kind: Any = type(config)
    usual = _usual_settings(kind)
    settings = {}
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            settings[name] = {"model_type": value.model_type, **_settings(value, ignored)}
        elif not name.startswith("_") and name not in ignored and (name not in usual or value != usual[name]):
            settings[name] = value
    return settings


@functools.cache
def _usual_settings(kind: type[PreTrainedConfig]) -> dict[str, Any]:
    return vars(kind())


def sample(model: nn.Module, dtype: torch.dtype) -> Tensor:
    """Runs of neighbouring values of some 16 parameters, spread over the model: (num_parameters, 2, 16) in float32."""
    kinds: dict[str, list[nn.Parameter]] = {}
    for name, parameter in sorted(model.named_parameters()):
        if parameter.shape[-1] >= _RUN:
            kinds.setdefault(re.sub(r"\d+", "", name), []).append(parameter)
    count = min(max(_PARAMETERS, len(kinds)), sum(map(len, kinds.values())))
    runs = []
    # Kinds take turns, from the first layers to the last.
    for index, kind in zip(range(count), itertools.cycle(kinds.values()), strict=False):
        parameter = kind[index * len(kind) // count]
        rows = full_tensor(parameter.detach()).reshape(-1, parameter.shape[-1])
        for run in range(_RUNS):
            # Quantised matrices have one scale for 16 neighbours of a row or for more, from such a place on.
            start = run * (rows.shape[1] // (2 * _RUN)) * _RUN
            runs.append(rows[(run + 1) * len(rows) // (_RUNS + 1), start : start + _RUN].to(dtype).float().cpu())
    return torch.stack(runs).view(count, _RUNS, _RUN) if runs else torch.empty(0, _RUNS, _RUN)


def sample_text(model: PreTrainedModel) -> str:
    """[`sample`] as text: base64 of the values in the model's type, 2.8 kB for 16 parameters in float32."""
    dtype = _sample_type(model.dtype)
    return base64.b64encode(sample(model, dtype).to(dtype).view(torch.uint8).numpy().tobytes()).decode()


def _sample_type(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in (torch.bfloat16, torch.float16) else torch.float32


def rounding(model: nn.Module, recorded: str, dtype: torch.dtype) -> tuple[float, bool]:
    """Measure the distance from the model that [`sample_text`] recorded, and tell whether a rounding explains it.

    Returns:
        root mean square of the difference, relative to that of the values, mean over the parameters that differ; and
        whether the values of one model are rounded ones of the other's. A cast is none: it has a sum of its own.
    """
    stored_as = _sample_type(dtype)
    expected = torch.frombuffer(bytearray(base64.b64decode(recorded)), dtype=stored_as).float().view(-1, _RUNS, _RUN)
    own = sample(model, torch.float32)
    if own.shape != expected.shape:
        return float("inf"), False
    values = own.to(stored_as).float()
    if values.equal(expected):
        return 0.0, False
    size = expected.flatten(1).norm(dim=1).clamp(min=torch.finfo(torch.float32).tiny)
    errors = (values - expected).flatten(1).norm(dim=1) / size
    # Norms are left as they are where matrices are rounded.
    error = float(errors.sum() / errors.count_nonzero().clamp(min=1))
    if any(expected.to(kind).to(stored_as).float().equal(values) for kind in (torch.float16, torch.bfloat16)):
        return error, False
    runs = own.flatten(0, 1), expected.flatten(0, 1)
    differ = (values != expected).any(dim=2).flatten()
    explained = []
    # Either model may be the rounded one.
    for rounded, other in (runs, runs[::-1]):
        taken = (rounded - other)[differ].square().mean(dim=1).sqrt() / _steps(rounded[differ])
        explained.append(float(((taken > _TAKEN[0]) & (taken < _TAKEN[1])).float().mean()))
    return error, error <= _MOST_ROUNDED and max(explained) > 0.4


def _steps(runs: Tensor) -> Tensor:
    """The step of the grid that each run's values lie on, `(num_runs,)`; NaN where they lie on none."""
    low, high = runs.aminmax(dim=1, keepdim=True)
    counts = torch.arange(1, _FINE + 1)
    places = ((runs - low) / (high - low))[:, :, None] * counts
    off = (places - places.round()).abs().amax(dim=1)
    allowed = torch.where(counts <= _COARSE, _OFF + counts * _OFF_A_STEP, _OFF)
    fits = off <= allowed
    steps = (high - low)[:, 0] / counts[fits.int().argmax(dim=1)]
    return steps.where(fits.any(dim=1), torch.nan)


def weight_versions(model: nn.Module) -> tuple[Any, ...]:
    """Return place, shape and count of changes in place of each parameter: another key once a value changes."""
    versions, modules = [], [model]
    # Every call of `compress` asks, and `model.parameters()`, which names each one, takes three times as long.
    while modules:
        module = modules.pop()
        modules += [child for child in module._modules.values() if child is not None]
        for weight in filter(torch.is_tensor, module._parameters.values()):
            # A quantized or shared-out weight may be a class of its own, without a place in memory.
            place = weight.data_ptr() if type(weight) in (Tensor, nn.Parameter) else id(weight)
            # Tensors made in inference mode count no versions.
            versions.append((place, weight.shape, -1 if weight.is_inference() else weight._version))
    return tuple(versions)


def all_weights(model: nn.Module, dtype: torch.dtype) -> str:
    """Sixteen hexadecimal digits from every bit of every parameter in a type."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        values = full_tensor(parameter.detach()).to(dtype)
        digest.update(f"{name}{tuple(values.shape)}{checksum(values)}".encode())
    return digest.hexdigest()[:16]


def checksum(tensor: Tensor) -> str | None:
    """Digits from all of a tensor's bits and their order; `None` for one without floating-point values at hand."""
    # A quantized weight may be a class of its own.
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta or not tensor.is_floating_point():
        return None
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()
    in_words = flat.numel() * flat.element_size() // 8 * 8 // flat.element_size()
    # Words of eight bytes are summed many times faster than single values.
    weights = _weights(flat.device)
    words = flat[:in_words].view(torch.int64).split(len(weights))
    sums = torch.stack([(chunk * weights[: len(chunk)]).sum() for chunk in words])
    return hashlib.sha256(f"{sums.tolist()}{flat[in_words:].view(torch.uint8).tolist()}".encode()).hexdigest()[:16]


def full_tensor(tensor: Tensor) -> Tensor:
    """The tensor itself, gathered where FSDP has shared it out among processes."""
    if torch.distributed.is_available():
        from torch.distributed.tensor import DTensor

        if isinstance(tensor, DTensor):
            return tensor.full_tensor()
    return tensor
