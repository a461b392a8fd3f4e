# SPDX-License-Identifier: Apache-2.0
"""Peak of the process's memory while a document is compressed, by its length, on a tiny model.

    python -m benchmarks.corpus_throughput.peak_memory

Each length has a process of its own; what it had in memory before is not counted.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from context_compressors.reporting.result_files import write_results

LENGTHS = (1024, 8192, 65_536, 262_144, 1_048_576)


def measure(num_tokens: int) -> dict[str, float]:
    """Megabytes at the peak, and those of the memory that is kept, of one document in this process."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from context_compressors import MeanPoolingForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes)).save_pretrained(folder)
        model = MeanPoolingForCausalLM.from_base(folder, compression_ratios=[16], chunk_size=256).eval()
    ids = torch.randint(3, 512, (1, num_tokens))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with torch.no_grad():
        memory = model.compress(ids, ratio=16)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"num_tokens": num_tokens, "peak_megabytes": round(peak / 1024), "memory_megabytes": memory.nbytes / 2**20}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--one", type=int, metavar="N", help="print what a document of N tokens takes, in this process"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all lengths, and write them to peak_memory.json."""
    arguments = build_parser().parse_args(argv)
    if arguments.one:
        print(json.dumps(measure(arguments.one)))
        return
    command = [sys.executable, "-m", "benchmarks.corpus_throughput.peak_memory", "--one"]
    rows = [json.loads(subprocess.check_output([*command, str(n)]).splitlines()[-1]) for n in LENGTHS]
    write_results({"rows": rows}, Path(__file__).with_suffix(".json"))
    print(*rows, sep="\n")


if __name__ == "__main__":
    main()
