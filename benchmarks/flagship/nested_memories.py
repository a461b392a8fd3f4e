# SPDX-License-Identifier: Apache-2.0
"""What a memory that serves every coarser ratio spares, and what it costs.

    python -m benchmarks.flagship.nested_memories CHECKPOINT --data qa_squad_train.parquet --first-row 85000

Documents are eight paragraphs of SQuAD, compressed as one context. Processor seconds of compressing it at a ratio, and
of taking the same memory from the finest one (`at_ratio`), medians over documents, the median of five calls for the
second; and the bytes of memories in the checkpoint's type and in int4, with those that say which ratios keep a pair.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from benchmarks.common.tools import positive_int, tells_errors, timed_by_processor
from benchmarks.flagship.reading_by_question import drawn
from context_compressors import RankedKeyValuesForCausalLM
from context_compressors.modeling.memory.carriers import carrier_tensors
from context_compressors.modeling.memory.compressed_context import CompressedContext
from context_compressors.reporting.environment import environment
from context_compressors.reporting.result_files import write_results
from context_compressors.reporting.tables import markdown_table

_CALLS = 5


def is_same(left: CompressedContext, right: CompressedContext) -> bool:
    """Whether two memories hold the same pairs in the same places."""
    tensors = zip(carrier_tensors(left), carrier_tensors(right), strict=True)
    return left.head_ids.equal(right.head_ids) and all(a.equal(b) for a, b in tensors)


@torch.inference_mode()
def measured(model: Any, ids: Sequence[int], ratios: Sequence[int]) -> list[dict[str, Any]]:
    """One document's figures, by ratio, the finest first."""

    def compressed(ratio: int) -> CompressedContext:
        return model.compress(torch.tensor([list(ids)]), ratio=ratio, allow_untrained_ratio=True)

    rows, finest = [], compressed(ratios[0])
    for ratio in ratios:
        memory, seconds = timed_by_processor(partial(compressed, ratio), model.device)
        calls = [timed_by_processor(partial(finest.at_ratio, ratio), model.device) for _ in range(_CALLS)]
        row = {"ratio": ratio, "compress_s": seconds, "at_ratio_s": statistics.median(each for _, each in calls)}
        row["same_pairs"] = is_same(calls[0][0], memory)
        of_pairs = memory.coarsest_ratios[memory.attention_mask.bool()].nbytes
        for name, kept in (("", memory), ("int4_", memory.quantize("int4"))):
            row |= {f"{name}bytes": kept.nbytes, f"{name}more": of_pairs / (kept.nbytes - of_pairs)}
        rows.append(row)
    return rows


def results_of(documents: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Medians over documents of seconds, means of all else."""
    rows = []
    for of_ratio in zip(*documents, strict=True):
        row = {}
        for name in of_ratio[0]:
            mean = statistics.median if name.endswith("_s") else statistics.mean
            row[name] = mean(found[name] for found in of_ratio)
        rows.append(row)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The results as a table."""
    cells = []
    for row in rows:
        # The finest is there already.
        taken = f"{1000 * row['at_ratio_s']:.0f} ms" if row is not rows[0] else ""
        sizes = [f"{row[f'{form}bytes'] / 1e6:.2f} MB, {100 * row[f'{form}more']:.1f} %" for form in ("", "int4_")]
        cells.append([f"{row['ratio']}x", f"{row['compress_s']:.1f} s", taken, *sizes])
    return markdown_table(["", "compressing", "`at_ratio`", "memory, more than without", "in int4"], cells)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.flagship.nested_memories", description=__doc__)
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    add = made.add_argument
    add("checkpoint", help="Hub id or folder of a checkpoint of ranked key/values")
    add("--data", required=True, metavar="FILE", help="Parquet file with context, question and answers")
    add("--first-row", type=int, default=0, help="of the file that is used (default: 0)")
    add("--documents", type=positive_int, default=2, help="of eight paragraphs each (default: 2)")
    add("--seed", type=int, default=0, help="draws the paragraphs (default: 0)")
    add("--ratios", nargs="+", type=positive_int, default=[2, 4, 8, 16], metavar="R", help="default: 2 4 8 16")
    add("--dtype", default="auto", help="default: as saved")
    add("--output", metavar="FILE", help="where the result goes (default: beside this file)")
    return made


@tells_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    arguments = build_parser().parse_args(argv)
    tokenizer = AutoTokenizer.from_pretrained(arguments.checkpoint)
    model = RankedKeyValuesForCausalLM.from_pretrained(arguments.checkpoint, dtype=arguments.dtype).eval()
    drawing = arguments.data, arguments.first_row, arguments.documents, arguments.seed, tokenizer
    documents = [document.ids for document in drawn(*drawing)]
    rows = results_of([measured(model, ids, sorted(arguments.ratios)) for ids in documents])
    settings = {"data": Path(arguments.data).name, "seed": arguments.seed, "dtype": str(model.dtype)}
    settings["tokens"] = [len(ids) for ids in documents]
    content = {"format_version": 1, "settings": settings, "environment": environment(), "rows": rows}
    output = write_results(content, arguments.output or Path(__file__).with_suffix(".json"))
    print(f"{table(rows)}\n\nwrote {output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
