# SPDX-License-Identifier: Apache-2.0
"""Contexts in, memories out: the backbone that every compressor has around its method, and its chunks."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ...configuration.layer_shape import key_value_shape
from ..checkpoint.fingerprints import at_hand, settings_fingerprint, weight_versions, weights_fingerprint
from ..memory.compressed_context import CompressedContext, KeyValues
from ..memory.key_value_memory import inverse_frequencies
from ..parts.packing import length_batches, right_padded, take_places
from ..parts.position_layout import encoder_memory_ids
from .pretrained_compressor import CompressorPreTrainedModel
from .validation import TokenRows, check_context_length, measure_rows, resolve_ratios, token_rows

# Pads for each token of a pass.
_MOST_PADDING_OF_CHUNKS = 0.2


Slots = Tensor | KeyValues


@dataclass
class Chunks:
    """Contexts cut into chunks that are compressed independently, all in one batch.

    Args:
        input_ids, attention_mask: `(batch_size * chunks_per_row, chunk_length)`, right-padded.
        position_ids: Same shape; positions of the context tokens by the layout.
        starts: `(batch_size * chunks_per_row,)`, context tokens in front of each chunk.
        lengths: Real tokens of each chunk, known on the host.
        chunks_per_row: Number of chunks of the longest row; shorter rows have empty ones.
        inputs_embeds: `(batch_size * chunks_per_row, chunk_length, hidden_size)`, what the encoder reads in place of
            the ids' own embeddings; `None` for these.
    """

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    starts: Tensor
    lengths: list[int]
    chunks_per_row: int
    inputs_embeds: Tensor | None = None

    def take(self, rows: Sequence[int]) -> Chunks:
        """Return some of the chunks without columns of pads alone; they are no longer those of whole contexts."""
        index = on_device(rows, self.input_ids.device)
        lengths = [self.lengths[row] for row in rows]
        tensors = {name: value[index] for name, value in vars(self).items() if isinstance(value, Tensor)}
        tensors = {name: value[:, : max(lengths)] if value.dim() > 1 else value for name, value in tensors.items()}
        return replace(self, **tensors, lengths=lengths, chunks_per_row=1)

    @property
    def is_full(self) -> bool:
        """Return whether there are no pads."""
        return min(self.lengths) == self.attention_mask.shape[1]


class CompressorBackbone(CompressorPreTrainedModel):
    """`compress` of every compressor; a method adds `encode`."""

    memory_class = CompressedContext
    # What tells which tokens a slot is made of: a "plan", the "attention" of memory tokens, "windows" of r neighbours,
    # or "kept", places of the context itself; see `slot_origins`.
    slot_origin: str | None = None
    # Whether `encode` needs all chunks of a row, also those without tokens behind the last one of a short row.
    reads_full_rows = False
    # Whether `encode` takes a list `own_losses`, to which it adds a loss of each row `(batch_size,)` while it trains.
    has_own_loss = False
    # Learned vectors in front of the slots of each chunk and behind them.
    marker_embeddings: Any
    _fingerprint: tuple[tuple[Any, ...], str] | None = None
    # That of the stored weights, by that of the same weights as they were loaded.
    _stored_fingerprints: Mapping[str, str] = MappingProxyType({})

    def encode(self, chunks: Chunks, ratios: Sequence[Any]) -> Sequence[Slots]:
        """Make slots of every ratio from one pass over the context: the method itself.

        Args:
            chunks: at least one of them has a token.
            ratios: For each memory wanted, an int or a LongTensor `(num_chunks,)`.

        Returns:
            For each ratio, slots `(num_chunks, num_slots, hidden_size)`, left-aligned: as many for each chunk as the
            configuration's `chunk_slots` says, and behind them anything. Where the carrier is key/values, for each
            layer keys and values `(num_chunks, num_heads, num_slots, head_dim)`. A dataclass holds several fields of
            `CompressedContext`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define `encode`; use the model class of a method")

    @property
    def encoder_backbone(self) -> nn.Module:
        """The language model that encodes."""
        raise NotImplementedError(f"{type(self).__name__} does not say what encodes")

    def compress(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        ratio: int | Tensor | Sequence[int] | None = None,
        allow_untrained_ratio: bool = False,
        *,
        chunk_lengths: Tensor | Sequence[Sequence[int]] | None = None,
        **unused: Any,
    ) -> CompressedContext | list[CompressedContext]:
        """Compress contexts into slots.

        Gradients are followed in training mode only, so that compressing a long document keeps no activations.

        Args:
            input_ids: Token ids `(batch_size, num_tokens)`; no special tokens are added, every id counts.
            attention_mask: Same shape, one for real tokens; pads may stand anywhere. All ones if not given.
            ratio: Context tokens per slot: an int, a LongTensor `(batch_size,)` with one for each row, or a list of
                ints, which gives one memory each from a single pass. The checkpoint's first if not given.
            allow_untrained_ratio: Go on with a ratio that the checkpoint was not trained for.
            chunk_lengths: `(batch_size, num_passages)`, or a list for each row: tokens of its passages, which are
                compressed apart from each other; 0 for none. `None`: a row is one passage.
            unused: Further inputs of the method, such as `pixel_values`; `token_type_ids` is ignored.

        Returns:
            The memory, or a list of memories if `ratio` is a list.

        Raises:
            ValueError: unknown token ids, a mask of the wrong shape, a ratio that the checkpoint does not have, or a
                context longer than the encoder's positions.
            TypeError: an unknown argument, or a value of another type.
        """
        extras = self.extra_inputs(unused) if unused else {}
        if unknown := set(unused) - {"token_type_ids"}:
            raise TypeError(f"compress() got unexpected arguments {sorted(unknown)}")
        ratios = list(ratio) if isinstance(ratio, (list, tuple)) else [ratio]
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.training):
            context = self.context_rows(input_ids, attention_mask, chunk_lengths=chunk_lengths)
            measure_rows(context)
            memories = self.compress_rows(context, ratios, allow_untrained_ratio, **extras)
        # While a model trains its weights change, and so would the name of its memories.
        name = "" if self.training else self.model_id
        for memory in memories:
            memory.maker, memory.model_id = weakref.ref(self), name
        return memories if isinstance(ratio, (list, tuple)) else memories[0]

    def extra_inputs(self, arguments: dict[str, Any], text: Any = None) -> dict[str, Any]:
        """Take other inputs of the method, such as images, out of a call's arguments; by default none.

        Args:
            arguments: the call's.
            text: ids and mask of the text that `generate` puts behind the context.
        """
        return {}

    def context_memory(self, context: TokenRows, ratio: Any, **extras: Any) -> CompressedContext:
        """Check contexts, and compress them into one memory without a name."""
        measure_rows(context)
        return self.compress_rows(context, [ratio], **extras)[0]

    def text_rows(self, input_ids: Tensor, attention_mask: Tensor | None) -> TokenRows:
        """Return a text for [`measure_rows`]."""
        known = {"vocab_size": self.config.vocab_size, "task_token_ids": self.config.task_token_ids}
        return token_rows(input_ids, attention_mask, **known, needs_tokens=True)

    def context_rows(
        self, input_ids: Tensor, attention_mask: Tensor | None, name: str = "input_ids", chunk_lengths: Any = None
    ) -> TokenRows:
        """Return contexts for [`measure_rows`]; task tokens belong to texts, and are unknown here."""
        vocab_size = self.config.get_encoder_config().vocab_size
        return token_rows(input_ids, attention_mask, name, vocab_size=vocab_size, chunk_lengths=chunk_lengths)

    def compress_rows(
        self, context: TokenRows, ratios: Sequence[Any], allow_untrained_ratio: bool = False, **extras: Any
    ) -> list[CompressedContext]:
        """Return memories without a name of contexts that [`measure_rows`] has seen; no more waits for the
        device."""
        config, is_key_values = self.config, self.config.carrier == "key_values"
        allow_untrained_ratio |= not config.is_trained
        ratios = resolve_ratios(ratios, config.compression_ratios, context.input_ids, allow_untrained_ratio)
        chunks = self.chunks_of(context)
        chunk_ratios = [r.repeat_interleave(chunks.chunks_per_row) if isinstance(r, Tensor) else r for r in ratios]
        encoded: Sequence[Slots]
        with at_hand(self):
            if chunks.input_ids.shape[1]:
                encoded = self.encode_chunks(chunks, chunk_ratios, **extras)
            else:
                encoded = [self._no_slots(len(chunks.lengths)) for _ in ratios]
            around: Sequence[Tensor] = ()
            if config.markers_per_chunk:
                around = self.marker_embeddings.split([config.slot_markers[side] for side in ("before", "after")])
        memories: list[CompressedContext] = []
        for ratio, chunk_ratio, slots in zip(ratios, chunk_ratios, encoded, strict=True):
            counts = self.kept_slots(chunks, chunk_ratio)
            if around and isinstance(slots, Tensor) and max(counts):
                slots, counts = with_markers(slots, counts, *around)
            fields = vars(slots) if is_dataclass(slots) else {config.carrier: slots}
            joined = {name: join(field, counts, chunks.chunks_per_row) for name, field in fields.items()}
            slot_mask = joined[config.carrier][1]
            own: dict[str, Any] = {name: field for name, (field, _) in joined.items()}
            memory = CompressedContext(
                **own,
                inverse_frequencies=inverse_frequencies(self.encoder_backbone) if is_key_values else None,
                attention_mask=slot_mask,
                position_ids=self.slot_positions(slot_mask, chunks, counts),
                num_context_tokens=context.attention_mask.sum(dim=1),
                ratio=ratio,
                position_layout=config.position_layout,
                check=False,
            )
            rows = range(0, len(counts), chunks.chunks_per_row)
            memory.slot_counts = [sum(counts[row : row + chunks.chunks_per_row]) for row in rows]
            memories.append(memory)
        return memories

    def encode_chunks(self, chunks: Chunks, ratios: Sequence[Any], **extras: Any) -> Sequence[Slots]:
        """Return the slots of all chunks. A pass reads chunks of similar lengths, a bounded number of tokens, none
        empty."""
        rows = [row for row, length in enumerate(chunks.lengths) if length]
        if self.reads_full_rows:
            return self.slots_of(chunks, ratios, **extras)
        # Other inputs, such as images, belong to all rows; processes that share weights make equal numbers of passes.
        is_one_pass = bool(extras) or (torch.distributed.is_available() and torch.distributed.is_initialized())
        # In training all activations are kept in any case.
        usual = 8192 if chunks.input_ids.device.type == "cpu" else 16_384
        most_tokens = None if self.training or is_one_pass else self.tokens_at_once or usual
        groups = [[0]]
        if len(rows) > 1:
            lengths = [chunks.lengths[row] for row in rows]
            groups = length_batches(lengths, None, most_tokens, math.inf if is_one_pass else _MOST_PADDING_OF_CHUNKS)
        if len(groups) == 1 and (chunks.chunks_per_row == 1 or len(rows) == len(chunks.lengths)):
            return self.slots_of(chunks, ratios, **extras)
        passes = []
        for group in groups:
            some = [rows[place] for place in group]
            part, index = chunks.take(some), on_device(some, chunks.starts.device)
            own = [ratio[index] if isinstance(ratio, Tensor) else ratio for ratio in ratios]
            passes.append(self.slots_of(part, own, **extras))
        read = [rows[place] for group in groups for place in group]
        places = {row: place for place, row in enumerate(read)}
        order = [places.get(chunk, len(read)) for chunk in range(len(chunks.lengths))]
        return [gathered(slots, order) for slots in zip(*passes, strict=True)]

    def slots_of(self, chunks: Chunks, ratios: Sequence[Any], **extras: Any) -> Sequence[Slots]:
        """Return the slots of one pass as the memory holds them; arguments as of [`encode`]."""
        return self.encode(chunks, ratios, **extras)

    def kept_slots(self, chunks: Chunks, ratio: int | Tensor) -> list[int]:
        """Return the slots of each chunk that the memory holds: all of them, unless a method says otherwise."""
        return slot_counts(self.config, chunks.lengths, ratio)

    def chunks_of(self, context: TokenRows) -> Chunks:
        """Cut contexts into chunks; `ValueError` for one that is longer than the encoder has positions."""
        config, layout = self.config, self.config.position_layout
        if context.passages is not None and not config.has_chunks:
            raise ValueError(f"the base reads a context whole, without `chunk_lengths`, got {context.passages}")
        rows = (context.input_ids, context.attention_mask, context.lengths)
        chunks = cut(*rows, config.chunk_size, layout, context.passages)
        # Chunks count from 0 again, or on from the first one's first position.
        in_row = max(context.lengths) + config.first_context_position
        check_context_length(config, max(chunks.lengths) if layout == "default" else in_row)
        return chunks

    def slot_positions(self, slot_mask: Tensor, chunks: Chunks, counts: Sequence[int]) -> Tensor:
        """Return the slots' positions in the decoder, 0 at padding slots (EPL, Tables 2, 3 and 13 to 15)."""
        layout, device = self.config.position_layout, slot_mask.device
        if self.config.carrier == "embeddings" and layout != "enhanced":
            return (slot_mask.cumsum(dim=1) - 1).clamp(min=0) * slot_mask
        lengths, of_chunks = on_device(chunks.lengths, device), on_device(counts, device)
        ids = encoder_memory_ids(lengths, of_chunks, chunks.starts, layout, max(counts))
        joined: Any = join(ids[:, :, None], counts, chunks.chunks_per_row)[0]
        return joined[:, :, 0] * slot_mask

    def _no_slots(self, num_chunks: int) -> Slots:
        """Return the slots of contexts without any token."""
        table = self.get_input_embeddings()
        with at_hand(table):
            weight = table.weight.detach()
        if self.config.carrier == "embeddings":
            return weight.new_zeros(num_chunks, 0, self.config.hidden_size)
        layers, heads, head_dim = key_value_shape(self.config.decoder_config)
        empty = weight.new_zeros(num_chunks, heads, 0, head_dim)
        return tuple((empty, empty) for _ in range(layers))

    @property
    def model_id(self) -> str:
        """The name that a memory must carry to be read by this model.

        It holds the method, a fingerprint of all weights, and one of all settings that change slots or how they are
        read. Any floating-point type that a checkpoint is loaded in gives one name; stored in float16 it has another.
        Weights are read when the name is first asked for and after changes, but for changes in place through
        `parameter.data`.
        """
        versions = weight_versions(self)
        if self._fingerprint is None or self._fingerprint[0] != versions:
            fingerprint = weights_fingerprint(self)
            self._fingerprint = (versions, self._stored_fingerprints.get(fingerprint, fingerprint))
        return f"{self.config.model_type}:{self._fingerprint[1]}-{settings_fingerprint(self.config)}"

    def is_own_memory(self, memory: CompressedContext) -> bool:
        """Return whether a memory is this model's, or nothing tells whose it is."""
        name = memory.model_id
        if name and not self.training:
            return name == self.model_id
        maker = None if memory.maker is None else memory.maker()
        # Another thread's twin of a model shares its weights.
        return bool(name) or maker is None or next(maker.parameters()) is next(self.parameters())


