# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations of compressing a context and answering from its slots (GMSA, section 4.3, Appendix G)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from .. import modeling  # noqa: F401  (makes the Auto classes know this package's methods)
from ..configuration.configuration_compressor import CompressorConfig
from ..configuration.layer_shape import LayerShape, stack_flops
from ..configuration.methods import METHODS, config_class, methods_on
from ..configuration.nearest_names import check_choice
from ..data.yaml_text import read_yaml
from ..modeling.checkpoint.pretrained_bases import base_place
from ..reporting.tables import markdown_table

_SHAPES: dict[str, dict[str, Any]] = read_yaml(Path(__file__).with_name("model_shapes.yaml"))
SHAPE_NAMES = tuple(_SHAPES)


def compression_flops(config: PreTrainedConfig, num_context_tokens: int, ratio: int) -> int:
    """Return the operations of compressing one context: for GMSA F^Encoder(L) + F^LSA(ceil(L / r)) (section 4.3)."""
    return config.compression_flops(num_context_tokens, ratio)


def generation_flops(
    config: PreTrainedConfig,
    num_slots: int,
    question_length: int,
    answer_length: int,
    slots_are_key_values: bool = False,
) -> int:
    """Return the operations of answering with a key/value cache: F^Decoder of equation 11 over the answer's passes.

    Args:
        num_slots: ceil(L / r), or the context's L tokens themselves.
        question_length: L_q.
        answer_length: L_a, tokens to write, one a pass.
        slots_are_key_values: the slots stand in the cache from the start (500xCompressor).
    """
    layer, total = LayerShape.from_config(config), 0
    if config.is_encoder_decoder:
        for i in range(1, answer_length + 1):
            # A start token stands in front of question and answer.
            length = 1 if i > 1 else question_length + 1
            total += layer.flops(length, question_length + i - length)
            total += layer.cross_attention_flops(length, num_slots, new_states=i == 1)
        return total * config.num_decoder_layers
    start = num_slots + question_length
    total = layer.flops(question_length, num_slots) if slots_are_key_values else layer.flops(start)
    total += sum(layer.flops(1, start + i - 2) for i in range(2, answer_length + 1))
    return total * config.num_hidden_layers


def full_context_flops(
    config: PreTrainedConfig, num_context_tokens: int, question_length: int, answer_length: int
) -> int:
    """Return the operations of answering from the context itself, which speed-ups are measured against."""
    reading = stack_flops(config, num_context_tokens) if config.is_encoder_decoder else 0
    return reading + generation_flops(config, num_context_tokens, question_length, answer_length)


def flops_table(
    base: str,
    methods: Sequence[str] = (),
    ratios: Sequence[int] = (),
    context_tokens: int = 3253,
    question_tokens: int = 50,
    answer_tokens: int = 100,
) -> str:
    """Return a Markdown table of the operations of methods and of the full context, in 10^9.

    Args:
        base: a name of `SHAPE_NAMES`, or the folder or Hub id of a language model or compressor.
        methods: all that go with the base when empty; none of a compressor.
        ratios: a compressor's own when empty, else 4 and 8.
        context_tokens, question_tokens, answer_tokens: L, L_q and L_a; by default those of GMSA's Table 7.
    """
    config = named_config(base) if base in _SHAPES else AutoConfig.from_pretrained(base_place(base))
    is_compressor = isinstance(config, CompressorConfig)
    ratios = ratios or (config.compression_ratios if is_compressor else (4, 8))
    configs = [config]
    if not is_compressor:
        configs = [method_config(method, config, ratios) for method in methods or methods_on(config)]
    lengths = (question_tokens, answer_tokens)
    full = full_context_flops(configs[0].decoder_config, context_tokens, *lengths)
    rows = [["full context", "", "", "", _giga(full), _giga(full), "1.00", ""]]
    for config in configs:
        for ratio in ratios:
            compression = compression_flops(config, context_tokens, ratio)
            slots, in_cache = config.num_slots(context_tokens, ratio), config.carrier == "key_values"
            answer = generation_flops(config.decoder_config, slots, *lengths, slots_are_key_values=in_cache)
            counts = [_giga(value) for value in (compression, answer, compression + answer)]
            speed_ups = [f"{full / (compression + answer):.2f}", f"{full / answer:.2f}"]
            rows.append([config.method, str(ratio), str(slots), *counts, *speed_ups])
    header = ["method", "ratio", "slots", "compression", "answer", "together", "speed-up", "speed-up, memory kept"]
    return markdown_table(header, rows)


def _giga(flops: int) -> str:
    value = flops / 1e9
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


# --- configurations of well-known models, and of methods on them ---


def named_config(name: str) -> PreTrainedConfig:
    """Return a new configuration of one of `SHAPE_NAMES`, such as "llama-2-7b"."""
    fields = dict(_SHAPES[name])
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def method_config(method: str, base: PreTrainedConfig, ratios: Sequence[int], **fields: Any) -> PreTrainedConfig:
    """A method's configuration on a base, with further `fields` of it."""
    check_choice("method", method, METHODS)
    if method not in methods_on(base):
        raise ValueError(f"{method} does not go with a base of type {base.model_type!r}; {methods_on(base)} do")
    return config_class(method)(decoder_config=base, compression_ratios=list(ratios), **fields)
