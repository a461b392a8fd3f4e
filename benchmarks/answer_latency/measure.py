# SPDX-License-Identifier: Apache-2.0
"""Time to the first and last token of an answer: from the full context, and from a stored memory.

    python -m benchmarks.answer_latency.measure
    python -m benchmarks.answer_latency.measure --setting table7 --compile    # GMSA's Table 7, on a GPU at 7B

Full context: the language model reads context and question. Memory: the compressor reads slots and question, with its
adapters in place or merged (--merge-adapters). Both write the same number of tokens greedily. Compression is timed
separately. It breaks even after compression time / (full-context time - memory time) readings. Weights are random.

`--setting` has the paper's shape on a GPU (Table 7: batches of 1, 8 and 32 contexts, up to 110 GB) and a small shape
on a CPU; other options override it. `--compile` compiles the passes over one token on both sides.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, StaticCache
from transformers.generation.streamers import BaseStreamer

from benchmarks.common.tools import (
    add_shape_arguments,
    device_of,
    positive_int,
    random_compressor,
    save_and_report,
    script_parser,
    seconds,
    shape_config,
    synchronize,
    tells_errors,
)
from context_compressors.modeling.parts.base_pass import CACHE
from context_compressors.reporting.tables import markdown_table

_TABLE_7 = {
    "method": "gmsa",
    "lengths": [3253],
    "ratios": [4, 8],
    "question_tokens": 50,
    "new_tokens": 100,
    "static_cache": True,
    "merge_adapters": True,
}
# Defaults of the paper's settings, and what a GPU adds to them; a CPU keeps the small shape.
SETTINGS: dict[str, dict[str, Any]] = {"table7": _TABLE_7, "table8": {**_TABLE_7, "lengths": [32768]}}
_GPU_SETTINGS: dict[str, dict[str, Any]] = {
    "table7": {"shape": "llama-2-7b", "dtype": "bfloat16", "batch_sizes": [1, 8, 32]},
    "table8": {"shape": "qwen2-7b", "dtype": "bfloat16", "batch_sizes": [1]},
}


class _Clock(BaseStreamer):
    """Record when each token arrives; the first call passes the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def compile_decoding(backbone: PreTrainedModel, **options: Any) -> None:
    """Compile a backbone's passes over one token, with `options` of `torch.compile` or else as CUDA graphs."""
    eager = backbone.forward
    compiled = torch.compile(eager, **(options or {"mode": "reduce-overhead"}))

    @functools.wraps(eager)
    def forward(*args: Any, **kwargs: Any) -> Any:
        tokens = kwargs.get("inputs_embeds")
        tokens = kwargs.get("input_ids") if tokens is None else tokens
        return (compiled if tokens is not None and tokens.shape[1] == 1 else eager)(*args, **kwargs)

    backbone.forward = forward


def answer_seconds(
    model: PreTrainedModel, input_ids: torch.Tensor, new_tokens: int, cache: StaticCache | None = None, **inputs: Any
) -> tuple[float, float]:
    """Return the seconds of one greedy answer to its first and to its last token, with a growing or a fixed cache."""
    clock = _Clock()
    if cache is not None:
        cache.reset()
        # What is compiled is the benchmark's choice, the same for both sides.
        inputs = {**inputs, CACHE: cache, "disable_compile": True}
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
    """Return the number of readings after which compressing once is no slower than reading the context each time.

    `None` where a reading from the memory is no faster, so that it never pays.
    """
    return max(1, math.ceil(compression / (full - memory))) if full > memory else None


