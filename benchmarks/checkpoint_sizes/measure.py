# SPDX-License-Identifier: Apache-2.0
"""Sizes that each method adds to a base: parameters, checkpoints with and without it, bytes of memory.

    python -m benchmarks.checkpoint_sizes.measure

Counted on configurations alone, in bfloat16: nothing is computed, and no weights are read. Methods whose base is
another kind of model are counted on the shape in `OTHER_BASES`. A light checkpoint holds the method's own parts,
adapters and base weights that train; a whole one all weights. Memory is that of the slots, for each token of the
context, beside the keys and values that the base would keep of that token.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from benchmarks.common.tools import add_output_argument, positive_int, save_and_report, script_parser
from context_compressors.configuration.layer_shape import LayerShape, key_value_shape
from context_compressors.configuration.methods import METHODS, methods_on
from context_compressors.evaluation.flops import SHAPE_NAMES, method_config, named_config
from context_compressors.modeling import model_class
from context_compressors.modeling.checkpoint.base_weights import base_name
from context_compressors.modeling.compressor.headwise_reading import HeadwiseModel
from context_compressors.reporting.tables import markdown_table

BYTES = 2
OTHER_BASES = ("llama-3.2-1b", "t5-v1.1-large")


def on_meta(method: str, config: PreTrainedConfig) -> PreTrainedModel:
    """A method's model without any weights."""
    with torch.device("meta"):
        return model_class(method)(config)


def cache_values(base: PreTrainedConfig) -> int:
    """Numbers that a base keeps of one token of its context: keys and values of every layer."""
    shape = LayerShape.from_config(base)
    return base.num_hidden_layers * 2 * shape.num_key_value_heads * shape.head_dim


def slot_bytes(model: PreTrainedModel, base: PreTrainedConfig) -> int:
    """Bytes of one slot: a vector, or keys and values of every layer; of each pair that may be of any head two for the
    head and one for the coarsest ratio that keeps it."""
    if model.config.carrier != "key_values":
        return BYTES * base.hidden_size
    layers, heads, _ = key_value_shape(base)
    return BYTES * cache_values(base) + 3 * layers * heads * isinstance(model.base_model, HeadwiseModel)


def row_of(method: str, base_shape: str, ratios: Sequence[int]) -> dict[str, Any]:
    """All figures of one method on one base."""
    base = named_config(base_shape)
    model = on_meta(method, method_config(method, base, ratios))
    parameters = dict(model.named_parameters())
    # What is the base's and frozen can be had from there.
    own = sum(p.numel() for name, p in parameters.items() if p.requires_grad or base_name(name) is None)
    total = sum(p.numel() for p in parameters.values())
    return {
        "method": method,
        "base": base_shape,
        "own_parameters": own,
        "parameters": total,
        "slot_bytes": slot_bytes(model, base),
        "base_bytes_per_token": BYTES * cache_values(base),
    }


def rows_of(base_shape: str, ratios: Sequence[int]) -> list[dict[str, Any]]:
    """Return a row for each method, on the base or the first other one that it supports."""
    rows = []
    for method in METHODS:
        shape = next(name for name in (base_shape, *OTHER_BASES) if method in methods_on(named_config(name)))
        rows.append(row_of(method, shape, ratios))
    return rows


def table_of(rows: Sequence[dict[str, Any]], ratios: Sequence[int]) -> str:
    """Return the rows as the page's table."""
    header = ["method", "light, MB", "whole, MB", *(f"ratio {ratio}" for ratio in ratios)]
    lines = [
        [
            row["method"].replace("_", " ") + (f" on {row['base']}" if row["base"] != rows[0]["base"] else ""),
            f"{BYTES * row['own_parameters'] / 1e6:,.1f}",
            f"{BYTES * row['parameters'] / 1e6:,.0f}",
            *(f"{row['slot_bytes'] / ratio:,.0f}" for ratio in ratios),
        ]
        for row in rows
    ]
    return markdown_table(header, lines)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = script_parser(__doc__)
    parser.add_argument("--base", default="llama-3.2-1b", choices=SHAPE_NAMES, help="shape (default: %(default)s)")
    parser.add_argument("--ratios", type=positive_int, nargs="+", default=[4, 16], metavar="R", help="default: 4 16")
    add_output_argument(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Count, print the table, and write the result file."""
    arguments = build_parser().parse_args(argv)
    rows = rows_of(arguments.base, arguments.ratios)
    save_and_report(__file__, arguments, rows, table_of(rows, arguments.ratios), "sizes")


if __name__ == "__main__":
    main()
