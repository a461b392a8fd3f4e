# SPDX-License-Identifier: Apache-2.0
"""The register of methods: one line each, and no other list of them anywhere.

A method's name is that of its files, `configuration_<name>.py` and `modeling_<name>.py`. Its line names its public
classes: the configuration, the model that `AutoModel` loads, and its heads, the one that generates first. The Auto
classes that load them are those of the configuration's `auto_classes`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from .configuration_compressor import CompressorConfig

METHODS = {
    "mean_pooling": ("MeanPoolingConfig", "MeanPoolingModel", "MeanPoolingForCausalLM"),
    "compression_tokens": ("CompressionTokensConfig", "CompressionTokensModel", "CompressionTokensForCausalLM"),
    "icae": ("ICAEConfig", "ICAEModel", "ICAEForCausalLM"),
    "autocompressor": ("AutoCompressorConfig", "AutoCompressorModel", "AutoCompressorForCausalLM"),
    "five_hundred_x": ("FiveHundredXConfig", "FiveHundredXModel", "FiveHundredXForCausalLM"),
    "voco": ("VoCoConfig", "VoCoModel", "VoCoForCausalLM"),
    "activation_beacon": ("ActivationBeaconConfig", "ActivationBeaconModel", "ActivationBeaconForCausalLM"),
    "comprexit": ("ComprExITConfig", "ComprExITModel", "ComprExITForCausalLM"),
    "gmsa": ("GMSAConfig", "GMSAModel", "GMSAForCausalLM"),
    "tcp_autoencoder": ("TCPAutoencoderConfig", "TCPAutoencoderModel", "TCPAutoencoderForCausalLM"),
    "pcc": ("PCCConfig", "PCCModel", "PCCForCausalLM"),
    "xrag": ("XRAGConfig", "XRAGModel", "XRAGForCausalLM"),
    "streaming_llm": ("StreamingLLMConfig", "StreamingLLMModel", "StreamingLLMForCausalLM"),
    "snap_kv": ("SnapKVConfig", "SnapKVModel", "SnapKVForCausalLM"),
    "kv_zip": ("KVZipConfig", "KVZipModel", "KVZipForCausalLM"),
    "ranked_key_values": ("RankedKeyValuesConfig", "RankedKeyValuesModel", "RankedKeyValuesForCausalLM"),
    "decal": ("DeCALConfig", "DeCALModel", "DeCALForConditionalGeneration", "DeCALForRetrieval"),
}


def config_class(method: str) -> type[CompressorConfig]:
    """The configuration class of a method of the register."""
    return getattr(importlib.import_module(f".configuration_{method}", __package__), METHODS[method][0])


def methods_on(base: PreTrainedConfig) -> tuple[str, ...]:
    """The methods that go with a base: those of encoder-decoders with a T5, the others with a decoder-only model."""
    return tuple(name for name in METHODS if config_class(name).is_encoder_decoder == base.is_encoder_decoder)


def methods_loaded_by(auto_class: str) -> tuple[str, ...]:
    """The methods with a class that an Auto class loads, such as "AutoModelForTextEncoding"."""
    return tuple(name for name in METHODS if auto_class in config_class(name).auto_classes())
