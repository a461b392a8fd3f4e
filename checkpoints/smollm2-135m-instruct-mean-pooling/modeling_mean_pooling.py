# SPDX-License-Identifier: Apache-2.0
# Written by context-compressors from its modules, whose names stand above their parts.

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from .compressor_base import Chunks, CompressorForCausalLM, CompressorModel, Float32Linear, Slots, mean_pool
from .configuration_mean_pooling import MeanPoolingConfig


# modeling/modeling_mean_pooling.py

def nearest_ratios(log_ratios: Tensor, ratios: Sequence[int], measure: str) -> Tensor:
    """The ratio of a set that is nearest to each predicted one; of two as near, the lower.

    Args:
        log_ratios: log2 of the predicted ratios, any shape.
        ratios: the set.
        measure: "ratio": between the ratios, so that 6 parts 4 and 8; "log_ratio": between their logarithms, which are
            parted by 5.66.

    Returns:
        A LongTensor of the same shape.
    """
    candidates = torch.tensor(sorted(ratios), device=log_ratios.device)
    places = candidates.float() if measure == "ratio" else candidates.float().log2()
    values = log_ratios.exp2() if measure == "ratio" else log_ratios
    # By the middles between neighbours: far outside the set all distances are alike.
    return candidates[torch.bucketize(values, (places[:-1] + places[1:]) / 2)]


