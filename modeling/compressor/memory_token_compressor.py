# SPDX-License-Identifier: Apache-2.0
"""Memory tokens behind the context: what ICAE, 500xCompressor and compression tokens have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..memory.key_value_memory import sliding_window
from ..parts.call_views import twin
from ..parts.lora import ENCODER
from ..parts.packing import SplicedSequence, reads_falling_ids_as_packed, splice, take_places
from ..parts.position_layout import encoder_memory_ids
from .chunking import cut
from .input_checks import check_context_length, check_mask, check_ratios, check_token_ids
from .modeling_compressor import CompressorModel, CompressorPreTrainedModel

# Implementations that take a mask with a value for every pair of places.
_PAIRWISE_MASKS = ("eager", "sdpa")


@dataclass
class MemoryRows:
    """A batch of `[pads, context, memory tokens]` rows, ready for the encoder.

    Args:
        inputs_embeds: `(num_chunks, num_places, hidden_size)`.
        attention_mask: what the encoder takes: `(num_chunks, num_places)`, or one value for each pair of places.
        position_ids: `(num_chunks, num_places)`.
        places: `(num_chunks, num_memory_tokens)`, where the memory tokens stand.
        groups: for each ratio, its first column in `places`, and the mask `(num_chunks, num_slots)` of its tokens.
    """

    inputs_embeds: Tensor
    attention_mask: Tensor | dict[str, Tensor]
    position_ids: Tensor
    places: Tensor
    groups: list[tuple[int, Tensor]]

    def read(self, states: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The memory tokens' states of each ratio, `(num_chunks, num_slots, hidden_size)`, and their mask."""
        states = take_places(states, self.places)
        return [
            (states[:, first : first + mask.shape[1]].masked_fill(mask[:, :, None] == 0, 0), mask)
            for first, mask in self.groups
        ]

    def read_key_values(self, layers: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[tuple, Tensor]]:
        """The memory tokens' keys and values of each ratio, by layer, and their mask."""
        found = []
        for first, mask in self.groups:
            hidden, span = mask[:, None, :, None] == 0, slice(first, first + mask.shape[1])
            found.append((tuple(tuple(t[:, :, span].masked_fill(hidden, 0) for t in pair) for pair in layers), mask))
        return found


