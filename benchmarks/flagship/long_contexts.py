# SPDX-License-Identifier: Apache-2.0
"""Contexts longer than the base's positions: where their chunks should stand, and what compressing them costs.

    python -m benchmarks.flagship.long_contexts places --model RANKED_KEY_VALUES --data squad.parquet --paragraphs 30
    python -m benchmarks.flagship.long_contexts costs --model RANKED_KEY_VALUES --data squad.parquet --tokens 100000

`places` joins paragraphs to documents and asks about some of them, one question each. The same pairs are read at other
positions: all chunks at the same ones, their starts squeezed into so many positions or wrapped at them; and, where the
base has positions enough, all at their own, beside the full text. Intervals hold 95 % of 10,000 resamples of the
questions, those of differences are of pairs. `costs` reads one document, in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.common.answers import AnswerLines
from benchmarks.common.questions import questions_by_context
from benchmarks.common.tools import positive_int, tells_errors
from context_compressors import RankedKeyValuesForCausalLM
from context_compressors.evaluation.bootstrap import mean_statistic, percentile_interval, resampled_scores
from context_compressors.evaluation.metrics import squad_scores
from context_compressors.modeling.compressor import opened_contexts
from context_compressors.modeling.compressor.context_compression_qa import padded
from context_compressors.modeling.compressor.opened_contexts import same_starts
from context_compressors.modeling.memory.compressed_context import CompressedContext
from context_compressors.modeling.parts.prompting import question_ids
from context_compressors.modeling.parts.text_ids import encode
from context_compressors.reporting.environment import environment
from context_compressors.reporting.result_files import write_results
from context_compressors.reporting.tables import markdown_table

_NUM_RESAMPLES = 10_000
_FILES = ("model", "output", "data", "answers", "memory")
_SAME, _OWN, _FULL, _NONE = "the same", "their own", "full text", "no context"


@dataclass
class Document:
    """Paragraphs joined, and questions about some of them.

    Args:
        ids: token ids.
        questions: each about another paragraph.
        answers: of each question, all that are right.
    """

    ids: list[int]
    questions: list[str]
    answers: list[list[str]]


def drawn(
    path: str, paragraphs: int, count: int, questions: int, seed: int, tokenizer: PreTrainedTokenizerBase
) -> list[Document]:
    """Documents of paragraphs that a seed draws from a Parquet file; the last is shorter where they do not suffice."""
    by_context = questions_by_context(path)
    contexts, generator, documents = sorted(by_context), random.Random(seed), []
    generator.shuffle(contexts)
    for place in range(count):
        texts = contexts[place * paragraphs : (place + 1) * paragraphs]
        # Evenly from the document's beginning to its end.
        asked = [texts[at * len(texts) // questions] for at in range(min(questions, len(texts)))]
        rows = [generator.choice(by_context[text]) for text in asked]
        ids = [token for text in texts for token in encode(tokenizer, f"{text}\n")]
        documents.append(Document(ids, [row["question"] for row in rows], [row["answers"] for row in rows]))
    return documents


# --- places ---


def squeezed_starts(memory: CompressedContext, is_long: Tensor, num_positions: int) -> tuple[Tensor, Tensor]:
    """As `same_starts`, but where chunks start is squeezed together evenly, into so many positions."""
    same, longest = same_starts(memory, is_long)
    starts, lengths = memory.position_ids, memory.num_context_tokens
    taken = longest.clamp(min=num_positions).where(is_long, lengths)
    squeezed = (starts - 1) * (taken - longest)[:, None] // (lengths - longest).clamp(min=1)[:, None] + 1
    return squeezed.where(same != starts, starts), taken


def wrapped_starts(memory: CompressedContext, is_long: Tensor, num_positions: int) -> tuple[Tensor, Tensor]:
    """As `same_starts`, but chunks start at their own places again and again from the first one on."""
    is_moved = is_long[:, None] & memory.attention_mask.bool()
    starts = ((memory.position_ids - 1) % num_positions + 1).where(is_moved, memory.position_ids)
    return starts, memory.num_context_tokens.clamp(max=num_positions).where(is_long, memory.num_context_tokens)


@contextmanager
def placed(model: PreTrainedModel, row: str) -> Iterator[None]:
    """Read memories as a row says: "the same", "their own", "squeezed N" or "wrapped N"."""
    module: Any = opened_contexts
    base, before = model.config.decoder_config, model.config.decoder_config.max_position_embeddings
    kind, _, number = row.partition(" ")
    if row not in (_OWN, _FULL, _NONE):
        # To the model its base then has just enough positions for one chunk.
        base.max_position_embeddings = model.config.chunk_size + len(model.config.opening_ids)
        if number.isdigit():
            starts = {"wrapped": wrapped_starts, "squeezed": squeezed_starts}[kind]
            module.same_starts = partial(starts, num_positions=int(number))
    try:
        yield
    finally:
        base.max_position_embeddings, module.same_starts = before, same_starts


def compressed(
    model: PreTrainedModel, ids: Sequence[int], ratios: Sequence[int], row: str
) -> dict[int, CompressedContext]:
    """Memories that any row may read, by ratio."""
    chunk_size = model.config.chunk_size
    with placed(model, row):
        if row == _FULL:
            ratios, model.config.chunk_size = [1], None
        memories = model.compress(torch.tensor([list(ids)]), ratio=list(ratios), allow_untrained_ratio=True)
    model.config.chunk_size = chunk_size
    # A name would tell that they were made with other settings.
    return {ratio: replace(memory, model_id=None, check=False) for ratio, memory in zip(ratios, memories, strict=True)}


def asked(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    memory: CompressedContext | None,
    document: Document,
    arguments: argparse.Namespace,
) -> Iterator[dict[str, Any]]:
    """Of each question what is written, and the negative log-likelihood of the right answer in nats a token."""
    prompts = [question_ids(model.config, tokenizer, question) for question in document.questions]
    at_once = max(1, arguments.slots_at_once // (int(memory.num_slots) if memory else 512))
    for start in range(0, len(prompts), at_once):
        some = prompts[start : start + at_once]
        right = [encode(tokenizer, answers[0]) for answers in document.answers[start : start + at_once]]
        texts: list[str] = [""] * len(some)
        if arguments.new_tokens:
            text = padded(some, model.device)
            written = model.generate(
                **text,
                memory=memory,
                max_new_tokens=arguments.new_tokens,
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
            )[:, text["input_ids"].shape[1] :]
            texts = [tokenizer.decode(row, skip_special_tokens=True).strip() for row in written]
        whole = padded([[*prompt, *answer] for prompt, answer in zip(some, right, strict=True)], model.device)
        logits = model(**whole, memory=memory, use_cache=False).logits.float()
        for row, (prompt, answer) in enumerate(zip(some, right, strict=True)):
            behind = logits[row, len(prompt) - 1 : len(prompt) + len(answer) - 1]
            nll = float(cross_entropy(behind, torch.tensor(answer)))
            yield {"text": texts[row], "nll": nll}


@torch.inference_mode()
def measure_places(arguments: argparse.Namespace) -> dict[str, Any]:
    """F1 and negative log-likelihoods of all rows, and what each adds to "the same"."""
    model, tokenizer = loaded(arguments)
    documents = drawn(
        arguments.data, arguments.paragraphs, arguments.documents, arguments.questions, arguments.seed, tokenizer
    )
    settings = {name: getattr(arguments, name) for name in ("paragraphs", "questions", "seed", "new_tokens")}
    known = AnswerLines(arguments.answers, {"model": model.model_id, "data": Path(arguments.data).name, **settings})
    answers = {(line["document"], line["row"]): line["answers"] for line in known.lines}
    found: dict[str, dict[str, list[float]]] = {}
    for place, document in enumerate(documents):
        memories: dict[str, dict[int, CompressedContext | None]] = {}
        for row in arguments.rows:
            for ratio in [1] if row in (_FULL, _NONE) else arguments.ratios:
                name = row if row in (_FULL, _NONE) else f"{row}, {ratio}x"
                if (place, name) not in answers:
                    # All but these two are read behind the opening.
                    read = row if row in (_OWN, _FULL, _NONE) else _SAME
                    if row == _NONE:
                        memories[read] = {ratio: None}
                    elif read not in memories:
                        memories[read] = compressed(model, document.ids, arguments.ratios, read)
                    with placed(model, row):
                        new = list(asked(model, tokenizer, memories[read][ratio], document, arguments))
                    answers[place, name] = new
                    known.add({"document": place, "row": name, "answers": new})
                scores = found.setdefault(name, {"nll": []})
                for answer, right in zip(answers[place, name], document.answers, strict=True):
                    scores["nll"].append(answer["nll"])
                    if arguments.new_tokens:
                        scores.setdefault("f1", []).append(squad_scores([answer["text"]], [right])["f1"])
                print(name, {kind: round(float(np.mean(values)), 2) for kind, values in scores.items()}, flush=True)
    rows = []
    for name, scores in found.items():
        same = found.get(f"{_SAME}, {name.rpartition(', ')[2]}", scores)
        row = {"row": name}
        for kind, values in scores.items():
            statistics = {"": mean_statistic(values), "_added": mean_statistic(np.subtract(values, same[kind]))}
            resampled = resampled_scores(statistics, range(len(values)), _NUM_RESAMPLES)
            for suffix, statistic in statistics.items():
                row[kind + suffix] = [statistic.score(), *percentile_interval(resampled[suffix])]
        rows.append(row)
    return {
        "tokens": [len(document.ids) for document in documents],
        "questions": sum(len(document.questions) for document in documents),
        "rows": rows,
    }


# --- costs ---


def peak_resident(resets: bool = False) -> int:
    """Most bytes that the process held in memory, since the last reset."""
    if resets:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


@torch.inference_mode()
def measure_costs(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time and memory of compressing one document, and of an answer."""
    model, tokenizer = loaded(arguments)
    ids = drawn(arguments.data, 10**6, 1, 1, arguments.seed, tokenizer)[0].ids
    last = arguments.first_token + arguments.tokens
    ids = (ids * -(-last // len(ids)))[arguments.first_token : last]
    context = torch.tensor([ids])
    # What the first pass makes once is not the document's.
    model.compress(context[:, :64], ratio=arguments.ratio)
    before = peak_resident(resets=True)
    wall, cpu = time.perf_counter(), time.process_time()
    memory = model.compress(context, ratio=arguments.ratio)
    seconds = {"compress_wall": time.perf_counter() - wall, "compress_cpu": time.process_time() - cpu}
    result = {
        "tokens": len(ids),
        "memory_bytes": memory.nbytes,
        "working_bytes": peak_resident() - before - memory.nbytes,
    }
    if arguments.memory:
        path = Path(arguments.memory)
        if path.exists():
            memory = CompressedContext.concatenate([CompressedContext.load(path), memory])
        memory.save(path)
    result["tokens_asked"] = int(memory.num_context_tokens)
    text = padded([question_ids(model.config, tokenizer, "What is the text about?")], model.device)
    new_tokens = arguments.new_tokens or 1
    for name, count in (("first_token", 1), ("answer", new_tokens)):
        began = time.process_time()
        given = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
        model.generate(**text, memory=memory, pad_token_id=tokenizer.pad_token_id, **given)
        seconds[f"{name}_cpu"] = time.process_time() - began
    return {**result, "seconds": seconds}


# --- both ---


def loaded(arguments: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, its adapter merged where that was asked for, and its tokenizer."""
    model = RankedKeyValuesForCausalLM.from_pretrained(arguments.model, dtype=getattr(torch, arguments.dtype))
    if arguments.merge:
        model.merge_adapters()
    return model.eval(), AutoTokenizer.from_pretrained(arguments.model)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.flagship.long_contexts", description=__doc__)
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    add = made.add_argument
    add("what", choices=("places", "costs"))
    add("--model", required=True, help="a checkpoint of ranked key/values, with chunks")
    add("--data", required=True, help="Parquet file with context, question and answers")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="default: bfloat16")
    add("--merge", action="store_true", help="add the adapter to the weights first")
    add("--new-tokens", type=int, default=16, help="longest answer; 0 for none (default: 16)")
    add("--output", help="where results are added (default: beside this file)")
    places = made.add_argument_group("places")
    add = places.add_argument
    add("--answers", default="long_contexts.jsonl", help="JSON lines of one set of documents, which are gone on with")
    add("--paragraphs", type=positive_int, default=30, help="of a document (default: 30)")
    add("--documents", type=positive_int, default=2, help="default: 2")
    add("--questions", type=positive_int, default=16, help="for each document (default: 16)")
    add("--ratios", type=positive_int, nargs="+", default=[4, 8], help="default: 4 8")
    rows = [_NONE, _FULL, _OWN, _SAME, "squeezed 1024", "squeezed 2048", "wrapped 1024"]
    add("--rows", nargs="+", default=rows, help=f"default: {rows}")
    add("--seed", type=int, default=0, help="draws paragraphs and questions (default: 0)")
    add("--slots-at-once", type=positive_int, default=2048, help="of all questions asked together (default: 2048)")
    costs = made.add_argument_group("costs")
    costs.add_argument("--tokens", type=positive_int, default=100_000, help="default: 100,000")
    costs.add_argument("--first-token", type=int, default=0, help="where in the text they start (default: 0)")
    costs.add_argument(
        "--memory", help="file that the memory is added to, so that parts of a document may be read apart"
    )
    costs.add_argument("--ratio", type=positive_int, default=16, help="default: 16")
    return made


@tells_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    arguments = build_parser().parse_args(argv)
    result = measure_places(arguments) if arguments.what == "places" else measure_costs(arguments)
    path = Path(arguments.output or Path(__file__).with_suffix(".json"))
    content = json.loads(path.read_text()) if path.exists() else {"format_version": 1, "runs": []}
    settings = {name: value for name, value in vars(arguments).items() if name not in _FILES}
    content["runs"] = [run for run in content["runs"] if run["settings"] != settings]
    content["runs"].append({"settings": settings, "environment": environment(), **result})
    write_results(content, path)
    if arguments.what == "places":
        titles = {"nll": "nats a token", "nll_added": "more than at the same places"}
        titles |= {"f1": "F1", "f1_added": "more than at the same places"} if arguments.new_tokens else {}
        table = [
            [row["row"], *("{:.2f} [{:.2f}, {:.2f}]".format(*row[kind]) for kind in titles)] for row in result["rows"]
        ]
        print(markdown_table(["places", *titles.values()], table))
    else:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
