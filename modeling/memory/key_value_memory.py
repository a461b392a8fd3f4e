# SPDX-License-Identifier: Apache-2.0
"""Memory as keys and values of every layer: recorded in the encoder, read by the decoder as a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer

from ...configuration.layer_shape import key_value_shape, layer_kinds
from ..parts.packing import take_places
from .compressed_context import CompressedContext, KeyValues

# Kinds of layers that keep keys and values.
_KEY_VALUE_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")
# Frequencies that do not depend on the length of the sequence, so that keys can be rotated on.
_FIXED_ROPE_TYPES = ("default", "linear", "llama3", "yarn", None)
# Families that rotate neighbouring channels, and not the halves of a key, against each other.
_INTERLEAVED = ("cohere", "cohere2", "cohere2_moe", "ernie4_5", "ernie4_5_moe", "glm", "glm4", "helium", "llama4_text")
# Families that turn a half's channels the other way, or norm keys behind the rotation.
_TURNED_OTHERWISE = ("nanochat", "hunyuan_v1_dense", "hunyuan_v1_moe")
# Families whose layers that see everything turn no keys; of the second, only beside others with a sliding window.
_TURN_IN_WINDOWS = ("afmoe", "exaone4", "exaone_moe", "flint", "kolibri1", "lara_mini")
_OR_WITHOUT_WINDOW = ("exaone4", "exaone_moe", "kolibri1")


_NUM_SLOTS, _PAIRS = "_context_compressor_num_slots", "_context_compressor_pairs"


def note_cached_slots(cache: Cache | None, num_slots: int) -> None:
    """Keep with a cache how many slots it holds in front of the text."""
    if cache is not None:
        vars(cache)[_NUM_SLOTS] = num_slots


def note_cached_pairs(cache: Cache | None, pairs: Any) -> None:
    """Keep with a cache the pairs that heads read in front of what it holds; `None` for none."""
    if cache is not None:
        vars(cache)[_PAIRS] = pairs


def cached_pairs(cache: Cache | None) -> Any:
    """The pairs that lie beside a cache, or `None`."""
    return None if cache is None else vars(cache).get(_PAIRS)


def num_cached_slots(cache: Cache | None) -> int:
    """Slots that a cache holds; 0 in an empty one, and where it was filled by another model."""
    return vars(cache).get(_NUM_SLOTS, 0) if cache is not None and cache.get_seq_length() else 0


class KeyValueRecorder(DynamicCache):
    """A cache that keeps nothing but the keys and values of some places, for one forward pass.

    Args:
        places: `(batch_size, num_memory_tokens)`, the places of the memory tokens in each row.
        take: called with a layer's number and the states that its attention reads, without gradients, in models that
            show them; `inputs` has its results, layer by layer.
    """

    def __init__(self, places: Tensor, take: Callable[[int, Tensor], Tensor] | None = None):
        super().__init__()
        self._places, self._take = places, take
        self.inputs: list[Tensor] = []
        self._recorded: dict[int, tuple[Tensor, Tensor]] = {}
        self._is_open = True

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Note a layer's rotated keys and values, `(batch_size, num_heads, num_places, head_dim)`."""
        # Gradient checkpointing runs this a second time and has to find the same operations.
        chosen = take_places(key_states, self._places, dim=2), take_places(value_states, self._places, dim=2)
        if self._is_open:
            self._recorded[layer_idx] = chosen
        return key_states, value_states

    def note_input(self, layer: int, states: Tensor) -> None:
        """Note the states `(batch_size, num_places, hidden_size)` that a layer's attention reads."""
        if self._take is not None and self._is_open:
            self.inputs.append(self._take(layer, states.detach()))

    def close(self, dtype: torch.dtype) -> KeyValues:
        """Return keys and values of all layers in order, each `(batch_size, num_heads, num_memory_tokens,
        head_dim)`."""
        self._is_open = False
        recorded, self._recorded = self._recorded, {}
        # Under autocast rotated keys are float32 and values are not.
        return tuple((keys.to(dtype), values.to(dtype)) for _, (keys, values) in sorted(recorded.items()))


