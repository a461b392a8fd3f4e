"""Time and peak memory of `compress`, beside the bare forward pass of its encoder.

    python benchmarks/compression_overhead.py
    python benchmarks/compression_overhead.py --methods icae five_hundred_x compression_tokens --ratio 5
    python benchmarks/compression_overhead.py --device cuda --dtype bfloat16 --hidden-size 2048 --layers 16

Both calls see the same batch, the same attention and the same adapter, and take turns, so that whatever else the
machine does hits both. Memory is what a call holds at its peak beyond the weights. The encoder alone reads the context
as one chunk, and nothing else. The goal for mean pooling is at most 1.05 times that, in both; methods with memory
tokens read 1 + 1/ratio times as many tokens, and their goal is 1.08 times that.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from benchmark_tools import (
    add_shape_arguments,
    device_of,
    llama_config,
    peak_bytes,
    positive_int,
    random_compressor,
    save_and_report,
    seconds,
)
from transformers import PreTrainedModel

from context_compressors.evaluation.report import markdown_table

_MEAN_POOLING_GOAL = 1.05
_MEMORY_TOKENS_GOAL = 1.08


def goal(method: str, ratio: int) -> float:
    """The most that `compress` should take, as a multiple of the encoder alone."""
    return _MEAN_POOLING_GOAL if method == "mean_pooling" else (1 + 1 / ratio) * _MEMORY_TOKENS_GOAL


def bare_encoder(model: PreTrainedModel, input_ids: torch.Tensor) -> Callable[[], Any]:
    """One pass of the encoder with its adapter over the batch, with the method's own attention, and nothing else."""
    backbone = model.base_model
    mask = torch.ones_like(input_ids)
    positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    is_causal = getattr(model.config, "encoder_attention", "causal") == "causal"
    return lambda: backbone.encoder_states(input_ids, mask, positions, is_causal=is_causal)


@torch.no_grad()
def measure(
    model: PreTrainedModel, method: str, length: int, batch_size: int, ratio: int, repeats: int, device: torch.device
) -> dict[str, Any]:
    """One row of the result: medians over the repeats, and the ratios of compression to the encoder alone."""
    generator = torch.Generator().manual_seed(length)
    input_ids = torch.randint(2, model.config.vocab_size, (batch_size, length), generator=generator).to(device)
    mask = torch.ones_like(input_ids)
    calls = {
        "encoder": bare_encoder(model, input_ids),
        "compress": lambda: model.compress(input_ids, mask, ratio=ratio),
    }
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            times[name].append(seconds(call, device))
    peaks = {name: peak_bytes(call, device) for name, call in calls.items()}
    medians = {name: median(values) for name, values in times.items()}
    return {
        "method": method,
        "num_tokens": length,
        "batch_size": batch_size,
        "ratio": ratio,
        "encoder_seconds": medians["encoder"],
        "compress_seconds": medians["compress"],
        "time_ratio": medians["compress"] / medians["encoder"],
        # The fastest turns are those that nothing else on the machine disturbed.
        "time_ratio_of_fastest": min(times["compress"]) / min(times["encoder"]),
        "encoder_peak_bytes": peaks["encoder"],
        "compress_peak_bytes": peaks["compress"],
        "memory_ratio": peaks["compress"] / peaks["encoder"],
        "goal": goal(method, ratio),
        "seconds": times,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows for people."""
    header = [
        "method",
        "N",
        "encoder ms",
        "compress ms",
        "time ratio",
        "of fastest",
        "encoder MiB",
        "compress MiB",
        "memory ratio",
        "goal",
    ]
    body = [
        [
            row["method"],
            row["num_tokens"],
            f"{1e3 * row['encoder_seconds']:.1f}",
            f"{1e3 * row['compress_seconds']:.1f}",
            f"{row['time_ratio']:.3f}",
            f"{row['time_ratio_of_fastest']:.3f}",
            f"{row['encoder_peak_bytes'] / 2**20:.2f}",
            f"{row['compress_peak_bytes'] / 2**20:.2f}",
            f"{row['memory_ratio']:.3f}",
            f"<= {row['goal']:.3f}",
        ]
        for row in rows
    ]
    return markdown_table(header, body)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_shape_arguments(parser, hidden_size=256, layers=2)
    add = parser.add_argument
    add("--methods", nargs="+", default=["mean_pooling"], metavar="METHOD", help="default: mean_pooling")
    add("--lengths", nargs="+", type=positive_int, default=[512, 2048], metavar="N", help="default: 512 2048")
    add("--batch-size", type=positive_int, default=4, metavar="B", help="default: 4")
    add("--ratio", type=positive_int, default=4, metavar="R", help="default: 4")
    add("--repeats", type=positive_int, default=5, metavar="N", help="turns of each of the two (default: 5)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    arguments = build_parser().parse_args(argv)
    device = device_of(arguments)
    rows = []
    try:
        longest = max(arguments.lengths)
        # Memory tokens have positions behind the context.
        config = llama_config(arguments, longest + -(-longest // arguments.ratio))
        for method in arguments.methods:
            model = random_compressor(method, config, [arguments.ratio], arguments.dtype, device)
            for length in arguments.lengths:
                row = measure(model, method, length, arguments.batch_size, arguments.ratio, arguments.repeats, device)
                rows.append(row)
                print(f"{method}, N = {length}: time {row['time_ratio']:.3f}, memory {row['memory_ratio']:.3f}")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    save_and_report("compression_overhead", arguments, rows, table(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
