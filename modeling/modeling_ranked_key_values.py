# SPDX-License-Identifier: Apache-2.0
"""Ranked key/values: the first of all keys and values of a context, by scores that one reading gives."""

from __future__ import annotations

import math
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
from .compressor.input_checks import check_context_length
from .compressor.token_rows import TokenRows
from .memory.compressed_context import CompressedContext, KeyValues
from .memory.headwise_memory import gather_pairs
from .memory.key_value_memory import KeyValueRecorder, key_value_shape
from .parts.float32_layers import Float32Linear
from .parts.packing import PackedSequence, text_positions

# Attention below it counts as none; and what is expected of every token before anything is learned.
_LEAST_ATTENTION, _FIRST_GUESS = 1e-4, 1e-2
# Of the scorers' squared error in the loss: so little that the norm that gradients are clipped by is the adapter's.
_ERROR_WEIGHT = 1e-2


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
            init.constant_(module.bias, math.log(_FIRST_GUESS))

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
        opening = self.first_slot_position
        key_values = tuple((keys[:, :, opening:], values[:, :, opening:]) for keys, values in key_values)
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
        """Keys and values of each layer, of the opening and the context, `(num_chunks, num_heads, num_places,
        head_dim)`, and what its attention reads of the context, `(num_chunks, num_tokens, hidden_size)`, without
        gradients."""
        num_chunks, num_opening = len(chunks.lengths), self.first_slot_position
        opening = torch.tensor(self.config.opening_ids, dtype=torch.long, device=chunks.input_ids.device)
        opening = opening.expand(num_chunks, -1)
        input_ids, mask = torch.cat([opening, chunks.input_ids], dim=1), self._mask(chunks)
        places = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
        # The layout counts from 1, the base from 0.
        position_ids = torch.cat([places[:, :num_opening], chunks.position_ids - 1 + num_opening], dim=1)
        recorder = KeyValueRecorder(places)
        outputs = self.encoder_outputs(
            input_ids, mask, position_ids, past_key_values=recorder, output_hidden_states=True
        )
        with torch.no_grad():
            layers = zip(self.language_model.layers, outputs.hidden_states, strict=False)
            states = [layer.input_layernorm(state[:, num_opening:]) for layer, state in layers]
        # Under autocast rotated keys are float32 and values are not.
        pairs = tuple((keys.to(self.dtype), values.to(self.dtype)) for keys, values in recorder.close())
        return pairs, states

    def _mask(self, chunks: Chunks) -> Tensor:
        """Of the opening and the chunks behind it, `(num_chunks, num_places)`."""
        opening = chunks.attention_mask.new_ones(len(chunks.lengths), self.first_slot_position)
        return torch.cat([opening, chunks.attention_mask], dim=1)

    def _repeated_attention(self, key_values: KeyValues, chunks: Chunks) -> Tensor:
        """Logarithms, `(num_chunks, num_layers * num_heads, num_tokens)`."""
        pairs = tuple((keys.detach(), values.detach()) for keys, values in key_values)
        ends = self.first_slot_position + chunks.starts + chunks.attention_mask.sum(dim=1)
        found = self.repeated_attention(pairs, self._mask(chunks), ends, chunks, self.config.repeat_size)
        attention = torch.stack(found, dim=1).flatten(1, 2)[:, :, self.first_slot_position :]
        return attention.clamp(min=_LEAST_ATTENTION).log()

    # --- in front of the slots ---

    @property
    def first_slot_position(self) -> int:  # type: ignore[override]
        """Tokens of the opening, which every context is read behind."""
        return len(self.config.opening_ids)

    def chunks_of(self, context: TokenRows) -> Chunks:
        chunks = super().chunks_of(context)
        positions = max(context.lengths) + self.first_slot_position
        check_context_length(self.config.decoder_config, positions, self.config.chunk_size)
        return chunks

    def text_position_offset(self, memory: CompressedContext, input_ids: Tensor, text_mask: Tensor | None) -> Tensor:
        offset = super().text_position_offset(memory, input_ids, text_mask) + self.first_slot_position
        mask = torch.ones_like(input_ids) if text_mask is None else text_mask[:, -input_ids.shape[1] :]
        moved = self._moves_first(input_ids, mask)
        return offset if moved is None else offset - moved.sum(dim=1)

    def first_inputs(
        self,
        text: TokenRows,
        position_ids: Tensor | None,
        memory: CompressedContext | None,
        offset: Tensor | None,
        is_full: bool = False,
    ) -> tuple[dict[str, Tensor], PackedSequence | None]:
        inputs, sequence = super().first_inputs(text, position_ids, memory, offset, is_full)
        moved = None if memory is None else self._moves_first(text.input_ids, text.attention_mask)
        if moved is not None:
            # The text's own opening ends where the one that the context was read behind does.
            ids = text_positions(text.attention_mask) if position_ids is None else position_ids
            ids = ids + self.first_slot_position - moved.sum(dim=1, keepdim=True)
            inputs["position_ids"] = torch.where(moved, ids, inputs["position_ids"])
        return inputs, sequence

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
        return gradient, torch.full_like(loss, _ERROR_WEIGHT)


class RankedKeyValuesForCausalLM(CompressorForCausalLM):
    r"""
    [`RankedKeyValuesModel`] with the decoder's LM head.

    Args:
        config ([`RankedKeyValuesConfig`]): the configuration.
    """

    model_class = RankedKeyValuesModel