class ReadOnlyCache(DynamicCache):
    """Keys and values that every layer reads in front of its own, and to which nothing is added.

    Args:
        key_values: a pair for each layer, `(batch_size, num_heads, num_slots, head_dim)`.
    """

    def __init__(self, key_values: KeyValues):
        super().__init__()
        self._key_values = key_values

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """The layer's memory with the new keys and values behind it."""
        keys, values = self._key_values[layer_idx]
        return torch.cat([keys, key_states], dim=2), torch.cat([values, value_states], dim=2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of slots, padding slots included."""
        return self._key_values[layer_idx][0].shape[2]

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """The place of the first text token."""
        return self.get_seq_length()

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Number of places that are attended to, and the first of them."""
        return self.get_seq_length() + query_length, 0


def keep_caches_under_checkpointing(model: nn.Module, enable: bool) -> None:
    """Let checkpointed layers keep the cache that they are given, or again drop it as the library has it.

    Only for a model whose layers, when checkpointed, see no caches but those above, which take no second update
    amiss.
    """
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer._can_checkpoint_with_cache = enable


def filled_cache(memory: CompressedContext, is_full: bool, cache: Cache | None, use_cache: bool) -> Cache:
    """Return a cache that starts with a memory of key/values, its padding slots in front; `is_full` if it has none.

    It is the one given, a new one, or where none is wanted one to read only.
    """
    pairs = memory.key_values or ()
    if not is_full:
        order = memory.attention_mask.argsort(dim=1, stable=True)
        pairs = tuple((take_places(keys, order, dim=2), take_places(values, order, dim=2)) for keys, values in pairs)
    if cache is None and not use_cache:
        return ReadOnlyCache(pairs)
    cache = DynamicCache() if cache is None else cache
    for layer, (keys, values) in enumerate(pairs if memory.attention_mask.shape[1] else ()):
        cache.update(keys, values, layer)
    return cache


def inverse_frequencies(backbone: PreTrainedModel) -> Tensor | None:
    """Angles per position of the backbone's rotary embedding, `(head_dim / 2,)`; `None` where they are not fixed, or
    do not turn one half of a whole key against the other, or not those of every layer alike."""
    config, rotary = backbone.config, getattr(backbone, "rotary_emb", None)
    if getattr(rotary, "rope_type", None) not in _FIXED_ROPE_TYPES or config.model_type in _INTERLEAVED:
        return None
    # 0 for a layer without rotary positions; of their bases 0 or `None`.
    bases = set(getattr(config, "layer_rope_theta", None) or (1.0,))
    turns_all_layers = 0 not in (getattr(config, "no_rope_layers", None) or ()) and len(bases) == 1 and all(bases)
    if config.model_type in _TURN_IN_WINDOWS and "full_attention" in config.layer_types:
        turns_all_layers &= config.model_type in _OR_WITHOUT_WINDOW and config.sliding_window is None
    if config.model_type in _TURNED_OTHERWISE or not turns_all_layers:
        return None
    frequencies = getattr(rotary, "inv_freq", None)
    if frequencies is None or 2 * len(frequencies) != key_value_shape(config)[2]:
        return None
    return frequencies.float().clone()


def position_bytes(config: Any, dtype: torch.dtype) -> int:
    """Return the bytes of one position's keys and values in a language model's cache, over all layers and heads."""
    layers, heads, head_dim = key_value_shape(config)
    layers = sum(kind in _KEY_VALUE_LAYERS for kind in layer_kinds(config)) or layers
    return 2 * layers * heads * head_dim * dtype.itemsize


def check_has_key_values(config: Any) -> None:
    """Refuse a language model some of whose layers have a state of fixed size in place of keys and values."""
    kinds = set(layer_kinds(config)) - set(_KEY_VALUE_LAYERS)
    if kinds:
        raise ValueError(
            f"layers of the kind {sorted(kinds)[0]!r} have no keys and values: a base of type {config.model_type!r} "
            "goes with methods whose slots are embeddings"
        )


def check_same_key_values(config: Any) -> None:
    """Raise `ValueError` unless a compressor's encoder has the decoder's layers, heads and head dimension."""
    shapes = [key_value_shape(part) for part in (config.get_encoder_config(), config.decoder_config)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            "the decoder reads the encoder's keys and values: layers, heads and head dimension must be the same, got "
            f"{shapes[0]} in the encoder and {shapes[1]} in the decoder"
        )


def sliding_window(config: Any) -> int | None:
    """Tokens that a layer of the model sees at most, or `None` where all layers see everything."""
    window = getattr(config, "sliding_window", None)
    kinds = layer_kinds(config)
    return window if not kinds or "sliding_attention" in kinds else None


def check_sliding_window(config: Any, num_slots: int, num_text_tokens: int) -> None:
    """Raise `ValueError` unless slots of keys and values and the text behind them fit into a sliding window."""
    window = sliding_window(config)
    if window is not None and num_slots + num_text_tokens > window:
        raise ValueError(
            f"{num_slots} slots and {num_text_tokens} text tokens do not fit into the base's sliding window of "
            f"{window} tokens: a memory of key/values needs them all inside; take a higher ratio or a shorter text"
        )
