# SPDX-License-Identifier: Apache-2.0
"""Tokens a second of `CorpusCompressor` by tokens in a batch, type and workers, beside the bare encoder.

    python -m benchmarks.corpus_throughput.measure --data qa_squad_dev.parquet

Contexts, drawn by a seed, become columns in int8. The bare encoder reads the same batches of token ids: it is the
limit. Both run in turns, and their times are the processor's own, so that other programs on a core
count little; with a GPU they are the clock's. Of the compressor's time, the model's is that of `model.compress`;
outside of it are tokens, batches, rounding, moving and columns. The model is loaded, and has read all texts once,
before the clock starts.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow.parquet
import torch
from tqdm.auto import tqdm

from benchmarks.common.tools import (
    DTYPES,
    add_place_arguments,
    device_of,
    positive_int,
    save_and_report,
    tells_errors,
    timed_by_processor,
)
from context_compressors import CorpusCompressor
from context_compressors.modeling.compressor.context_compression_qa import padded
from context_compressors.modeling.parts.length_batches import length_batches
from context_compressors.reporting.tables import markdown_table

CHECKPOINT = Path(__file__).resolve().parents[2] / "checkpoints" / "smollm2-135m-instruct-mean-pooling"
_COMPRESSORS: list[CorpusCompressor] = []


def drawn(path: str, num_texts: int, seed: int) -> list[str]:
    """Different contexts of a Parquet file.

    Raises:
        ValueError: it has fewer.
    """
    texts = dict.fromkeys(pyarrow.parquet.read_table(path, columns=["context"])["context"].to_pylist())
    if len(texts) < num_texts:
        raise ValueError(f"{path} has {len(texts)} different contexts, and --texts asks for {num_texts}")
    return random.Random(seed).sample(list(texts), num_texts)


class Measured:
    """A compressor and its encoder, timed in turns over the same texts.

    Args:
        texts: what is compressed.
        compressor: what compresses them.
        device: where.
    """

    def __init__(self, texts: Sequence[str], compressor: CorpusCompressor, device: torch.device):
        self.texts, self.device, self.compressor = list(texts), device, compressor
        self._ids = compressor.pipe.document_ids(self.texts)
        self.num_tokens = sum(map(len, self._ids))
        self._model_seconds = 0.0

    def encode(self) -> None:
        """The bare encoder over the batches of the compressor."""
        lengths = [len(row) for row in self._ids]
        for batch in length_batches(lengths, batch_tokens=self.compressor.batch_tokens):
            inputs = padded([self._ids[row] for row in batch], self.device)
            with torch.no_grad():
                self.compressor.pipe.model.base_model.encoder_states(**inputs)

    def compress(self) -> None:
        """Texts to columns; the model's own time is added up."""
        model = self.compressor.pipe.model
        inner = model.compress

        def timed(*arguments: Any, **keywords: Any) -> Any:
            memory, seconds = timed_by_processor(lambda: inner(*arguments, **keywords), self.device)
            self._model_seconds += seconds
            return memory

        model.compress = timed
        try:
            self.compressor({"id": range(len(self.texts)), "text": self.texts})
        finally:
            model.compress = inner

    def run(self, rounds: int) -> dict[str, Any]:
        """Both, in turns."""
        times: dict[str, float] = {"encoder": 0.0, "compressor": 0.0}
        self.compress()
        self._model_seconds = 0.0
        for _ in range(rounds):
            times["encoder"] += timed_by_processor(self.encode, self.device)[1]
            times["compressor"] += timed_by_processor(self.compress, self.device)[1]
        tokens = rounds * self.num_tokens
        return {
            "tokens_per_second": tokens / times["compressor"],
            "encoder_tokens_per_second": tokens / times["encoder"],
            "time_over_encoder": times["compressor"] / times["encoder"],
            "share_outside_model": 1 - self._model_seconds / times["compressor"],
        }


def load_worker(options: dict[str, Any], device: str) -> None:
    """Load a worker's own model."""
    torch.set_num_threads(1)
    _COMPRESSORS[:] = [CorpusCompressor(CHECKPOINT, device=device, **options)]
    _COMPRESSORS[0]({"id": ["a"], "text": ["Loaded."]})


def work(texts: list[str]) -> tuple[int, float]:
    """A worker's part: its tokens, and its time on the processor."""
    start = time.process_time()
    rows = _COMPRESSORS[0]({"id": range(len(texts)), "text": texts})
    return sum(rows["num_tokens"].to_pylist()), time.process_time() - start


def by_workers(texts: list[str], workers: int, options: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Tokens a second of several processes, by the clock and by their own time on the processor."""
    parts = [texts[start::workers] for start in range(workers)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, load_worker, (options, str(device))) as pool:
        list(pool.map(work, [["Loaded."]] * workers))
        start = time.perf_counter()
        done = list(pool.map(work, parts))
        wall = time.perf_counter() - start
    tokens = sum(count for count, _ in done)
    return {"tokens_per_second_of_clock": tokens / wall, "tokens_per_second": tokens / sum(spent for _, spent in done)}


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return the results as a table."""
    rows = [
        [
            result["dtype"],
            f"{result['batch_tokens']:,}",
            str(result["workers"]),
            f"{result['tokens_per_second']:,.0f}",
            f"{result['encoder_tokens_per_second']:,.0f}" if "time_over_encoder" in result else "",
            f"{result['time_over_encoder']:.2f}" if "time_over_encoder" in result else "",
            f"{result['share_outside_model']:.1%}" if "time_over_encoder" in result else "",
        ]
        for result in results
    ]
    header = ["type", "tokens in a batch", "workers", "tokens a second", "bare encoder", "time over it", "outside"]
    return markdown_table(header, rows)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.corpus_throughput.measure", description=__doc__)
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    add = made.add_argument
    add("--data", required=True, help="Parquet file with a column context")
    add("--texts", type=positive_int, default=64, help="default: 64")
    add("--seed", type=int, default=0, help="draws the texts (default: 0)")
    add("--ratio", type=positive_int, default=4, help="default: 4")
    add("--batch-tokens", type=positive_int, nargs="+", default=[256, 1024, 4096], help="default: 256 1024 4096")
    add("--dtypes", choices=DTYPES, nargs="+", default=["float32", "bfloat16"], help="default: float32 bfloat16")
    add(
        "--workers",
        type=positive_int,
        nargs="*",
        default=[2],
        help="beside one, at the last of --batch-tokens (default: 2)",
    )
    add("--rounds", type=positive_int, default=3, help="default: 3")
    add_place_arguments(made)
    return made


@tells_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    arguments = build_parser().parse_args(argv)
    device = device_of(arguments)
    texts = drawn(arguments.data, arguments.texts, arguments.seed)
    results = []
    for dtype in tqdm(arguments.dtypes, disable=not sys.stderr.isatty()):
        options = {"ratio": arguments.ratio, "dtype": dtype}
        compressor = CorpusCompressor(CHECKPOINT, device=str(device), **options)
        for batch_tokens in arguments.batch_tokens:
            compressor.batch_tokens = batch_tokens
            found = Measured(texts, compressor, device).run(arguments.rounds)
            results.append({"dtype": dtype, "batch_tokens": batch_tokens, "workers": 1, **found})
        batch_tokens = arguments.batch_tokens[-1]
        for workers in arguments.workers:
            found = by_workers(texts, workers, {**options, "batch_tokens": batch_tokens}, device)
            results.append({"dtype": dtype, "batch_tokens": batch_tokens, "workers": workers, **found})
    arguments.data = Path(arguments.data).name
    save_and_report(__file__, arguments, results, table(results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
