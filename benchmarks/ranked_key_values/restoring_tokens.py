# SPDX-License-Identifier: Apache-2.0
"""Loss of right answers with a few learned tokens that restore what was dropped, as RestoreKV's, at equal caches.

    python -m benchmarks.ranked_key_values.restoring_tokens --data qa_squad_train.parquet

The tokens stand behind every context and read it whole. All their keys and values stay, in place of as many pairs of
the context. They train with the reader's adapter: to restore the context's first tokens and to answer questions, from
memories at the chosen ratios. The adapter alone, trained likewise on the same examples, is the control.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

from benchmarks.common.questions import questions_by_context
from benchmarks.common.tools import positive_int, save_and_report, script_parser, tells_errors
from benchmarks.ranked_key_values.choosing import (
    FIRST_ROW,
    add_choosing_arguments,
    answer_losses,
    choosing_questions,
    paired_scores,
)
from context_compressors import RankedKeyValuesForCausalLM
from context_compressors.demo import fetch_base
from context_compressors.modeling import modeling_ranked_key_values
from context_compressors.modeling.compressor import backbone
from context_compressors.modeling.compressor.backbone import slot_counts
from context_compressors.modeling.compressor.context_compression_qa import padded
from context_compressors.modeling.parts.text_ids import document_ids
from context_compressors.reporting.tables import markdown_table

SHIPPED, TRAINED, RESTORING = "the checkpoint", "its reader trained further", "the same with restoring tokens"
_RESTORED_TOKENS = 64
_RESTORE = "Repeat the beginning of the text."


class Variant(nn.Module):
    """A checkpoint whose contexts are followed by learned tokens, or by none.

    Args:
        folder: of the checkpoint.
        tokenizer: its tokenizer; the last of its added tokens, which no text has, stand for the learned ones.
        num_tokens: learned tokens, at most ten.
    """

    def __init__(self, folder: str, tokenizer: Any, num_tokens: int):
        super().__init__()
        self.model = RankedKeyValuesForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.model.model.tokens_at_once = sys.maxsize
        self.tokenizer = tokenizer
        embed = self.model.get_input_embeddings()
        self.ids = sorted(tokenizer.added_tokens_decoder)[-num_tokens:] if num_tokens else []
        start = tokenizer("In short, the text above says the following:").input_ids[:num_tokens]
        self.embeddings = nn.Parameter(embed.weight[start].detach().clone())
        if num_tokens:
            embed.register_forward_hook(self._embedded)

    def _embedded(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        for token, embedding in zip(self.ids, self.embeddings, strict=True):
            output = torch.where((args[0] == token)[..., None], embedding, output)
        return output

    def compress(self, texts: Sequence[str], ratios: Sequence[int]) -> Any:
        """Return memories of texts at each ratio, equal in size whatever the number of learned tokens."""
        inner = self.model.model
        rows = [[*document_ids(self.model.config, self.tokenizer, text)[:496], *self.ids] for text in texts]
        read = inner._scored

        def scored(chunks: Any) -> Any:
            key_values, scores = read(chunks)
            is_learned = torch.isin(chunks.input_ids, torch.tensor(self.ids, dtype=torch.long))
            return key_values, scores.masked_fill(is_learned[:, None], torch.inf)

        def counts(config: Any, lengths: Sequence[int], ratio: Any) -> list[int]:
            return slot_counts(config, [length - len(self.ids) for length in lengths], ratio)

        with (
            patch.object(inner, "_scored", scored),
            patch.object(modeling_ranked_key_values, "slot_counts", counts),
            patch.object(backbone, "slot_counts", counts),
        ):
            return self.model.compress(**padded(rows, self.model.device), ratio=list(ratios))

    def losses(self, memory: Any, rows: Sequence[dict[str, Any]]) -> Tensor:
        """Return the loss of each right answer."""
        return answer_losses(self.model, self.tokenizer, memory, rows)


def restored(tokenizer: Any, row: dict[str, Any]) -> dict[str, Any]:
    """Return a question that the first tokens of the row's context answer."""
    return {
        "question": _RESTORE,
        "answers": [tokenizer.decode(tokenizer(row["context"]).input_ids[:_RESTORED_TOKENS])],
    }


