# SPDX-License-Identifier: Apache-2.0
# Written by context-compressors from its modules, whose names stand above their parts.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from .compressor_base import (
    Chunks,
    CompressedContext,
    CompressorForCausalLM,
    CompressorModel,
    Float32Linear,
    TokenRows,
    check_together,
    length_batches,
    mean_pool,
)
from .configuration_mean_pooling import MeanPoolingConfig


# modeling/modeling_mean_pooling.py

def nearest_ratios(log_ratios: Tensor, ratios: Sequence[int]) -> Tensor:
    """Return the ratio of a set that is nearest to each predicted one; of two as near, the lower.

    Args:
        log_ratios: log2 of the predicted ratios, any shape.

    Returns:
        A LongTensor of the same shape.
    """
    candidates = torch.tensor(sorted(ratios), device=log_ratios.device)
    # By the middles between neighbours: far outside the set all distances are alike.
    return candidates[torch.bucketize(log_ratios.exp2(), (candidates[:-1] + candidates[1:]) / 2)]


class MeanPoolingModel(CompressorModel):
    """Averages r neighbouring hidden states of a bidirectional encoder into one slot."""

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
        self.ratio_selector: Any = Float32Linear(encoder_width, 1) if config.ratio_selector else None
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

    # --- the paper's compressor ---

    def encode(self, chunks: Chunks, ratios: Sequence[int | Tensor]) -> list[Tensor]:
        hidden_states = self._hidden_states(chunks)
        return [self._slots(hidden_states, chunks, ratio) for ratio in ratios]

    def _hidden_states(self, chunks: Chunks) -> Tensor:
        # Section 4.1: h_1 ... h_L, with full self-attention; the ablation "No Encoder" pools token embeddings.
        if self.config.encoder_type == "embeddings":
            return self._embed_text(chunks.input_ids)
        inputs = (chunks.input_ids, chunks.attention_mask, chunks.position_ids)
        is_causal = self.config.encoder_attention == "causal"
        return self.encoder_states(*inputs, is_causal=is_causal, is_full=chunks.is_full, is_right_padded=True)

    def _slots(self, hidden_states: Tensor, chunks: Chunks, ratio: int | Tensor) -> Tensor:
        # Equations 3 and 4: S_k = {(k-1)r + 1, ..., min(kr, L)},  z_k = 1 / |S_k| sum_{i in S_k} h_i.
        slots = mean_pool(hidden_states, chunks.attention_mask, ratio, chunks.lengths)[0]
        # Section 5.1: a learned matrix W is applied to f_c(T, r).
        if self.slot_projection is not None:
            slots = self.slot_projection(slots.float()).to(hidden_states.dtype)
        elif self.slot_mlp is not None:
            slots = self.slot_mlp(slots.float()).to(hidden_states.dtype)
        return slots

    # --- semi-dynamic ratios ---

    def compress_rows(
        self, context: TokenRows, ratios: Sequence[Any], allow_untrained_ratio: bool = False, **beside: Any
    ) -> list[CompressedContext]:
        """See [`CompressorBackbone.compress_rows`]; a ratio of "auto" is the one that each context asks for."""
        if self.config.ratio_selector and any(isinstance(ratio, str) for ratio in ratios):
            with torch.no_grad():
                log_ratios = self._log_ratios(context) + self.config.ratio_scale
            selected = nearest_ratios(log_ratios, self.config.compression_ratios)
            selected = selected.where(~log_ratios.isnan(), self.config.default_ratio)
            ratios = [selected if isinstance(ratio, str) and ratio == "auto" else ratio for ratio in ratios]
        return super().compress_rows(context, ratios, allow_untrained_ratio, **beside)

    def predicted_log_ratios(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, chunk_lengths: Any = None
    ) -> Tensor:
        """Predict log2 of the ratio that each context asks for, from a pass of the encoder.

        Returns:
            `(batch_size,)`, NaN for a context without tokens.
        """
        context = self.context_rows(input_ids, attention_mask, chunk_lengths=chunk_lengths)
        check_together(context)
        return self._log_ratios(context)

    def _log_ratios(self, context: TokenRows) -> Tensor:
        chunks = self.chunks_of(context)
        num_tokens = torch.tensor(chunks.lengths, device=chunks.input_ids.device)
        log_ratios = torch.zeros(len(chunks.lengths), device=num_tokens.device)
        rows = [row for row, length in enumerate(chunks.lengths) if length]
        most_tokens = None if self.training else self.tokens_at_once
        for group in length_batches([chunks.lengths[row] for row in rows], None, most_tokens):
            index = torch.tensor([rows[place] for place in group], device=num_tokens.device)
            hidden_states = self._hidden_states(chunks.take(index.tolist()))
            # y of a chunk: a linear map of its last token's state.
            last = (num_tokens[index] - 1)[:, None, None]
            predicted = self.ratio_selector(hidden_states.take_along_dim(last, dim=1))[:, 0, 0]
            log_ratios = log_ratios.index_copy(0, index, predicted)
        # A context asks for as many slots as its chunks together: sum_c n_c 2^(-y_c) of sum_c n_c tokens.
        num_tokens, log_ratios = (x.unflatten(0, (-1, chunks.chunks_per_row)) for x in (num_tokens, log_ratios))
        num_slots = (num_tokens * (-log_ratios).exp2()).sum(dim=1)
        return (num_tokens.sum(dim=1) / num_slots).log2()


class MeanPoolingForCausalLM(CompressorForCausalLM):
    """[`MeanPoolingModel`] with the decoder's LM head."""

    model_class = MeanPoolingModel
