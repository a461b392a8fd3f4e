# SPDX-License-Identifier: Apache-2.0
"""Tokens a second of the text compressor and of LLMLingua, in turns; needs the environment of LLMLingua.

python -m benchmarks.comparison.text_speed --base BASE --questions OUT/questions/squad.jsonl
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from statistics import median
from types import SimpleNamespace

import torch
from transformers import AutoTokenizer

from benchmarks.common.tools import add_place_arguments, device_of, save_and_report, seconds
from benchmarks.comparison.peers import KEEP_DROP, KeepDrop, LLMLingua
from context_compressors.reporting.tables import markdown_table


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, metavar="FOLDER", help="LLMLingua's small model")
    parser.add_argument("--questions", required=True, nargs="+", metavar="FILE", help="made by run.py")
    parser.add_argument("--contexts", type=int, default=3, metavar="N", help="of each file (default: 3)")
    parser.add_argument("--ratio", type=int, default=4, metavar="R", help="default: 4")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="default: 3")
    add_place_arguments(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    arguments = build_parser().parse_args(argv)
    device = device_of(arguments)
    questions = []
    for path in arguments.questions:
        with open(path, encoding="utf-8") as file:
            questions += [json.loads(line) for line, _ in zip(file, range(arguments.contexts), strict=False)]
    tokenizer = AutoTokenizer.from_pretrained(arguments.base)
    reader = SimpleNamespace(dtype=torch.float32, device=device)
    systems = {
        "keep or drop": KeepDrop("keep_drop", reader, tokenizer, KEEP_DROP),
        "keep or drop, question seen": KeepDrop("keep_drop_aware", reader, tokenizer, KEEP_DROP),
        "LLMLingua": LLMLingua("llmlingua", reader, tokenizer, arguments.base),
    }
    samples: dict[str, list[float]] = {name: [] for name in systems}
    for repeat in range(arguments.repeats + 1):
        for name, system in systems.items():
            time = seconds(lambda s=system: [s.compress(q, None, arguments.ratio) for q in questions], device)
            # The first round warms up.
            samples[name] += [time] if repeat else []
    num_tokens = sum(len(question["context_ids"]) for question in questions)
    rows = [{"system": name, "num_tokens": num_tokens, "seconds": times} for name, times in samples.items()]
    speeds = [num_tokens / median(times) for times in samples.values()]
    body = [[name, f"{speed:,.0f}", f"{speed / speeds[-1]:.1f}"] for name, speed in zip(samples, speeds, strict=True)]
    arguments.base, arguments.questions = "SmolLM2-135M-Instruct", len(questions)
    save_and_report(
        __file__, arguments, rows, markdown_table(["system", "tokens a second", "ratio"], body), "text_speed"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
