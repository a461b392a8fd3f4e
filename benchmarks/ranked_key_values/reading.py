# SPDX-License-Identifier: Apache-2.0
"""Cache bytes and processor time of a token: behind a memory, truncated text of as many positions, and the text.

    python -m benchmarks.ranked_key_values.reading

One thread in float32. The three take turns token by token, so that what else runs on the machine slows all alike. The
text's cache has random keys and values, whose reading takes as long.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from transformers import Cache, DynamicCache

from benchmarks.common.tools import (
    add_output_argument,
    cache_bytes,
    positive_int,
    save_and_report,
    script_parser,
    tells_errors,
)
from benchmarks.ranked_key_values.choosing import CHECKPOINT, load
from context_compressors.configuration.layer_shape import key_value_shape
from context_compressors.demo import read_pages
from context_compressors.modeling.parts.base_pass import CACHE
from context_compressors.reporting.tables import markdown_table


def text_cache(config: Any, length: int) -> Cache:
    """Return the cache of a text of so many tokens."""
    cache, (layers, heads, width) = DynamicCache(), key_value_shape(config)
    for layer in range(layers):
        cache.update(torch.randn(1, heads, length, width), torch.randn(1, heads, length, width), layer)
    return cache


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = script_parser(__doc__)
    parser.add_argument("--checkpoint", default=CHECKPOINT, metavar="FOLDER", help=f"default: {CHECKPOINT}")
    parser.add_argument("--lengths", type=positive_int, nargs="+", default=[2000, 8000], metavar="N")
    parser.add_argument("--ratios", type=positive_int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--tokens", type=positive_int, default=60, metavar="N", help="timed (default: 60)")
    add_output_argument(parser)
    return parser


@tells_errors
@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> int:
    """Measure each length at each ratio; returns the exit status."""
    arguments = build_parser().parse_args(argv)
    torch.set_num_threads(1)
    model, tokenizer = load(arguments.checkpoint)
    page = tokenizer(" ".join(page.text for page in read_pages()), add_special_tokens=False).input_ids
    first = torch.tensor([[*model.config.opening_ids, *page[:20]]])
    results = []
    for length in arguments.lengths:
        document = torch.tensor([(page * -(-length // len(page)))[:length]])
        for ratio, memory in zip(
            arguments.ratios, model.compress(document, ratio=arguments.ratios, allow_untrained_ratio=True), strict=True
        ):
            offset = model.model.text_position_offset(memory, first, torch.ones_like(first))
            behind = {"memory": {"memory": memory, "text_position_offset": offset}}
            caches = {"memory": model(first, **behind["memory"], use_cache=True)[CACHE]}
            for name, positions in (("truncated text", -(-length // ratio)), ("text", length)):
                cache = text_cache(model.config.decoder_config, positions)
                caches[name] = model(first, cache=cache, use_cache=True)[CACHE]
            sizes = {name: cache_bytes(cache) for name, cache in caches.items()}
            seconds: dict[str, list[float]] = {name: [] for name in caches}
            for _ in range(arguments.tokens):
                for name, cache in caches.items():
                    start = time.process_time()
                    model(first[:, -1:], cache=cache, **behind.get(name, {}), use_cache=True)
                    seconds[name].append(time.process_time() - start)
            pairs = zip(seconds["memory"], seconds["truncated text"], strict=True)
            results.append(
                {
                    "tokens": length,
                    "ratio": ratio,
                    "cache_bytes": sizes,
                    "milliseconds": {name: 1000 * median(times) for name, times in seconds.items()},
                    "time_of_truncated_text": median(one / other for one, other in pairs),
                }
            )
    table = markdown_table(list(results[0]), [[str(value) for value in row.values()] for row in results])
    save_and_report(__file__, arguments, results, table, "reading")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
