# SPDX-License-Identifier: Apache-2.0
"""Activation Beacon ("Long Context Compression with Activation Beacon"): only beacons are remembered of a window."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import initialization as init

from ..configuration.configuration_activation_beacon import ActivationBeaconConfig
from ..configuration.configuration_compressor import max_positions
from .compressor.backbone import Chunks
from .compressor.causal_lm import CompressorForCausalLM
from .compressor.modeling_compressor import CompressorModel
from .compressor.validation import measure_rows, resolve_ratios
from .memory.compressed_context import CompressedContext, KeyValues
from .memory.key_value_memory import (
    KeyValueRecorder,
    ReadOnlyCache,
    check_same_key_values,
    check_sliding_window,
    inverse_frequencies,
)
from .parts.lora import PASSES, Passes, activated
from .parts.packing import right_padded, take_places
from .parts.position_layout import moved_pairs

# What the attention of a base calls its maps.
_NAMES = {"query": ("q_proj",), "key": ("k_proj",), "value": ("v_proj",), "output": ("o_proj", "out_proj", "dense")}
# The thread's pass: the places in its flattened batch, and the maps of their own.
_PASS = Passes()


@dataclass
class BeaconWindow:
    """One window of each row, `[group, beacon, group, beacon, ...]`; pads stand behind.

    Args:
        sources: `(batch_size, num_places)`, the context token at each place; at beacons and pads any.
        attention_mask, is_beacon: same shape.
        beacons: `(num_beacons,)`, the places of all beacons in the flattened batch.
        tokens: `(batch_size, num_tokens)`, the places of the context tokens, one behind the other.
        kept: `(batch_size, num_kept)`, on the host: the places whose keys and values stay; behind a row's own, any.
        num_kept, num_places: each row's own.
    """

    sources: Tensor
    attention_mask: Tensor
    is_beacon: Tensor
    beacons: Tensor
    tokens: Tensor
    kept: Tensor
    num_kept: list[int]
    num_places: list[int]


def beacon_window(
    starts: Sequence[int],
    lengths: Sequence[int],
    ratios: Sequence[int | None],
    num_sinks: int,
    device: torch.device,
) -> BeaconWindow:
    """Return the next window of each row.

    Args:
        starts, lengths: context tokens in front of each row's window, and its own; 0 for a row that has ended.
        ratios: its tokens for each beacon; `None` for a window without beacons, of which nothing stays.
        num_sinks: first tokens of the window that stay, in front of its beacons.
    """
    tokens, beacons, kept = [], [], []
    for num_tokens, ratio in zip(lengths, ratios, strict=True):
        order, group = torch.arange(num_tokens), ratio or num_tokens + 1
        count = num_tokens // group + (ratio is not None and num_tokens % group > 0)
        places = order + order // group
        sinks = places[: num_sinks if ratio else 0]
        ends = ((torch.arange(count) + 1) * (group + 1)).clamp(max=num_tokens + count) - 1
        tokens.append(places)
        beacons.append(ends)
        kept.append(torch.cat([sinks, ends]))
    sizes = [len(row) + len(ends) for row, ends in zip(tokens, beacons, strict=True)]
    width = max(sizes)
    sources = torch.zeros(len(sizes), width, dtype=torch.long)
    is_beacon = torch.zeros(len(sizes), width, dtype=torch.bool)
    for row, (start, places, ends) in enumerate(zip(starts, tokens, beacons, strict=True)):
        sources[row, places] = start + torch.arange(len(places))
        is_beacon[row, ends] = True
    return BeaconWindow(
        sources=sources.to(device),
        attention_mask=(torch.arange(width) < torch.tensor(sizes)[:, None]).long().to(device),
        is_beacon=is_beacon.to(device),
        beacons=torch.cat([row * width + ends for row, ends in enumerate(beacons)]).to(device),
        tokens=pad_sequence(tokens, batch_first=True).to(device),
        kept=pad_sequence(kept, batch_first=True),
        num_kept=[len(row) for row in kept],
        num_places=sizes,
    )


@dataclass
class BeaconMemory:
    """Keys and values that stay of the windows so far, with keys as they are before their rotation.

    Args:
        key_values: for each layer keys and values `(batch_size, num_heads, num_slots, head_dim)`, left-aligned.
        num_slots: each row's own.
        inverse_frequencies: of the base's rotary positions, `(head_dim / 2,)`; `None` where keys have none.
    """

    key_values: KeyValues
    num_slots: list[int]
    inverse_frequencies: Tensor | None

    @property
    def width(self) -> int:
        """Slots of the longest row."""
        return self.key_values[0][0].shape[2]

    def numbered(self) -> KeyValues:
        """Keys and values with the keys rotated at 0, 1, ..., one behind the other."""
        if not self.width:
            return self.key_values
        return moved_pairs(self.key_values, torch.arange(self.width)[None], self.inverse_frequencies)

    def with_window(self, key_values: KeyValues, position_ids: Tensor, num_kept: Sequence[int]) -> BeaconMemory:
        """Return the memory with `num_kept` keys and values of one more window behind it, rotated at
        `position_ids`."""
        width, added = self.width, max(num_kept)
        new = moved_pairs(key_values, -position_ids, self.inverse_frequencies) if added else key_values
        num_slots = [old + count for old, count in zip(self.num_slots, num_kept, strict=True)]
        pairs: list[Any] = [
            tuple(torch.cat([old, own], dim=2) for old, own in zip(*layer, strict=True))
            for layer in zip(self.key_values, new, strict=True)
        ]
        if max(num_slots) < width + added or min(num_slots) < max(num_slots):
            numbers = ((self.num_slots, width), (num_kept, added))
            is_slot = [torch.arange(size) < torch.tensor(counts)[:, None] for counts, size in numbers]
            order = torch.cat(is_slot, dim=1).long().argsort(dim=1, stable=True, descending=True)[:, : max(num_slots)]
            order = order.to(pairs[0][0].device)
            pairs = [tuple(take_places(part, order, dim=2) for part in layer) for layer in pairs]
        return replace(self, key_values=tuple(pairs), num_slots=num_slots)

    def latest(self, num_sinks: int, max_slots: int) -> BeaconMemory:
        """The sinks and the latest of the others, at most so many slots in all; rows are of one length."""
        if self.width <= max_slots:
            return self
        first = self.width - max_slots + num_sinks
        pairs: Any = tuple(
            tuple(torch.cat([part[:, :, :num_sinks], part[:, :, first:]], dim=2) for part in layer)
            for layer in self.key_values
        )
        return replace(self, key_values=pairs, num_slots=[max_slots] * len(self.num_slots))


class RecordingCache(ReadOnlyCache):
    """A cache that every layer reads in front of its own places, and which keeps some of those, for one pass."""

    def __init__(self, key_values: KeyValues, places: Tensor):
        super().__init__(key_values)
        self.recorder = KeyValueRecorder(places)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Note a layer's keys and values, and give it those of its memory with them behind."""
        return super().update(*self.recorder.update(key_states, value_states, layer_idx), layer_idx)


