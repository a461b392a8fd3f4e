# SPDX-License-Identifier: Apache-2.0
"""Ranked key/values: the first of all keys and values of a context, by scores that one reading gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ..configuration.configuration_ranked_key_values import RankedKeyValuesConfig
from .compressor.backbone import slot_counts
from .compressor.causal_lm import CompressorForCausalLM
from .compressor.chunking import Chunks
from .compressor.headwise_reading import HeadwiseModel, highest
from .memory.compressed_context import KeyValues
from .memory.headwise_memory import gather_pairs
from .memory.key_value_memory import KeyValueRecorder, key_value_shape
from .parts.float32_layers import Float32Linear

# Attention below it counts as none.
_LEAST_ATTENTION = 1e-4


class RankedKeyValuesModel(HeadwiseModel):
    r"""
    Reads a context of n tokens once, scores the keys and values of all layers and heads, and keeps the ceil(n / r) *
    layers * heads highest of them.

    Args:
        config ([`RankedKeyValuesConfig`]): the configuration.
    """

    config_class = RankedKeyValuesConfig
    method_parts = ("scorers",)

    def __init__(self, config: RankedKeyValuesConfig):
        super().__init__(config)
        layers, heads, _ = key_value_shape(config.decoder_config)
        self.scorers = nn.ModuleList(Float32Linear(config.hidden_size, heads) for _ in range(layers))
        self.read_by_heads()
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Float32Linear):
            # Nothing is expected of any token at first.
            init.constant_(module.bias, float(torch.tensor(_LEAST_ATTENTION).log()))

    def encode(self, chunks: Chunks, ratios: Sequence[int | Tensor]) -> list[KeyValues]:
        # 1. K_l, V_l: the base with the adapter reads the context, each token at its own position.
        key_values, states = self._read(chunks)
        # 2. s_l = W_l norm(x_l) + b_l, one score for each key/value head of each token.
        scores = torch.stack(
            [scorer(state).transpose(1, 2) for scorer, state in zip(self.scorers, states, strict=True)], dim=1
        ).flatten(1, 2)
        if self.training:
            # 3. What s_l learns: the logarithm of the highest attention that a second reading pays to a token; and
            # while they learn it, that itself ranks.
            attention = self._repeated_attention(key_values, chunks)
            key_values = self._with_loss(key_values, scores, attention, chunks.attention_mask)
            scores = attention
        # 4. The pairs of the highest scores in all layers and heads are the memory.
        memories, chunks.head_ids = [], []
        for ratio in ratios:
            counts = slot_counts(self.config, chunks.lengths, ratio)
            num_kept = torch.tensor(counts, device=scores.device) * scores.shape[1]
            is_kept = highest(scores.detach(), chunks.attention_mask, num_kept)
            pairs, head_ids = gather_pairs(key_values, is_kept, counts)
            memories.append(pairs)
            chunks.head_ids.append(head_ids)
        return memories

    def _read(self, chunks: Chunks) -> tuple[KeyValues, list[Tensor]]:
        """Keys and values of each layer, `(num_chunks, num_heads, num_tokens, head_dim)`, and what its attention
        reads, `(num_chunks, num_tokens, hidden_size)`, without gradients."""
        num_chunks, num_tokens = chunks.input_ids.shape
        places = torch.arange(num_tokens, device=chunks.input_ids.device).expand(num_chunks, -1)
        recorder = KeyValueRecorder(places)
        outputs = self.encoder_outputs(
            chunks.input_ids,
            chunks.attention_mask,
            # The layout counts from 1, the base from 0.
            chunks.position_ids - 1,
            past_key_values=recorder,
            output_hidden_states=True,
        )
        with torch.no_grad():
            layers = zip(self.language_model.layers, outputs.hidden_states, strict=False)
            states = [layer.input_layernorm(state) for layer, state in layers]
        # Under autocast rotated keys are float32 and values are not.
        pairs = tuple((keys.to(self.dtype), values.to(self.dtype)) for keys, values in recorder.close())
        return pairs, states

    def _repeated_attention(self, key_values: KeyValues, chunks: Chunks) -> Tensor:
        """Logarithms, `(num_chunks, num_layers * num_heads, num_tokens)`."""
        pairs = tuple((keys.detach(), values.detach()) for keys, values in key_values)
        lengths = chunks.attention_mask.sum(dim=1)
        found = self.repeated_attention(
            pairs, chunks.attention_mask, chunks.starts + lengths, chunks, self.config.repeat_size
        )
        return torch.stack(found, dim=1).flatten(1, 2).clamp(min=_LEAST_ATTENTION).log()

    def _with_loss(self, key_values: KeyValues, scores: Tensor, attention: Tensor, mask: Tensor) -> KeyValues:
        """The same keys and values, through which the scorers get the gradient of their squared errors."""
        real = mask[:, None].expand_as(scores).bool()
        loss = (scores - attention)[real].square().mean()
        (keys, values), *others = key_values
        return ((_WithLoss.apply(keys, loss), values), *others)


class _WithLoss(torch.autograd.Function):
    """A tensor as it is; in the backward pass a loss beside it gets its gradient, whatever trainer runs it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return gradient, torch.ones_like(loss)


class RankedKeyValuesForCausalLM(CompressorForCausalLM):
    r"""
    [`RankedKeyValuesModel`] with the decoder's LM head.

    Args:
        config ([`RankedKeyValuesConfig`]): the configuration.
    """

    model_class = RankedKeyValuesModel
