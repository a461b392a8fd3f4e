# SPDX-License-Identifier: Apache-2.0
"""Accuracy by the length of a document: the same questions about documents of 1, 2, 4 and 8 chunks.

    python -m benchmarks.smollm2.long_documents --source DATA/qa_squad_dev.parquet --answers answers.jsonl

A document is a run of paragraphs in the order of the source, with a question's paragraph anywhere in it. Each is
answered from memories at every ratio and from the full text, by the same decoder.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Pipeline

from benchmarks.answer_ten_questions.measure import num_shared
from benchmarks.common.questions import questions_by_context
from benchmarks.common.tools import add_output_argument, positive_int, save_and_report, script_parser, tells_errors
from context_compressors.demo import load
from context_compressors.evaluation.bootstrap import mean_statistic, percentile_interval, resampled_scores
from context_compressors.evaluation.metrics import substring_accuracy
from context_compressors.modeling.parts.base_pass import CACHE
from context_compressors.reporting.tables import markdown_table

CHUNKS = (1, 2, 4, 8)
FULL_TEXT = "full text"
QUESTIONS_PER_DOCUMENT = 10
NEW_TOKENS = 24
# Fewer documents have no interval.
LEAST_DOCUMENTS = 4
# Tokens left for the opening of the chat template.
_OPENING = 48


class AnswerLines:
    """JSON lines of a file that a stopped run resumes from; the first has the settings, which must be the same."""

    def __init__(self, path: str | os.PathLike[str], settings: Mapping[str, Any]):
        self._path = Path(path)
        header = {"settings": dict(settings)}
        text = self._path.read_text(encoding="utf-8") if self._path.is_file() else ""
        # A kill leaves an unfinished last line.
        known = [json.loads(line) for line in text.split("\n")[:-1]]
        if known and known[0] != json.loads(json.dumps(header)):
            raise ValueError(f"{path} has answers to {known[0]}, not to {header}: take another file, or delete it")
        self.lines: list[dict[str, Any]] = known[1:]
        self._path.write_text("".join(json.dumps(line) + "\n" for line in known or [header]), encoding="utf-8")

    def add(self, line: Mapping[str, Any]) -> None:
        """Append an answer."""
        self.lines.append(dict(line))
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def window(lengths: Sequence[int], middle: int, most: int, draw: random.Random) -> range:
    """Return paragraphs around one, drawn from both sides, of at most `most` tokens in all."""
    first, last, total, sides = middle, middle, lengths[middle], [-1, 1]
    while sides:
        side = draw.choice(sides)
        place = first - 1 if side < 0 else last + 1
        if not 0 <= place < len(lengths) or total + lengths[place] > most:
            sides.remove(side)
            continue
        total += lengths[place]
        first, last = min(first, place), max(last, place)
    return range(first, last + 1)


def documents(pipe: Pipeline, source: str, count: int) -> list[tuple[dict[int, str], list[dict[str, Any]]]]:
    """Return the texts of each document by number of chunks, and the questions about its shortest text."""
    rows = questions_by_context(source)
    paragraphs, size = list(rows), pipe.model.config.chunk_size
    lengths = [len(pipe.tokenizer(f"{text}\n\n", add_special_tokens=False).input_ids) for text in paragraphs]
    step, drawn = len(paragraphs) // count, []
    for number in range(count):
        draw = random.Random(number)
        places = {1: window(lengths, number * step + step // 2, size - _OPENING, draw)}
        for chunks in CHUNKS[1:]:
            shorter = places[chunks // 2]
            # The shorter document is one paragraph of the longer one.
            inner = sum(lengths[place] for place in shorter)
            merged = [*lengths[: shorter.start], inner, *lengths[shorter.stop :]]
            outer = window(merged, shorter.start, size * chunks - _OPENING, draw)
            places[chunks] = range(outer.start, outer.stop + len(shorter) - 1)
        asked = [row for place in places[1] for row in rows[paragraphs[place]]]
        asked = draw.sample(asked, min(QUESTIONS_PER_DOCUMENT, len(asked)))
        texts = {chunks: "\n\n".join(paragraphs[place] for place in run) for chunks, run in places.items()}
        drawn.append((texts, asked))
    return drawn


@torch.no_grad()
def full_text_answers(pipe: Pipeline, text: str, questions: Sequence[str]) -> list[str]:
    """Return the answers from a document's own tokens, whose keys and values are computed once."""
    inputs = {"question": list(questions), "messages": None, "context": text, "memory": None, "batch_size": 1}
    (rows,) = pipe.preprocess(inputs, full_text=True)["full_text_ids"]
    prefix = torch.tensor([rows[0][: num_shared(rows)]])
    cache = pipe.model(input_ids=prefix, use_cache=True, logits_to_keep=1)[CACHE]
    answers = []
    for row in rows:
        ids = torch.tensor([row])
        options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": pipe.tokenizer.eos_token_id}
        output = pipe.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), cache=cache, **options)
        answers.append(pipe.tokenizer.decode(output[0, len(row) :], skip_special_tokens=True).strip())
        cache.crop(prefix.shape[1] - cache.get_seq_length())
    return answers


