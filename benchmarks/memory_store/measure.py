# SPDX-License-Identifier: Apache-2.0
"""What a store of memories takes: bytes for each token of context, appending, and reading ten memories of 100,000.

    python -m benchmarks.memory_store.measure

Slots are random numbers of a given width (a smaller one where there are many rows), as many as chunks of a given
length have at each ratio; the store keeps no texts. Beside the store stand safetensors files, the slots' numbers
alone, and the text: UTF-8, and Parquet with zstd.
Times are the processor's own, on which other programs of the machine count little; those by the clock are beside them.
"""

from __future__ import annotations

import argparse
import functools
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch
from tqdm.auto import tqdm

from benchmarks.common.tools import add_output_argument, positive_int, save_and_report, tells_errors
from context_compressors import CompressedContext, MemoryStore
from context_compressors.reporting.tables import markdown_table

DTYPES = ("float16", "int8", "int4", "int2")
# Memories that are written as a file each, for their size.
NUM_FILES = 200
TOKENIZER = Path(__file__).resolve().parents[2] / "checkpoints" / "smollm2-135m-instruct-mean-pooling"


def random_memory(num_rows: int, num_slots: int, width: int, ratio: int) -> CompressedContext:
    """Chunks' memories with random slots, `num_slots * ratio` tokens each."""
    return CompressedContext(
        embeddings=torch.randn(num_rows, num_slots, width),
        attention_mask=torch.ones(num_rows, num_slots, dtype=torch.long),
        position_ids=torch.arange(num_slots).expand(num_rows, -1),
        num_context_tokens=torch.full((num_rows,), num_slots * ratio),
        ratio=ratio,
        model_id="random",
    )