def slot_counts(config: Any, lengths: Sequence[int], ratio: int | Tensor) -> list[int]:
    """Return the slots of each chunk at an int ratio or a LongTensor `(num_chunks,)`; none where it has no tokens."""
    ratios = [ratio] * len(lengths) if isinstance(ratio, int) else ratio.tolist()
    return [config.chunk_slots(n, r) if n else 0 for n, r in zip(lengths, ratios, strict=True)]


class CompressorHead(CompressorPreTrainedModel):
    """A model with a compressor's backbone in `model`. Its class names the backbone's in `model_class`."""

    model_class: type[CompressorBackbone] = CompressorBackbone

    def __init_subclass__(cls, **kwargs: Any):
        cls.config_class = cls.model_class.config_class
        super().__init_subclass__(**kwargs)

    def __init__(self, config: Any):
        super().__init__(config)
        self.model = self.model_class(config)

    @property
    def model_id(self) -> str:
        """See [`CompressorBackbone.model_id`]."""
        return self.model.model_id

    def _setting(self, name: str, arguments: dict[str, Any]) -> Any:
        """Return the library's value of a field: an argument, the caller's configuration, or else the model's."""
        value = arguments.get(name, getattr(arguments.get("generation_config"), name, None))
        return getattr(self.generation_config, name, None) if value is None else value

    def compress(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, ratio: Any = None, **kwargs: Any
    ) -> Any:
        """Compress contexts into slots; see [`CompressorBackbone.compress`]."""
        return self.model.compress(input_ids, attention_mask, ratio, **kwargs)