class BeaconLinear(nn.Linear):
    """A map whose weight is float32, and which computes in the type of its input."""

    def forward(self, inputs: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(inputs.dtype)
        # A copy in every case: for few rows the last bit depends on where a weight lies, and a file puts it elsewhere.
        return functional.linear(inputs, self.weight.to(inputs.dtype, copy=True), bias)


class BeaconMaps(nn.ModuleList):
    """Maps W^b of beacons: for each layer of a base, maps as large as its own, by "query", "key", "value", "output".

    The last layer has no query and no output: they act on states that nothing reads.
    """

    def __init__(self, backbone: nn.Module, names: Sequence[str]):
        super().__init__()
        layers = attention_maps(backbone, names)
        for number, layer in enumerate(layers):
            is_last = number == len(layers) - 1
            maps = {
                name: BeaconLinear(linear.in_features, linear.out_features, bias=linear.bias is not None)
                for name, linear in layer.items()
                if name in ("key", "value") or not is_last
            }
            self.append(nn.ModuleDict(maps))

    def at(self, places: Tensor, backbone: nn.Module, names: Sequence[str]) -> AbstractContextManager[None]:
        """Inside this block these maps stand in for the base's own in this thread, at some places of the pass's batch,
        flattened to `(batch_size * num_places, ...)`."""
        for number, layer in enumerate(attention_maps(backbone, names, with_adapters=True)):
            for name, linear in layer.items():
                # Where a quantizer or PEFT has put another module in the base's, it has none yet.
                if not any(isinstance(hook, _Beacons) for hook in linear._forward_hooks.values()):
                    linear.register_forward_hook(_Beacons(number, name))
        return activated(_PASS, (places, self))


# Gradient checkpointing recomputes a pass with what was active in it, as with adapters.
setattr(BeaconMaps, PASSES, (_PASS, None))


class _Beacons:
    """A hook of one map of the base, which replaces its output at the pass's places."""

    def __init__(self, layer: int, name: str):
        self.layer, self.name = layer, name

    def __call__(self, linear: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        if _PASS.names is None:
            return None
        places, maps = _PASS.names
        if self.name not in maps[self.layer]:
            return None
        own = maps[self.layer][self.name](inputs[0].flatten(0, 1)[places])
        return output.flatten(0, 1).index_copy(0, places, own.to(output.dtype)).view_as(output)


def attention_maps(backbone: nn.Module, names: Sequence[str], with_adapters: bool = False) -> list[dict[str, Any]]:
    """Return the maps of each layer's attention by their names here, `with_adapters` around them or without."""
    layers = []
    for module in backbone.modules():
        children = dict(module.named_children())
        if not children.keys() >= {"q_proj", "k_proj", "v_proj"}:
            continue
        maps = {name: next((children[n] for n in _NAMES[name] if n in children), None) for name in names}
        if not with_adapters:
            maps = {
                name: m if m is None else dict(m.named_children()).get("base_layer", m) for name, m in maps.items()
            }
        layers.append(maps)
    config: Any = backbone.config
    if len(layers) != config.num_hidden_layers or any(linear is None for layer in layers for linear in layer.values()):
        raise ValueError(
            f"beacons have their own {', '.join(names)} maps, and the attention of a base of type "
            f"{config.model_type!r} has no such maps of its own in each layer (such as q_proj, k_proj and v_proj)"
        )
    return layers


class ActivationBeaconModel(CompressorModel):
    r"""
    Activation Beacon: reads a context window by window, with a beacon behind every r tokens that has maps of its own;
    the keys and values of the beacons are all that later windows, and the text, read of earlier ones.
    """

    config_class = ActivationBeaconConfig
    method_parts = ("beacon_maps", "beacon_embedding")

    def __init__(self, config: ActivationBeaconConfig):
        super().__init__(config)
        check_same_key_values(config)
        self.beacon_maps = BeaconMaps(self.encoder_backbone, config.beacon_maps)
        self.beacon_embedding = nn.Parameter(torch.zeros(config.get_encoder_config().hidden_size))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self:
            self.start_from_base()

    def start_from_base(self) -> None:
        # W_Q^b, W_K^b, W_V^b start as the base's W_Q, W_K, W_V, and the beacon's embedding as that of EOS.
        maps: Any = self.beacon_maps
        for own, layer in zip(maps, attention_maps(self.encoder_backbone, self.config.beacon_maps), strict=True):
            for name, beacon in own.items():
                for part, parameter in beacon.named_parameters():
                    init.copy_(parameter, layer[name].get_parameter(part))
        end = self.config.eos_token_id
        end = end[0] if isinstance(end, (list, tuple)) else end
        table = self.encoder_backbone.get_input_embeddings()
        if end is None:
            self._init_like_embeddings(self.beacon_embedding, self.encoder_backbone)
        else:
            init.copy_(self.beacon_embedding, table(torch.tensor([end], device=table.weight.device))[0])

    def encode(self, chunks: Chunks, ratios: Sequence[int | Tensor]) -> list[KeyValues]:
        return [self._compress(chunks, ratio) for ratio in ratios]

    def _compress(self, chunks: Chunks, ratio: int | Tensor) -> KeyValues:
        ratios = [ratio] * len(chunks.lengths) if isinstance(ratio, int) else ratio.tolist()
        memory, starts = self.empty_memory(len(ratios)), [0] * len(ratios)
        while starts != chunks.lengths:
            ends = [
                min(start + self.config.window_tokens(r), length)
                for start, r, length in zip(starts, ratios, chunks.lengths, strict=True)
            ]
            memory = self._read_next(chunks.input_ids, starts, ends, ratios, memory)[1]
            starts = ends
        return memory.numbered()

    def read_windows(self, input_ids: Tensor, attention_mask: Tensor | None, ratios: Sequence[int]) -> Tensor:
        """Read texts for next-token training: each window behind the beacons of earlier ones, the last without any.

        Gradients go through all windows.

        Args:
            input_ids: `(batch_size, num_tokens)`.
            attention_mask: `(batch_size, num_tokens)`; pads may stand anywhere.
            ratios: context tokens for each beacon of the first window, the second and so on; from the first again
                where there are fewer than windows.

        Returns:
            Last hidden states of the texts' own tokens, `(batch_size, num_tokens, hidden_size)`.
        """
        text = self.context_rows(input_ids, attention_mask)
        measure_rows(text)
        drawn = resolve_ratios(ratios, self.config.compression_ratios, input_ids, False)
        ids = right_padded(text.input_ids, text.attention_mask)
        memory, starts = self.empty_memory(len(ids)), [0] * len(ids)
        states: list[Tensor] = []
        while starts != text.lengths:
            ratio = drawn[len(states) % len(drawn)]
            size, rows = self.config.window_tokens(ratio), range(len(ids))
            ends = [min(starts[row] + size, text.lengths[row]) for row in rows]
            own = [ratio if ends[row] < text.lengths[row] else None for row in rows]
            of_tokens, memory = self._read_next(ids, starts, ends, own, memory)
            states.append(of_tokens)
            starts = ends
        joined = torch.cat(states, dim=1)
        # Of right-padded rows back to where the tokens stood.
        order = text.attention_mask.argsort(dim=1, stable=True, descending=True).argsort(dim=1)
        return take_places(joined, order.clamp(max=joined.shape[1] - 1))

    def empty_memory(self, batch_size: int) -> BeaconMemory:
        """Return what is remembered before the first window."""
        backbone = self.encoder_backbone
        key_values: Any = self._no_slots(batch_size)
        frequencies = inverse_frequencies(backbone)
        if hasattr(backbone, "rotary_emb") and frequencies is None:
            raise ValueError(
                "beacons are numbered anew in front of every window, and the rotary embedding of a base of type "
                f"{backbone.config.model_type!r} does not tell how keys move: its angles must not depend on the "
                "length, and turn whole heads, half against half"
            )
        return BeaconMemory(key_values, [0] * batch_size, frequencies)

    def _read_next(
        self,
        input_ids: Tensor,
        starts: Sequence[int],
        ends: Sequence[int],
        ratios: Sequence[int | None],
        memory: BeaconMemory,
    ) -> tuple[Tensor, BeaconMemory]:
        """Run the base over the next window of each row of `input_ids`, `(batch_size, num_context_tokens)`, behind the
        memory; a ratio of `None` is a window without beacons.

        Returns:
            The states of its tokens, `(batch_size, num_tokens, hidden_size)`, and the memory with it behind.
        """
        backbone, device = self.encoder_backbone, input_ids.device
        lengths = [end - start for start, end in zip(starts, ends, strict=True)]
        num_sinks = 0 if memory.width else self.config.num_sinks
        window = beacon_window(starts, lengths, ratios, num_sinks, device)
        reach = max(old + new for old, new in zip(memory.num_slots, window.num_places, strict=True))
        if not self.training:
            # A run does not stop at a text for whose windows low ratios were drawn.
            limit = max_positions(backbone.config)
            if limit is not None and reach > limit:
                raise ValueError(
                    f"a window and the slots in front of it need {reach} positions, the base has {limit} "
                    "(max_position_embeddings): take a higher ratio or cut the context, or read it into a "
                    "`sliding_memory`"
                )
        if memory.width:
            check_sliding_window(backbone.config, memory.width, window.sources.shape[1])
        tokens = backbone.get_input_embeddings()(input_ids.gather(1, window.sources))
        beacon = self.beacon_embedding.to(tokens.dtype)
        # [sinks, beacons so far, window with its beacons] are numbered 0, 1, 2, ...
        num_slots = torch.tensor(memory.num_slots)[:, None]
        slot_mask = (torch.arange(memory.width) < num_slots).to(device, window.attention_mask.dtype)
        position_ids = (num_slots + torch.arange(window.sources.shape[1])).to(device)
        cache = RecordingCache(memory.numbered(), window.kept.to(device))
        with self.beacon_maps.at(window.beacons, backbone, self.config.beacon_maps):
            states = self.encoder_outputs(
                inputs_embeds=torch.where(window.is_beacon[:, :, None], beacon, tokens),
                attention_mask=torch.cat([slot_mask, window.attention_mask], dim=1),
                position_ids=position_ids,
                cache=cache,
            ).last_hidden_state
        kept = cache.recorder.close(self.dtype)
        memory = memory.with_window(kept, num_slots + window.kept, window.num_kept)
        return take_places(states, window.tokens), memory

    def slot_positions(self, slot_mask: Tensor, chunks: Chunks, counts: Sequence[int]) -> Tensor:
        """Number slots 0, 1, ..., `(batch_size, num_slots)`; the text goes on behind them."""
        return (slot_mask.cumsum(dim=1) - 1) * slot_mask


class SlidingMemory:
    r"""
    What stays of a text that is read as it comes: the latest beacons, and the sinks. Its size, and that of every pass,
    is the same however long the text is.

    Args:
        model ([`ActivationBeaconModel`]): the compressor.
        ratio: context tokens for each beacon; the checkpoint's default if not given.
        max_slots: slots that stay at most, sinks included; the oldest beacons go first.
    """

    def __init__(self, model: ActivationBeaconModel, ratio: int | None = None, max_slots: int = 1024):
        config = model.config
        self.model, self.max_slots, self.num_tokens = model, max_slots, 0
        empty = torch.zeros(0, 0, dtype=torch.long, device=model.device)
        self.ratio: int = resolve_ratios([ratio], config.compression_ratios, empty, False)[0]
        size = config.window_tokens(self.ratio)
        window, limit = size + size // self.ratio, max_positions(config.get_encoder_config())
        if max_slots <= config.num_sinks or (limit is not None and max_slots + window > limit):
            raise ValueError(
                f"`max_slots` must be above the {config.num_sinks} sinks and leave {window} positions of the base's "
                f"{limit} to a window and its beacons, got {max_slots}"
            )
        # Tokens of a window that is not full yet.
        self._unread = empty
        self._memory: BeaconMemory | None = None

    @torch.no_grad()
    def append(self, input_ids: Tensor) -> None:
        """Read on: `input_ids` `(batch_size, num_tokens)` are the next tokens of each text, without pads."""
        measure_rows(self.model.context_rows(input_ids, None))
        if self._memory is None:
            self._memory, self._unread = self.model.empty_memory(len(input_ids)), input_ids[:, :0]
        unread, size = torch.cat([self._unread, input_ids], dim=1), self.model.config.window_tokens(self.ratio)
        memory = self._memory
        while unread.shape[1] >= size:
            memory = self._with_window(memory, unread[:, :size])
            unread = unread[:, size:]
        # A copy: a view would keep all that has been read.
        self._memory, self._unread = memory, unread.clone()
        self.num_tokens += input_ids.shape[1]

    @torch.no_grad()
    def memory(self) -> CompressedContext:
        """Return the memory as it is now, for `forward`, `generate` and `save`; the text may go on behind it.

        A window that is not full has its beacons, too, and is read anew when more of it has come.
        """
        if self._memory is None or not self.num_tokens:
            raise ValueError("nothing has been read: give the text to `append`, got no tokens")
        memory = self._with_window(self._memory, self._unread) if self._unread.shape[1] else self._memory
        batch_size, device = len(self._unread), self._unread.device
        attention_mask = torch.ones(batch_size, memory.width, dtype=torch.long, device=device)
        return CompressedContext(
            key_values=memory.numbered(),
            attention_mask=attention_mask,
            position_ids=attention_mask.cumsum(dim=1) - 1,
            num_context_tokens=torch.full((batch_size,), self.num_tokens, device=device),
            ratio=self.ratio,
            model_id="" if self.model.training else self.model.model_id,
            inverse_frequencies=memory.inverse_frequencies,
            maker=weakref.ref(self.model),
            check=False,
        )

    def _with_window(self, memory: BeaconMemory, input_ids: Tensor) -> BeaconMemory:
        batch_size, length = input_ids.shape
        ends, ratios = [length] * batch_size, [self.ratio] * batch_size
        memory = self.model._read_next(input_ids, [0] * batch_size, ends, ratios, memory)[1]
        return memory.latest(self.model.config.num_sinks, self.max_slots)


class ActivationBeaconForCausalLM(CompressorForCausalLM):
    """[`ActivationBeaconModel`] with the decoder's LM head."""

    model_class = ActivationBeaconModel

    def sliding_memory(self, ratio: int | None = None, max_slots: int = 1024) -> SlidingMemory:
        """Start a memory of a text that goes on for ever, in bounded space; see [`SlidingMemory`]."""
        return SlidingMemory(self.model, ratio, max_slots)