class MeanPoolingModel(CompressorModel):
    r"""
    Averages r neighbouring hidden states of a bidirectional encoder into one slot.

    Args:
        config ([`MeanPoolingConfig`]): the configuration.
    """

    config_class = MeanPoolingConfig
    pools_windows = True
    method_parts = ("slot_projection", "slot_mlp", "ratio_selector")

    def __init__(self, config: MeanPoolingConfig):
        super().__init__(config)
        encoder_width = config.get_encoder_config().hidden_size
        self.slot_projection = None
        if config.linear_after_pooling:
            self.slot_projection = Float32Linear(encoder_width, config.hidden_size, bias=False)
        elif encoder_width != config.hidden_size and config.normed_mlp_size is None:
            raise ValueError(
                f"the encoder has width {encoder_width}, the decoder {config.hidden_size}: "
                "`linear_after_pooling` must be True"
            )
        self.slot_mlp = None
        if config.normed_mlp_size is not None:
            up = Float32Linear(encoder_width, config.normed_mlp_size, bias=False)
            down = Float32Linear(config.normed_mlp_size, config.hidden_size, bias=False)
            self.slot_mlp = nn.Sequential(nn.RMSNorm(encoder_width, eps=1e-6), up, nn.GELU(), down)
        self.ratio_selector = Float32Linear(encoder_width, 1) if config.selects_ratios else None
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if module is self.slot_projection:
            (init.zeros_ if self.config.embedding_residual else init.eye_)(module.weight)
        elif self.config.embedding_residual and self.slot_mlp is not None and module is self.slot_mlp[3]:
            init.zeros_(module.weight)
        elif isinstance(module, nn.RMSNorm):
            init.ones_(module.weight)
        else:
            super()._init_weights(module)
        if module is self.ratio_selector:
            # It starts in the middle of its set.
            ratios = torch.tensor(self.config.compression_ratios, dtype=torch.float32)
            init.constant_(module.bias, float(ratios.log2().mean()))

    def beside_contexts(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Take out `ratio_scale`, which replaces the configuration's: `ratio="auto"` adds it to the predicted log2."""
        scale = arguments.pop("ratio_scale", None)
        if scale is None:
            return {}
        if not self.config.selects_ratios:
            raise ValueError(f"`ratio_scale` is {scale}, but the checkpoint has no ratio selector to be moved")
        if not math.isfinite(scale):
            raise ValueError(f"`ratio_scale` must be a finite number, got {scale}")
        return {"ratio_scale": scale}

    def compress_with_log_ratios(
        self, input_ids: Tensor, attention_mask: Tensor | None, ratios: Sequence[Any] | Tensor, **passages: Any
    ) -> tuple[Any, Tensor]:
        """Memories, and what the ratio selector predicts of the contexts, from one pass of the encoder.

        Args:
            input_ids, attention_mask, ratios: as `input_ids`, `attention_mask` and `ratio` of `compress`.
            passages: `chunk_lengths`, as there.

        Returns:
            What `compress` returns, and `(batch_size, num_chunks)`: log2 of the predicted ratio of each chunk, NaN
            behind a context's last one.
        """
        found: list[Tensor] = []
        memories = self.named_memories(input_ids, attention_mask, ratios, False, log_ratios=found, **passages)
        nothing = torch.full((len(input_ids), 1), torch.nan, device=input_ids.device)
        return memories, found[0] if found else nothing

    def encode_chunks(
        self, chunks: Chunks, ratios: Sequence[Any], log_ratios: list[Tensor] | None = None, **beside: Any
    ) -> Sequence[Slots]:
        slots = super().encode_chunks(chunks, ratios, **beside)
        if log_ratios is not None and chunks.log_ratios is not None:
            log_ratios.append(chunks.log_ratios.unflatten(0, (-1, chunks.chunks_per_row)))
        return slots

    def encode(
        self, chunks: Chunks, ratios: Sequence[int | Tensor | str], ratio_scale: float | None = None
    ) -> list[Tensor]:
        # Section 4.1: h_1 ... h_L, with full self-attention; the ablation "No Encoder" pools token embeddings.
        if self.config.encoder_type == "embeddings":
            hidden_states = self._embed_text(chunks.input_ids)
        else:
            inputs = (chunks.input_ids, chunks.attention_mask, chunks.position_ids)
            is_causal = self.config.encoder_attention == "causal"
            padding = {"is_full": chunks.is_full, "is_right_padded": True}
            hidden_states = self.encoder_states(*inputs, is_causal=is_causal, **padding)
        if self.ratio_selector is not None:
            # Of each chunk's last token, NaN where it has none.
            num_tokens = chunks.attention_mask.sum(dim=1)
            last = (num_tokens - 1).clamp(min=0)[:, None, None]
            predicted = self.ratio_selector(hidden_states.take_along_dim(last, dim=1))[:, 0, 0]
            chunks.log_ratios = predicted.masked_fill(num_tokens == 0, torch.nan)
            chunks.selected_ratios = self._selected_ratios(chunks.log_ratios, ratio_scale)
        chosen: Any = [chunks.selected_ratios if isinstance(ratio, str) else ratio for ratio in ratios]
        return [self._slots(hidden_states, chunks, ratio) for ratio in chosen]

    def _selected_ratios(self, predicted: Tensor, ratio_scale: float | None) -> Tensor:
        config = self.config
        scaled = predicted.detach() + (config.ratio_scale if ratio_scale is None else ratio_scale)
        nearest = nearest_ratios(scaled, config.compression_ratios, config.ratio_selector)
        return nearest.where(~predicted.isnan(), config.default_ratio)

    def _slots(self, hidden_states: Tensor, chunks: Chunks, ratio: int | Tensor) -> Tensor:
        # Equations 3 and 4: S_k = {(k-1)r + 1, ..., min(kr, L)},  z_k = 1 / |S_k| sum_{i in S_k} h_i.
        slots = mean_pool(hidden_states, chunks.attention_mask, ratio, chunks.lengths)[0]
        # Section 5.1: a learned matrix W is applied to f_c(T, r).
        if self.slot_projection is not None:
            slots = self.slot_projection(slots.float()).to(hidden_states.dtype)
        elif self.slot_mlp is not None:
            slots = self.slot_mlp(slots.float()).to(hidden_states.dtype)
        return slots


class MeanPoolingForCausalLM(CompressorForCausalLM):
    r"""
    [`MeanPoolingModel`] with the decoder's LM head.

    Args:
        config ([`MeanPoolingConfig`]): the configuration.
    """

    model_class = MeanPoolingModel
