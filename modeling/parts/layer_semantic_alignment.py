# SPDX-License-Identifier: Apache-2.0
"""Layer semantic alignment: blocks like the decoder's lowest, in front of the decoder (GMSA, section 3.2)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

from ...configuration.configuration_shallow_encoder import first_layers
from .base_precision import in_base_precision, weights_of


class LayerSemanticAlignment(nn.Module):
    """Causal blocks that start as copies of the decoder's first ones.

    Args:
        decoder_config: configuration of the decoder.
        num_layers: number of blocks, k_LSA.

    Raises:
        ValueError: a decoder that is not built of `embed_tokens`, `layers` and `norm`.
    """

    def __init__(self, decoder_config: PreTrainedConfig, num_layers: int):
        super().__init__()
        config = first_layers(decoder_config, num_layers)
        # Slots come in place of embeddings, so that no table is needed.
        config.vocab_size, config.pad_token_id = 1, None
        self.blocks = AutoModel.from_config(config, dtype=torch.get_default_dtype())
        missing = {"embed_tokens", "layers", "norm"} - dict(self.blocks.named_children()).keys()
        if missing:
            raise ValueError(
                f"a decoder of type {decoder_config.model_type!r} has no {sorted(missing)}: layer semantic alignment "
                "needs one that is built of `embed_tokens`, `layers` and `norm`"
            )
        self.blocks.embed_tokens = None
        self.blocks.norm = nn.Identity()

    @torch.no_grad()
    def copy_blocks(self, decoder: PreTrainedModel) -> None:
        """Copy the values of the decoder's first blocks.

        Args:
            decoder: the decoder's backbone, with or without adapters.
        """
        source = {name.replace(".base_layer.", "."): parameter for name, parameter in decoder.named_parameters()}
        for name, parameter in self.blocks.named_parameters():
            parameter.copy_(source[name])

    @torch.no_grad()
    def start_from(self, decoder: PreTrainedModel) -> None:
        """`copy_blocks`, the tables that no checkpoint holds, and for blocks that do not train the decoder's type.

        Args:
            decoder: the decoder's backbone, as it was loaded.
        """
        self.copy_blocks(decoder)
        for path, module in self.blocks.named_modules():
            for name in module._buffers:
                module._buffers[name] = decoder.get_submodule(path)._buffers[name].clone()
        for parameter in self.blocks.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(decoder.dtype)

    def forward(self, slots: Tensor, decoder_type: torch.dtype) -> Tensor:
        """Align slots, each row by itself and from position 0 on.

        Args:
            slots: `(batch_size, num_slots, hidden_size)`, every row's own slots first: later ones are not seen, so
                that padding slots need no mask.
            decoder_type: the decoder's, in which flash attention runs where the blocks are held in float32 to train.

        Returns:
            `(batch_size, num_slots, hidden_size)`, in the blocks' type.
        """
        batch_size, num_slots, _ = slots.shape
        weight_type = next(weights_of(self.blocks)).dtype
        with in_base_precision(self.blocks, self._attention_precision(weight_type, decoder_type, slots.device.type)):
            return self.blocks(
                inputs_embeds=slots.to(weight_type),
                # Explicit: without a mask, some attention implementations look for several sequences in a row.
                attention_mask=torch.ones(batch_size, num_slots, dtype=torch.long, device=slots.device),
                position_ids=torch.arange(num_slots, device=slots.device).expand(batch_size, -1),
                use_cache=False,
            ).last_hidden_state

    def _attention_precision(
        self, weight_type: torch.dtype, decoder_type: torch.dtype, device_type: str
    ) -> AbstractContextManager[Any]:
        # Flash attention has kernels for half types alone.
        is_flash = "flash" in str(self.blocks.config._attn_implementation)
        needs_half = is_flash and weight_type == torch.float32 != decoder_type
        if not needs_half or torch.is_autocast_enabled(device_type):
            return nullcontext()
        return torch.autocast(device_type, dtype=decoder_type)
