# SPDX-License-Identifier: Apache-2.0
"""Ranked key/values: the first of all keys and values of a context, by scores that one reading gives."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import initialization as init
from transformers.cache_utils import Cache

from ..configuration.configuration_ranked_key_values import RankedKeyValuesConfig
from ..configuration.layer_shape import key_value_shape
from .compressor.backbone import Chunks, cut, slot_counts
from .compressor.causal_lm import CompressorForCausalLM
from .compressor.headwise_reading import HeadwiseModel
from .compressor.validation import TokenRows, check_context_length, measure_rows
from .memory.compressed_context import CompressedContext, KeyValues
from .memory.headwise_pairs import HeadwisePairs, kept_pairs
from .memory.key_value_memory import KeyValueRecorder, inverse_frequencies
from .parts.base_pass import Float32Linear
from .parts.packing import text_positions
from .parts.position_layout import moved_pairs

# Attention below it counts as none; and what is expected of every token before anything is learned.
_LEAST_ATTENTION, _FIRST_GUESS = 1e-4, 1e-2
# Of the scorers' squared error in the loss: so little that the norm that gradients are clipped by is the adapter's.
_ERROR_WEIGHT = 1e-2


class RankedKeyValuesModel(HeadwiseModel):
    r"""
    Reads a context x of n tokens once, and keeps the key/value pairs of highest score of all L layers and H heads:

        (1)  K_l, V_l = LLM(x)                          one reading, each token at its own position
        (2)  s_l = W_l norm_l(x_l) + b_l                a score for each key/value head of each token
        (3)  kept = the ceil(n / r) * L * H highest of all s
        (4)  P(answer) = LLM([K, V]_kept, question)     the same adapter
        (5)  a = max(1e-4, the highest attention that a second reading pays to a pair)
        (6)  loss = -log P(answer) + 0.01 mean (s - log a)^2

    Contexts are read behind the configuration's `opening_ids`, such as a chat's, which are in no memory. Keys keep
    their places, and the text goes on behind the context. Of a context with more tokens than the base has positions
    each chunk is read right behind the opening; its keys are turned to their places in the document, so that memories
    are joined as ever, and when a text reads them all chunks stand at the same positions (Parallel Context Windows,
    https://arxiv.org/abs/2212.10947).

    In training (5) ranks in (3). `forward` adds the second term of (6) where contexts come with labels, and `compress`
    appends it to a list `own_losses`. W and b may also be fitted alone, see `fit_scorers`.

    (2) and its fit are KVzap-Linear's (2601.07891), (5) and the shared budget of (3) KVzip's (2505.23416) and Fast
    KVzip's (2601.17668). Learned selection with an adapter is near KV-Distill (2503.10337), nested rankings are
    KVP's (2602.10238), and learned budgets LKV's (2605.06676). RestoreKV (2608.01247) adds learned tokens.
    """

    config_class = RankedKeyValuesConfig
    slot_origin = "kept"
    method_parts = ("scorers",)
    has_own_loss = True

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

    # --- contexts behind the opening ---

    @property
    def reads_full_rows(self) -> bool:  # type: ignore[override]
        """Return whether `encode` gets all chunks of a row: the loss of (6) is a row's."""
        return self.training

    @property
    def first_slot_position(self) -> int:  # type: ignore[override]
        """Tokens of the opening, which every context is read behind."""
        return len(self.config.opening_ids)

    def chunks_of(self, context: TokenRows) -> Chunks:
        config = self.config
        rows = (context.input_ids, context.attention_mask, context.lengths)
        chunks = cut(*rows, config.chunk_size, config.position_layout, context.passages)
        positions = (
            max(chunks.lengths) if inverse_frequencies(self.encoder_backbone) is not None else max(context.lengths)
        )
        check_context_length(config, positions + self.first_slot_position)
        is_long = [n > self._most_positions for n in context.lengths for _ in range(chunks.chunks_per_row)]
        if any(is_long):
            # No base reads farther than its positions: the chunks of these are read right behind the opening.
            starts = chunks.starts.where(torch.tensor(is_long, device=chunks.starts.device), 0)
            chunks.position_ids = chunks.position_ids - starts[:, None]
        return chunks

    def opened(self, chunks: Chunks) -> tuple[Tensor, Tensor, Tensor]:
        """Return token ids, mask and positions of the opening and the chunks behind it, `(num_chunks, num_places)`
        each."""
        num_chunks, ids = len(chunks.lengths), chunks.input_ids
        opening = torch.tensor(self.config.opening_ids, dtype=torch.long, device=ids.device).expand(num_chunks, -1)
        mask = torch.cat([torch.ones_like(opening), chunks.attention_mask], dim=1)
        places = torch.arange(opening.shape[1], device=ids.device).expand_as(opening)
        # The layout counts from 1, the base from 0.
        position_ids = torch.cat([places, chunks.position_ids - 1 + opening.shape[1]], dim=1)
        return torch.cat([opening, ids], dim=1), mask, position_ids

    @property
    def _most_positions(self) -> int:
        """Tokens of a context that have positions of their own behind the opening."""
        limit = self.config.max_position_embeddings
        return sys.maxsize if limit is None else limit - self.first_slot_position

    def encode_chunks(self, chunks: Chunks, ratios: Sequence[Any], **extras: Any) -> Sequence[Any]:
        """See [`CompressorBackbone.encode_chunks`]; keys of chunks that were read right behind the opening move to
        their places in the document."""
        memories: Any = super().encode_chunks(chunks, ratios, **extras)
        rows = range(0, len(chunks.lengths), chunks.chunks_per_row)
        if max(sum(chunks.lengths[row : row + chunks.chunks_per_row]) for row in rows) > self._most_positions:
            moves = chunks.starts + 1 - chunks.position_ids[:, 0]
            for memory in memories:
                memory.key_values = moved_pairs(memory.key_values, moves, inverse_frequencies(self.encoder_backbone))
        return memories

    def slot_positions(self, slot_mask: Tensor, chunks: Chunks, counts: Sequence[int]) -> Tensor:
        """Return the position of each chunk's first token: the heads settle which tokens the pairs of a slot are
        of."""
        of_slots = [chunk for chunk, count in enumerate(counts) for _ in range(count)]
        starts = chunks.starts[torch.tensor(of_slots, dtype=torch.long, device=slot_mask.device)] + 1
        return torch.zeros_like(slot_mask).masked_scatter(slot_mask.bool(), starts)

    def _starts_and_lengths(self, memory: CompressedContext) -> tuple[Tensor, Tensor]:
        """Return where the chunk of each slot is read, as in `position_ids`, and the positions that each row takes:
        keys keep their places, unless a context has more tokens than the base positions."""
        starts, lengths, num_slots = memory.position_ids, memory.num_context_tokens, memory.attention_mask.shape[1]
        is_short = isinstance(memory.ratio, int) and num_slots * memory.ratio <= self._most_positions
        if is_short or not num_slots or memory.inverse_frequencies is None:
            return starts, lengths
        return _same_starts(memory, lengths > self._most_positions)

    def cache_of_slots(self, memory: CompressedContext, is_full: bool, cache: Cache | None, use_cache: bool) -> Cache:
        starts, _ = self._starts_and_lengths(memory)
        if starts is not memory.position_ids:
            pairs = moved_pairs(memory.key_values or (), starts - memory.position_ids, memory.inverse_frequencies)
            memory = replace(memory, key_values=pairs, position_ids=starts, check=False)
        return super().cache_of_slots(memory, is_full, cache, use_cache)

    def text_position_offset(self, memory: CompressedContext, input_ids: Tensor, text_mask: Tensor | None) -> Tensor:
        offset = self._starts_and_lengths(memory)[1] + self.first_slot_position
        mask = torch.ones_like(input_ids) if text_mask is None else text_mask[:, -input_ids.shape[1] :]
        moved = self._moves_first(input_ids, mask)
        return offset if moved is None else offset - moved.sum(dim=1)

    def first_inputs(
        self, text: TokenRows, position_ids: Tensor | None, memory: CompressedContext | None, *args: Any
    ) -> tuple[dict[str, Any], Any]:
        inputs, sequence = super().first_inputs(text, position_ids, memory, *args)
        moved = None if memory is None else self._moves_first(text.input_ids, text.attention_mask)
        if moved is not None:
            # The text's own opening ends where the one that the context was read behind does.
            ids = text_positions(text.attention_mask) if position_ids is None else position_ids
            ids = ids + self.first_slot_position - moved.sum(dim=1, keepdim=True)
            inputs["position_ids"] = torch.where(moved, ids, inputs["position_ids"])
        return inputs, sequence

    # --- what stays of them ---

    def extra_inputs(self, arguments: dict[str, Any], text: Any = None) -> dict[str, Any]:
        return {name: arguments.pop(name) for name in ("own_losses",) if name in arguments}

    # Dynamo traces what stands in front of a graph break, the first reading, once more for each frame around it.
    @torch.compiler.disable(recursive=False)
    def encode(
        self, chunks: Chunks, ratios: Sequence[int | Tensor], own_losses: list[Tensor] | None = None
    ) -> list[HeadwisePairs]:
        """See [`CompressorBackbone.encode`]; `own_losses` takes each row's error of (6) while the model trains."""
        # (1), and (2) of what each layer's attention reads, norm_l(x_l).
        if self.training:
            key_values, states = self._read(chunks)
            of_layers = [scorer(state) for scorer, state in zip(self.scorers, states, strict=True)]
            scores = torch.stack(of_layers, dim=1).mT.flatten(1, 2)
            # (5), which ranks while the scorers learn it by (6).
            attention = self._repeated_attention(key_values, chunks)
            if own_losses is not None:
                own_losses.append(_ERROR_WEIGHT * self._row_errors(scores - attention, chunks))
            scores = attention
        else:
            key_values, scores = self._scored(chunks)
        opening = self.first_slot_position
        key_values = tuple((keys[:, :, opening:], values[:, :, opening:]) for keys, values in key_values)
        # (3) is the memory; (4) is the reading of any memory with `head_ids`.
        counts = [slot_counts(self.config, chunks.lengths, ratio) for ratio in ratios]
        return [kept_pairs(key_values, scores.detach(), chunks.attention_mask, of_all) for of_all in counts]

    @torch.no_grad()
    def kept_tokens(self, chunks: Chunks, ratio: int | Tensor) -> Sequence[Tensor]:
        """Return the places in the chunk of the tokens whose keys and values stay, of contexts without pads.

        Returns:
            For each layer `(num_chunks, num_heads, num_slots)`: of the pairs that stand there in the memory, which may
            be those of another layer's head.
        """
        key_values, scores = self._scored(chunks)
        places = torch.arange(scores.shape[2], device=scores.device)[:, None]
        places = places.expand(*key_values[0][0].shape[:2], -1, -1)
        counts = slot_counts(self.config, chunks.lengths, ratio)
        kept = kept_pairs(((places, places),) * len(key_values), scores, chunks.attention_mask, counts)
        return [of_layer[..., 0] for of_layer, _ in kept.key_values]

    def _scored(self, chunks: Chunks) -> tuple[KeyValues, Tensor]:
        """Return (1) and (2), which leave of no layer what its attention reads; scores are `(num_chunks, num_layers *
        num_heads, num_tokens)`."""
        key_values, scores = self._read(chunks, lambda layer, states: self.scorers[layer](states))
        return key_values, torch.stack(scores, dim=1).mT.flatten(1, 2)

    def _read(
        self, chunks: Chunks, take: Callable[[int, Tensor], Tensor] = lambda layer, states: states
    ) -> tuple[KeyValues, list[Tensor]]:
        """Read the opening and the context: keys and values of each layer, `(num_chunks, num_heads, num_places,
        head_dim)`, and the inputs of its attention `(num_chunks, num_tokens, hidden_size)`, without gradients, or what
        `take` makes of them."""
        input_ids, mask, position_ids = self.opened(chunks)
        places, opening = torch.arange(mask.shape[1], device=mask.device).expand_as(mask), self.first_slot_position
        recorder = KeyValueRecorder(places, lambda layer, states: take(layer, states[:, opening:]))
        self.encoder_outputs(input_ids, mask, position_ids, cache=recorder, is_full=chunks.is_full)
        return recorder.close(self.dtype), recorder.inputs

    def _repeated_attention(self, key_values: KeyValues, chunks: Chunks) -> Tensor:
        """Return log a of (5), `(num_chunks, num_layers * num_heads, num_tokens)`."""
        pairs = tuple((keys.detach(), values.detach()) for keys, values in key_values)
        ends = self.first_slot_position + chunks.position_ids[:, 0] - 1 + chunks.attention_mask.sum(dim=1)
        of_layers = self.repeated_attention(pairs, self.opened(chunks)[1], ends, chunks, self.config.repeat_size)
        attention = torch.stack(of_layers, dim=1).flatten(1, 2)[:, :, self.first_slot_position :]
        return attention.clamp(min=_LEAST_ATTENTION).log()

    @torch.no_grad()
    def fit_scorers(self, batches: Iterable[Sequence[Any]], ridge: float = 1e-3) -> None:
        """Fit the scorers by least squares to what a second reading of some hundred contexts attends to, a of (5).

        In each layer W, b = argmin sum_i |W norm(x_i) + b - log a_i|^2 + ridge |W|^2; nothing else changes.

        Args:
            batches: of contexts, input ids and their mask (`None` where no token is a pad), both
                `(batch_size, num_tokens)`, and behind them the tokens of each row's passages, if any.
            ridge: finite and above 0, in mean squares of the inputs.
        """
        if not 0 < ridge < math.inf:
            raise ValueError(f"`ridge` must be finite and above 0, got {ridge}")
        layers, heads, _ = key_value_shape(self.config.decoder_config)
        width, was_training = self.config.hidden_size, self.training
        options = {"dtype": torch.float64, "device": self.device}
        squares = torch.zeros(layers, width + 1, width + 1, **options)
        products = torch.zeros(layers, width + 1, heads, **options)
        self.eval()
        try:
            for input_ids, mask, *passages in batches:
                rows = self.context_rows(input_ids, mask, "input_ids", *passages)
                measure_rows(rows)
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
        solutions = torch.linalg.solve(squares, products)
        if not bool(solutions.isfinite().all()):
            raise ValueError("`batches` give scorers that are not finite: the model's states overflow or are NaN")
        scorers: Any = self.scorers
        for scorer, solution in zip(scorers, solutions, strict=True):
            scorer.weight.copy_(solution[:-1].T)
            scorer.bias.copy_(solution[-1])

    def _row_errors(self, errors: Tensor, chunks: Chunks) -> Tensor:
        """Return the mean of squared errors over the tokens of each row, `(batch_size,)`."""
        is_real = chunks.attention_mask[:, None].expand_as(errors)
        of_chunks = torch.stack([(errors.square() * is_real).sum(dim=(1, 2)), is_real.sum(dim=(1, 2))])
        total, count = of_chunks.unflatten(1, (-1, chunks.chunks_per_row)).sum(dim=2)
        return total / count.clamp(min=1)


def _same_starts(memory: CompressedContext, is_long: Tensor) -> tuple[Tensor, Tensor]:
    """Put all chunks of the rows `is_long` at the same positions (Parallel Context Windows); return the first position
    of each slot's chunk, `(batch_size, num_slots)`, counted from 1, and how many each row takes, `(batch_size,)`."""
    starts, lengths, is_real = memory.position_ids, memory.num_context_tokens, memory.attention_mask.bool()
    ends = functional.pad(starts, (0, 1))[:, 1:].where(functional.pad(is_real, (0, 1))[:, 1:], lengths[:, None] + 1)
    longest = (ends - starts).masked_fill(~is_real, 0).amax(dim=1)
    return starts.masked_fill(is_long[:, None] & is_real, 1), longest.where(is_long, lengths)


class RankedKeyValuesForCausalLM(CompressorForCausalLM):
    """[`RankedKeyValuesModel`] with the decoder's LM head."""

    model_class = RankedKeyValuesModel

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("fused_lm_head") or kwargs.get("context_input_ids") is None:
            return super().__call__(*args, **kwargs)
        # TRL's `SFTTrainer` puts a head of its own in place of `forward`, and sums up the losses of all targets.
        own_losses: list[Tensor] = []
        outputs = super().__call__(*args, own_losses=own_losses, **kwargs)
        for of_rows in own_losses:
            outputs.log_probs = outputs.log_probs - of_rows[:, None] * outputs.label_mask
        return outputs
