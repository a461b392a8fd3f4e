# SPDX-License-Identifier: Apache-2.0
"""Answers from scorers of ranked key/values, KVzap and Fast KVzip, fitted to the same contexts.

    python -m benchmarks.ranked_key_values.scorers --data DATA --contexts 60 --gate-steps 500 --ratios 4 8

Every variant answers the first questions of each set of the comparison, and is compared with the checkpoint's own
scorers.

The published scorers are for other bases. Here the modules and recipes of the authors' code fit scorers to the
checkpoint's reader, on contexts that trained it. The highest scores of all layers and heads stay, so that all variants
have equal memories and equal caches.

- KVzap (2601.07891): a ridge regression, or an MLP, from an attention layer's inputs to the logs of KVzip+'s scores.
- Fast KVzip (2601.17668): a gate, trained on KVzip's scores by cross-entropy. Its tokens that always stay, the first
  four and the last 2 %, are left out: the chat's opening stands in front of all contexts.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.common.questions import questions_by_context
from benchmarks.common.tools import add_output_argument, positive_int, save_and_report, tells_errors
from benchmarks.comparison.peers import lines_of
from benchmarks.comparison.plan import read_table
from benchmarks.comparison.questions import write_sets
from benchmarks.ranked_key_values.choosing import (
    CHECKPOINT,
    FIRST_ROW,
    load,
    once,
    paired_scores,
)
from context_compressors.evaluation.metrics import squad_scores, substring_accuracy
from context_compressors.modeling.compressor.context_compression_qa import padded
from context_compressors.modeling.parts.text_ids import document_ids, question_ids
from context_compressors.reporting.tables import markdown_table

SHIPPED = "the checkpoint's own"
_REPEAT = "\n\nRepeat the previous context exactly."


class Gate(nn.Module):
    """Fast KVzip's gate of a layer, s = mean_g 1 / (1 + sum_sinks exp((k_base - k) q_g / sqrt(d) - b_g)).

    Args:
        width: of an attention layer's inputs.
        heads: key/value heads.
        group: query heads of each.
        size: d of keys and queries.
        sinks: learned keys that a token's own key stands against.
    """

    def __init__(self, width: int, heads: int, group: int, size: int = 16, sinks: int = 16):
        super().__init__()
        self.shape = heads, group, size
        self.q_proj = nn.Linear(width, heads * group * size)
        self.k_proj = nn.Linear(width, heads * size, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(size, eps=1e-6), nn.RMSNorm(size, eps=1e-6)
        self.b = nn.Parameter(torch.zeros(heads, group))
        self.k_base = nn.Parameter(torch.zeros(heads, sinks, size))

    def forward(self, states: Tensor) -> Tensor:
        heads, group, size = self.shape
        queries = self.q_norm(self.q_proj(states).unflatten(-1, (heads, group, size)))
        keys = self.k_norm(self.k_proj(states).unflatten(-1, (heads, 1, size)))
        own = (queries * keys).sum(dim=-1) / size**0.5 + self.b
        others = torch.einsum("...hgd,hsd->...hgs", queries, self.k_base) / size**0.5
        return torch.sigmoid(own - others.logsumexp(dim=-1)).mean(dim=-1)


@torch.no_grad()
def scores_of_contexts(
    reader: Any, tokenizer: Any, contexts: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what attention layers read, and the scores of KVzip and of KVzip+ of its keys and values.

    Args:
        reader: a language model's backbone with eager attention.
        tokenizer: has a chat template.
        contexts: token ids.

    Returns:
        Inputs `(num_layers, num_tokens, hidden_size)` in bfloat16; scores `(num_layers, num_tokens, num_heads)` each.
    """
    group = _group(reader)
    messages = [{"role": "user", "content": f"CONTEXT{_REPEAT}"}, {"role": "assistant", "content": "CONTEXT"}]
    around = tokenizer.apply_chat_template(messages, tokenize=False).split("CONTEXT")[:2]
    opening, repeat = (tokenizer(text, add_special_tokens=False).input_ids for text in around)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    span = slice(0)

    def note(attention: Any, args: Any, kwargs: Any, output: Any) -> None:
        states, weights = kwargs["hidden_states"][0], output[1][0][:, -(span.stop - span.start) :, span]
        values = attention.v_proj(states[span]).unflatten(-1, (-1, attention.head_dim)).repeat_interleave(group, 1)
        projection = attention.o_proj.weight.unflatten(1, (-1, attention.head_dim))
        norms = torch.einsum("nhd,whd->hnw", values, projection).norm(dim=-1)
        # KVzip+: by the norm of what reads, and of what is read behind the output projection.
        plus = weights / states[-weights.shape[1] :].norm(dim=-1)[None, :, None] * norms[:, None]
        highest = [scores.amax(dim=1).unflatten(0, (-1, group)).amax(dim=1).T.float() for scores in (weights, plus)]
        found.append((states[span].bfloat16(), *highest))

    hooks = [layer.self_attn.register_forward_hook(note, with_kwargs=True) for layer in reader.layers]
    parts = []
    for ids in contexts:
        found, span = [], slice(len(opening), len(opening) + len(ids))
        reader(torch.tensor([[*opening, *ids, *repeat, *ids]]))
        parts.append([torch.stack(side) for side in zip(*found, strict=True)])
    for hook in hooks:
        hook.remove()
    inputs, scores, plus = (torch.cat(side, dim=1) for side in zip(*parts, strict=True))
    return inputs, scores, plus


