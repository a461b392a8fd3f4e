"""Time to the first token and to the last one: the full context in words, against a memory that is ready.

    python benchmarks/answer_latency.py
    python benchmarks/answer_latency.py --device cuda --dtype bfloat16 --hidden-size 2048 --layers 16

Full context: the plain language model of the same shape reads context and question. Memory: the compressor, its
adapters in place (or merged, with --merge-adapters), reads slots and question. Both write greedily, always the same
number of tokens. Compression is timed by itself, so that the table can show the time with it, too, and after how many
readings it has paid for itself: compression time / (full-context time - memory time). Weights are random: they change
no time.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from benchmark_tools import (
    add_shape_arguments,
    device_of,
    llama_config,
    positive_int,
    random_compressor,
    save_and_report,
    seconds,
    synchronize,
)
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from context_compressors.evaluation.report import markdown_table


class _Clock(BaseStreamer):
    """Notes when each token arrives; the first call hands over the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def answer_seconds(
    model: PreTrainedModel, input_ids: torch.Tensor, new_tokens: int, **inputs: Any
) -> tuple[float, float]:
    """Time of one greedy answer to its first and to its last token."""
    clock = _Clock()
    synchronize(input_ids.device)
    start = time.perf_counter()
    model.generate(
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids),
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        do_sample=False,
        num_beams=1,
        pad_token_id=model.config.eos_token_id,
        streamer=clock,
        **inputs,
    )
    return clock.times[1] - start, clock.times[-1] - start


def break_even(compression: float, full: float, memory: float) -> int | None:
    """Smallest number of readings after which compressing once took no longer than reading the context each time.

    `None` where a reading from the memory is no faster, so that it never pays.
    """
    return max(1, math.ceil(compression / (full - memory))) if full > memory else None


@torch.no_grad()
def measure(
    language_model: PreTrainedModel, compressor: PreTrainedModel, length: int, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """Rows of one context length, one for each ratio."""
    device = device_of(arguments)
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(2, arguments.vocab_size, (1, length + arguments.question_tokens), generator=generator).to(
        device
    )
    context, question = ids[:, :length], ids[:, length:]
    ratios, new_tokens = arguments.ratios, arguments.new_tokens
    memories = {ratio: compressor.compress(context, ratio=ratio) for ratio in ratios}
    full: list[tuple[float, float]] = []
    compression: dict[int, list[float]] = {ratio: [] for ratio in ratios}
    answers: dict[int, list[tuple[float, float]]] = {ratio: [] for ratio in ratios}
    # One round more than asked for: the first only warms up.
    for _ in range(1 + arguments.repeats):
        full.append(answer_seconds(language_model, ids, new_tokens))
        for ratio in ratios:
            compression[ratio].append(seconds(lambda ratio=ratio: compressor.compress(context, ratio=ratio), device))
            answers[ratio].append(answer_seconds(compressor, question, new_tokens, memory=memories[ratio]))
    return [
        _row(length, ratio, memories[ratio], full[1:], compression[ratio][1:], answers[ratio][1:]) for ratio in ratios
    ]


def _row(
    length: int,
    ratio: int,
    memory: Any,
    full: Sequence[tuple[float, float]],
    compression: Sequence[float],
    answers: Sequence[tuple[float, float]],
) -> dict[str, Any]:
    compress = median(compression)
    row = {
        "num_tokens": length,
        "ratio": ratio,
        "slots": int(memory.num_slots[0]),
        "memory_bytes": memory.nbytes,
        "compression_seconds": compress,
    }
    for index, name in enumerate(("first_token", "last_token")):
        full_time = median(times[index] for times in full)
        memory_time = median(times[index] for times in answers)
        row[name] = {
            "full_context_seconds": full_time,
            "memory_seconds": memory_time,
            "memory_and_compression_seconds": memory_time + compress,
            "break_even_reads": break_even(compress, full_time, memory_time),
        }
    row["samples"] = {"compression": list(compression), "full_context": list(full), "memory": list(answers)}
    return row


def table(rows: Sequence[dict[str, Any]], new_tokens: int) -> str:
    """The rows for people, times in milliseconds."""
    header = [
        "N",
        "ratio",
        "to token",
        "full context",
        "memory",
        "compression",
        "with compression",
        "break-even reads",
    ]
    body = []
    for row in rows:
        for name, tokens in (("first_token", 1), ("last_token", new_tokens)):
            times = row[name]
            milliseconds = [
                times["full_context_seconds"],
                times["memory_seconds"],
                row["compression_seconds"],
                times["memory_and_compression_seconds"],
            ]
            reads = times["break_even_reads"]
            body.append(
                [row["num_tokens"], row["ratio"], tokens]
                + [f"{1e3 * value:.1f}" for value in milliseconds]
                + ["never" if reads is None else reads]
            )
    return "Times in milliseconds.\n\n" + markdown_table(header, body)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_shape_arguments(parser, hidden_size=128, layers=4)
    add = parser.add_argument
    add("--method", default="mean_pooling", help="default: mean_pooling")
    add(
        "--lengths",
        nargs="+",
        type=positive_int,
        default=[512, 2048, 8192],
        metavar="N",
        help="default: 512 2048 8192",
    )
    add("--ratios", nargs="+", type=positive_int, default=[4, 16], metavar="R", help="default: 4 16")
    add("--question-tokens", type=positive_int, default=16, metavar="N", help="default: 16")
    add("--new-tokens", type=positive_int, default=64, metavar="N", help="tokens of an answer (default: 64)")
    add("--repeats", type=positive_int, default=3, metavar="N", help="measurements of everything (default: 3)")
    add(
        "--merge-adapters", action="store_true", help="merge the compressor's adapters: encoder and decoder then apart"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    arguments = build_parser().parse_args(argv)
    device = device_of(arguments)
    try:
        config = llama_config(arguments, max(arguments.lengths) + arguments.question_tokens + arguments.new_tokens)
        compressor = random_compressor(arguments.method, config, arguments.ratios, arguments.dtype, device)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if arguments.merge_adapters:
        compressor.merge_adapters()
    dtype = getattr(torch, arguments.dtype)
    language_model = AutoModelForCausalLM.from_config(config, dtype=dtype).to(device).eval()
    rows = []
    for length in tqdm(arguments.lengths, desc="answer latency", unit="length"):
        rows += measure(language_model, compressor, length, arguments)
    save_and_report("answer_latency", arguments, rows, table(rows, arguments.new_tokens))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
