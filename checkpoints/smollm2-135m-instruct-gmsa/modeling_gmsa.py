# SPDX-License-Identifier: Apache-2.0
# Written by context-compressors from its modules, whose names stand above their parts.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel, initialization as init

from .compressor_base import (
    Chunks, CompressorForCausalLM, CompressorModel, Float32Linear, in_base_precision, mean_pool, weights_of
)
from .configuration_gmsa import GMSAConfig, first_layers


# modeling/modeling_gmsa.py

class LayerSemanticAlignment(nn.Module):
    """Causal blocks that start as copies of the decoder's first ones, k_LSA of them."""

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
        """Copy the values of the decoder's first blocks."""
        source = {name.replace(".base_layer.", "."): parameter for name, parameter in decoder.named_parameters()}
        for name, parameter in self.blocks.named_parameters():
            parameter.copy_(source[name])

    def forward(self, slots: Tensor, decoder_type: torch.dtype) -> Tensor:
        """Align slots, each row by itself and from position 0 on, `(batch_size, num_slots, hidden_size)` in the
        blocks' type.

        Every row's own slots come first: later ones are not seen, so that padding slots need no mask. In
        `decoder_type` flash attention runs where the blocks are held in float32 to train.
        """
        (batch_size, num_slots, _), device = slots.shape, slots.device
        weight_type = next(weights_of(self.blocks)).dtype
        # Flash attention has kernels for half types alone.
        is_flash = "flash" in str(self.blocks.config._attn_implementation) and weight_type == torch.float32
        needs_half = is_flash and decoder_type != torch.float32 and not torch.is_autocast_enabled(device.type)
        with torch.autocast(device.type, decoder_type) if needs_half else in_base_precision(self.blocks):
            return self.blocks(
                inputs_embeds=slots.to(weight_type),
                # Explicit: without a mask, some attention implementations look for several sequences in a row.
                attention_mask=torch.ones(batch_size, num_slots, dtype=torch.long, device=device),
                position_ids=torch.arange(num_slots, device=device).expand(batch_size, -1),
                use_cache=False,
            ).last_hidden_state


class GMSAModel(CompressorModel):
    r"""
    Averages r neighbouring states of a shallow encoder, and takes them to the decoder's input through blocks like its
    lowest.
    """

    config_class = GMSAConfig
    slot_origin = "windows"
    method_parts = ("width_map",)

    def __init__(self, config: GMSAConfig):
        super().__init__(config)
        encoder_width = config.get_encoder_config().hidden_size
        self.width_map = None
        if encoder_width != config.hidden_size:
            self.width_map = Float32Linear(encoder_width, config.hidden_size, bias=False)
        self.layer_semantic_alignment = None
        if config.lsa_layers:
            self.layer_semantic_alignment = LayerSemanticAlignment(config.decoder_config, config.lsa_layers)
            # Section 3.2: initialized with the weights from the first k_LSA layers of the decoder.
            self.layer_semantic_alignment.copy_blocks(self.language_model)
        self.post_init()

    @property
    def method_parameters(self) -> tuple[str, ...]:
        """Blocks of layer semantic alignment train, and where they do not, they have the decoder's type."""
        return (*super().method_parameters, r"(^|\.)layer_semantic_alignment\.")

    def _init_weights(self, module: nn.Module) -> None:
        if module is self.width_map:
            # It keeps the size of vectors whatever their width.
            init.normal_(module.weight, std=module.in_features**-0.5)
        else:
            super()._init_weights(module)

    def start_from_base(self) -> None:
        alignment, decoder = self.layer_semantic_alignment, self.language_model
        if alignment is None:
            return
        alignment.copy_blocks(decoder)
        # The tables that no checkpoint holds; and blocks that do not train have the decoder's type.
        for path, module in alignment.blocks.named_modules():
            for name in module._buffers:
                module._buffers[name] = decoder.get_submodule(path)._buffers[name].clone()
        for parameter in alignment.blocks.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(decoder.dtype)

    def encode(self, chunks: Chunks, ratios: Sequence[int | Tensor]) -> list[Tensor]:
        # Equation 2: H = Encoder_k(X).
        inputs = (chunks.input_ids, chunks.attention_mask, chunks.position_ids)
        states = self.encoder_outputs(*inputs, is_full=chunks.is_full, is_right_padded=True).last_hidden_state
        # Section 3.1: H~ = [1 / L_G sum H_{G_1}, ..., 1 / L_G sum H_{G_N}], L_G = r; the last group by its length.
        merged = [mean_pool(states, chunks.attention_mask, ratio, chunks.lengths)[0] for ratio in ratios]
        return [self.align(summary).to(self.dtype) for summary in merged]

    def align(self, summary: Tensor) -> Tensor:
        """Return slots of merged states, `(num_chunks, num_slots, hidden_size)`."""
        if self.width_map is not None:
            summary = self.width_map(summary)
        if self.layer_semantic_alignment is None:
            return summary
        # Equation 3: m~ = F_{k_LSA}(H~).
        aligned = self.layer_semantic_alignment(summary, self.dtype)
        return self.language_model.norm(aligned) if self.config.lsa_final_norm else aligned


class GMSAForCausalLM(CompressorForCausalLM):
    r"""
    [`GMSAModel`] with the decoder's LM head, which reads [m~; X_ins; x] (equation 4) or [m~; q; a] (equation 5).

    The loss is -log p(x_i | m~, X_ins, x_<i) (equation 4) where the text is the context's, and
    -log p(a_i | m~, q, a_<i) (equation 8) where it is an answer, as a mean over tokens. In the second stage
    (`training_stage="keft"`) exactly the W_Q, W_K and W_V of equation 6 train; equation 7 is the decoder's own
    attention, whose d is that of a head.
    """

    model_class = GMSAModel
