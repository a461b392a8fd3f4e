# SPDX-License-Identifier: Apache-2.0
"""The command `flops`: operations of every method beside the full context, without any weights."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..configuration.methods import METHODS, methods_on
from ..evaluation.flops import answering_flops, compression_flops, full_context_flops
from ..evaluation.model_shapes import SHAPE_NAMES, config_of, method_config
from .command import argument, command, positive_int

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_EXAMPLES = """
# Every method on LLaMA-2-7B at the mean length of NaturalQuestions, as in GMSA's Table 7:
context-compressors flops llama-2-7b --context-tokens 3253 --ratios 4 8 --answer-tokens 100

# Two methods on a language model of one's own, and a checkpoint as it is configured:
context-compressors flops my-base --methods icae mean_pooling --context-tokens 512 --ratios 5
context-compressors flops my-compressor --context-tokens 512
"""

_SHAPES = ", ".join(SHAPE_NAMES)
_HEADER = ("method", "ratio", "slots", "compression", "answer", "together", "speed-up", "speed-up, memory kept")


def rows_of(
    configs: Sequence[PreTrainedConfig],
    ratios: Sequence[int],
    context_tokens: int,
    question_tokens: int,
    answer_tokens: int,
) -> list[list[str]]:
    """Rows of the table: the full context, then each compressor at each ratio, in 10^9 operations.

    Args:
        configs: configurations of compressors on one base.
        ratios: compression ratios.
        context_tokens: L.
        question_tokens: L_q.
        answer_tokens: L_a.
    """
    full = full_context_flops(configs[0].decoder_config, context_tokens, question_tokens, answer_tokens)
    rows = [["full context", "", "", "", _giga(full), _giga(full), "1.00", ""]]
    for config in configs:
        for ratio in ratios:
            compression = compression_flops(config, context_tokens, ratio)
            answer = answering_flops(config, context_tokens, ratio, question_tokens, answer_tokens)
            speed_ups = (full / (compression + answer), full / answer)
            rows.append(
                [config.method, str(ratio)]
                + [str(config.num_slots(context_tokens, ratio))]
                + [_giga(value) for value in (compression, answer, compression + answer)]
                + [f"{value:.2f}" for value in speed_ups]
            )
    return rows


def _is_compressor(config: PreTrainedConfig) -> bool:
    return hasattr(config, "compression_ratios")


def _giga(flops: int) -> str:
    value = flops / 1e9
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


@command(
    "flops",
    "Floating-point operations of compressing a context and answering from the slots, beside reading "
    "the full context (GMSA, Appendix G): one sequence, a key/value cache, adapters merged, no LM head.",
    argument("base", help=f"{_SHAPES}; or folder or Hub id of a language model or compressor"),
    argument("--methods", nargs="+", metavar="METHOD", help=f"among {', '.join(METHODS)} (default: all)"),
    argument(
        "--context-tokens", type=positive_int, default=3253, metavar="N", help="default: 3253, as in GMSA's Table 7"
    ),
    argument("--ratios", type=positive_int, nargs="+", metavar="R", help="default: a compressor's own, else 4 8"),
    argument("--question-tokens", type=positive_int, default=50, metavar="N", help="default: 50"),
    argument("--answer-tokens", type=positive_int, default=100, metavar="N", help="default: 100"),
    argument(
        "--encoder-layers",
        type=positive_int,
        metavar="K",
        help="of methods that encode with some of the base's layers only (default: the method's own)",
    ),
    examples=_EXAMPLES,
)
def main(arguments: argparse.Namespace) -> None:
    """Run `context-compressors flops`.

    Raises:
        ValueError: a base or method that there is none of, or that do not go together.
    """
    from ..reporting.tables import markdown_table

    base = config_of(arguments.base)
    ratios = arguments.ratios or getattr(base, "compression_ratios", (4, 8))
    if not _is_compressor(base):
        methods = arguments.methods or methods_on(base)
        configs = [method_config(method, base, ratios, arguments.encoder_layers) for method in methods]
    elif arguments.methods or arguments.encoder_layers:
        raise ValueError(f"{arguments.base} is a compressor already: leave out --methods and --encoder-layers")
    else:
        configs = [base]
    counts = (arguments.context_tokens, arguments.question_tokens, arguments.answer_tokens)
    print(f"{arguments.base}: {counts[0]} context, {counts[1]} question and {counts[2]} answer tokens; 10^9 FLOPs\n")
    print(markdown_table(_HEADER, rows_of(configs, ratios, *counts)))