def _group(reader: Any) -> int:
    """Return the number of query heads of a key/value head."""
    return reader.config.num_attention_heads // reader.config.num_key_value_heads


def ridge(inputs: Tensor, targets: Tensor) -> nn.Module:
    """Return linear maps, in each layer scikit-learn's `Ridge()` with its penalty of 1."""
    modules = nn.ModuleList()
    for states, of_layer in zip(inputs, targets, strict=True):
        states, of_layer = states.double(), of_layer.double()
        means = states.mean(dim=0), of_layer.mean(dim=0)
        states, of_layer = states - means[0], of_layer - means[1]
        squares = states.T @ states + torch.eye(states.shape[1], dtype=torch.float64)
        weight = torch.linalg.solve(squares, states.T @ of_layer).T
        module = nn.Linear(*weight.shape[::-1])
        module.weight.data, module.bias.data = weight.float(), (means[1] - weight @ means[0]).float()
        modules.append(module)
    return modules


def mlp(inputs: Tensor, targets: Tensor, epochs: int = 15, rate: float = 5e-3, batch_size: int = 512) -> nn.Module:
    """Return KVzap-MLP: an eighth of the width hidden, AdamW with a cosine, squared errors."""
    width, heads = inputs.shape[2], targets.shape[2]
    modules = nn.ModuleList(
        nn.Sequential(nn.Linear(width, width // 8), nn.GELU(), nn.Linear(width // 8, heads)) for _ in inputs
    )
    optimizer = torch.optim.AdamW(modules.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        for batch in torch.randperm(inputs.shape[1]).split(batch_size):
            errors = [
                functional.mse_loss(module(states[batch].float()), target[batch])
                for module, states, target in zip(modules, inputs, targets, strict=True)
            ]
            optimizer.zero_grad()
            torch.stack(errors).mean().backward()
            nn.utils.clip_grad_norm_(modules.parameters(), 1.0)
            optimizer.step()
        schedule.step()
    return modules


def gate(
    inputs: Tensor, scores: Tensor, group: int, steps: int, rate: float = 0.2, batch_size: int = 1000
) -> nn.Module:
    """Return Fast KVzip's gates: SGD with momentum, binary cross-entropy."""
    modules = nn.ModuleList(Gate(inputs.shape[2], scores.shape[2], group) for _ in inputs)
    optimizer = torch.optim.SGD(modules.parameters(), lr=rate, momentum=0.9)
    batches: list[Tensor] = []
    for step in range(steps):
        batches = batches or [*torch.randperm(inputs.shape[1]).split(batch_size)]
        batch = batches.pop()
        losses = [
            functional.binary_cross_entropy(module(states[batch].float()), target[batch].clamp(max=1))
            for module, states, target in zip(modules, inputs, scores, strict=True)
        ]
        share = 1.0 if step < 0.5 * steps else 0.5 if step < 0.75 * steps else 0.25
        optimizer.param_groups[0]["lr"] = rate * min(share, 100 * step / steps)
        optimizer.zero_grad()
        # The sum over layers and heads, as the authors add it.
        (torch.stack(losses).sum() * scores.shape[2]).backward()
        optimizer.step()
    return modules


def scored(read: Any, chunks: Any, modules: nn.Module) -> Any:
    """Return keys and values of chunks and their scores, in place of the model's own."""
    key_values, states = read(chunks)
    scores = [module(of_layer.float()).mT for module, of_layer in zip(modules, states, strict=True)]
    return key_values, torch.stack(scores, dim=1).flatten(1, 2)


def comparison_questions(data: Path, tokenizer: Any, number: int) -> list[dict[str, Any]]:
    """Return as many of the comparison's questions, the first of each set that has questions.

    Args:
        data: folder with the sets' files.
        tokenizer: the base's.
        number: of all sets together.
    """
    table = read_table()
    sets = {title: entry for title, entry in table["sets"].items() if entry["task"] == "question_answering"}
    with tempfile.TemporaryDirectory() as folder:
        write_sets({**table, "sets": sets}, data, tokenizer, Path(folder))
        lines = [list(lines_of(Path(folder, f"{title}.jsonl")))[: number // len(sets)] for title in sets]
    return [line for of_set in lines for line in of_set]


def _answer_scores(
    model: Any, tokenizer: Any, memory: Any, questions: Sequence[Mapping[str, Any]]
) -> list[dict[str, float]]:
    """Return F1 of each answer, and whether it contains a reference, 0 to 100 each."""
    text = padded([question_ids(model.config, tokenizer, row["question"]) for row in questions], model.device)
    eos, most = tokenizer.eos_token_id, questions[0]["max_new_tokens"]
    options = {"do_sample": False, "eos_token_id": eos, "pad_token_id": eos, "max_new_tokens": most}
    written = model.generate(**text, memory=memory, **options)[:, text["input_ids"].shape[1] :]
    answers = [answer.strip() for answer in tokenizer.batch_decode(written, skip_special_tokens=True)]
    pairs = [([answer], [row["references"]]) for answer, row in zip(answers, questions, strict=True)]
    return [{"f1": squad_scores(*pair)["f1"], "contained": substring_accuracy(*pair)} for pair in pairs]


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, metavar="FOLDER", help="the comparison's data, and SQuAD train")
    parser.add_argument("--questions", type=positive_int, default=120, metavar="N", help="(default: 120)")
    parser.add_argument("--checkpoint", default=CHECKPOINT, metavar="FOLDER", help=f"default: {CHECKPOINT}")
    add_output_argument(parser)
    parser.add_argument("--contexts", type=positive_int, default=60, metavar="N", help="to fit to (default: 60)")
    parser.add_argument("--gate-steps", type=positive_int, default=300, metavar="N", help="of Fast KVzip's gates")
    parser.add_argument("--ratios", type=positive_int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--batch-size", type=positive_int, default=20)
    return parser


@tells_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Fit all scorers and answer with each; returns the exit status."""
    arguments = build_parser().parse_args(argv)
    torch.manual_seed(0)
    model, tokenizer = load(arguments.checkpoint)
    reader, backbone = model.model.language_model, model.model
    squad = str(Path(arguments.data, "qa_squad_train.parquet"))
    choosing = questions_by_context(squad, FIRST_ROW)
    training = [context for context in questions_by_context(squad) if context not in choosing]
    drawn = random.Random(0).sample(training, arguments.contexts)
    attention = reader.config._attn_implementation
    reader.set_attn_implementation("eager")
    contexts = [document_ids(model.config, tokenizer, context) for context in drawn]
    inputs, scores, plus = scores_of_contexts(reader, tokenizer, contexts)
    reader.set_attn_implementation(attention)
    print(f"{inputs.shape[1]:,} tokens", flush=True)
    plus = plus.clamp(min=torch.finfo(torch.float32).tiny).log()
    variants: dict[str, nn.Module] = {
        SHIPPED: backbone.scorers,
        "KVzap-Linear": ridge(inputs, plus),
        "KVzap-MLP": mlp(inputs, plus),
        "Fast KVzip": gate(inputs, scores, _group(reader), arguments.gate_steps),
    }
    print("fitted", flush=True)

    # Each batch is one pass, which `once` remembers.
    backbone.tokens_at_once = sys.maxsize
    questions = comparison_questions(Path(arguments.data), tokenizer, arguments.questions)
    found: dict[int, dict[str, list[dict[str, float]]]] = {
        ratio: {name: [] for name in variants} for ratio in arguments.ratios
    }
    for start in range(0, len(questions), arguments.batch_size):
        batch = questions[start : start + arguments.batch_size]
        rows = padded([document_ids(model.config, tokenizer, row["context"]) for row in batch], model.device)
        read = once(backbone._read)
        with torch.no_grad():
            for name, modules in variants.items():
                with patch.object(backbone, "_scored", partial(scored, read, modules=modules)):
                    memories = model.compress(**rows, ratio=arguments.ratios)
                for ratio, memory in zip(arguments.ratios, memories, strict=True):
                    found[ratio][name] += _answer_scores(model, tokenizer, memory, batch)
        print(f"{start + len(batch)} of {len(questions)}", flush=True)
    contexts_of = [row["context"] for row in questions]
    results = [
        {"ratio": ratio, "scorer": name, **scores}
        for ratio, of_ratio in found.items()
        for name, scores in paired_scores(of_ratio, SHIPPED, contexts_of).items()
    ]
    table = markdown_table(list(results[0]), [[str(value) for value in row.values()] for row in results])
    arguments.data = Path(arguments.data).name
    save_and_report(__file__, arguments, results, table, "scorers")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
