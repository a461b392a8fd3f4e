# SPDX-License-Identifier: Apache-2.0
"""Ranked key/values: the first of all keys and values of a context, by scores that one reading gives."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import initialization as init
from transformers.cache_utils import Cache

from ..configuration.configuration_ranked_key_values import RankedKeyValuesConfig
from .compressor.backbone import slot_counts
from .compressor.causal_lm import CompressorForCausalLM
from .compressor.chunking import Chunks, cut
from .compressor.headwise_reading import HeadwiseModel, highest
from .compressor.input_checks import check_context_length
from .compressor.token_rows import TokenRows, check_together
from .memory.compressed_context import CompressedContext, KeyValues
from .memory.headwise_memory import InputRecorder, gather_pairs, same_starts
from .memory.key_value_memory import inverse_frequencies, key_value_shape
from .parts.float32_layers import Float32Linear
from .parts.packing import PackedSequence, text_positions
from .parts.position_layout import rotated, rotation

# Attention below it counts as none; and what is expected of every token before anything is learned.
_LEAST_ATTENTION, _FIRST_GUESS = 1e-4, 1e-2
# Of the scorers' squared error in the loss: so little that the norm that gradients are clipped by is the adapter's.
_ERROR_WEIGHT = 1e-2
# Tokens of contexts that are read at once, so that long ones take no more memory; in training all are.
_TOKENS_AT_ONCE = 8192


class RankedKeyValuesModel(HeadwiseModel):
    r"""
    Reads a context x of n tokens once, and keeps the key/value pairs of highest score of all L layers and H heads:

        (1)  K_l, V_l = LLM(x)                          one reading, each token at its own position
        (2)  s_l = W_l norm_l(x_l) + b_l                a score for each key/value head of each token
        (3)  kept = the ceil(n / r) * L * H highest of all s
        (4)  P(answer) = LLM([K, V]_kept, question)     the same adapter
        (5)  a = max(1e-4, the highest attention that a second reading pays to a pair)
        (6)  loss = -log P(answer) + 0.01 mean (s - log a)^2

    In training (5) ranks in (3). W and b may also be fitted alone, see `fit_scorers`.

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
        counts = [slot_counts(self.config, chunks.lengths, ratio) for ratio in ratios]
        num_chunks = len(chunks.lengths)
        at_once = num_chunks if self.training else max(1, _TOKENS_AT_ONCE // chunks.input_ids.shape[1])
        if at_once >= num_chunks:
            found = self._encode_some(chunks, counts, slice(num_chunks))
        else:
            # Made first: what stays must not lie between what is dropped, whose place is used again.
            found = [self._room(num_chunks, max(of_all)) for of_all in counts]
            for start in range(0, num_chunks, at_once):
                span = slice(start, start + at_once)
                for room, part in zip(found, self._encode_some(chunks, counts, span), strict=True):
                    for whole, tensor in zip(_tensors(*room), _tensors(*part), strict=True):
                        whole[span] = tensor
        chunks.head_ids = [head_ids for _, head_ids in found]
        return [pairs for pairs, _ in found]

    def _room(self, num_chunks: int, num_slots: int) -> tuple[KeyValues, Tensor]:
        """Pairs and the heads that they are of, of any values."""
        layers, heads, head_dim = key_value_shape(self.config.decoder_config)
        empty = partial(torch.empty, device=self.device)
        shape = (num_chunks, heads, num_slots, head_dim)
        pairs = tuple((empty(shape, dtype=self.dtype), empty(shape, dtype=self.dtype)) for _ in range(layers))
        return pairs, empty((num_chunks, num_slots, layers * heads), dtype=torch.int16)

    def _encode_some(
        self, chunks: Chunks, counts: Sequence[Sequence[int]], span: slice
    ) -> list[tuple[KeyValues, Tensor]]:
        """Of each ratio the pairs that stay of the chunks in a span, and the heads that they are of."""
        moves = self._moves(chunks)
        names = ("input_ids", "attention_mask", "position_ids", "starts", "lengths")
        chunks = replace(chunks, **{name: getattr(chunks, name)[span] for name in names})
        # (1), and (2) of what each layer's attention reads, norm_l(x_l).
        if self.training:
            key_values, states = self._read(chunks)
            found = [scorer(state) for scorer, state in zip(self.scorers, states, strict=True)]
        else:
            key_values, found = self._read(chunks, lambda layer, states: self.scorers[layer](states))
        scores = _by_head(found)
        if self.training:
            # (5), which ranks while the scorers learn it by (6).
            attention = self._repeated_attention(key_values, chunks)
            key_values = self._with_loss(key_values, scores, attention, chunks.attention_mask)
            scores = attention
        opening = self.first_slot_position
        key_values = tuple((keys[:, :, opening:], values[:, :, opening:]) for keys, values in key_values)
        # (3) is the memory; (4) is the reading of any memory with `head_ids`.
        memories = []
        for of_all in counts:
            num_kept = torch.tensor(of_all[span], device=scores.device) * scores.shape[1]
            is_kept = highest(scores.detach(), chunks.attention_mask, num_kept)
            pairs, head_ids = gather_pairs(key_values, is_kept, of_all[span], max(of_all))
            if moves is not None:
                pairs = _moved(pairs, moves[span], inverse_frequencies(self.encoder_backbone))
            memories.append((pairs, head_ids))
        return memories

    @torch.no_grad()
    def kept_tokens(self, chunks: Chunks, ratio: int | Tensor) -> Sequence[Tensor]:
        """Tokens whose keys and values stay.

        Args:
            chunks: contexts without pads.
            ratio: context tokens per slot.

        Returns:
            For each layer `(num_chunks, num_heads, num_slots)`: of the pairs that stand there in the memory, which may
            be those of another layer's head, the places in the chunk.
        """
        key_values, found = self._read(chunks, lambda layer, states: self.scorers[layer](states))
        scores, counts = _by_head(found), slot_counts(self.config, chunks.lengths, ratio)
        num_kept = torch.tensor(counts, device=scores.device) * scores.shape[1]
        places = torch.arange(scores.shape[2], device=scores.device)[:, None]
        places = places.expand(*key_values[0][0].shape[:2], -1, -1)
        is_kept = highest(scores, chunks.attention_mask, num_kept)
        pairs, _ = gather_pairs(((places, places),) * len(key_values), is_kept, counts)
        return [of_layer[..., 0] for of_layer, _ in pairs]

    def _read(
        self, chunks: Chunks, take: Callable[[int, Tensor], Tensor] | None = None
    ) -> tuple[KeyValues, list[Tensor]]:
        """Keys and values of each layer, of the opening and the context, `(num_chunks, num_heads, num_places,
        head_dim)`, and what its attention reads of the context, `(num_chunks, num_tokens, hidden_size)`, without
        gradients, or what `take` makes of a layer's number and that."""
        num_chunks, num_opening = len(chunks.lengths), self.first_slot_position
        opening = torch.tensor(self.config.opening_ids, dtype=torch.long, device=chunks.input_ids.device)
        opening = opening.expand(num_chunks, -1)
        input_ids, mask = torch.cat([opening, chunks.input_ids], dim=1), self._mask(chunks)
        places = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
        # The layout counts from 1, the base from 0.
        position_ids = torch.cat([places[:, :num_opening], chunks.position_ids - 1 + num_opening], dim=1)

        def of_context(layer: int, states: Tensor) -> Tensor:
            states = states[:, num_opening:]
            return states if take is None else take(layer, states)

        recorder = InputRecorder(places, of_context)
        self.encoder_outputs(input_ids, mask, position_ids, past_key_values=recorder)
        # Under autocast rotated keys are float32 and values are not.
        pairs = tuple((keys.to(self.dtype), values.to(self.dtype)) for keys, values in recorder.close())
        return pairs, recorder.inputs

    def _mask(self, chunks: Chunks) -> Tensor:
        """Of the opening and the chunks behind it, `(num_chunks, num_places)`."""
        opening = chunks.attention_mask.new_ones(len(chunks.lengths), self.first_slot_position)
        return torch.cat([opening, chunks.attention_mask], dim=1)

    def _repeated_attention(self, key_values: KeyValues, chunks: Chunks) -> Tensor:
        """log a of (5), `(num_chunks, num_layers * num_heads, num_tokens)`."""
        pairs = tuple((keys.detach(), values.detach()) for keys, values in key_values)
        ends = self.first_slot_position + chunks.position_ids[:, 0] - 1 + chunks.attention_mask.sum(dim=1)
        found = self.repeated_attention(pairs, self._mask(chunks), ends, chunks, self.config.repeat_size)
        attention = torch.stack(found, dim=1).flatten(1, 2)[:, :, self.first_slot_position :]
        return attention.clamp(min=_LEAST_ATTENTION).log()

    @torch.no_grad()
    def fit_scorers(self, batches: Iterable[tuple[Tensor, Tensor | None]], ridge: float = 1e-3) -> None:
        """Fit the scorers by least squares to what a second reading of some hundred contexts attends to, a of (5).

        In each layer W, b = argmin sum_i |W norm(x_i) + b - log a_i|^2 + ridge |W|^2; nothing else changes.

        Args:
            batches: of contexts, input ids and their mask (`None` where no token is a pad), both
                `(batch_size, num_tokens)`.
            ridge: above 0, in mean squares of the inputs.

        Raises:
            ValueError: no token, or a `ridge` of 0 or below.
        """
        if ridge <= 0:
            raise ValueError(f"`ridge` must be above 0, got {ridge}")
        layers, heads, _ = key_value_shape(self.config.decoder_config)
        width, was_training = self.config.hidden_size, self.training
        options = {"dtype": torch.float64, "device": self.device}
        squares = torch.zeros(layers, width + 1, width + 1, **options)
        products = torch.zeros(layers, width + 1, heads, **options)
        self.eval()
        try:
            for input_ids, mask in batches:
                rows = self.context_rows(input_ids, mask)
                check_together(rows)
                chunks = self.chunks_of(rows)
                key_values, states = self._read(chunks)
                attention = self._repeated_attention(key_values, chunks).unflatten(1, (layers, heads))
                is_real = chunks.attention_mask.bool()
                targets = attention.permute(1, 0, 3, 2)[:, is_real].double()
                # The last input is b's.
                inputs = functional.pad(torch.stack(states)[:, is_real].double(), (0, 1), value=1.0)
                squares += inputs.mT @ inputs
                products += inputs.mT @ targets
        finally:
            self.train(was_training)
        num_tokens = squares[0, -1, -1]
        if not num_tokens:
            raise ValueError("`batches` have no token: give a few hundred contexts")
        diagonal = squares.diagonal(dim1=1, dim2=2)[:, :-1]
        diagonal += ridge * diagonal.mean(dim=1, keepdim=True)
        scorers: Any = self.scorers
        for scorer, solution in zip(scorers, torch.linalg.solve(squares, products), strict=True):
            scorer.weight.copy_(solution[:-1].T)
            scorer.bias.copy_(solution[-1])

    # --- in front of the slots ---

    @property
    def first_slot_position(self) -> int:  # type: ignore[override]
        """Tokens of the opening, which every context is read behind."""
        return len(self.config.opening_ids)

    def chunks_of(self, context: TokenRows) -> Chunks:
        config = self.config
        rows = (context.input_ids, context.attention_mask, context.lengths)
        chunks = cut(*rows, config.chunk_size, config.position_layout, context.passages)
        positions = max(chunks.lengths) if self._can_move else max(context.lengths)
        check_context_length(config.decoder_config, positions + self.first_slot_position, None)
        is_long = [n > self._most_positions for n in context.lengths for _ in range(chunks.chunks_per_row)]
        if any(is_long):
            # No base reads farther than its positions: the chunks of these are read right behind the opening.
            starts = chunks.starts.where(torch.tensor(is_long, device=chunks.starts.device), 0)
            chunks.position_ids = chunks.position_ids - starts[:, None]
        return chunks

    @property
    def _most_positions(self) -> int:
        """Tokens of a context that have positions of their own behind the opening."""
        limit = self.config.max_position_embeddings
        return sys.maxsize if limit is None else limit - self.first_slot_position

    @property
    def _can_move(self) -> bool:
        return inverse_frequencies(self.encoder_backbone) is not None

    def _moves(self, chunks: Chunks) -> Tensor | None:
        """How far behind the place where it was read each chunk stands in its document, `(num_chunks,)`; `None` if all
        were read in their places."""
        rows = range(0, len(chunks.lengths), chunks.chunks_per_row)
        if max(sum(chunks.lengths[row : row + chunks.chunks_per_row]) for row in rows) <= self._most_positions:
            return None
        return chunks.starts + 1 - chunks.position_ids[:, 0]

    def slot_positions(self, slot_mask: Tensor, chunks: Chunks, counts: Sequence[int]) -> Tensor:
        """That of each chunk's first token: which of its tokens the pairs of a slot are of, their heads settle."""
        of_slots = [chunk for chunk, count in enumerate(counts) for _ in range(count)]
        starts = chunks.starts[torch.tensor(of_slots, dtype=torch.long, device=slot_mask.device)] + 1
        return torch.zeros_like(slot_mask).masked_scatter(slot_mask.bool(), starts)

    def _starts_and_lengths(self, memory: CompressedContext) -> tuple[Tensor, Tensor]:
        """Where the chunk of each slot is read, as in `position_ids`, and the positions that each row takes: keys keep
        their places, unless a context has more tokens than the base positions."""
        starts, lengths, num_slots = memory.position_ids, memory.num_context_tokens, memory.attention_mask.shape[1]
        is_short = isinstance(memory.ratio, int) and num_slots * memory.ratio <= self._most_positions
        if is_short or not num_slots or memory.inverse_frequencies is None:
            return starts, lengths
        return same_starts(memory, lengths > self._most_positions)

    def cache_of_slots(self, memory: CompressedContext, is_full: bool, cache: Cache | None, use_cache: bool) -> Cache:
        starts, _ = self._starts_and_lengths(memory)
        if starts is not memory.position_ids:
            pairs = _moved(memory.key_values or (), starts - memory.position_ids, memory.inverse_frequencies)
            memory = replace(memory, key_values=pairs, position_ids=starts, check=False)
        return super().cache_of_slots(memory, is_full, cache, use_cache)

    def text_position_offset(self, memory: CompressedContext, input_ids: Tensor, text_mask: Tensor | None) -> Tensor:
        offset = self._starts_and_lengths(memory)[1] + self.first_slot_position
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


def _tensors(pairs: KeyValues, head_ids: Tensor) -> list[Tensor]:
    return [*chain.from_iterable(pairs), head_ids]


def _moved(key_values: KeyValues, moves: Tensor, frequencies: Tensor | None) -> KeyValues:
    """Pairs at other positions, see [`rotation`]."""
    if not key_values or frequencies is None:
        return key_values
    tables = rotation(moves, frequencies, key_values[0][0])
    return tuple((rotated(keys, tables), values) for keys, values in key_values)


def _by_head(scores: Sequence[Tensor]) -> Tensor:
    """Scores of all layers, `(num_chunks, num_layers * num_heads, num_tokens)`; of each `(num_chunks, num_tokens,
    num_heads)`."""
    return torch.stack([of_layer.transpose(1, 2) for of_layer in scores], dim=1).flatten(1, 2)


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
