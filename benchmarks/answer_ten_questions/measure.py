# SPDX-License-Identifier: Apache-2.0
"""Seconds to answer ten questions about a page, from text with a prefix cache and from a memory.

    python -m benchmarks.answer_ten_questions.measure

The page is the demo's pages one after the other, again and again, cut to the length. It is read once and then asked
ten questions, one by one. From the text: the page goes through the decoder once, and every question goes on from its
keys and values. From a memory: the page is compressed once, its slots go through the decoder once, and every question
goes on from their keys and values. Both sides have the same decoder, the same prompts and the same loop, and write the
same number of tokens, so that they differ in what stands for the page and in nothing else.

Of memories of embeddings the pipeline's further questions are measured, too: with slots that it has kept, and with
slots that it reads again with each question.

A page that is too long for the base's positions, with question and answer, is cut to what fits; the table says so.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import Cache, Pipeline
from transformers.utils import logging

from benchmarks.common.tools import (
    DTYPES,
    add_place_arguments,
    cache_bytes,
    device_of,
    positive_int,
    save_and_report,
    tells_errors,
    timed,
    timed_by_processor,
)
from context_compressors.demo import CHECKPOINT, fastest_dtype, load, read_pages
from context_compressors.modeling.memory.compressed_context import CompressedContext
from context_compressors.modeling.parts.base_pass import CACHE
from context_compressors.modeling.parts.text_ids import decoder_document_ids, question_ids
from context_compressors.reporting.tables import markdown_table

TEXT = "text"
_FASTEST = "fastest"


def num_shared(rows: Sequence[Sequence[int]]) -> int:
    """Return the length of the common prefix of all rows, shorter than the shortest row."""
    differ = (place for place, ids in enumerate(zip(*rows, strict=False)) if len(set(ids)) > 1)
    return min(next(differ, len(rows[0])), *(len(row) - 1 for row in rows))


class Reader:
    """A decoder that has read the common prefix of all prompts.

    Args:
        model: a compressor with its LM head.
        rows: token ids of each prompt; all start alike.
        memory: the slots that stand in the prompts; `None` where they hold the text itself.
    """

    def __init__(self, model: Any, rows: Sequence[Sequence[int]], memory: CompressedContext | None = None):
        self.model, self.rows = model, rows
        self._num_shared = num_shared(rows)
        self._inputs: dict[str, Any] = {"use_cache": True, "logits_to_keep": 1}
        if memory is not None:
            start = self._ids(rows[0])
            offset = model.model.text_position_offset(memory, start, torch.ones_like(start))
            self._inputs |= {"memory": memory, "text_position_offset": offset}
        self._cache: Cache | None = None
        self._num_places = 0

    @torch.no_grad()
    def read(self) -> None:
        """Read the common prefix, including slots, and keep its keys and values."""
        ids = self._ids(self.rows[0][: self._num_shared])
        self._cache = self.model(input_ids=ids, **self._inputs)[CACHE]
        self._num_places = self._cache.get_seq_length()

    @torch.no_grad()
    def answer(self, index: int, new_tokens: int) -> list[int]:
        """Return `new_tokens` greedy ids after a prompt, and restore the cache."""
        written: list[int] = []
        ids = self._ids(self.rows[index][self._num_shared :])
        for _ in range(new_tokens):
            logits = self.model(input_ids=ids, cache=self._cache, **self._inputs).logits
            ids = logits[:, -1].argmax(dim=-1, keepdim=True)
            written.append(int(ids))
        self._cache.crop(self._num_places - self._cache.get_seq_length())
        return written

    @property
    def num_bytes(self) -> int:
        """Bytes of the keys and values of the common prefix."""
        return cache_bytes(self._cache)

    def _ids(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor([ids], device=self.model.device)


def page_of(pipe: Pipeline, length: int, questions: Sequence[str], new_tokens: int) -> list[int]:
    """Token ids of a page: the demo's pages as often as it takes, cut to what fits beside a question and its answer.

    Raises:
        ValueError: nothing fits.
    """
    config, text = pipe.model.config, "\n\n".join(page.text for page in read_pages())
    page = decoder_document_ids(config, pipe.tokenizer, text)
    around = new_tokens + max(
        len(question_ids(config, pipe.tokenizer, question, document_ids=[])) for question in questions
    )
    positions = config.decoder_config.max_position_embeddings
    if positions <= around:
        raise ValueError(f"the base has {positions} positions; prompt and answer alone need {around}")
    length = min(length, positions - around)
    return (page * -(-length // len(page)))[:length]


def questions_of(count: int) -> list[str]:
    """The first questions of the demo's pages.

    Raises:
        ValueError: there are not so many.
    """
    questions = [question for page in read_pages() for question in page.questions]
    if count > len(questions):
        raise ValueError(f"--questions must be at most {len(questions)}, which the demo's pages have, got {count}")
    return questions[:count]


@torch.no_grad()
def measure(
    pipe: Pipeline, page: Sequence[int], questions: Sequence[str], new_tokens: int, ratio: int | None
) -> dict[str, Any]:
    """One row of the result, with the seconds of each step.

    Args:
        pipe: the checkpoint.
        page: its token ids.
        questions: asked one by one.
        new_tokens: of every answer.
        ratio: of the memory; `None` reads the text.
    """
    model, config, device = pipe.model, pipe.model.config, pipe.device
    # By the clock, and of the processor.
    samples: list[dict[str, Any]] = [{}, {}]

    def note(name: str, function: Callable[[], Any], *, is_list: bool = True) -> Any:
        (result, processor), clock = timed(lambda: timed_by_processor(function, device), device)
        for sample, time in zip(samples, (clock, processor), strict=True):
            sample[name] = [*sample.get(name, []), time] if is_list else time
        return result

    memory = None
    if ratio is None:
        prompts = [question_ids(config, pipe.tokenizer, question, document_ids=page) for question in questions]
        samples = [{"compression": 0.0}, {"compression": 0.0}]
    else:
        prompts = [question_ids(config, pipe.tokenizer, question) for question in questions]
        context = torch.tensor([page], device=device)
        memory = note("compression", lambda: model.compress(context, ratio=ratio), is_list=False)
    reader = Reader(model, prompts, memory)
    note("reading", reader.read, is_list=False)
    for index in range(len(questions)):
        note("answers", lambda index=index: reader.answer(index, new_tokens))
    if memory is not None and memory.embeddings is not None:
        length, most = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}, pipe.read_slots.max_bytes
        for name, size in (("kept", most), ("read again", 0)):
            pipe.read_slots.max_bytes = size
            pipe(questions[0], memory=memory, **length)
            for question in questions[1:4]:
                note(name, lambda question=question: pipe(question, memory=memory, **length))
        pipe.read_slots.max_bytes = most
    return {
        "num_tokens": len(page),
        "text_bytes": len(pipe.tokenizer.decode(page).encode()),
        "read_as": TEXT if ratio is None else f"{ratio}x",
        "places": len(page) if memory is None else int(memory.num_slots[0]),
        "kept_bytes": reader.num_bytes if memory is None else memory.nbytes,
        "cache_bytes": reader.num_bytes,
        "samples": samples[:1],
        "processor_samples": samples[1:],
    }


def times(samples: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the median seconds of each column.

    The first answer waits for compressing and reading, the others do not. All answers from a memory that was kept
    earlier wait for reading alone.
    """

    def middle(time: Callable[[dict[str, Any]], float]) -> float:
        return median(time(sample) for sample in samples)

    found = {
        "compress": middle(lambda s: s["compression"]),
        "read": middle(lambda s: s["reading"]),
        "first answer": middle(lambda s: s["compression"] + s["reading"] + s["answers"][0]),
        "each further": middle(lambda s: median(s["answers"][1:] or s["answers"])),
        "all": middle(lambda s: s["compression"] + s["reading"] + sum(s["answers"])),
        "all, if compressed before": middle(lambda s: s["reading"] + sum(s["answers"])),
    }
    for name in ("kept", "read again"):
        if name in samples[0]:
            found[f"pipeline, {name}"] = middle(lambda s, name=name: median(s[name]))
    return found


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a table: times in seconds by the clock and of the processor, sizes in kB."""
    names = max((times(row["samples"]) for row in rows), key=len)
    header = ["page, tokens", "read as", "tokens or slots", *names, "stored, kB", "cache, kB", "text, kB"]
    body = []
    for row in rows:
        asked = row["asked_tokens"]
        length = f"{row['num_tokens']:,}" + (f" (of {asked:,})" if asked != row["num_tokens"] else "")
        clock, processor = times(row["samples"]), times(row["processor_samples"])
        waits = {name: f"{time:.2f} ({processor[name]:.2f})" for name, time in clock.items()}
        if row["read_as"] == TEXT:
            waits["compress"] = waits["all, if compressed before"] = "-"
        sizes = [f"{row[name] / 1000:,.1f}" for name in ("kept_bytes", "cache_bytes", "text_bytes")]
        body.append([length, row["read_as"], f"{row['places']:,}", *(waits.get(name, "-") for name in names), *sizes])
    return "Seconds by the clock, and of the processor in brackets.\n\n" + markdown_table(header, body)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--checkpoint", default=str(CHECKPOINT), metavar="FOLDER", help=f"default: checkpoints/{CHECKPOINT.name}")
    add("--lengths", nargs="+", type=positive_int, default=[512, 2048, 8192], metavar="N", help="tokens of a page")
    add("--ratios", nargs="+", type=positive_int, default=[4, 16], metavar="R", help="default: 4 16")
    add("--questions", type=positive_int, default=10, metavar="N", help="default: 10")
    add("--new-tokens", type=positive_int, default=16, metavar="N", help="tokens of every answer (default: 16)")
    add("--repeats", type=positive_int, default=3, metavar="N", help="measurements of everything (default: 3)")
    dtypes = (_FASTEST, *DTYPES)
    add("--dtype", choices=dtypes, default=_FASTEST, help="of the base (default: what is faster here)")
    add_place_arguments(parser)
    return parser


@tells_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    arguments = build_parser().parse_args(argv)
    logging.set_verbosity_error()
    device = device_of(arguments)
    if arguments.dtype == _FASTEST:
        arguments.dtype = str(fastest_dtype(device)).removeprefix("torch.")
    rows: list[dict[str, Any]] = []
    questions, new_tokens = questions_of(arguments.questions), arguments.new_tokens
    pipe = load(arguments.checkpoint, getattr(torch, arguments.dtype), device)
    pages = {length: page_of(pipe, length, questions, new_tokens) for length in arguments.lengths}
    ways = (None, *arguments.ratios)
    # What is slow the first time is over before the clock runs.
    for ratio in ways:
        measure(pipe, min(pages.values(), key=len), questions, new_tokens, ratio)
    for length, page in tqdm(pages.items(), desc="pages", unit="page"):
        # All ways in turns: what else the machine does hits all.
        found = [[measure(pipe, page, questions, new_tokens, way) for way in ways] for _ in range(arguments.repeats)]
        for of_way in zip(*found, strict=True):
            found_samples = {
                name: [sample for one in of_way for sample in one[name]] for name in ("samples", "processor_samples")
            }
            rows.append({"asked_tokens": length, **of_way[-1], **found_samples})
    arguments.checkpoint = Path(arguments.checkpoint).name
    save_and_report(__file__, arguments, rows, table(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
