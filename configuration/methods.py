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
    from .configuration_compressor import CompressorConfig

METHODS = {
    "mean_pooling": ("MeanPoolingConfig", "MeanPoolingModel", "MeanPoolingForCausalLM"),
    "compression_tokens": ("CompressionTokensConfig", "CompressionTokensModel", "CompressionTokensForCausalLM"),
    "icae": ("ICAEConfig", "ICAEModel", "ICAEForCausalLM"),
    "five_hundred_x": ("FiveHundredXConfig", "FiveHundredXModel", "FiveHundredXForCausalLM"),
    "comprexit": ("ComprExITConfig", "ComprExITModel", "ComprExITForCausalLM"),
    "gmsa": ("GMSAConfig", "GMSAModel", "GMSAForCausalLM"),
    "tcp_autoencoder": ("TCPAutoencoderConfig", "TCPAutoencoderModel", "TCPAutoencoderForCausalLM"),
    "decal": ("DeCALConfig", "DeCALModel", "DeCALForConditionalGeneration", "DeCALForRetrieval"),
}


def config_class(method: str) -> type[CompressorConfig]:
    """The configuration class of a method of the register."""
    return getattr(importlib.import_module(f".configuration_{method}", __package__), METHODS[method][0])
