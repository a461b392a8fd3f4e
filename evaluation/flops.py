# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations of compressing a context and answering from its slots (GMSA, section 4.3, Appendix G).

As in the appendix, attention counts every pair of tokens whatever its mask, the softmax counts, and norms, rotations,
embeddings and the LM head do not; adapters count as merged into the weights. Everything is for one sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..configuration.nearest_names import nearest

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class LayerShape:
    """Sizes of a transformer layer that its operations depend on.

    Args:
        hidden_size: D of Appendix G.
        head_dim: d, size of an attention head.
        num_heads: h^q, query heads.
        num_key_value_heads: h^k, key/value heads.
        intermediate_size: I, width of the feed-forward part.
        is_gated: whether the feed-forward part has a gate, as equation 10 takes it; the first T5 has none.
    """

    hidden_size: int
    head_dim: int
    num_heads: int
    num_key_value_heads: int
    intermediate_size: int
    is_gated: bool = True

    @classmethod
    def from_config(cls, config: PreTrainedConfig) -> LayerShape:
        """The layer of a language model's configuration.

        Raises:
            ValueError: a configuration that does not name a layer's sizes.
        """
        if config.model_type == "t5":
            heads = config.num_heads
            return cls(config.d_model, config.d_kv, heads, heads, config.d_ff, config.is_gated_act)
        names = ("hidden_size", "num_attention_heads", "intermediate_size")
        if missing := [name for name in names if getattr(config, name, None) is None]:
            raise ValueError(f"a configuration of type {config.model_type!r} has no {', '.join(missing)}")
        heads = config.num_attention_heads
        return cls(
            config.hidden_size,
            getattr(config, "head_dim", None) or config.hidden_size // heads,
            heads,
            getattr(config, "num_key_value_heads", None) or heads,
            config.intermediate_size,
        )

    def parts(self, length: int, num_past: int = 0) -> dict[str, int]:
        """Operations of the layer by part.

        Args:
            length: L_in, tokens that go through the layer at once.
            num_past: tokens in front of them whose keys and values are in a cache.

        Returns:
            `qkv`, `qk`, `softmax`, `av`, `out` (equation 9), `up` and `down` (equation 10).
        """
        hidden, d, heads = self.hidden_size, self.head_dim, self.num_heads
        num_keys = num_past + length
        return {
            "qkv": 2 * length * hidden * d * heads + 2 * 2 * length * hidden * d * self.num_key_value_heads,
            "qk": 2 * heads * length * num_keys * d,
            "softmax": heads * length * num_keys,
            "av": 2 * heads * length * num_keys * d,
            "out": 2 * length * d * heads * hidden,
            "up": 2 * length * hidden * (2 if self.is_gated else 1) * self.intermediate_size,
            "down": 2 * length * hidden * self.intermediate_size,
        }

    def flops(self, length: int, num_past: int = 0) -> int:
        """Operations of the whole layer; arguments as `parts`."""
        return sum(self.parts(length, num_past).values())

    def future_flops(self, length: int) -> int:
        """Operations of equation 9 between `length` tokens and later ones, which a causal kernel need not do."""
        return self.num_heads * (4 * self.head_dim + 1) * (length * (length - 1) // 2)

    def cross_attention_flops(self, length: int, num_states: int, new_states: bool) -> int:
        """Operations of cross-attention by equation 9, with the keys and values of an encoder's output.

        Args:
            length: decoder tokens that go through the layer at once.
            num_states: vectors of the encoder's output.
            new_states: whether their keys and values are still to be computed.
        """
        projection = 2 * self.hidden_size * self.head_dim * self.num_heads
        keys_and_values = 2 * num_states * projection if new_states else 0
        scores = self.num_heads * length * num_states * (2 * self.head_dim + 1 + 2 * self.head_dim)
        return keys_and_values + 2 * length * projection + scores


def layer_flops(
    length: int,
    hidden_size: int,
    head_dim: int,
    num_heads: int,
    num_key_value_heads: int,
    intermediate_size: int,
) -> int:
    """Operations of one layer, attention and feed-forward, over `length` tokens at once (equations 9 and 10)."""
    return LayerShape(hidden_size, head_dim, num_heads, num_key_value_heads, intermediate_size).flops(length)


def stack_flops(config: PreTrainedConfig, length: int, num_layers: int | None = None) -> int:
    """Operations of a stack of layers over `length` tokens at once: F^Encoder and F^LSA of equation 11.

    Args:
        config: a language model's configuration.
        length: tokens.
        num_layers: layers that they go through; all of the model's when `None`.
    """
    return LayerShape.from_config(config).flops(length) * (
        config.num_hidden_layers if num_layers is None else num_layers
    )


def generation_flops(
    config: PreTrainedConfig,
    num_slots: int,
    question_length: int,
    answer_length: int,
    cached: bool = True,
    slots_are_key_values: bool = False,
) -> int:
    """Operations of answering: F^Decoder of equation 11, summed over the answer's passes.

    A decoder-only model reads slots and question in its first pass. A T5 decoder reads the question, and attends to
    the slots, whose keys and values it makes once.

    Args:
        config: the decoder's configuration.
        num_slots: ceil(L / r), or the context's L tokens themselves.
        question_length: L_q.
        answer_length: L_a, tokens to write, one a pass.
        cached: with a key/value cache, where a later pass runs over one token against all keys so far; without, every
            pass runs over everything again, as equation 11 reads literally.
        slots_are_key_values: the slots stand in the cache from the start (500xCompressor).

    Raises:
        ValueError: a number below zero, no token to read or to write, or key/value slots without a cache.
    """
    _check_at_least(0, num_slots=num_slots, question_length=question_length)
    _check_at_least(1, answer_length=answer_length)
    if slots_are_key_values and not cached:
        raise ValueError("slots_are_key_values needs cached=True: without a cache there is no place for them")
    if config.is_encoder_decoder:
        return _cross_attending_flops(config, num_slots, question_length, answer_length, cached)
    layer = LayerShape.from_config(config)
    start = num_slots + question_length
    if cached:
        first = layer.flops(question_length, num_slots) if slots_are_key_values else layer.flops(start)
        total = first + sum(layer.flops(1, start + i - 2) for i in range(2, answer_length + 1))
    else:
        total = sum(layer.flops(start + i - 1) for i in range(1, answer_length + 1))
    return total * config.num_hidden_layers


def _cross_attending_flops(
    config: PreTrainedConfig, num_slots: int, question_length: int, answer_length: int, cached: bool
) -> int:
    layer = LayerShape.from_config(config)
    total = 0
    for i in range(1, answer_length + 1):
        # A start token stands in front of question and answer.
        length = 1 if cached and i > 1 else question_length + i
        total += layer.flops(length, question_length + i - length)
        total += layer.cross_attention_flops(length, num_slots, new_states=i == 1 or not cached)
    return total * config.num_decoder_layers


def num_slots(config: PreTrainedConfig, num_context_tokens: int, ratio: int) -> int:
    """Slots that a compressor makes of a context, all chunks together.

    Args:
        config: a compressor's configuration.
        num_context_tokens: L.
        ratio: r.
    """
    _check_at_least(0, num_context_tokens=num_context_tokens)
    _check_at_least(1, ratio=ratio)
    return sum(times * _slots_of_chunk(config, length, ratio) for length, times in _chunks(config, num_context_tokens))


def compression_flops(config: PreTrainedConfig, num_context_tokens: int, ratio: int) -> int:
    """Operations of compressing one context: for GMSA F^Encoder(L) + F^LSA(ceil(L / r)) (section 4.3).

    Args:
        config: a compressor's configuration.
        num_context_tokens: L.
        ratio: r, context tokens per slot.

    Raises:
        ValueError: a method whose cost is not known here, or a number below its least value.
    """
    if config.model_type not in _COSTS:
        raise ValueError(f"no count of operations for {config.model_type!r}{nearest(config.model_type, _COSTS)}")
    _check_at_least(0, num_context_tokens=num_context_tokens)
    _check_at_least(1, ratio=ratio)
    cost = _COSTS[config.model_type]
    return sum(times * cost(config, length, ratio) for length, times in _chunks(config, num_context_tokens))


def answering_flops(
    config: PreTrainedConfig, num_context_tokens: int, ratio: int, question_length: int, answer_length: int
) -> int:
    """Operations of answering from a compressor's slots, with a cache; arguments as before."""
    slots = num_slots(config, num_context_tokens, ratio)
    in_cache = config.model_type == _KEY_VALUE_METHOD
    return generation_flops(
        config.decoder_config, slots, question_length, answer_length, slots_are_key_values=in_cache
    )


def full_context_flops(
    config: PreTrainedConfig, num_context_tokens: int, question_length: int, answer_length: int
) -> int:
    """Operations of answering from the context itself, uncompressed: what a speed-up is measured against.

    Args:
        config: a language model's configuration; a T5 encoder reads the context.
        num_context_tokens: L.
        question_length: L_q.
        answer_length: L_a.
    """
    reading = stack_flops(config, num_context_tokens) if config.is_encoder_decoder else 0
    return reading + generation_flops(config, num_context_tokens, question_length, answer_length)


def methods_of(config: PreTrainedConfig) -> tuple[str, ...]:
    """The methods that go with a base: DeCAL with a T5, all others with a decoder-only language model."""
    return tuple(name for name in METHODS if (f"{name}_compressor" == _SEQ2SEQ_METHOD) == config.is_encoder_decoder)


def _check_at_least(least: int, **values: int) -> None:
    for name, value in values.items():
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")


def _chunks(config: PreTrainedConfig, num_context_tokens: int) -> list[tuple[int, int]]:
    """Lengths of the context's chunks, and how many there are of each."""
    size = config.chunk_size or max(1, num_context_tokens)
    full, rest = divmod(num_context_tokens, size)
    return [(length, times) for length, times in ((size, full), (rest, 1)) if length and times]


def _slots_of_chunk(config: PreTrainedConfig, length: int, ratio: int) -> int:
    is_fixed = getattr(config, "memory_tokens", None) == "fixed"
    return -(-(config.chunk_size if is_fixed else length) // ratio)


def _linear(num_vectors: int, in_features: int, out_features: int) -> int:
    return 2 * num_vectors * in_features * out_features


# --- by method: operations over one chunk of n tokens ---


def _mean_pooling(config: PreTrainedConfig, n: int, ratio: int) -> int:
    encoder, slots = config.get_encoder_config(), _slots_of_chunk(config, n, ratio)
    reading = stack_flops(encoder, n) if config.encoder_type == "language_model" else 0
    return reading + (_linear(slots, encoder.hidden_size, config.hidden_size) if config.linear_after_pooling else 0)


def _compression_tokens(config: PreTrainedConfig, n: int, ratio: int) -> int:
    encoder, slots = config.get_encoder_config(), _slots_of_chunk(config, n, ratio)
    projection = _linear(slots, encoder.hidden_size, config.hidden_size) if config.linear_after_encoder else 0
    return stack_flops(encoder, n + slots) + projection


def _distinct_memory_tokens(config: PreTrainedConfig, n: int, ratio: int) -> int:
    return stack_flops(config.get_encoder_config(), n + _slots_of_chunk(config, n, ratio))


def _comprexit(config: PreTrainedConfig, n: int, ratio: int) -> int:
    encoder, slots = config.get_encoder_config(), _slots_of_chunk(config, n, ratio)
    width, total = encoder.hidden_size, stack_flops(encoder, n)
    if config.token_anchors == "gate":
        states, gate = encoder.num_hidden_layers + (not config.literal_equations), config.gate_size
        # The mixture, the scores and the weighted sum go over the states of all layers.
        total += 3 * _linear(n, states, width) + _linear(n, gate, states)
        total += 2 * _linear(n, width, gate) + _linear(n, width, width)
    if config.slot_aggregation == "transport":
        total += _transport(config, width, n, ratio)
    else:
        total += _linear(n, 1, width)
        if config.slot_aggregation != "mean":
            total += _linear(n + slots, width, config.metric_size) + _linear(n, config.metric_size, 1)
    return total + _linear(slots, width, config.hidden_size) + _linear(slots, config.hidden_size, config.hidden_size)


def _transport(config: PreTrainedConfig, width: int, n: int, ratio: int) -> int:
    slots = -(-n // ratio)
    window = ratio * max(1, config.window_size // ratio)
    windows, rest = divmod(n, window)
    # A token meets the slots of its own window only.
    pairs = windows * window * (window // ratio) + rest * -(-rest // ratio)
    plan = _linear(n + slots, width, config.metric_size) + _linear(pairs, config.metric_size, 1)
    if config.uniform_sender_share < 1:
        plan += _linear(n, width, 1)
    # An iteration multiplies the kernel by one scaling for the rows, and by one for the columns.
    iterations = 2 * _linear(pairs, 1, config.transport_iterations)
    return plan + iterations + _linear(pairs, 1, width) + _linear(slots, width, width)


def _gmsa(config: PreTrainedConfig, n: int, ratio: int) -> int:
    encoder, slots = config.get_encoder_config(), _slots_of_chunk(config, n, ratio)
    reading = stack_flops(encoder, n + slots if config.appended_tokens else n)
    if encoder.hidden_size != config.hidden_size:
        reading += _linear(slots, encoder.hidden_size, config.hidden_size)
    return reading + stack_flops(config.decoder_config, slots, config.lsa_layers)


def _tcp_autoencoder(config: PreTrainedConfig, n: int, ratio: int) -> int:
    encoder, slots = config.get_encoder_config(), _slots_of_chunk(config, n, ratio)
    mlp = _linear(slots, encoder.hidden_size, config.hidden_size) + _linear(
        slots, config.hidden_size, config.hidden_size
    )
    return stack_flops(encoder, n + slots) + mlp


def _decal(config: PreTrainedConfig, n: int, ratio: int) -> int:
    t5, slots = config.decoder_config, _slots_of_chunk(config, n, ratio)
    if config.compression == "latents":
        return stack_flops(t5, n + slots)
    pooling = config.compression == "attention_pooling"
    return stack_flops(t5, n) + pooling * LayerShape.from_config(t5).cross_attention_flops(slots, n, new_states=True)


_COSTS: dict[str, Callable[[PreTrainedConfig, int, int], int]] = {
    "mean_pooling_compressor": _mean_pooling,
    "compression_tokens_compressor": _compression_tokens,
    "icae_compressor": _distinct_memory_tokens,
    "five_hundred_x_compressor": _distinct_memory_tokens,
    "comprexit_compressor": _comprexit,
    "gmsa_compressor": _gmsa,
    "tcp_autoencoder_compressor": _tcp_autoencoder,
    "decal_compressor": _decal,
}
_KEY_VALUE_METHOD = "five_hundred_x_compressor"
_SEQ2SEQ_METHOD = "decal_compressor"
METHODS = tuple(model_type.removesuffix("_compressor") for model_type in _COSTS)