def folder_bytes(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def spent(function: Callable[[], Any]) -> tuple[float, float]:
    """Seconds of a call on the processor, and by the clock."""
    processor, clock = time.process_time(), time.perf_counter()
    function()
    return time.process_time() - processor, time.perf_counter() - clock


def read_milliseconds(place: Path, ids: Sequence[str], count: int, repeats: int) -> dict[str, float]:
    """Median times of reading some random memories, with a store that is open; and the best one by the clock."""
    store, drawn = MemoryStore.open(place), random.Random(0)
    store.get(drawn.sample(ids, count))
    times = [spent(functools.partial(store.get, drawn.sample(ids, count))) for _ in range(repeats)]
    processor, clock = ([1000 * seconds for seconds in column] for column in zip(*times, strict=True))
    return {
        "read_ms": statistics.median(processor),
        "read_clock_ms": statistics.median(clock),
        "best_read_clock_ms": min(clock),
    }


def row_of(
    arguments: argparse.Namespace,
    ratio: int,
    dtype: str,
    folder: Path,
    num_rows: int,
    width: int,
    compacts: bool = False,
) -> dict[str, Any]:
    """All figures of slots of one ratio, type, number and width, and where it `compacts` those after it."""
    place, num_slots = folder / f"{ratio}_{dtype}.lance", -(-arguments.chunk_tokens // ratio)
    memory = random_memory(min(arguments.rows_of_a_version, num_rows), num_slots, width, ratio)
    store = MemoryStore.create(place, memory, dtype)
    ids, seconds, clock_seconds = [f"chunk-{row:07d}" for row in range(num_rows)], 0.0, 0.0
    for start in tqdm(range(0, num_rows, len(memory)), desc=f"{dtype} at {ratio}", leave=False):
        chosen = ids[start : start + len(memory)]
        table = store.table_of(chosen, memory.rows(slice(len(chosen))))
        processor, clock = spent(functools.partial(store.append, table))
        seconds, clock_seconds = seconds + processor, clock_seconds + clock
    files = folder / f"{ratio}_{dtype}"
    list(store.export(files, ids[:NUM_FILES]))
    num_tokens = num_rows * num_slots * ratio
    kept = memory.to(dtype="float16") if dtype == "float16" else memory.quantize(dtype)
    row = {
        "ratio": ratio,
        "dtype": dtype,
        "rows": num_rows,
        "hidden_size": width,
        "slots_bytes_per_token": kept.nbytes / len(memory) / num_slots / ratio,
        "store_bytes_per_token": folder_bytes(place) / num_tokens,
        "files_bytes_per_token": sum(path.stat().st_size for path in files.glob("*.safetensors"))
        / (min(NUM_FILES, num_rows) * num_slots * ratio),
        "appended_rows_per_second": num_rows / seconds,
        "appended_megabytes_per_second": folder_bytes(place) / seconds / 1e6,
        "appended_megabytes_per_clock_second": folder_bytes(place) / clock_seconds / 1e6,
        "versions": store.version,
        **read_milliseconds(place, ids, arguments.memories, arguments.repeats),
    }
    if compacts:
        row["compact_seconds"], row["compact_clock_seconds"] = spent(store.compact)
        compacted = read_milliseconds(place, ids, arguments.memories, arguments.repeats)
        row |= {f"compacted_{name}": value for name, value in compacted.items()}
    return row


def text_rows(path: str, column: str, model: str, folder: Path) -> list[dict[str, Any]]:
    """Bytes of different texts for each of their tokens, as UTF-8 and in Parquet with zstd."""
    from transformers import AutoTokenizer

    texts = list(dict.fromkeys(pyarrow.parquet.read_table(path, columns=[column])[column].to_pylist()))
    tokenizer = AutoTokenizer.from_pretrained(model)
    num_tokens = sum(len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"])
    packed = folder / "texts.parquet"
    pyarrow.parquet.write_table(pyarrow.table({column: texts}), packed, compression="zstd")
    return [
        {"dtype": "text, UTF-8", "store_bytes_per_token": sum(len(text.encode()) for text in texts) / num_tokens},
        {"dtype": "text, Parquet with zstd", "store_bytes_per_token": packed.stat().st_size / num_tokens},
    ]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    header = ["ratio", "kept as", "width", "rows", "slots", "store", "files", "rows/s", "MB/s"]
    header += ["10 memories", "compacted"]
    lines = []
    for row in rows:
        taken = [row.get(f"{name}_bytes_per_token") for name in ("slots", "store", "files")]
        appended = [row.get(f"appended_{name}_per_second") for name in ("rows", "megabytes")]
        times = [row.get("read_ms"), row.get("compacted_read_ms")]
        lines.append(
            [
                row.get("ratio", ""),
                row["dtype"],
                row.get("hidden_size", ""),
                f"{row['rows']:,}" if "rows" in row else "",
                *("" if size is None else f"{size:,.1f}" for size in taken),
                *("" if speed is None else f"{speed:,.0f}" for speed in appended),
                *("" if milliseconds is None else f"{milliseconds:.1f} ms" for milliseconds in times),
            ]
        )
    return markdown_table(header, lines)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--hidden-size", type=positive_int, default=576, metavar="H", help="of a slot (default: 576)")
    add("--chunk-tokens", type=positive_int, default=512, metavar="N", help="default: 512")
    add("--ratios", type=positive_int, nargs="+", default=[4, 16], metavar="R", help="default: 4 16")
    add("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="what slots are kept in (default: all)")
    add("--rows", type=positive_int, default=300, help="of each ratio and type (default: 300)")
    add("--many-hidden-size", type=positive_int, default=128, metavar="H", help="of these (default: 128)")
    add("--many-rows", type=positive_int, default=100_000, help="at the last ratio in int8, which is compacted")
    add("--rows-of-a-version", type=positive_int, default=1_000, help="appended at once (default: 1000)")
    add("--memories", type=positive_int, default=10, help="read at once (default: 10)")
    add("--repeats", type=positive_int, default=50, help="of reading (default: 50)")
    add("--texts", metavar="FILE", help="Parquet with texts, for their bytes")
    add("--column", default="context", help="of the texts (default: context)")
    add("--tokenizer", default=str(TOKENIZER), help="what counts the texts' tokens (default: that of this repository)")
    add_output_argument(parser)
    return parser


@tells_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, and write the result file; returns the exit status."""
    arguments = build_parser().parse_args(argv)
    if arguments.memories > min(arguments.rows, arguments.many_rows):
        raise ValueError(f"--memories {arguments.memories} must be at most --rows and --many-rows")
    torch.manual_seed(0)
    rows = []
    for ratio in arguments.ratios:
        for dtype in arguments.dtypes:
            with tempfile.TemporaryDirectory() as folder:
                of_one = Path(folder), arguments.rows, arguments.hidden_size
                rows.append(row_of(arguments, ratio, dtype, *of_one))
    with tempfile.TemporaryDirectory() as folder:
        of_many = Path(folder), arguments.many_rows, arguments.many_hidden_size
        rows.append(row_of(arguments, arguments.ratios[-1], "int8", *of_many, compacts=True))
        if arguments.texts:
            rows += text_rows(arguments.texts, arguments.column, arguments.tokenizer, Path(folder))
    arguments.texts = None if arguments.texts is None else Path(arguments.texts).name
    # A result names no folders.
    arguments.tokenizer = Path(arguments.tokenizer).name
    save_and_report(__file__, arguments, rows, table(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
