# SPDX-License-Identifier: Apache-2.0
"""Estimate what a billion tokens cost: GPU hours, bytes and money, from the roofline and a share of it.

    python -m benchmarks.memory_store.cost --share 0.4
    python -m benchmarks.memory_store.cost    # on a GPU that is known

The share is that of the least time, operations by GMSA's Appendix G at the maker's limit. It is given, or measured on
a GPU that is known: mean pooling of each shape with random weights in bfloat16, its adapters merged, compresses
batches of chunks, and its slots are rounded to int8 and moved to the host, as a worker of `compress-corpus` does;
reading and tokenizing texts and writing the store are beside it. A CPU's share says nothing of a GPU.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.answer_latency.roofline import Hardware, compression_pass, hardware_of
from benchmarks.common.tools import (
    add_place_arguments,
    device_of,
    positive_float,
    positive_int,
    random_compressor,
    save_and_report,
    tells_errors,
    timed_by_processor,
)
from context_compressors.evaluation.flops import compression_flops
from context_compressors.evaluation.model_shapes import SHAPE_NAMES, method_config, named_config
from context_compressors.modeling.memory.memory_quantization import num_blocks
from context_compressors.reporting.tables import markdown_table

RATIOS = (4, 16)
# The maker's numbers for one H200, dense and in 16 bits: what costs are on paper.
H200 = Hardware(989e12, 4.8e12)


def measured(shape: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Tokens a second on this GPU, and their share of what its limits allow.

    Raises:
        ValueError: the device is no GPU whose limit is known.
    """
    device = device_of(arguments)
    hardware, base = hardware_of(device, torch.bfloat16), named_config(shape)
    if hardware is None:
        raise ValueError(f"the limit of {device} is not known: give --share, such as 0.4")
    base.bos_token_id, base.eos_token_id, base.pad_token_id = 0, 1, 1
    model = random_compressor("mean_pooling", base, RATIOS, "bfloat16", device)
    model.merge_adapters()
    size = (max(1, arguments.batch_tokens // arguments.chunk_tokens), arguments.chunk_tokens)
    ids = torch.randint(2, base.vocab_size, size, device=device)

    @torch.inference_mode()
    def compress() -> None:
        model.compress(ids, ratio=RATIOS[0]).quantize("int8").to("cpu")

    compress()
    spent = statistics.median(timed_by_processor(compress, device)[1] for _ in range(arguments.repeats))
    least = compression_pass(model, *size, RATIOS[0]).least_seconds(hardware)
    return {
        "measured_tokens_per_second": ids.numel() / spent,
        "measured_flops_limit": hardware.flops_per_second,
        "share": least / spent,
    }


def row_of(shape: str, ratio: int, share: float, arguments: argparse.Namespace) -> dict[str, Any]:
    """The cost of `arguments.tokens` tokens on paper."""
    base = named_config(shape)
    config = method_config("mean_pooling", base, RATIOS, None, base.max_position_embeddings)
    flops = compression_flops(config, arguments.chunk_tokens, ratio) * arguments.tokens / arguments.chunk_tokens
    least_hours = flops / H200.flops_per_second / 3600
    num_slots = arguments.tokens / arguments.chunk_tokens * -(-arguments.chunk_tokens // ratio)
    num_bytes = num_slots * (base.hidden_size + 2 * num_blocks(base.hidden_size))
    return {
        "shape": shape,
        "ratio": ratio,
        "flops": flops,
        "least_gpu_hours": least_hours,
        "share": share,
        "gpu_hours": least_hours / share,
        "gpu_dollars": least_hours / share * arguments.dollars_per_gpu_hour,
        "int8_gigabytes": num_bytes / 1e9,
        "store_dollars_per_month": num_bytes / 1e9 * arguments.dollars_per_gigabyte_month,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    header = ["base", "ratio", "least GPU hours", "share", "GPU hours", "money", "store in int8", "money a month"]
    return markdown_table(
        header,
        [
            [
                row["shape"],
                row["ratio"],
                f"{row['least_gpu_hours']:.2f}",
                f"{100 * row['share']:.0f} %",
                f"{row['gpu_hours']:.2f}",
                f"${row['gpu_dollars']:,.2f}",
                f"{row['int8_gigabytes']:,.0f} GB",
                f"${row['store_dollars_per_month']:,.2f}",
            ]
            for row in rows
        ],
    )


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shapes", nargs="+", choices=SHAPE_NAMES, default=["llama-3.2-1b", "qwen3-8b"], metavar="SHAPE")
    add("--share", type=positive_float, help="of the limit (default: measured on this GPU)")
    add("--tokens", type=positive_float, default=1e9, help="of the collection (default: 1e9)")
    add("--chunk-tokens", type=positive_int, default=512, metavar="N", help="default: 512")
    add("--batch-tokens", type=positive_int, default=16_384, metavar="N", help="default: 16384")
    add("--repeats", type=positive_int, default=20, help="default: 20")
    add("--dollars-per-gpu-hour", type=positive_float, default=3.5, help="of one H200 (default: 3.5)")
    add("--dollars-per-gigabyte-month", type=positive_float, default=0.023, help="of object storage (default: 0.023)")
    add_place_arguments(parser)
    return parser


@tells_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Measure or take the shares, print the table, and write the result file."""
    arguments = build_parser().parse_args(argv)
    rows: list[dict[str, Any]] = []
    found = {"share": arguments.share}
    for shape in arguments.shapes:
        if arguments.share is None:
            found = measured(shape, arguments)
        rows += [{**row_of(shape, ratio, found["share"], arguments), **found} for ratio in RATIOS]
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    save_and_report(__file__, arguments, rows, table(rows), "cost")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
