# SPDX-License-Identifier: Apache-2.0
"""Time to the first token and to the last one: the full context in words, against a memory that is ready.

    python -m benchmarks.answer_latency.measure
    python -m benchmarks.answer_latency.measure --setting table7 --compile    # GMSA's Table 7, on a GPU at 7B

Full context: the plain language model of the same shape reads context and question. Memory: the compressor, its
adapters in place (or merged, with --merge-adapters), reads slots and question. Both write greedily, always the same
number of tokens. Compression is timed by itself, so that the table can show the time with it, too, and after how many
readings it has paid for itself: compression time / (full-context time - memory time). Weights are random: they change
no time.

Beside each time stands its roofline: the operations of GMSA's Appendix G, the bytes of weights and of the cache that
must move and, on a GPU that is known, the time that these take at the least. A setting of the paper is a set of
defaults: on a GPU the paper's shape (Table 7: batches of 1, 8 and 32 contexts, the last of which need some 110 GB), on
a CPU the small shape; what is given on the command line replaces them. `--compile` turns the passes over one token, of
both sides, into compiled graphs: otherwise starting the kernels can take longer than running them.
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

from benchmarks.answer_latency.roofline import (
    ForwardPass,
    answer_passes,
    compression_pass,
    hardware_of,
    module_bytes,
    summary,
)
from benchmarks.common.tools import (
    add_shape_arguments,
    device_of,
    positive_int,
    random_compressor,
    save_and_report,
    seconds,
    shape_config,
    synchronize,
    tells_errors,
)
from context_compressors.modeling.parts.cache_name import CACHE
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
    """Notes when each token arrives; the first call hands over the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def compile_decoding(backbone: PreTrainedModel, **options: Any) -> None:
    """Run a backbone's passes over one token as compiled graphs, and longer ones as they are.

    Args:
        backbone: a language model without its head.
        options: of `torch.compile`; CUDA graphs when there are none.
    """
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
    """Time of one greedy answer to its first and to its last token.

    Args:
        model: writes the answer.
        input_ids: `(batch_size, num_tokens)`.
        new_tokens: tokens to write.
        cache: a cache of fixed length to write into; one that grows when `None`.
        inputs: what else the model takes.
    """
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
    """Smallest number of readings after which compressing once took no longer than reading the context each time.

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
        rows.append(row | {"roofline": _rooflines(language_model, compressor, row, arguments)})
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


def _rooflines(
    language_model: PreTrainedModel, compressor: PreTrainedModel, row: dict[str, Any], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Operations, bytes and least time of each side, the answers to the first and to the last token."""
    config, dtype = language_model.config, getattr(torch, arguments.dtype)
    hardware = hardware_of(device_of(arguments), dtype)
    embeddings = language_model.get_input_embeddings()
    weights = module_bytes(language_model, without=None if config.tie_word_embeddings else embeddings)
    is_cached = compressor.config.carrier == "key_values"
    slots, question = row["slots"], arguments.question_tokens

    def answer(prefill: int, num_cached: int) -> list[ForwardPass]:
        sizes = (weights, dtype.itemsize, row["batch_size"], prefill, num_cached, arguments.new_tokens)
        return answer_passes(config, *sizes)

    sides = {
        "full_context": answer(row["num_tokens"] + question, 0),
        "memory": answer(question, slots) if is_cached else answer(slots + question, 0),
    }
    found = {
        side: {"first_token": summary(passes[:1], hardware), "last_token": summary(passes, hardware)}
        for side, passes in sides.items()
    }
    compression = compression_pass(compressor, row["batch_size"], row["num_tokens"], row["ratio"])
    return {**found, "compression": summary([compression], hardware)}


def table(rows: Sequence[dict[str, Any]], new_tokens: int) -> str:
    """The rows for people: times in milliseconds with the least ones behind them, and the operations."""
    header = ["N", "batch", "ratio", "to token", "full context", "memory", "compression", "with compression"]
    header += ["speed-up", "break-even reads", "GFLOPs full", "memory", "compression", "speed-up by FLOPs"]
    body = []
    for row in rows:
        if row.get("out_of_memory"):
            continue
        rooflines = row["roofline"]
        for name, tokens in zip(_TOKENS, (1, new_tokens), strict=True):
            full, memory, compression = times = medians(row, name)
            parts = [rooflines[side].get(name, rooflines[side]) for side in ("full_context", "memory", "compression")]
            flops, reads = [part["flops"] for part in parts], break_even(compression, full, memory)
            pairs = [*zip(times, [part["least_seconds"] for part in parts], strict=True), (memory + compression, None)]
            body.append(
                [row["num_tokens"], row["batch_size"], row["ratio"], tokens]
                + [f"{1e3 * time:.1f}" + (f" (>= {1e3 * least:.1f})" if least else "") for time, least in pairs]
                + [f"{full / (memory + compression):.2f}", "never" if reads is None else reads]
                + [f"{value / 1e9:.4g}" for value in flops]
                + [f"{flops[0] / (flops[1] + flops[2]):.2f}"]
            )
    return "Times in milliseconds.\n\n" + markdown_table(header, body)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_shape_arguments(parser, hidden_size=128, layers=4)
    add = parser.add_argument
    add("--setting", choices=list(SETTINGS), help="defaults of a table of GMSA's, see above")
    add("--method", default="mean_pooling", help="default: mean_pooling")
    add(
        "--encoder-layers",
        type=positive_int,
        metavar="L",
        help="of GMSA and TCP-AE (default: 8, or a quarter of the layers where there are fewer than 16)",
    )
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
    sizes = (arguments.ratios, arguments.dtype, device, arguments.encoder_layers)
    compressor = random_compressor(arguments.method, config, *sizes)
    if arguments.encoder_layers is not None and not hasattr(compressor.config, "encoder_layers"):
        raise ValueError(f"--encoder-layers is for GMSA and TCP-AE: {arguments.method} encodes with all layers")
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
    save_and_report(__file__, arguments, rows, table(rows, arguments.new_tokens), name)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
