# SPDX-License-Identifier: Apache-2.0
"""Loss of memories in int8, int4 and int2: answers, and divergence of the decoder's next tokens.

    python -m benchmarks.quantized_memories.measure --data qa_squad_dev.parquet --ratios 2
    python -m benchmarks.quantized_memories.measure --data qa_squad_dev.parquet --ratios 4 16 --checkpoint CHECKPOINT

Questions on SQuAD, drawn by a seed, one for each context. Each is answered from its memory as it was compressed, and
from the same memory rounded; the checkpoint says whether memories are embeddings or keys and values. F1 is that of
greedy answers; the divergence is that of the next token's distribution, in nats, from the exact memory's to the
rounded one's, on average over the tokens of an answer up to the first that differs. Intervals hold 95 % of 10,000
resamples of the questions; those of differences are of pairs.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import Pipeline

from benchmarks.common.questions import questions_by_context
from benchmarks.common.tools import (
    add_place_arguments,
    device_of,
    positive_int,
    save_and_report,
    script_parser,
    tells_errors,
)
from context_compressors import CorpusCompressor
from context_compressors.evaluation.bootstrap import mean_statistic, percentile_interval, resampled_scores
from context_compressors.evaluation.metrics import squad_scores
from context_compressors.modeling.compressor.context_compression_qa import padded
from context_compressors.modeling.memory.compressed_context import CompressedContext
from context_compressors.modeling.memory.memory_quantization import QUANTIZATIONS
from context_compressors.modeling.parts.text_ids import question_ids
from context_compressors.reporting.tables import markdown_table

CHECKPOINTS = Path(__file__).resolve().parents[2] / "checkpoints"
EXACT = "exact"
BATCH_SIZE, NEW_TOKENS, _NUM_RESAMPLES = 20, 12, 10_000


def drawn(path: str, num_questions: int, seed: int) -> list[dict[str, Any]]:
    """Questions of different contexts, from a Parquet file with `context`, `question` and `answers`."""
    by_context, chosen = questions_by_context(path, at_least=num_questions), random.Random(seed)
    return [chosen.choice(rows) for rows in chosen.sample(list(by_context.values()), num_questions)]


@torch.no_grad()
def written(
    pipe: Pipeline, memory: CompressedContext, questions: Sequence[str]
) -> tuple[list[list[int]], torch.Tensor]:
    """Greedy answers, one for each row of a memory, and the log-probabilities that each token was chosen from.

    Returns:
        The ids up to the end of each answer, and `(batch_size, new_tokens, vocab_size)`.
    """
    text = padded([question_ids(pipe.model.config, pipe.tokenizer, question) for question in questions], pipe.device)
    output = pipe.model.generate(
        **text,
        memory=memory,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=pipe.tokenizer.pad_token_id,
        output_logits=True,
        return_dict_in_generate=True,
    )
    ends = pipe.model.generation_config.eos_token_id
    ends = {ends} if isinstance(ends, int) else set(ends)
    rows = []
    for row in output.sequences[:, text["input_ids"].shape[1] :].tolist():
        end = next((place for place, token in enumerate(row) if token in ends), len(row) - 1)
        rows.append(row[: end + 1])
    return rows, torch.stack(output.logits, dim=1).float().log_softmax(dim=-1)


def divergence(exact: list[int], rounded: list[int], p: torch.Tensor, q: torch.Tensor) -> float:
    """Mean divergence of the next token, up to the first in which two answers differ.

    Args:
        exact, rounded: ids of both answers.
        p, q: their log-probabilities `(new_tokens, vocab_size)`.
    """
    pairs = list(zip(exact, rounded, strict=False))
    same = next((place for place, (one, other) in enumerate(pairs) if one != other), len(pairs) - 1)
    p, q = p[: same + 1], q[: same + 1]
    return float((p.exp() * (p - q)).sum(dim=-1).mean())


def measured(pipe: Pipeline, rows: Sequence[dict[str, Any]], ratio: int) -> list[dict[str, Any]]:
    """F1, and the divergence from the exact memory, of each form of a memory."""
    memory = pipe.compress([row["context"] for row in rows], ratio=ratio, batch_size=BATCH_SIZE)
    forms = {EXACT: memory, **{name: memory.quantize(name) for name in QUANTIZATIONS}}
    answers: dict[str, list[str]] = {name: [] for name in forms}
    divergences: dict[str, list[float]] = {name: [] for name in forms}
    for start in tqdm(
        range(0, len(rows), BATCH_SIZE), desc=f"{memory.carrier} {ratio}x", disable=not sys.stderr.isatty()
    ):
        places = range(len(rows))[start : start + BATCH_SIZE]
        batch = [rows[place]["question"] for place in places]
        texts = {name: written(pipe, form.rows(places), batch) for name, form in forms.items()}
        exact, p = texts[EXACT]
        for name, (found, q) in texts.items():
            answers[name] += [pipe.tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in found]
            divergences[name] += list(map(divergence, exact, found, p, q))
    f1 = {
        name: [squad_scores([text], [row["answers"]])["f1"] for text, row in zip(texts, rows, strict=True)]
        for name, texts in answers.items()
    }
    statistics = {}
    for name in forms:
        statistics[name, "f1"] = mean_statistic(f1[name])
        statistics[name, "f1_difference"] = mean_statistic(
            [one - other for one, other in zip(f1[name], f1[EXACT], strict=True)]
        )
        statistics[name, "divergence"] = mean_statistic(divergences[name])
    resampled = resampled_scores(statistics, range(len(rows)), _NUM_RESAMPLES)
    num_tokens = int(memory.num_context_tokens.sum())
    results = []
    for name, form in forms.items():
        result: dict[str, Any] = {
            "carrier": memory.carrier,
            "method": pipe.model.config.model_type.removesuffix("_compressor"),
            "ratio": ratio,
            "form": name,
            "dtype": str(memory.dtype).removeprefix("torch."),
            "questions": len(rows),
            "bytes_per_context_token": form.nbytes / num_tokens,
            "same_answers": sum(map(str.__eq__, answers[name], answers[EXACT])),
        }
        for score in ("f1", "f1_difference", "divergence"):
            result[score] = statistics[name, score].score()
            result[f"{score}_interval"] = percentile_interval(resampled[name, score])
        results.append(result)
    return results


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return the results as a table."""

    def with_interval(result: dict[str, Any], name: str, digits: int) -> str:
        low, high = result[f"{name}_interval"]
        return f"{result[name]:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"

    rows = [
        [
            f"{result['method']}, {result['ratio']}x",
            result["form"] if result["form"] != EXACT else result["dtype"],
            f"{result['bytes_per_context_token']:,.0f}",
            with_interval(result, "f1", 1),
            "" if result["form"] == EXACT else with_interval(result, "f1_difference", 1),
            "" if result["form"] == EXACT else with_interval(result, "divergence", 4),
            f"{result['same_answers']} of {result['questions']}",
        ]
        for result in results
    ]
    header = ["memory", "form", "bytes a token", "F1", "difference", "divergence", "same answers"]
    return markdown_table(header, rows)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = script_parser(__doc__)
    add = parser.add_argument
    add("--data", required=True, help="Parquet file with context, question and answers, such as SQuAD's dev set")
    add("--questions", type=positive_int, default=100, help="default: 100")
    add("--seed", type=int, default=0, help="draws the questions (default: 0)")
    add("--ratios", type=positive_int, nargs="+", default=[2], help="default: 2")
    add(
        "--checkpoint",
        default=str(CHECKPOINTS / "smollm2-135m-instruct-mean-pooling"),
        help="folder or Hub id (default: the repository's of mean pooling)",
    )
    add_place_arguments(parser)
    return parser


@tells_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    arguments = build_parser().parse_args(argv)
    device = device_of(arguments)
    rows = drawn(arguments.data, arguments.questions, arguments.seed)
    pipe = CorpusCompressor(arguments.checkpoint, device=str(device), dtype="float32").pipe
    results = [result for ratio in arguments.ratios for result in measured(pipe, rows, ratio)]
    arguments.data, arguments.checkpoint = Path(arguments.data).name, Path(arguments.checkpoint).name
    save_and_report(__file__, arguments, results, table(results), results[0]["carrier"])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