class MemoryTokenModel(CompressorModel):
    r"""
    A compressor whose encoder reads `[S(i); M(i)]`: the context of a chunk, then learned memory tokens (EPL, equation
    1). A method says how many there are, and what is carried over.

    Args:
        config: the configuration.
    """

    _keep_in_fp32_modules_strict = [*CompressorPreTrainedModel._keep_in_fp32_modules_strict, "memory_embeddings"]
    method_parameters = (*CompressorPreTrainedModel.method_parameters, r"(^|\.)memory_embeddings$")
    # Whether a memory token sees the ones behind it, too.
    _bidirectional_memory = False

    def _init_memory_embeddings(self, num_vectors: int) -> None:
        width = self.config.get_encoder_config().hidden_size
        self.memory_embeddings = nn.Parameter(torch.zeros(num_vectors, width))

    def memory_vectors(self, num_memory_tokens: int) -> Tensor:
        """The first `num_memory_tokens` memory tokens, `(num_memory_tokens, hidden_size)`."""
        raise NotImplementedError(f"{type(self).__name__} does not say what its memory tokens are")

    def carry_over(self, rows: MemoryRows) -> list[tuple[Any, Tensor]]:
        """Run the encoder over the rows and read the memory of each ratio, with its mask."""
        raise NotImplementedError(f"{type(self).__name__} does not say what is carried over to the decoder")

    def encode(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, ratios: Sequence[int | Tensor]
    ) -> list[tuple[Any, Tensor]]:
        memories = []
        for together in self.memory_passes(ratios):
            rows = self.memory_rows(input_ids, attention_mask, position_ids, together)
            memories += [self.no_slots(input_ids) for _ in together] if rows is None else self.carry_over(rows)
        return memories

    def memory_states(self, rows: MemoryRows, **kwargs: Any) -> Tensor:
        """Last hidden states of the encoder over the rows, `(num_chunks, num_places, hidden_size)`."""
        return self.encoder_states(
            inputs_embeds=rows.inputs_embeds,
            attention_mask=rows.attention_mask,
            position_ids=rows.position_ids,
            **kwargs,
        )

    def memory_counts(self, lengths: Tensor, ratio: int | Tensor) -> Tensor:
        """Number of memory tokens of each chunk: ceil(n / r).

        Args:
            lengths: `(num_chunks,)`, context tokens.
            ratio: an int or a LongTensor `(num_chunks,)`.

        Returns:
            `(num_chunks,)`.
        """
        return (lengths + ratio - 1) // ratio

    def memory_passes(self, ratios: Sequence[int | Tensor]) -> list[list[int | Tensor]]:
        """Which ratios share a pass of the encoder: all, where its attention can keep them apart."""
        attention = self.encoder_backbone.config._attn_implementation
        if attention in _PAIRWISE_MASKS or self._are_nested:
            return [list(ratios)]
        return [[ratio] for ratio in ratios]

    @property
    def _are_nested(self) -> bool:
        # Without later tokens in sight and with the same positions, fewer tokens are the first ones of more.
        return not self._bidirectional_memory and self.config.position_layout == "default"

    def memory_rows(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, ratios: Sequence[int | Tensor]
    ) -> MemoryRows | None:
        """`[S(i); M(i)]`, with the memory tokens of all ratios behind one context.

        Causal memory tokens under the default layout are nested: those of a higher ratio are the first ones of a lower
        ratio (the remark on Matryoshka representations in "Simple Context Compression"), and stand there once.
        Elsewhere each ratio has its own tokens, which do not see those of another.

        Args:
            input_ids: `(num_chunks, num_tokens)`, right-padded.
            attention_mask: Same shape.
            position_ids: Same shape.
            ratios: an int or a LongTensor `(num_chunks,)` each.

        Returns:
            The rows; `None` if there is nothing to compress.

        Raises:
            ValueError: memory tokens beyond the encoder's positions, or an attention implementation that cannot take
                the mask.
        """
        lengths = attention_mask.sum(dim=1)
        counts = [self.memory_counts(lengths, ratio) for ratio in ratios]
        if not any(bool(count.any()) for count in counts):
            return None
        blocks = [torch.stack(counts).amax(dim=0)] if self._are_nested else counts
        widths = [int(block.max()) for block in blocks]
        layout, encoder_config = self.config.position_layout, self.encoder_backbone.config
        starts = position_ids[:, 0] - 1
        memory_ids = torch.cat([encoder_memory_ids(lengths, block, starts, layout) for block in blocks], dim=1)
        check_context_length(encoder_config, int(memory_ids.max()) + 1, self.config.chunk_size)
        memory_mask = torch.cat([_filled(block) for block in blocks], dim=1)
        pad = layout != "default" and reads_falling_ids_as_packed(encoder_config, len(input_ids))
        sequence = splice(attention_mask, memory_mask, pad_in_front=pad)
        context = self.encoder_backbone.get_input_embeddings()(input_ids)
        vectors = torch.cat([self.memory_vectors(width) for width in widths]).to(context.dtype)
        mask: Tensor | dict[str, Tensor] = sequence.attention_mask
        if len(blocks) > 1 or self._bidirectional_memory:
            mask = self._block_mask(sequence, lengths, widths, context.dtype)
        firsts = [0] * len(ratios) if self._are_nested else [sum(widths[:i]) for i in range(len(widths))]
        joined = torch.cat([context, vectors.expand(len(input_ids), -1, -1)], dim=1)
        return MemoryRows(
            inputs_embeds=sequence.arrange(joined),
            attention_mask=mask,
            position_ids=sequence.arrange(torch.cat([position_ids, memory_ids], dim=1)) * sequence.attention_mask,
            places=sequence.text_places,
            groups=list(zip(firsts, map(_filled, counts), strict=True)),
        )

    def _block_mask(
        self, sequence: SplicedSequence, lengths: Tensor, widths: Sequence[int], dtype: torch.dtype
    ) -> Tensor | dict[str, Tensor]:
        """Who sees whom, where that is not simply "everything before".

        Args:
            sequence: the rows' arrangement.
            lengths: `(num_chunks,)`, context tokens of each row.
            widths: number of memory tokens of each block.
            dtype: of the encoder's hidden states.
        """
        config = self.encoder_backbone.config
        if config._attn_implementation not in _PAIRWISE_MASKS:
            raise ValueError(
                "memory tokens that see each other need one of the attention implementations "
                f"{list(_PAIRWISE_MASKS)}, not {config._attn_implementation!r}"
            )
        device, num_tokens = lengths.device, sequence.attention_mask.shape[1] - sum(widths) - sequence.pad_in_front
        block_sizes = torch.tensor([num_tokens, *widths], device=device)
        blocks = torch.arange(len(block_sizes), device=device).repeat_interleave(block_sizes)
        # A place as it would be if its block stood alone behind the context.
        context_places = torch.arange(num_tokens, device=device).expand(len(lengths), -1)
        behind = torch.cat([torch.arange(width, device=device) for width in widths])
        places = sequence.arrange(torch.cat([context_places, lengths[:, None] + behind], dim=1))
        blocks = sequence.arrange(blocks.expand(len(lengths), -1))
        place, other_place, block, other = places[:, :, None], places[:, None], blocks[:, :, None], blocks[:, None]
        visible = ((other == 0) | (other == block)) & (other_place <= place)
        if self._bidirectional_memory:
            visible = visible | ((other == block) & (other > 0))
        visible = visible & sequence.attention_mask.bool()[:, None]
        window = sliding_window(config)
        near = visible if window is None else visible & ((place - other_place).abs() < window)
        # A pad that saw nothing would become NaN.
        itself = torch.eye(visible.shape[1], dtype=torch.bool, device=device)
        full, near = (_attention_bias(mask | itself, config, dtype) for mask in (visible, near))
        if getattr(config, "layer_types", None):
            return {"full_attention": full, "sliding_attention": near}
        return full if window is None else near

    @torch.no_grad()
    def memory_attention(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, ratio: int | None = None
    ) -> tuple[Tensor, ...]:
        """How much each memory token attends to each context token, by layer (EPL, Figures 6 and 7).

        Args:
            input_ids: contexts `(batch_size, num_tokens)` of at most one chunk.
            attention_mask: their mask.
            ratio: one of the checkpoint's; its first if not given.

        Returns:
            For each layer `(batch_size, num_heads, num_memory_tokens, num_tokens)`; context tokens stand left-aligned,
            and pads have zero.

        Raises:
            ValueError: a context of several chunks, or no context tokens at all; as `compress` besides.
        """
        attention_mask = check_mask("attention_mask", attention_mask, "input_ids", input_ids)
        input_ids = check_token_ids(
            "input_ids", input_ids, attention_mask, self.encoder_backbone.config.vocab_size, {}
        )
        ratios = check_ratios([ratio], self.config.compression_ratios, input_ids, False)
        chunks = cut(input_ids, attention_mask, self.config.chunk_size, self.config.position_layout)
        longest = int(attention_mask.sum(dim=1).max()) if attention_mask.numel() else 0
        if chunks.chunks_per_row > 1 or longest == 0:
            raise ValueError(
                f"attention is drawn for a context of 1 to {self.config.chunk_size} tokens (one chunk), got {longest}"
            )
        # Only this implementation gives its weights away.
        alone = twin(self)
        alone.encoder_backbone.set_attn_implementation("eager")
        rows = alone.memory_rows(chunks.input_ids, chunks.attention_mask, chunks.position_ids, ratios)
        with alone._adapter(alone.encoder_backbone, ENCODER):
            attentions = alone.encoder_backbone(
                inputs_embeds=rows.inputs_embeds,
                attention_mask=rows.attention_mask,
                position_ids=rows.position_ids,
                use_cache=False,
                output_attentions=True,
            ).attentions
        memory_mask = rows.groups[0][1]
        lengths = chunks.lengths
        pads = rows.inputs_embeds.shape[1] - lengths - memory_mask.sum(dim=1)
        columns = torch.arange(longest, device=lengths.device)
        is_real = (columns < lengths[:, None])[:, None, None] & memory_mask.bool()[:, None, :, None]
        columns = (pads[:, None] + columns).clamp(max=rows.inputs_embeds.shape[1] - 1)
        return tuple(
            weights.take_along_dim(rows.places[:, None, :, None], dim=2)
            .take_along_dim(columns[:, None, None], dim=3)
            .masked_fill(~is_real, 0)
            for weights in attentions
        )


def _filled(counts: Tensor) -> Tensor:
    """The mask `(num_chunks, counts.max())` of so many tokens in each row."""
    return (torch.arange(int(counts.max()), device=counts.device) < counts[:, None]).long()


def _attention_bias(visible: Tensor, config: Any, dtype: torch.dtype) -> Tensor:
    """`(batch_size, 1, num_places, num_places)` in the form that the attention implementation takes."""
    visible = visible[:, None]
    if config._attn_implementation == "sdpa":
        return visible
    zero = torch.zeros((), dtype=dtype, device=visible.device)
    return torch.where(visible, zero, torch.finfo(dtype).min)
