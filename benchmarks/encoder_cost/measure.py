# SPDX-License-Identifier: Apache-2.0
"""Time of DeCAL's encoder by ratio: latents beside the tokens cost less the fewer they are.

    python -m benchmarks.encoder_cost.measure

Random weights, all models interleaved, the median of the repetitions. Beside DeCAL at every ratio stand the T5 encoder
(no compression) and AttnPool, which pools behind it. Writes JSON and a picture.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from matplotlib.figure import Figure

from benchmarks.common.tools import (
    DTYPES,
    add_place_arguments,
    device_of,
    positive_int,
    save_and_report,
    seconds,
    tells_errors,
)
from context_compressors import DeCALConfig, DeCALModel
from context_compressors.reporting.tables import markdown_table


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--length", type=positive_int, default=1024, metavar="N", help="tokens of context (default: 1024)")
    add("--ratios", nargs="+", type=positive_int, default=[2, 4, 8, 16], metavar="C", help="default: 2 4 8 16")
    add("--batch-size", type=positive_int, default=1, metavar="B", help="default: 1")
    add("--d-model", type=positive_int, default=256, metavar="H", help="a multiple of 64 (default: 256)")
    add("--layers", type=positive_int, default=4, metavar="L", help="default: 4")
    add("--repeats", type=positive_int, default=9, metavar="R", help="default: 9")
    add("--dtype", choices=DTYPES, default="float32", help="default: float32")
    add_place_arguments(parser)
    return parser


def encoder(arguments: argparse.Namespace, **fields: Any) -> DeCALModel:
    """An encoder with random weights, in evaluation mode."""
    shape = {
        "vocab_size": 4096,
        "d_model": arguments.d_model,
        "d_kv": 64,
        "num_heads": arguments.d_model // 64,
        "d_ff": arguments.d_model * 11 // 4,
        "num_layers": arguments.layers,
    }
    torch.manual_seed(0)
    device, dtype = device_of(arguments), getattr(torch, arguments.dtype)
    return DeCALModel(DeCALConfig(decoder_config=shape, **fields)).to(device=device, dtype=dtype).eval()


@torch.inference_mode()
def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each model and ratio with its time; the first is T5's."""
    device = device_of(arguments)
    ids = torch.randint(5, 4096, (arguments.batch_size, arguments.length), device=device)
    cases: list[tuple[str, int, DeCALModel]] = [("T5", 1, encoder(arguments, compression="none"))]
    ratios = tuple(arguments.ratios)
    decal = encoder(arguments, compression_ratios=ratios)
    pooling = encoder(arguments, compression="attention_pooling", compression_ratios=ratios)
    cases += [("DeCAL", ratio, decal) for ratio in ratios] + [("AttnPool", ratio, pooling) for ratio in ratios]
    times: list[list[float]] = [[] for _ in cases]
    for repeat in range(arguments.repeats + 1):
        for case, (_, ratio, model) in zip(times, cases, strict=True):
            elapsed = seconds(lambda model=model, ratio=ratio: model(ids, ratio=ratio), device)
            # The first round fills caches.
            if repeat:
                case.append(elapsed)
    return [
        {"model": name, "ratio": ratio, "seconds": median(case)}
        for (name, ratio, _), case in zip(cases, times, strict=True)
    ]


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Time relative to T5's encoder by ratio, a line for each model."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name in ("DeCAL", "AttnPool"):
        mine = [row for row in rows if row["model"] == name]
        relative = [row["seconds"] / rows[0]["seconds"] for row in mine]
        axes.plot([row["ratio"] for row in mine], relative, marker="o", label=name)
    axes.axhline(1.0, color="grey", linestyle="--", label="T5's encoder")
    axes.set_xscale("log", base=2)
    axes.set_xticks([row["ratio"] for row in rows if row["model"] == "DeCAL"])
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("compression ratio")
    axes.set_ylabel("encoder time, relative")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, dpi=150)


def table(rows: Sequence[dict[str, Any]], length: int) -> str:
    """The rows for people."""
    cells = []
    for row in rows:
        read = length + (-(-length // row["ratio"]) if row["model"] == "DeCAL" else 0)
        times = [f"{1000 * row['seconds']:.1f}", f"{row['seconds'] / rows[0]['seconds']:.2f}"]
        cells.append([row["model"], row["ratio"], read, *times])
    return markdown_table(["model", "ratio", "encoder's tokens", "time, ms", "relative"], cells)


@tells_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    arguments = build_parser().parse_args(argv)
    if arguments.d_model % 64:
        raise ValueError(f"--d-model must be a multiple of 64, got {arguments.d_model}")
    rows = measure(arguments)
    path = save_and_report(__file__, arguments, rows, table(rows, arguments.length))
    draw(rows, path.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