def cut(
    input_ids: Tensor,
    attention_mask: Tensor,
    lengths: Sequence[int],
    chunk_size: int | None,
    layout: str,
    passages: Sequence[Sequence[int]] | None = None,
) -> Chunks:
    """Cut contexts into chunks of `chunk_size` real tokens; the last one of a row, or of a passage, may be short.

    Args:
        input_ids, attention_mask: `(batch_size, num_tokens)`, padded anywhere.
        lengths: Real tokens of each row.
        chunk_size: `None`: one chunk whatever the length.
        layout: "default" restarts the positions in each chunk at 0; "uniform" and "enhanced" count on from 1 (EPL,
            Tables 1 and 12).
        passages: Tokens of each passage of each row; `None`: a row is one passage.
    """
    device, num_tokens = input_ids.device, input_ids.shape[1]
    if any(length != num_tokens for length in lengths):
        input_ids = right_padded(input_ids, attention_mask)
    size = chunk_size or max(1, num_tokens)
    passages = passages or [[length] for length in lengths]
    rows = [[min(size, n - start) for n in row for start in range(0, n, size)] for row in passages]
    chunks_per_row = max(1, max(map(len, rows)))
    rows = [row + [0] * (chunks_per_row - len(row)) for row in rows]
    in_chunks, of_chunks = on_device(rows, device), [n for row in rows for n in row]
    starts = (in_chunks.cumsum(dim=1) - in_chunks).reshape(-1)
    mask = first_places(of_chunks, device)
    position_ids = torch.arange(mask.shape[1], device=device).expand(mask.shape)
    places = (position_ids + starts[:, None]).clamp(max=num_tokens - 1)
    input_ids = input_ids.gather(1, places.reshape(len(rows), -1)).reshape(places.shape) * mask
    if layout != "default":
        position_ids = position_ids + starts[:, None] + 1
    return Chunks(input_ids, mask, position_ids, starts, of_chunks, chunks_per_row)