@torch.no_grad()
def measure(
    language_model: PreTrainedModel,
    compressor: PreTrainedModel,
    length: int,
    batch_size: int,
    arguments: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Rows of one context length and batch size, one for each ratio."""
    device = device_of(arguments)
    generator = torch.Generator().manual_seed(length)
    shape = (batch_size, length + arguments.question_tokens)
    ids = torch.randint(2, arguments.vocab_size, shape, generator=generator).to(device)
    context, question = ids[:, :length], ids[:, length:]
    ratios, new_tokens = arguments.ratios, arguments.new_tokens
    memories = {ratio: compressor.compress(context, ratio=ratio) for ratio in ratios}
    places = {ratio: int(memory.num_slots[0]) for ratio, memory in memories.items()}
    caches = {
        key: _cache(language_model.config, slots + arguments.question_tokens + new_tokens, arguments.static_cache)
        for key, slots in {None: length, **places}.items()
    }
    full: list[tuple[float, float]] = []
    compression: dict[int, list[float]] = {ratio: [] for ratio in ratios}
    answers: dict[int, list[tuple[float, float]]] = {ratio: [] for ratio in ratios}
    # More rounds than asked for: the first only warm up, and a graph is recorded in the second.
    warm_up = 2 if arguments.compile else 1
    for _ in range(warm_up + arguments.repeats):
        full.append(answer_seconds(language_model, ids, new_tokens, caches[None]))
        for ratio in ratios:
            compression[ratio].append(seconds(lambda ratio=ratio: compressor.compress(context, ratio=ratio), device))
            memory, cache = memories[ratio], caches[ratio]
            answers[ratio].append(answer_seconds(compressor, question, new_tokens, cache, memory=memory))
    rows = []
    for ratio in ratios:
        times = (full[warm_up:], compression[ratio][warm_up:], answers[ratio][warm_up:])
        row = {"num_tokens": length, "batch_size": batch_size, "ratio": ratio, "slots": places[ratio]}
        row |= {"memory_bytes": memories[ratio].nbytes, "samples": dict(zip(_SIDES, times, strict=True))}
        rows.append(row)
    return rows


_SIDES = ("full_context", "compression", "memory")
_TOKENS = ("first_token", "last_token")


def _cache(config: PreTrainedConfig, length: int, is_static: bool) -> StaticCache | None:
    return StaticCache(config=config, max_cache_len=length) if is_static else None


def medians(row: dict[str, Any], token: str) -> tuple[float, float, float]:
    """Median seconds to the "first_token" or "last_token" from full context and memory, and to compress."""
    samples, index = row["samples"], _TOKENS.index(token)
    full, memory = (median(times[index] for times in samples[side]) for side in ("full_context", "memory"))
    return full, memory, median(samples["compression"])


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a table, with times in milliseconds."""
    header = ["N", "batch", "ratio", "to token", "full context", "memory", "compression", "with compression"]
    header += ["speed-up", "break-even reads"]
    body = []
    for row in rows:
        if row.get("out_of_memory"):
            continue
        for name in _TOKENS:
            full, memory, compression = medians(row, name)
            times = [f"{1e3 * seconds:.1f}" for seconds in (full, memory, compression, memory + compression)]
            reads = break_even(compression, full, memory)
            sizes = [row["num_tokens"], row["batch_size"], row["ratio"], name.removesuffix("_token")]
            body.append([*sizes, *times, f"{full / (memory + compression):.2f}", "never" if reads is None else reads])
    return "Times in milliseconds.\n\n" + markdown_table(header, body)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = script_parser(__doc__)
    add_shape_arguments(parser, hidden_size=128, layers=4)
    add = parser.add_argument
    add("--setting", choices=list(SETTINGS), help="defaults of a table of GMSA's, see above")
    add("--method", default="mean_pooling", help="default: mean_pooling")
    add(
        "--lengths",
        nargs="+",
        type=positive_int,
        default=[512, 2048, 8192],
        metavar="N",
        help="default: 512 2048 8192",
    )
    add("--batch-sizes", nargs="+", type=positive_int, default=[1], metavar="B", help="contexts at once (default: 1)")
    add("--ratios", nargs="+", type=positive_int, default=[4, 16], metavar="R", help="default: 4 16")
    add("--question-tokens", type=positive_int, default=16, metavar="N", help="default: 16")
    add("--new-tokens", type=positive_int, default=64, metavar="N", help="tokens of an answer (default: 64)")
    add("--repeats", type=positive_int, default=3, metavar="N", help="measurements of everything (default: 3)")
    add("--static-cache", action="store_true", help="key/value caches of fixed length, made once")
    add("--compile", action="store_true", help="compiled graphs for passes over one token; needs --static-cache")
    add(
        "--merge-adapters",
        action="store_true",
        help="merge the compressor's adapters: encoder and decoder then apart, and all weights in --dtype",
    )
    return parser


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments, with a setting's defaults where nothing else is given."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if arguments.setting is not None:
        # Whether this machine has it is asked when something is measured.
        is_gpu = arguments.device.startswith("cuda") or (arguments.device == "auto" and torch.cuda.is_available())
        parser.set_defaults(**SETTINGS[arguments.setting], **(_GPU_SETTINGS[arguments.setting] if is_gpu else {}))
        arguments = parser.parse_args(argv)
    if arguments.compile and not arguments.static_cache:
        parser.error("--compile needs --static-cache: a cache that grows has no graph of its own")
    return arguments


@tells_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    arguments = parse(argv)
    device, dtype = device_of(arguments), getattr(torch, arguments.dtype)
    config = shape_config(arguments, max(arguments.lengths) + arguments.question_tokens + arguments.new_tokens)
    compressor = random_compressor(arguments.method, config, arguments.ratios, arguments.dtype, device)
    if arguments.merge_adapters:
        compressor.merge_adapters()
        compressor.to(dtype)
    with device:
        language_model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    if arguments.compile:
        compile_decoding(language_model.base_model)
        compile_decoding(compressor.model.language_model)
    rows: list[dict[str, Any]] = []
    work = [(length, batch_size) for length in arguments.lengths for batch_size in arguments.batch_sizes]
    for length, batch_size in tqdm(work, desc="answer latency", unit="size"):
        try:
            rows += measure(language_model, compressor, length, batch_size, arguments)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            print(f"{batch_size} contexts of {length} tokens do not fit into the memory", file=sys.stderr)
            rows.append({"num_tokens": length, "batch_size": batch_size, "out_of_memory": True})
    name = device.type if arguments.setting is None else f"{arguments.setting}_{device.type}"
    save_and_report(__file__, arguments, rows, table(rows), name)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
