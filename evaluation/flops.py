# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations of compressing a context and answering from its slots (GMSA, section 4.3, Appendix G).

What is counted and what is not, `LayerShape` says; what a method does with a context, its configuration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..configuration.layer_shape import LayerShape, check_at_least, stack_flops

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def compression_flops(config: PreTrainedConfig, num_context_tokens: int, ratio: int) -> int:
    """Operations of compressing one context: for GMSA F^Encoder(L) + F^LSA(ceil(L / r)) (section 4.3).

    Args:
        config: a compressor's configuration.
        num_context_tokens: L.
        ratio: r, context tokens per slot.

    Raises:
        ValueError: another model's configuration, or a number below its least value.
    """
    if not hasattr(config, "compression_flops"):
        raise ValueError(f"no count of operations for {config.model_type!r}: it is no compressor")
    return config.compression_flops(num_context_tokens, ratio)


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
    check_at_least(0, num_slots=num_slots, question_length=question_length)
    check_at_least(1, answer_length=answer_length)
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


def answering_flops(
    config: PreTrainedConfig, num_context_tokens: int, ratio: int, question_length: int, answer_length: int
) -> int:
    """Operations of answering from a compressor's slots, with a cache; arguments as before."""
    slots, in_cache = config.num_slots(num_context_tokens, ratio), config.carrier == "key_values"
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