def on_device(numbers: Sequence[Any], device: torch.device) -> Tensor:
    """Return integers as a tensor, on CUDA without a wait for what the device has still to do."""
    return torch.tensor(numbers, dtype=torch.long).to(device, non_blocking=device.type == "cuda")


def first_places(counts: Sequence[int], device: torch.device) -> Tensor:
    """Return the mask `(len(counts), max(counts))` of so many left-aligned places in each row."""
    places = torch.arange(max(counts), device=device)
    return (places < on_device(counts, device)[:, None]).long()


def gathered(parts: Sequence[Any], order: Sequence[int]) -> Any:
    """Bring the slots of groups of chunks into the order of all chunks, with zeros for chunks in no group; `order` has
    each chunk's place among those of all groups, or their number where it is in none."""
    first = parts[0]
    if is_dataclass(first) and not isinstance(first, type):
        return replace(first, **{name: gathered([vars(part)[name] for part in parts], order) for name in vars(first)})
    if not isinstance(first, Tensor):
        layers = [zip(*of_layer, strict=True) for of_layer in zip(*parts, strict=True)]
        return tuple(tuple(gathered(states, order) for states in of_layer) for of_layer in layers)
    width = max(part.shape[-2] for part in parts)
    parts = [torch.nn.functional.pad(part, (0, 0, 0, width - part.shape[-2])) for part in parts]
    if sum(map(len, parts)) in order:
        parts = [*parts, parts[0].new_zeros((1, *parts[0].shape[1:]))]
    joined = torch.cat(list(parts)) if len(parts) > 1 else parts[0]
    if list(order) == list(range(len(joined))):
        return joined
    return joined.index_select(0, on_device(order, joined.device))