def train(variant: Variant, rows: Sequence[dict[str, Any]], arguments: Any) -> float:
    """Train adapter and learned tokens; returns the processor seconds."""
    adapter = [parameter for name, parameter in variant.model.named_parameters() if "lora_" in name]
    for parameter in variant.parameters():
        parameter.requires_grad_(False)
    trained = [*adapter, variant.embeddings]
    for parameter in trained:
        parameter.requires_grad_(True)
    groups = [{"params": adapter, "lr": arguments.rate}, {"params": [variant.embeddings], "lr": 10 * arguments.rate}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.99), weight_decay=0.0)
    draw, start = random.Random(1), time.process_time()
    for step in range(arguments.steps):
        batch = [rows[(step * arguments.contexts + place) % len(rows)] for place in range(arguments.contexts)]
        ratio = draw.choice(arguments.ratios)
        (memory,) = variant.compress([row["context"] for row in batch], [ratio])
        asked = variant.losses(memory, batch).mean()
        loss = asked + variant.losses(memory, [restored(variant.tokenizer, row) for row in batch]).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        for group, rate in zip(optimizer.param_groups, (1, 10), strict=True):
            group["lr"] = (
                rate * arguments.rate * min(1.0, (step + 1) / 5, (arguments.steps - step) / arguments.steps * 2)
            )
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1} ratio {ratio} answers {asked:.3f} all {loss:.3f}", flush=True)
    return time.process_time() - start


@torch.no_grad()
def choosing_losses(variant: Variant, questions: Sequence[dict[str, Any]], ratios: Sequence[int]) -> dict[int, list]:
    """Return the loss of each right answer by ratio."""
    found: dict[int, list[dict[str, float]]] = {ratio: [] for ratio in ratios}
    for start in range(0, len(questions), 20):
        batch = questions[start : start + 20]
        memories = variant.compress([row["context"] for row in batch], ratios)
        for ratio, memory in zip(ratios, memories, strict=True):
            found[ratio] += [{"loss": loss} for loss in variant.losses(memory, batch).tolist()]
    return found


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = script_parser(__doc__)
    add_choosing_arguments(parser, questions=120)
    parser.add_argument("--tokens", type=positive_int, default=8)
    parser.add_argument("--ratios", type=positive_int, nargs="+", default=[8, 16])
    parser.add_argument("--steps", type=positive_int, default=60)
    parser.add_argument("--contexts", type=positive_int, default=4, help="a step")
    parser.add_argument("--rate", type=float, default=2e-4)
    return parser


@tells_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Train control and trial and compare them on the choosing part; returns the exit status."""
    arguments = build_parser().parse_args(argv)
    fetch_base(arguments.checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(arguments.checkpoint)
    questions = choosing_questions(arguments.data, arguments.questions)
    choosing = questions_by_context(arguments.data, FIRST_ROW)
    contexts = [rows for context, rows in questions_by_context(arguments.data).items() if context not in choosing]
    draw = random.Random(0)
    examples = [
        draw.choice(rows) for rows in draw.sample(contexts, min(len(contexts), arguments.steps * arguments.contexts))
    ]
    found: dict[str, dict[int, list]] = {}
    seconds = {}
    for name, tokens in ((SHIPPED, 0), (TRAINED, 0), (RESTORING, arguments.tokens)):
        torch.manual_seed(0)
        variant = Variant(arguments.checkpoint, tokenizer, tokens)
        seconds[name] = 0.0 if name == SHIPPED else train(variant, examples, arguments)
        found[name] = choosing_losses(variant, questions, arguments.ratios)
        print(
            name,
            {ratio: sum(row["loss"] for row in rows) / len(rows) for ratio, rows in found[name].items()},
            flush=True,
        )
    results = [
        {"ratio": ratio, "variant": name, **scores, "training_seconds": round(seconds[name])}
        for ratio in arguments.ratios
        for name, scores in paired_scores(
            {name: of_ratios[ratio] for name, of_ratios in found.items()},
            TRAINED,
            [row["context"] for row in questions],
        ).items()
    ]
    table = markdown_table(list(results[0]), [[str(value) for value in row.values()] for row in results])
    arguments.data = Path(arguments.data).name
    save_and_report(__file__, arguments, results, table, "restoring_tokens")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
