# SPDX-License-Identifier: Apache-2.0
"""Ten training steps of each method in bfloat16, on batches with pads: sdpa beside eager attention.

    python -m benchmarks.gpu.correctness --output correctness.json

Losses and gradients must be finite, and the losses near those of eager attention.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common.tools import tells_errors
from context_compressors.configuration.methods import METHODS
from context_compressors.modeling import model_class
from context_compressors.modeling.checkpoint.pretrained_bases import pretrained_base
from context_compressors.reporting.environment import environment
from context_compressors.reporting.result_files import write_results

# Of the base, without training or without a decoder-only language model.
LEFT_OUT = ("streaming_llm", "snap_kv", "kv_zip", "decal", "xrag")
FIELDS: dict[str, dict[str, Any]] = {
    "ranked_key_values": {"encoder_lora": {"rank": 8, "alpha": 16}},
    "tcp_autoencoder": {"appended_tokens": 128},
    "icae": {"chunk_size": 256},
    "five_hundred_x": {"chunk_size": 256},
    "pcc": {"chunk_size": 256},
    "autocompressor": {"chunk_size": 128},
    "activation_beacon": {"window_size": 64},
}
# Two bfloat16 kernels round differently.
MOST_DIFFERENCE = 0.05


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--base", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="a base model's name or folder")
    add("--methods", nargs="+", default=[name for name in METHODS if name not in LEFT_OUT], metavar="NAME")
    add("--steps", type=int, default=10, metavar="N", help="default: 10")
    add("--batch-size", type=int, default=24, metavar="N", help="default: 24")
    add("--device", default="cuda", help="default: cuda")
    add("--output", type=Path, required=True, metavar="FILE", help="results as JSON")
    return parser


def batch(step: int, num_rows: int, vocab_size: int, device: str) -> dict[str, Tensor]:
    """Rows of different lengths, padded on the right: contexts of 8 to 200 tokens, texts of 4 to 80."""
    generator = torch.Generator().manual_seed(step)

    def rows(low: int, high: int) -> tuple[Tensor, Tensor]:
        lengths = torch.randint(low, high, (num_rows, 1), generator=generator)
        mask = (torch.arange(high) < lengths).long()
        return torch.randint(5, vocab_size, mask.shape, generator=generator) * mask, mask

    (context, context_mask), (text, text_mask) = rows(8, 200), rows(4, 80)
    labels = text.masked_fill(text_mask == 0, -100)
    found = {"input_ids": text, "attention_mask": text_mask, "labels": labels, "context_input_ids": context}
    return {name: tensor.to(device) for name, tensor in {**found, "context_attention_mask": context_mask}.items()}


def train(method: str, attention: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Losses of the steps, and the largest norm of their gradients."""
    torch.manual_seed(0)
    base = arguments.base if Path(arguments.base).is_dir() else str(pretrained_base(arguments.base))
    load = {"dtype": torch.bfloat16, "attn_implementation": attention}
    model = model_class(method).from_base(base, compression_ratios=[4, 2], **load, **FIELDS.get(method, {}))
    model = model.to(arguments.device).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    losses, norms = [], []
    for step in range(arguments.steps):
        rows = batch(step, arguments.batch_size, model.config.vocab_size, arguments.device)
        # As in training: the adapters stay in float32, and their passes are not.
        with torch.autocast(torch.device(arguments.device).type, torch.bfloat16):
            loss = model(**rows, ratio=4, use_cache=False).loss
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(trained, 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "largest_gradient_norm": max(norms)}


def check(method: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One method's losses with both attentions, and whether they are as they must be."""
    sdpa, eager = (train(method, attention, arguments) for attention in ("sdpa", "eager"))
    values = torch.tensor([*sdpa["losses"], sdpa["largest_gradient_norm"]])
    difference = max(abs(one - other) / other for one, other in zip(sdpa["losses"], eager["losses"], strict=True))
    passed = bool(values.isfinite().all()) and difference <= MOST_DIFFERENCE
    return {"method": method, "passed": passed, "largest_difference": difference, "sdpa": sdpa, "eager": eager}


@tells_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Check all methods and write the results; returns 1 if one of them fails."""
    arguments = build_parser().parse_args(argv)
    results = []
    for method in arguments.methods:
        try:
            results.append(check(method, arguments))
        except Exception as error:
            results.append({"method": method, "passed": False, "error": repr(error)[:500]})
        print(method, "passed" if results[-1]["passed"] else f"FAILED {results[-1]}", flush=True)
        finite = [{k: v for k, v in found.items() if k not in ("sdpa", "eager")} for found in results]
        write_results({"methods": _plain(finite), "environment": environment()}, arguments.output)
    return 0 if all(found["passed"] for found in results) else 1


def _plain(value: Any) -> Any:
    """Numbers that are not finite as words, since JSON has none."""
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return str(value) if isinstance(value, float) and value - value != 0 else value


if __name__ == "__main__":
    raise SystemExit(main())
