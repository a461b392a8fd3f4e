# SPDX-License-Identifier: Apache-2.0
"""Memory tokens behind the context: the common part of ICAE, 500xCompressor and compression tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ...configuration.layer_shape import layer_kinds
from ..memory.compressed_context import KeyValues
from ..memory.key_value_memory import KeyValueRecorder, sliding_window
from ..parts.base_pass import PAIRWISE_MASKS, embedding_scale, mask_for
from ..parts.packing import PackedSequence, pack, reads_falling_ids_as_packed, take_places
from ..parts.pooling import pooled_embeddings
from ..parts.position_layout import encoder_memory_ids
from .backbone import Chunks, Slots, first_places, slot_counts, with_markers
from .modeling_compressor import CompressorModel
from .validation import check_context_length


@dataclass
class MemoryRows:
    """A batch of `[context, memory tokens, pads]` rows, ready for the encoder.

    Args:
        inputs: what the encoder takes: `inputs_embeds` `(num_chunks, num_places, hidden_size)`, `position_ids` and an
            `attention_mask` `(num_chunks, num_places)`, which may also have one value for each pair of places.
        places: `(num_chunks, num_memory_tokens)`, where the memory tokens stand.
        groups: for each ratio, its first column in `places`, and the mask `(num_chunks, num_slots)` of its tokens.
    """

    inputs: dict[str, Any]
    places: Tensor
    groups: list[tuple[int, Tensor]]

    def read(self, states: Tensor) -> list[Tensor]:
        """Return the memory tokens' states of each ratio, `(num_chunks, num_slots, hidden_size)`; zeros for none."""
        states = take_places(states, self.places)
        return [
            states[:, first : first + mask.shape[1]].masked_fill(mask[:, :, None] == 0, 0)
            for first, mask in self.groups
        ]


def _block_mask(
    config: Any,
    sequence: PackedSequence,
    lengths: Tensor,
    widths: Sequence[int],
    bidirectional: bool,
    dtype: torch.dtype,
) -> Tensor | dict[str, Tensor]:
    """Return the mask of memory tokens that see more or less than everything before them; `lengths` are context
    tokens."""
    if config._attn_implementation not in PAIRWISE_MASKS:
        raise ValueError(f"memory tokens that see each other need eager or sdpa, got {config._attn_implementation!r}")
    device, num_tokens = lengths.device, sequence.attention_mask.shape[1] - sum(widths) - sequence.pad_in_front
    sizes = [num_tokens, *widths]
    blocks = torch.cat([torch.full((size,), block, device=device) for block, size in enumerate(sizes)])
    # A place as it would be if its block stood alone behind the context.
    context_places = torch.arange(num_tokens, device=device).expand(len(lengths), -1)
    behind = torch.cat([torch.arange(width, device=device) for width in widths])
    places = sequence.arrange(torch.cat([context_places, lengths[:, None] + behind], dim=1))
    blocks = sequence.arrange(blocks.expand(len(lengths), -1))
    place, other_place, block, other = places[:, :, None], places[:, None], blocks[:, :, None], blocks[:, None]
    visible = ((other == 0) | (other == block)) & (other_place <= place)
    if bidirectional:
        visible = visible | ((other == block) & (other > 0))
    visible = visible & sequence.attention_mask.bool()[:, None]
    window = sliding_window(config)
    near = visible if window is None else visible & ((place - other_place).abs() < window)
    return mask_for(config, visible, near, dtype)


