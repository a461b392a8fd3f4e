# SPDX-License-Identifier: Apache-2.0
"""Time and peak memory of `compress`, relative to the forward pass of its encoder.

    python -m benchmarks.compression_overhead.measure --methods comprexit mean_pooling

Both calls see the same batch, the same attention and the same adapter, and take turns, so that whatever else the
machine does hits both. Memory is what a call holds at its peak beyond the weights. The encoder alone reads the context
as one chunk, and nothing else.

The goal is 1.05 times the encoder alone for mean pooling and 1.15 times for ComprExIT; methods with memory tokens read
1 + 1/ratio times as many tokens, and their goal is 1.08 times that.

`--row-lengths` makes a batch full of padding: its rows have these shares of N, one after the other. Such a row of the
result also has the time of compressing each context alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.common.tools import (
    add_shape_arguments,
    device_of,
    peak_bytes,
    positive_float,
    positive_int,
    random_compressor,
    save_and_report,
    script_parser,
    seconds,
    shape_config,
    tells_errors,
)
from context_compressors.reporting.tables import markdown_table


def goal(method: str, ratio: int) -> float:
    """The most time that `compress` should take, as a multiple of the encoder alone."""
    return {"mean_pooling": 1.05, "comprexit": 1.15}.get(method, (1 + 1 / ratio) * 1.08)


def bare_encoder(model: PreTrainedModel, input_ids: torch.Tensor, mask: torch.Tensor) -> Callable[[], Any]:
    """One pass of the encoder with its adapter over the batch, with the method's own attention, and nothing else."""
    backbone = model.base_model
    positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
    is_causal = getattr(model.config, "encoder_attention", "causal") == "causal"
    return lambda: backbone.encoder_outputs(input_ids, mask, positions, is_causal=is_causal).last_hidden_state


def batch(
    model: PreTrainedModel, length: int, batch_size: int, row_lengths: Sequence[float], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random contexts `(batch_size, length)`, right-padded where rows are shorter, and their mask."""
    generator = torch.Generator().manual_seed(length)
    input_ids = torch.randint(2, model.config.vocab_size, (batch_size, length), generator=generator)
    lengths = torch.tensor([max(1, round(length * row_lengths[i % len(row_lengths)])) for i in range(batch_size)])
    mask = (torch.arange(length) < lengths[:, None]).long()
    return input_ids.to(device), mask.to(device)


@torch.no_grad()
def measure(model: PreTrainedModel, method: str, length: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """One row of the result: seconds of every turn, and peak memory."""
    device, ratio = device_of(arguments), arguments.ratio
    input_ids, mask = batch(model, length, arguments.batch_size, arguments.row_lengths, device)
    calls = {
        "encoder": bare_encoder(model, input_ids, mask),
        "compress": lambda: model.compress(input_ids, mask, ratio=ratio),
    }
    if not mask.all():
        contexts = [ids[None, row.bool()] for ids, row in zip(input_ids, mask, strict=True)]
        calls["one_by_one"] = lambda: [model.compress(context, ratio=ratio) for context in contexts]
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(arguments.repeats):
        for name, call in calls.items():
            times[name].append(seconds(call, device))
    return {
        "method": method,
        "num_tokens": length,
        "batch_size": arguments.batch_size,
        "padding_share": 1 - float(mask.float().mean()),
        "ratio": ratio,
        "peak_bytes": {name: peak_bytes(calls[name], device) for name in ("encoder", "compress")},
        "seconds": times,
    }


def time_ratio(row: dict[str, Any], of: Callable[[Sequence[float]], float] = median) -> float:
    """Time of `compress` over that of the encoder alone, of the medians or of another choice among the turns."""
    return of(row["seconds"]["compress"]) / of(row["seconds"]["encoder"])


def memory_ratio(row: dict[str, Any]) -> float:
    """Peak memory of `compress` over that of the encoder alone."""
    return row["peak_bytes"]["compress"] / row["peak_bytes"]["encoder"]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a table."""
    header = ["method", "N", "padding", "encoder ms", "compress ms", "one by one ms", "time ratio", "of fastest"]
    header += ["goal", "memory ratio"]
    body = []
    for row in rows:
        times, cells = row["seconds"], [row["method"], row["num_tokens"], f"{100 * row['padding_share']:.0f} %"]
        for name in ("encoder", "compress", "one_by_one"):
            cells.append(f"{1e3 * median(times[name]):.1f}" if name in times else "-")
        # The fastest turns are those that nothing else on the machine disturbed.
        cells += [f"{time_ratio(row):.3f}", f"{time_ratio(row, min):.3f}"]
        body.append([*cells, f"<= {goal(row['method'], row['ratio']):.3f}", f"{memory_ratio(row):.3f}"])
    return markdown_table(header, body)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = script_parser(__doc__)
    add_shape_arguments(parser, hidden_size=256, layers=2)
    add = parser.add_argument
    usual = "mean_pooling compression_tokens comprexit gmsa tcp_autoencoder"
    add("--methods", nargs="+", default=usual.split(), metavar="METHOD", help=f"default: {usual}")
    add("--lengths", nargs="+", type=positive_int, default=[512, 2048], metavar="N", help="default: 512 2048")
    add("--batch-size", type=positive_int, default=4, metavar="B", help="default: 4")
    add("--ratio", type=positive_int, default=4, metavar="R", help="default: 4")
    add("--repeats", type=positive_int, default=5, metavar="N", help="turns of each of the two (default: 5)")
    add(
        "--row-lengths",
        nargs="+",
        type=positive_float,
        default=[1.0],
        metavar="X",
        help="shares of N, by row (default: 1)",
    )
    return parser


@tells_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    arguments = build_parser().parse_args(argv)
    device = device_of(arguments)
    rows = []
    longest = max(arguments.lengths)
    # Memory tokens have positions behind the context.
    config = shape_config(arguments, longest + -(-longest // arguments.ratio))
    for method in arguments.methods:
        model = random_compressor(method, config, [arguments.ratio], arguments.dtype, device)
        for length in arguments.lengths:
            row = measure(model, method, length, arguments)
            rows.append(row)
            print(f"{method}, N = {length}: time {time_ratio(row):.3f}, memory {memory_ratio(row):.3f}")
    save_and_report(__file__, arguments, rows, table(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