def with_markers(slots: Tensor, counts: Sequence[int], before: Tensor, after: Tensor) -> tuple[Tensor, list[int]]:
    """Put vectors `(num_markers, hidden_size)` in front of the left-aligned slots of each chunk, and behind them.

    A chunk without slots has none. Returns slots and markers, and how many there are in each chunk.
    """
    around = [markers.to(slots.dtype).expand(len(counts), -1, -1) for markers in (before, after)]
    joined = torch.cat([around[0], slots[:, : max(counts)], around[1]], dim=1)
    num_markers = len(before) + len(after)
    totals = [count + num_markers if count else 0 for count in counts]
    if min(counts) < max(counts):
        mask = first_places(counts, slots.device)
        marks = mask[:, :1].expand(-1, num_markers)
        mask = torch.cat([marks[:, : len(before)], mask, marks[:, len(before) :]], dim=1)
        joined = take_places(joined, mask.argsort(dim=1, stable=True, descending=True))
    return joined, totals


def join(slots: Slots, counts: Sequence[int], chunks_per_row: int) -> tuple[Slots, Tensor]:
    """Join the chunks' left-aligned slots row by row, without gaps.

    Args:
        slots: `(batch_size * chunks_per_row, slots_per_chunk, hidden_size)`; or for each layer keys and values
            `(batch_size * chunks_per_row, num_heads, slots_per_chunk, head_dim)`.
        counts: Slots of each chunk.

    Returns:
        Slots `(batch_size, num_slots, hidden_size)`, or keys and values likewise, zeros at padding slots, and their
        mask.
    """
    mask = first_places(counts, slots.device if isinstance(slots, Tensor) else slots[0][0].device)
    pads = (mask == 0)[:, :, None]
    num_slots = max(sum(counts[start : start + chunks_per_row]) for start in range(0, len(counts), chunks_per_row))
    in_rows = mask.reshape(len(counts) // chunks_per_row, -1)
    order = in_rows.argsort(dim=1, stable=True, descending=True)[:, :num_slots]
    joined = []
    for states in [slots] if isinstance(slots, Tensor) else [states for pair in slots for states in pair]:
        states = states[..., : max(counts), :]
        if min(counts) != max(counts):
            states = states.masked_fill(pads if states.dim() == 3 else pads[:, None], 0)
        if chunks_per_row > 1:
            # `(batch_size, num_heads, chunks_per_row, slots_per_chunk, head_dim)`, or the same without heads.
            chunks = states.unflatten(0, (-1, chunks_per_row)).movedim(1, -3)
            states = take_places(chunks.flatten(-3, -2), order, dim=states.dim() - 2)
        joined.append(states)
    slots = joined[0] if isinstance(slots, Tensor) else tuple(zip(joined[::2], joined[1::2], strict=True))
    return slots, in_rows.gather(1, order)
