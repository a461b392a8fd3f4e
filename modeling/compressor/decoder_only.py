# SPDX-License-Identifier: Apache-2.0
"""Compressors on a causal language model: taking its weights, what trains beside them, and merging adapters."""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers import initialization as init
from transformers.utils import logging

from ..checkpoint.base_weights import own_modules, remember_base, share_weights
from ..parts.base_precision import note_trained_weights
from ..parts.lora import DECODER, ENCODER, check_adapters, initialize_lora, merge_lora
from .pretrained_compressor import CompressorPreTrainedModel

logger = logging.get_logger(__name__)


class DecoderOnlyPreTrainedModel(CompressorPreTrainedModel):
    """A compressor whose base, a causal language model, stays as it is: what trains beside it is float32."""

    _supports_flash_attn = True
    _supports_flex_attn = True
    trains_base = False

    def post_init(self) -> None:
        super().post_init()
        # What trains is loaded in float32 whatever type the rest is loaded in; the backbone names most of its parts.
        names = [name for name, parameter in self.named_parameters() if parameter.requires_grad]
        names = [name for name in names if not self._keep_in_fp32_modules_strict & set(name.split("."))]
        self._keep_in_fp32_modules_strict |= {f"^{re.escape(name)}$" for name in names}
        if getattr(self.config, "quantization_config", None) is not None:
            # The library's quantizers leave these as they are.
            self._keep_in_fp32_modules |= {re.escape(path) for path in own_modules(self)}

    @classmethod
    def _from_config(cls, config: Any, **kwargs: Any) -> Any:
        model = super()._from_config(config, **kwargs)
        # As `from_pretrained` leaves them.
        kept = set(model.base_model._keep_in_fp32_modules_strict)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad or kept & set(name.split(".")):
                parameter.data = parameter.data.float()
        return model

    def apply_trainable_set(self) -> None:
        super().apply_trainable_set()
        for module in self.modules():
            if isinstance(module, PreTrainedModel) and not isinstance(module, CompressorPreTrainedModel):
                note_trained_weights(module)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            init.normal_(module.weight, std=getattr(self.config.decoder_config, "initializer_range", 0.02))
            if module.bias is not None:
                init.zeros_(module.bias)

    @torch.no_grad()
    def load_base_weights(self, base: PreTrainedModel, encoder: PreTrainedModel | None = None) -> None:
        """See [`CompressorPreTrainedModel.load_base_weights`]; without `encoder`, one of its own copies the base."""
        backbone = self.base_model
        source = base.base_model
        device, dtype = base.device, base.dtype
        backbone.take_base(source)
        if backbone.encoder_model is not None:
            share_weights(backbone.encoder_model, encoder or source, copied=encoder is None)
        if self.get_output_embeddings() is not None:
            self.get_output_embeddings().weight = base.get_output_embeddings().weight
        # In the order of the modules: a seed must give the same start values in every process.
        fresh: dict[str, None] = {}
        for path, module in list(self.named_modules()):
            for name, parameter in list(module.named_parameters(recurse=False)):
                if parameter.is_meta:
                    setattr(
                        module, name, nn.Parameter(torch.empty_like(parameter, device=device, dtype=torch.float32))
                    )
                    fresh[path] = None
        for path in fresh:
            if ".lora_" not in path:
                # The backbone knows its own parts' start values.
                backbone._init_weights(self.get_submodule(path))
        initialize_lora(self)
        self.tie_weights()
        self.apply_trainable_set()
        for parameter in self.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        backbone.start_from_base()
        self.config.dtype = dtype
        self.generation_config = copy.deepcopy(getattr(base, "generation_config", None) or GenerationConfig())

    def merge_adapters(self) -> None:
        """Add the adapters to the weights they sit on, so that inference needs no `peft`.

        A shared base becomes two models, one for the encoder and one for the decoder, which takes twice the memory; a
        warning says so. With a `shared_adapter` alone it stays one. What else trains goes on training.
        """
        backbone, config = self.base_model, self.config
        check_adapters(self)
        if config.encoder_lora is not None or config.decoder_lora is not None:
            if getattr(config, "quantization_config", None) is not None:
                raise ValueError(
                    "adapters cannot be merged into quantized weights: load the checkpoint unquantized first"
                )
            # Most weights are the base's no more.
            remember_base(self, None)
            is_one_model = config.shared_adapter and config.decoder_adapter is None
            if config.has_encoder and backbone.encoder_model is None and not is_one_model:
                logger.warning("merge_adapters: encoder and decoder become two copies of the base, twice the memory")
                backbone.encoder_model = copy.deepcopy(backbone.language_model)
                config.encoder_config = copy.deepcopy(config.decoder_config)
            if backbone.encoder_model is not None:
                merge_lora(backbone.encoder_model, ENCODER)
            merge_lora(backbone.language_model, DECODER)
            config.encoder_lora = config.decoder_lora = None
            config.shared_adapter = False
            if config.trainable_parameters is not None:
                names = [f"model.{name}" if self is backbone else name for name, _ in self.named_parameters()]
                # None left is an empty list: `None` would be the method's own set.
                config.trainable_parameters = [
                    pattern
                    for pattern in config.trainable_parameters
                    if any(re.search(pattern, name) for name in names)
                ]
        self.apply_trainable_set()