def answers_about(pipe: Pipeline, text: str, questions: Sequence[str]) -> dict[str, list[str]]:
    """Return the answers from memories at each ratio and from the full text."""
    answers = {FULL_TEXT: full_text_answers(pipe, text, questions)}
    for memory in pipe.compress(text, ratio=sorted(pipe.model.config.compression_ratios)):
        rows = pipe(list(questions), memory=memory, batch_size=QUESTIONS_PER_DOCUMENT, max_new_tokens=NEW_TOKENS)
        answers[f"{memory.ratio}x"] = [row["answer"] for row in rows]
    return answers


def result_rows(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the percentage of right answers by length and condition, with 95 % intervals over enough documents."""
    rows = []
    for chunks in sorted({line["chunks"] for line in lines}):
        of_length = [line for line in lines if line["chunks"] == chunks]
        for condition in of_length[0]["answers"]:
            scores, names = [], []
            for line in of_length:
                for answer, right in zip(line["answers"][condition], line["right"], strict=True):
                    scores.append(substring_accuracy([answer], [right]))
                    names.append(str(line["document"]))
            row = {"chunks": chunks, "condition": condition, "questions": len(scores), "documents": len(set(names))}
            row["accuracy"] = sum(scores) / len(scores)
            if row["documents"] >= LEAST_DOCUMENTS:
                resampled = resampled_scores({"accuracy": mean_statistic(scores)}, names, num_resamples=10_000)
                row["interval"] = list(percentile_interval(resampled["accuracy"]))
            rows.append(row)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a line for each number of chunks and a column for each condition."""
    cells: dict[int, list[str]] = {}
    for row in rows:
        counts = [str(row["chunks"]), f"{row['questions']} about {row['documents']}"]
        ends = ", ".join(f"{end:.0f}" for end in row.get("interval", ()))
        cells.setdefault(row["chunks"], counts).append(f"{row['accuracy']:.0f}" + f" [{ends}]" * bool(ends))
    conditions = list(dict.fromkeys(row["condition"] for row in rows))
    return markdown_table(["chunks", "questions", *conditions], list(cells.values()))


def build_parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = script_parser(__doc__)
    name = "checkpoints/smollm2-135m-instruct-mean-pooling"
    parser.add_argument("--model", default=name, metavar="FOLDER", help=f"default: {name}")
    parser.add_argument("--source", required=True, metavar="FILE", help="SQuAD dev as Parquet")
    parser.add_argument("--documents", type=positive_int, default=6, metavar="N", help="default: 6")
    parser.add_argument("--answers", required=True, metavar="FILE", help="where answers go; a stopped run goes on")
    add_output_argument(parser)
    return parser


@tells_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Ask all questions at all lengths; returns the exit status."""
    arguments = build_parser().parse_args(argv)

    name = Path(arguments.model).name
    settings = {"model": name, "source": Path(arguments.source).name, "documents": arguments.documents}
    lines = AnswerLines(arguments.answers, settings)
    answered = {(line["document"], line["chunks"]) for line in lines.lines}
    pipe = load(arguments.model)
    for number, (texts, asked) in enumerate(documents(pipe, arguments.source, arguments.documents)):
        for chunks, text in texts.items():
            if (number, chunks) in answered:
                continue
            answers = answers_about(pipe, text, [row["question"] for row in asked])
            right = [row["answers"] for row in asked]
            lines.add({"document": number, "chunks": chunks, "answers": answers, "right": right})
            print(number, chunks, flush=True)
    results = result_rows(lines.lines)
    save_and_report(__file__, arguments, results, table(results), name="long_documents")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
