# SPDX-License-Identifier: Apache-2.0
"""A pretrained language model's tensors inside a compressor: what may be taken over, and the taking."""

from __future__ import annotations

import re

from torch import nn


def check_base(language_model: nn.Module) -> None:
    """Refuse a base that could not be taken over whole; what is left behind would silently change its output."""
    name = type(language_model).__name__
    devices = {str(tensor.device) for tensor in language_model.state_dict().values()}
    if len(devices) > 1 or "meta" in devices:
        raise ValueError(
            f"`from_base` needs the whole base on one device, `device_map` put it on {sorted(devices)} (meta is "
            "offloaded); save the compressor and load it with `from_pretrained(..., device_map=...)` instead"
        )
    if getattr(language_model, "hf_quantizer", None) is not None:
        raise ValueError(
            "the base is quantized: start from the unquantized one, save the compressor, and quantize it with "
            "`from_pretrained(..., quantization_config=...)`"
        )
    if getattr(language_model.get_output_embeddings(), "bias", None) is not None:
        raise ValueError(f"the LM head of {name} has a bias, which compressors do not support")
    for field in ("logit_scale", "logits_scaling"):
        if getattr(language_model.config, field, None) not in (None, 1, 1.0):
            raise ValueError(f"{name} scales its logits (`{field}`), which compressors do not support")


def take_tensors(target: nn.Module, source: nn.Module, copied: bool = False) -> None:
    """Put the parameters and buffers of `source` into `target`, whose linear maps may be inside LoRA layers.

    A target of fewer layers takes the first ones.
    """
    modules = dict(target.named_modules())
    num_layers = target.config.num_hidden_layers
    for path, module in source.named_modules():
        layer = re.match(r"layers\.(\d+)(\.|$)", path)
        if layer and int(layer[1]) >= num_layers:
            continue
        if path not in modules:
            raise ValueError(f"the base has {path!r}, which the model of `encoder_config` lacks: take the base's own")
        # A LoRA layer keeps the map that it adapts in `base_layer`.
        destination = getattr(modules[path], "base_layer", modules[path])
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
