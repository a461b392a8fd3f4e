# SPDX-License-Identifier: Apache-2.0
"""Memory and tokens per second of Activation Beacon by length, beside the plain model.

    python -m benchmarks.activation_beacon.measure

A text is read in windows: by the sliding memory, which keeps the latest slots; by `compress`, which keeps them all;
and by the plain model, behind the keys and values of everything before. Weights are random: neither memory nor time
depends on them. Peak memory is what tensors made on the way hold at once, what is kept of the text included, and not
the weights; on a CPU the time is the processor's own, which is that of an idle core on a shared machine, too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from benchmarks.common.tools import (
    add_shape_arguments,
    device_of,
    peak_bytes,
    positive_int,
    save_and_report,
    shape_config,
    tells_errors,
    timed_by_processor,
)
from context_compressors import ActivationBeaconConfig, ActivationBeaconModel
from context_compressors.modeling.parts.cache_name import CACHE
from context_compressors.reporting.tables import markdown_table


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--lengths", type=positive_int, nargs="+", default=[4096, 8192, 16384, 32768], metavar="N", help="tokens")
    add("--window", type=positive_int, default=512, metavar="W", help="tokens of a window (default: 512)")
    add("--ratio", type=positive_int, default=8, metavar="R", help="default: 8")
    add("--max-slots", type=positive_int, default=384, metavar="S", help="of the sliding memory (default: 384)")
    add_shape_arguments(parser, hidden_size=128, layers=2)
    return parser


def compressor(arguments: argparse.Namespace) -> ActivationBeaconModel:
    """Activation Beacon with random weights, in evaluation mode."""
    base = shape_config(arguments, max(arguments.lengths) + 1)
    torch.manual_seed(0)
    config = ActivationBeaconConfig(
        decoder_config=base, compression_ratios=[arguments.ratio], window_size=arguments.window
    )
    device = device_of(arguments)
    with device:
        model = ActivationBeaconModel._from_config(config, dtype=getattr(torch, arguments.dtype))
    return model.to(device).eval()


def readers(model: ActivationBeaconModel, arguments: argparse.Namespace) -> dict[str, Callable[[Tensor], Any]]:
    """Return the functions that read a text `(1, num_tokens)` and return its memory, by name."""

    def slide(ids: Tensor) -> Any:
        memory = model.sliding_memory(arguments.ratio, arguments.max_slots)
        for window in ids.split(arguments.window, dim=1):
            memory.append(window)
        return memory

    def plain(ids: Tensor) -> Any:
        cache, read = DynamicCache(), 0
        for window in ids.split(arguments.window, dim=1):
            positions = torch.arange(read, read + window.shape[1], device=ids.device)[None]
            read += window.shape[1]
            model.language_model(input_ids=window, position_ids=positions, **{CACHE: cache}, use_cache=True)
        return cache

    return {"sliding memory": slide, "one document": model.compress, "plain model": plain}


@torch.inference_mode()
def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each reader and length."""
    model, rows = compressor(arguments), []
    device = device_of(arguments)
    for length in arguments.lengths:
        ids = torch.randint(3, model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(length))
        ids = ids.to(device)
        for name, read in readers(model, arguments).items():
            read(ids[:, : 2 * arguments.window])
            took, peak = time_and_peak(lambda read=read, ids=ids: read(ids), device)
            rows.append({"reader": name, "tokens": length, "tokens_per_second": length / took, "peak_bytes": peak})
            print(f"{name}, {length:,} tokens: {length / took:,.0f} a second, {peak / 1e6:.1f} MB", flush=True)
    return rows


def time_and_peak(function: Callable[[], Any], device: torch.device) -> tuple[float, int]:
    """Seconds and peak bytes; on a CPU both of one call, whose time is the processor's own."""
    if device.type == "cuda":
        return timed_by_processor(function, device)[1], peak_bytes(function, device)
    took: list[float] = []

    def call() -> Any:
        result, seconds = timed_by_processor(function, device)
        took.append(seconds)
        return result

    peak = peak_bytes(call, device)
    return took[0], peak


def table_of(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as the page's table."""
    names = list(dict.fromkeys(row["reader"] for row in rows))
    found = {(row["reader"], row["tokens"]): row for row in rows}
    header = ["tokens", *(f"{name}, {what}" for what in ("MB", "tokens/s") for name in names)]
    lines = [
        [
            f"{length:,}",
            *(f"{found[name, length]['peak_bytes'] / 1e6:.1f}" for name in names),
            *(f"{found[name, length]['tokens_per_second']:,.0f}" for name in names),
        ]
        for length in dict.fromkeys(row["tokens"] for row in rows)
    ]
    return markdown_table(header, lines)


@tells_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, and write the result file."""
    arguments = build_parser().parse_args(argv)
    rows = measure(arguments)
    save_and_report(__file__, arguments, rows, table_of(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