class MemoryTokenModel(CompressorModel):
    r"""
    A compressor whose encoder reads `[S(i); M(i)]`: the context of a chunk, then learned memory tokens, the same for
    all chunks (EPL, equation 1 and section 3.1.1). A method says what of them is the memory (`read_memory`).

    Args:
        config ([`CompressorConfig`]): the configuration; one token is learned where `num_memory_tokens` is `None`.
    """

    method_parts: tuple[str, ...] = ("memory_embeddings", "chunk_marker_embeddings")
    slot_origin = "attention"
    # Whether a memory token sees the ones behind it, too.
    has_bidirectional_memory = False

    def __init__(self, config: Any):
        super().__init__(config)
        count = 1 if config.num_memory_tokens is None else config.num_memory_tokens
        width = config.get_encoder_config().hidden_size
        self.memory_embeddings = nn.Parameter(torch.zeros(count, width))
        if config.chunk_markers and config.position_layout != "default":
            raise ValueError(f"`chunk_markers` need `position_layout='default'`, got {config.position_layout!r}")
        self.chunk_marker_embeddings = nn.Parameter(torch.zeros(2, width)) if config.chunk_markers else None

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self:
            self.start_memory_tokens(self.memory_embeddings)
            if self.chunk_marker_embeddings is not None:
                self._init_like_embeddings(self.chunk_marker_embeddings, self.encoder_backbone)

    def start_memory_tokens(self, tokens: nn.Parameter) -> None:
        """Start memory tokens by `memory_start`, a repeated one at the mean embedding, beside pooled ones at zero."""
        table = self.encoder_backbone.get_input_embeddings()
        if self.adds_pooled_embeddings:
            init.zeros_(tokens)
        elif self.config.num_memory_tokens is None:
            init.copy_(tokens, embedding_scale(table) * table.weight.float().mean(dim=0, keepdim=True))
        elif self.config.memory_start == "standard_normal":
            init.normal_(tokens)
        elif self.config.memory_start == "eos":
            eos = self.config.get_encoder_config().eos_token_id
            if eos is None:
                raise ValueError("`memory_start='eos'` needs a base with an EOS token, got eos_token_id None")
            first = torch.tensor(eos if isinstance(eos, list) else [eos], device=table.weight.device)[:1]
            init.copy_(tokens, table(first).to(tokens).expand(tokens.shape))
        else:
            self._init_like_embeddings(tokens, self.encoder_backbone)

    @property
    def adds_pooled_embeddings(self) -> bool:
        """Return whether pooled embeddings are added to memory tokens, whose keys and values are kept."""
        return self.config.embedding_residual and self.config.carrier == "key_values"

    def memory_vectors(self, num_memory_tokens: int) -> Tensor:
        """Return the first memory tokens (EPL, section 3.1.1), or copies of the one, `(num_memory_tokens,
        hidden_size)`."""
        tokens = self.memory_embeddings
        if self.config.num_memory_tokens is None:
            return tokens.expand(num_memory_tokens, -1)
        if num_memory_tokens > len(tokens):
            raise ValueError(
                f"the context needs {num_memory_tokens} memory tokens, the checkpoint has {len(tokens)}: take a "
                "higher ratio, or shorter contexts or chunks"
            )
        return tokens[:num_memory_tokens]

    def memory_token_ids(self, chunks: Chunks, counts: Tensor, width: int) -> Tensor:
        """Return the encoder's position ids of `counts` memory tokens, `(num_chunks, width)` (EPL, Tables 1 and
        12)."""
        lengths = torch.tensor(chunks.lengths, device=counts.device)
        return encoder_memory_ids(lengths, counts, chunks.starts, self.config.position_layout, width)

    def memory_rows(self, chunks: Chunks, ratios: Sequence[int | Tensor]) -> Iterator[MemoryRows]:
        """Yield `[S(i); M(i)]` for each pass of the encoder, with the memory tokens of all its ratios behind it.

        Causal memory tokens under the default layout are nested: those of a higher ratio are the first ones of a lower
        ratio (the remark on Matryoshka representations in "Simple Context Compression"), and stand there once.
        Elsewhere each ratio has its own tokens, which do not see those of another, or a pass of its own.
        """
        # Without later tokens in sight and with the same positions, fewer tokens are the first ones of more.
        apart = self.has_bidirectional_memory or self.adds_pooled_embeddings
        are_nested = not apart and self.config.position_layout == "default"
        counts = [slot_counts(self.config, chunks.lengths, ratio) for ratio in ratios]
        chunks = self._with_markers(chunks)
        encoder = self.encoder_backbone.config
        # Layers of linear attention take no mask between the tokens of two ratios.
        is_pairwise = encoder._attn_implementation in PAIRWISE_MASKS and "linear_attention" not in layer_kinds(encoder)
        for places in [slice(None)] if are_nested or is_pairwise else [slice(i, i + 1) for i in range(len(counts))]:
            yield self._joined_rows(chunks, counts[places], ratios[places], are_nested)

    def _with_markers(self, chunks: Chunks) -> Chunks:
        if self.chunk_marker_embeddings is None:
            return chunks
        embeddings = self.encoder_backbone.get_input_embeddings()(chunks.input_ids)
        embeddings, lengths = with_markers(embeddings, chunks.lengths, *self.chunk_marker_embeddings.split(1))
        mask = first_places(lengths, embeddings.device)
        places = torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)
        return replace(chunks, inputs_embeds=embeddings, attention_mask=mask, position_ids=places, lengths=lengths)

    def _joined_rows(
        self, chunks: Chunks, counts: Sequence[Sequence[int]], ratios: Sequence[int | Tensor], are_nested: bool
    ) -> MemoryRows:
        """Return the rows of one pass; `counts` has for each ratio the memory tokens of each chunk."""
        layout, config, device = self.config.position_layout, self.encoder_backbone.config, chunks.input_ids.device
        lengths = torch.tensor(chunks.lengths, device=device)
        blocks = [[max(of_chunk) for of_chunk in zip(*counts, strict=True)]] if are_nested else counts
        widths = [max(block) for block in blocks]
        if layout == "default":
            places = [n + m for block in blocks for n, m in zip(chunks.lengths, block, strict=True) if m]
            check_context_length(self.config, max(places, default=0))
        memory_ids = [
            self.memory_token_ids(chunks, torch.tensor(block, device=device), width)
            for block, width in zip(blocks, widths, strict=True)
        ]
        memory_mask = torch.cat([first_places(block, device) for block in blocks], dim=1)
        is_full = chunks.is_full and all(min(b) == max(b) for b in blocks)
        pad = layout != "default" and reads_falling_ids_as_packed(config, len(lengths))
        sequence = pack(chunks.attention_mask, memory_mask, pad_in_front=pad, is_full=is_full, pads_behind=True)
        context = chunks.inputs_embeds
        context = self.encoder_backbone.get_input_embeddings()(chunks.input_ids) if context is None else context
        tokens = torch.cat([self.memory_vectors(width) for width in widths]).expand(len(lengths), -1, -1)
        if self.adds_pooled_embeddings:
            # m_k + |S_k|^(-1/2) sum_{i in S_k} E(x_i), m_k = 0 at the start: no paper has it.
            row = (context.float(), chunks.attention_mask)
            sizes = zip(ratios, widths, strict=True)
            tokens = tokens + torch.cat([pooled_embeddings(*row, r, chunks.lengths, w) for r, w in sizes], dim=1)
        joined = torch.cat([context, tokens.to(context.dtype)], dim=1)
        inputs: dict[str, Any] = sequence.inputs(joined, torch.cat([chunks.position_ids, *memory_ids], dim=1))
        if len(blocks) > 1 or self.has_bidirectional_memory:
            seen = (widths, self.has_bidirectional_memory, context.dtype)
            inputs["attention_mask"] = _block_mask(config, sequence, lengths, *seen)
        firsts = [0] * len(counts) if are_nested else [sum(widths[:i]) for i in range(len(widths))]
        groups = [(first, first_places(count, device)) for first, count in zip(firsts, counts, strict=True)]
        return MemoryRows(inputs, sequence.text_places, groups)

    def encode(self, chunks: Chunks, ratios: Sequence[int | Tensor]) -> Sequence[Slots]:
        return [slots for rows in self.memory_rows(chunks, ratios) for slots in self.read_memory(rows)]

    def read_memory(self, rows: MemoryRows) -> Sequence[Slots]:
        """Run the encoder over the rows and read the memory of each ratio."""
        raise NotImplementedError(f"{type(self).__name__} does not say what its memory is read from")

    def token_states(self, rows: MemoryRows) -> list[Tensor]:
        """Return the memory tokens' last hidden states of each ratio, `(num_chunks, num_slots, hidden_size)`."""
        return rows.read(self.encoder_outputs(**rows.inputs).last_hidden_state)

    def token_key_values(self, rows: MemoryRows) -> list[KeyValues]:
        """Return the memory tokens' keys and values of each ratio, by layer."""
        recorder = KeyValueRecorder(rows.places)
        self.encoder_outputs(**rows.inputs, cache=recorder)
        layers = recorder.close(self.dtype)
        spans = [slice(first, first + mask.shape[1]) for first, mask in rows.groups]
        return [tuple((keys[:, :, span], values[:, :, span]) for keys, values in layers) for span in spans]
