# SPDX-License-Identifier: Apache-2.0
"""Who shares a budget of ranked key/values: heads, by each text's needs or by fixed shares; and chunks?

    python -m benchmarks.flagship.budgets CHECKPOINT --data CHOOSING.parquet --seed 22 --chunk-sizes 512 128 \
        --answers budgets.jsonl

Documents are eight paragraphs of SQuAD with a question about each. `heads` compresses each paragraph by itself: with
one budget of all heads, and with a share for each head that is the same in every paragraph, the mean of those of 64
other paragraphs. `chunks` compresses documents chunk by chunk: with a budget for each, and with one of all. Both have
as many pairs. Intervals hold 95 % of 10,000 resamples, of the paragraphs and of the documents; differences are of
pairs. A run that is stopped goes on where its answers end.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from tqdm.auto import tqdm
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.common.answers import AnswerLines
from benchmarks.common.tools import positive_int, tells_errors
from benchmarks.flagship.ablations import highest_of_groups
from benchmarks.flagship.reading_by_question import Document, drawn, written
from context_compressors import RankedKeyValuesForCausalLM
from context_compressors.evaluation.bootstrap import mean_statistic, percentile_interval, resampled_scores
from context_compressors.evaluation.metrics import squad_scores
from context_compressors.modeling.compressor.context_compression_qa import padded
from context_compressors.modeling.memory import headwise_pairs
from context_compressors.modeling.memory.compressed_context import CompressedContext, KeyValues
from context_compressors.modeling.memory.headwise_pairs import HeadwisePairs
from context_compressors.modeling.parts.prompting import question_ids
from context_compressors.reporting.environment import environment
from context_compressors.reporting.result_files import write_results
from context_compressors.reporting.tables import markdown_table

_NUM_RESAMPLES = 10_000
# Documents whose paragraphs tell the fixed shares, and which are not asked about.
_OF_SHARES = 8
ONE_BUDGET, FIXED = "one budget of all heads", "a fixed share for each head"
EACH_CHUNK, ALL_CHUNKS = "a budget for each chunk", "one budget of all chunks"
SHARES, HEADS, CHUNKS = "shares", "heads", "chunks of "

# What is kept, and how it becomes a memory.
Rule = Callable[[Tensor, Tensor, Tensor], Tensor]
Budget = tuple[Rule, Callable[..., HeadwisePairs]]

_HIGHEST, _GATHER = headwise_pairs.highest, headwise_pairs.gather_pairs
_SHIPPED: Budget = (_HIGHEST, _GATHER)


# --- budgets ---


def apportioned(shares: Tensor, total: int, most: int) -> Tensor:
    """Whole numbers near `total` times the shares, none above `most`, that sum to `total` (Webster's method).

    Args:
        shares: `(num_heads,)`, which sum to 1.
        total: at most `most` times as many as there are shares.
        most: pairs that a head has.
    """
    quotients = shares.double()[:, None] / (torch.arange(most) + 0.5)
    return _HIGHEST(quotients[None], torch.ones(1, most), torch.tensor([total]))[0].sum(dim=1)


def by_shares(shares: Tensor) -> Rule:
    """As `highest`, each head so much of the budget, `(num_heads,)`."""

    def rule(scores: Tensor, mask: Tensor, num_kept: Tensor) -> Tensor:
        rows = zip(num_kept.tolist(), mask.sum(dim=1).tolist(), strict=True)
        return highest_of_groups(scores, mask, torch.stack([apportioned(shares, *row) for row in rows]))

    return rule


def one_row(states: Tensor) -> Tensor:
    """Chunks of a document side by side, `(num_chunks, num_heads, num_places, ...)` as `(1, num_heads, num_chunks *
    num_places, ...)`."""
    return states.transpose(0, 1).flatten(1, 2)[None]


def of_all_chunks(scores: Tensor, mask: Tensor, num_kept: Tensor) -> Tensor:
    """As `highest` of one document, with one budget of all its chunks."""
    is_kept = _HIGHEST(one_row(scores), mask.reshape(1, -1), num_kept.sum()[None])
    return is_kept[0].unflatten(1, (len(scores), -1)).transpose(0, 1)


def gathered_of_all(key_values: KeyValues, is_kept: Tensor, ratios: Tensor, counts: Sequence[int]) -> HeadwisePairs:
    """As `gather_pairs` of one document: its pairs fill the slots of all its chunks, one chunk's after the other's."""
    rows = tuple((one_row(keys), one_row(values)) for keys, values in key_values)
    kept = _GATHER(rows, one_row(is_kept), one_row(ratios), [sum(counts)])

    def split(states: Tensor) -> Tensor:
        parts = states[0].split(list(counts), dim=-2)
        return torch.stack([pad(part, (0, 0, 0, max(counts) - part.shape[-2])) for part in parts])

    pairs = tuple((split(keys), split(values)) for keys, values in kept.key_values)
    return HeadwisePairs(pairs, split(kept.head_ids), split(kept.coarsest_ratios))


@contextmanager
def ranked_by(budgets: Sequence[Budget]) -> Iterator[list[Tensor]]:
    """Compress with others in place of `highest` and `gather_pairs`, a pair of them for each memory of a call.

    Yields:
        A list, to which what each memory keeps is added.
    """
    kept: list[Tensor] = []

    def highest(*args: Tensor) -> Tensor:
        kept.append(budgets[len(kept) % len(budgets)][0](*args))
        return kept[-1]

    def gather_pairs(*args: Any) -> HeadwisePairs:
        return budgets[(len(kept) - 1) % len(budgets)][1](*args)

    with mock.patch.multiple(headwise_pairs, highest=highest, gather_pairs=gather_pairs):
        yield kept


def shares_of(is_kept: Tensor) -> Tensor:
    """Each head's share of what is kept of each context, `(batch_size, num_heads)`."""
    counts = is_kept.sum(dim=2).double()
    return counts / counts.sum(dim=1, keepdim=True)


def moved(first: Tensor, second: Tensor) -> float:
    """Part of a budget that lies elsewhere, the mean over documents of shares `(num_documents, num_sharers)`."""
    return float((first - second).abs().sum(dim=1).mean() / 2)


# --- questions ---


def compressed(
    model: PreTrainedModel, blocks: Sequence[list[int]], ratios: Sequence[int], budgets: Sequence[Budget]
) -> tuple[list[CompressedContext], list[Tensor]]:
    """Memories of contexts, for each ratio one with its budget, and what each keeps."""
    with ranked_by(budgets) as kept:
        memories = model.compress(**padded(blocks, model.device), ratio=list(ratios), allow_untrained_ratio=True)
    return memories, kept


def mean_shares(model: PreTrainedModel, documents: Sequence[Document], ratios: Sequence[int]) -> list[Tensor]:
    """The mean share of each head, at each ratio, over the paragraphs of some documents."""
    found: list[list[Tensor]] = [[] for _ in ratios]
    for document in documents:
        _, kept = compressed(model, document.blocks, ratios, [_SHIPPED])
        for of_ratio, is_kept in zip(found, kept, strict=True):
            of_ratio.append(shares_of(is_kept))
    return [torch.cat(of_ratio).mean(dim=0) for of_ratio in found]


def ask(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    document: Document,
    ratios: Sequence[int],
    shares: Sequence[Tensor] | None,
    new_tokens: int,
) -> dict[str, Any]:
    """What a document's questions are answered, and how much of the budget the second way of sharing moves.

    Args:
        shares: of heads, for each ratio; `None`: the chunks share.
    """
    questions = [question_ids(model.config, tokenizer, question) for question in document.questions]
    blocks, names = (document.blocks, (ONE_BUDGET, FIXED)) if shares else ([document.ids], (EACH_CHUNK, ALL_CHUNKS))
    others = [(by_shares(of_ratio), _GATHER) for of_ratio in shares] if shares else [(of_all_chunks, gathered_of_all)]
    budgets = [_SHIPPED] * len(ratios) + others * (len(ratios) // len(others))
    # One reading for all.
    memories, kept = compressed(model, blocks, [*ratios, *ratios], budgets)
    found: dict[str, Any] = {"texts": {}, "moved": {}}
    for place, ratio in enumerate(ratios):
        both = slice(place, None, len(ratios))
        rows = [memory.repeat_interleave(len(questions) // len(blocks)) for memory in memories[both]]
        texts = written(model, tokenizer, CompressedContext.stack(rows), questions * 2, new_tokens)
        for name, start in zip(names, (0, len(questions)), strict=True):
            found["texts"][f"{name} {ratio}x"] = texts[start : start + len(questions)]
        found["moved"][f"{ratio}x"] = moved(
            *(shares_of(of_one if shares else of_one.flatten(1)[None]) for of_one in kept[both])
        )
    return found


# --- results ---


def results_of(documents: Sequence[Document], answers: Sequence[dict[str, Any]], ratios: Sequence[int]) -> list[dict]:
    """For each part, ratio and way of sharing F1 and how much that is above the first way, with their intervals."""
    rows = []
    for part in dict.fromkeys(found["part"] for found in answers):
        of_part = sorted((found for found in answers if found["part"] == part), key=lambda found: found["document"])
        references = [answer for found in of_part for answer in documents[found["document"]].answers]
        names = (ONE_BUDGET, FIXED) if part == HEADS else (EACH_CHUNK, ALL_CHUNKS)
        # One memory answers all questions about a document; a paragraph by itself has one of its own.
        clusters = [place if part == HEADS else place // len(documents[0].blocks) for place in range(len(references))]
        for ratio in ratios:
            scores = []
            for name in names:
                texts = [text for found in of_part for text in found["texts"][f"{name} {ratio}x"]]
                pairs = zip(texts, references, strict=True)
                scores.append(np.array([squad_scores([text], [known])["f1"] for text, known in pairs]))
            above = [of_name - scores[0] for of_name in scores]
            statistics = {
                (kind, place): mean_statistic(values)
                for kind, of_kind in (("f1", scores), ("difference", above))
                for place, values in enumerate(of_kind)
            }
            resampled = resampled_scores(statistics, clusters, _NUM_RESAMPLES)
            for place, name in enumerate(names):
                row = {"part": part, "ratio": ratio, "budget": name, "questions": len(references)}
                for kind in ("f1", "difference"):
                    row[kind] = statistics[kind, place].score()
                    row[f"{kind}_interval"] = list(percentile_interval(resampled[kind, place]))
                if place:
                    row["moved"] = float(np.mean([found["moved"][f"{ratio}x"] for found in of_part]))
                rows.append(row)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The results as a table."""
    cells = []
    for row in rows:
        score, low, high = row["f1"], *row["f1_interval"]
        given = [f"{row['part']}, {row['ratio']}x", row["budget"], f"{score:.1f} [{low:.1f}, {high:.1f}]", "", ""]
        if "moved" in row:
            low, high = row["difference_interval"]
            given[3:] = f"{row['difference']:+.1f} [{low:.1f}, {high:.1f}]", f"{100 * row['moved']:.0f} %"
        cells.append(given)
    return markdown_table(["what shares", "how", "F1", "more than the first", "of the budget elsewhere"], cells)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.flagship.budgets", description=__doc__)
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    add = made.add_argument
    add("checkpoint", help="Hub id or folder of a checkpoint of ranked key/values")
    add("--data", required=True, metavar="FILE", help="Parquet file with context, question and answers")
    add("--documents", type=positive_int, default=10, help="of eight questions each (default: 10)")
    add("--seed", type=int, default=0, help="draws the paragraphs (default: 0)")
    add("--ratios", nargs="+", type=positive_int, default=[4, 8, 16], metavar="R", help="default: 4 8 16")
    add("--chunk-sizes", nargs="*", type=positive_int, default=[512], metavar="TOKENS", help="default: 512")
    add("--new-tokens", type=positive_int, default=16, help="longest answer (default: 16)")
    add("--answers", required=True, metavar="FILE", help="JSON lines that are gone on with")
    add("--output", metavar="FILE", help="where the result goes (default: beside this file)")
    return made


@tells_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    arguments = build_parser().parse_args(argv)
    tokenizer, ratios = AutoTokenizer.from_pretrained(arguments.checkpoint), arguments.ratios
    model = RankedKeyValuesForCausalLM.from_pretrained(arguments.checkpoint).eval()
    documents = drawn(arguments.data, 0, _OF_SHARES + arguments.documents, arguments.seed, tokenizer)
    of_shares, documents = documents[:_OF_SHARES], documents[_OF_SHARES:]
    settings = {"data": Path(arguments.data).name, "seed": arguments.seed, "new_tokens": arguments.new_tokens}
    known = AnswerLines(arguments.answers, {"model": model.model_id, "ratios": ratios, **settings})
    lines = known.lines
    # Paragraphs are read whole.
    sizes = {HEADS: None} | {f"{CHUNKS}{size}": size for size in arguments.chunk_sizes}
    with torch.inference_mode():
        model.config.chunk_size = None
        if not any(line["part"] == SHARES for line in lines):
            found = [of_ratio.tolist() for of_ratio in mean_shares(model, of_shares, ratios)]
            known.add({"part": SHARES, "shares": found})
        shares = [torch.tensor(of_ratio) for line in lines if line["part"] == SHARES for of_ratio in line["shares"]]
        done = {(line["part"], line.get("document")) for line in lines}
        missing = [(part, place) for place in range(len(documents)) for part in sizes if (part, place) not in done]
        for part, place in tqdm(missing, disable=not sys.stderr.isatty()):
            model.config.chunk_size = sizes[part]
            asked = documents[place], ratios, shares if part == HEADS else None, arguments.new_tokens
            known.add({"part": part, "document": place, **ask(model, tokenizer, *asked)})
    answers = [line for line in lines if line["part"] != SHARES and line["document"] < len(documents)]
    rows = results_of(documents, answers, ratios)
    settings["documents"] = arguments.documents
    content = {"format_version": 1, "settings": settings, "environment": environment(), "rows": rows}
    output = write_results(content, arguments.output or Path(__file__).with_suffix(".json"))
    print(f"{table(rows)}\n\nwrote {output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
