# SPDX-License-Identifier: Apache-2.0
"""Shared parts of speed benchmarks: random models, time and memory of a call, arguments, result files."""

from __future__ import annotations

import argparse
import functools
import gc
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import Cache, LlamaConfig, PreTrainedConfig, PreTrainedModel

from context_compressors.cli.command import device_name, positive_int
from context_compressors.configuration.layer_shape import LayerShape
from context_compressors.configuration.methods import config_class
from context_compressors.evaluation.flops import SHAPE_NAMES, method_config, named_config
from context_compressors.modeling import model_class
from context_compressors.modeling.memory.key_value_memory import cached_pairs
from context_compressors.reporting.environment import environment
from context_compressors.reporting.result_files import write_results

DTYPES = ("float32", "bfloat16", "float16")


def tells_errors(main: Callable[[Sequence[str] | None], int]) -> Callable[..., int]:
    """Wrap a benchmark's `main(argv)` so that user errors are printed and return 1."""

    @functools.wraps(main)
    def telling(argv: Sequence[str] | None = None) -> int:
        try:
            return main(argv)
        except (OSError, ValueError, ImportError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1

    return telling


def script_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with a script's docstring as its description."""
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )


def cache_bytes(cache: Cache) -> int:
    """Bytes of all keys and values that a cache holds or that lie beside it."""
    layers, _ = cached_pairs(cache) or ((), 0)
    held = [*((layer.keys, layer.values) for layer in cache.layers)]
    held += [(group.keys, group.values) for layer in layers for group in layer]
    return sum(keys.nbytes + values.nbytes for keys, values in held)


def positive_float(text: str) -> float:
    """Parse a finite number above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number above 0")
    return value


def add_shape_arguments(parser: argparse.ArgumentParser, hidden_size: int, layers: int) -> None:
    """Add the arguments of a random model, its device and the output; the two sizes are defaults."""
    add = parser.add_argument
    add("--hidden-size", type=positive_int, default=hidden_size, metavar="H", help=f"default: {hidden_size}")
    add("--layers", type=positive_int, default=layers, metavar="L", help=f"default: {layers}")
    add("--head-dim", type=positive_int, default=64, metavar="D", help="divides the hidden size (default: 64)")
    add("--vocab-size", type=positive_int, default=4096, metavar="V", help="default: 4096")
    add("--shape", choices=SHAPE_NAMES, help="a well-known model's sizes, in place of those above")
    add("--dtype", choices=DTYPES, default="float32", help="default: float32")
    add_place_arguments(parser)


def add_place_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the device and the output file."""
    parser.add_argument("--device", default="auto", help='such as "cpu" or "cuda" (default: a GPU when there is one)')
    add_output_argument(parser)


def add_output_argument(parser: argparse.ArgumentParser) -> None:
    """Add the output file."""
    parser.add_argument("--output", metavar="FILE", help="where the JSON goes (default: the benchmark's own folder)")


def device_of(arguments: argparse.Namespace) -> torch.device:
    """Return the device of the arguments, "cpu" without one; "auto" is a GPU where there is one."""
    name = device_name(vars(arguments).get("device", "cpu"))
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)


def llama_config(arguments: argparse.Namespace, max_positions: int) -> LlamaConfig:
    """Return a Llama configuration of the shape in the arguments."""
    heads, rest = divmod(arguments.hidden_size, arguments.head_dim)
    if rest or not heads:
        raise ValueError(f"--head-dim {arguments.head_dim} must divide --hidden-size {arguments.hidden_size}")
    return LlamaConfig(
        vocab_size=arguments.vocab_size,
        hidden_size=arguments.hidden_size,
        # As in Llama: two thirds of four times the width.
        intermediate_size=-(-arguments.hidden_size * 8 // 3 // 64) * 64,
        num_hidden_layers=arguments.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=arguments.head_dim,
        max_position_embeddings=max_positions,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )


def random_compressor(
    method: str,
    decoder_config: PreTrainedConfig,
    ratios: Sequence[int],
    dtype: str,
    device: torch.device,
) -> PreTrainedModel:
    """Return a method with random weights that reads the context as one chunk, in evaluation mode."""
    torch.manual_seed(0)
    longest = decoder_config.max_position_embeddings
    fields: dict[str, Any] = {} if config_class(method)().chunk_size is None else {"chunk_size": longest}
    if method == "tcp_autoencoder":
        fields["appended_tokens"] = -(-longest // min(ratios))
    config = method_config(method, decoder_config, ratios, **fields)
    with device:
        model = model_class(method)._from_config(config, dtype=getattr(torch, dtype))
    return model.to(device).eval()


def shape_config(arguments: argparse.Namespace, max_positions: int) -> PreTrainedConfig:
    """Return the configuration that `--shape` names, whose sizes the arguments then have, or else one of theirs."""
    if arguments.shape is None:
        return llama_config(arguments, max_positions)
    config = named_config(arguments.shape)
    config.max_position_embeddings = max(config.max_position_embeddings, max_positions)
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 0, 1, 1
    arguments.hidden_size, arguments.layers = config.hidden_size, config.num_hidden_layers
    arguments.head_dim, arguments.vocab_size = LayerShape.from_config(config).head_dim, config.vocab_size
    return config


def synchronize(device: torch.device) -> None:
    """Wait for a GPU to finish."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(function: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """Return the result of a call and its wall-clock seconds, including a GPU's work."""
    synchronize(device)
    start = time.perf_counter()
    result = function()
    synchronize(device)
    return result, time.perf_counter() - start


def seconds(function: Callable[[], Any], device: torch.device) -> float:
    """Return the wall-clock seconds of a call, including a GPU's work."""
    return timed(function, device)[1]


def timed_by_processor(function: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """As `timed`, but in processor time of all threads on a CPU.

    Other programs, which lengthen what the clock says, count little in it.
    """
    if device.type != "cpu":
        return timed(function, device)
    start = time.process_time()
    result = function()
    return result, time.process_time() - start


def peak_bytes(function: Callable[[], Any], device: torch.device) -> int:
    """Return the peak bytes of tensors made inside a call, without earlier ones such as weights.

    On a CPU it is summed up from the allocator's own records, which is exact, unlike a process's resident memory.
    """
    # What is garbage already must not be freed inside the call.
    gc.disable()
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            function()
            torch.cuda.synchronize(device)
            return torch.cuda.max_memory_allocated(device) - before
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
            result = function()
            del result
    finally:
        gc.enable()
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def save_and_report(
    script: str, arguments: argparse.Namespace, rows: Sequence[dict[str, Any]], table: str, name: str | None = None
) -> Path:
    """Print the table and write the result file with settings, environment and rows.

    The file goes to `arguments.output`, or beside the script under `name`, or the kind of device.
    """
    device, folder = device_of(arguments), Path(script).parent
    content = {
        "format_version": 2,
        "benchmark": folder.name,
        "settings": {name: value for name, value in vars(arguments).items() if name not in ("output", "device")},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "environment": environment(),
        "rows": list(rows),
    }
    path = write_results(content, arguments.output or folder / f"{name or device.type}.json")
    print(f"\n{table}\n\nwrote {path}")
    return path
