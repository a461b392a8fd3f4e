# SPDX-License-Identifier: Apache-2.0
"""Seconds to answer ten questions about a page: from its text with a prefix cache, and from a memory.

    python benchmarks/answer_ten_questions.py                                   # the repository's own checkpoint
    python benchmarks/answer_ten_questions.py --checkpoint FOLDER --lengths 512 2048 --ratios 4 16

The page is the demo's pages one after the other, again and again, cut to the length. It is read once and then asked
ten questions, one by one. From the text: the page goes through the decoder once, and every question goes on from its
keys and values. From a memory: the page is compressed once, its slots go through the decoder once, and every question
goes on from their keys and values. Both sides have the same decoder, the same prompts and the same loop, and write the
same number of tokens, so that they differ in what stands for the page and in nothing else.

A page that is too long for the base's positions, with question and answer, is cut to what fits; the table says so.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from benchmark_tools import DTYPES, RESULTS, device_of, positive_int, save_and_report, seconds
from tqdm.auto import tqdm
from transformers import Cache, Pipeline
from transformers.utils import logging

from context_compressors.demo import CHECKPOINT, decoder_ids, load, num_shared, read_pages
from context_compressors.evaluation.report import environment, markdown_table
from context_compressors.modeling.memory.compressed_context import CompressedContext
from context_compressors.modeling.parts.prompting import full_context_ids, question_ids
from context_compressors.precision import fastest_dtype

NUM_QUESTIONS = 10
TEXT = "text"
_FASTEST = "fastest"


class Reader:
    """A decoder that has read what all prompts start with, and answers from there.

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
        """Run what all prompts start with, slots included, through the decoder, and keep its keys and values."""
        ids = self._ids(self.rows[0][: self._num_shared])
        self._cache = self.model(input_ids=ids, **self._inputs).past_key_values
        self._num_places = self._cache.get_seq_length()

    @torch.no_grad()
    def answer(self, index: int, new_tokens: int) -> list[int]:
        """The most likely `new_tokens` ids behind a prompt, one after the other; the cache is then as before."""
        written: list[int] = []
        ids = self._ids(self.rows[index][self._num_shared :])
        for _ in range(new_tokens):
            logits = self.model(input_ids=ids, past_key_values=self._cache, **self._inputs).logits
            ids = logits[:, -1].argmax(dim=-1, keepdim=True)
            written.append(int(ids))
        self._cache.crop(self._num_places - self._cache.get_seq_length())
        return written

    @property
    def num_bytes(self) -> int:
        """Bytes of the keys and values of what all prompts start with."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self._cache.layers)

    def _ids(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor([ids], device=self.model.device)


def page_of(pipe: Pipeline, length: int) -> list[int]:
    """Token ids of a page: the demo's pages one after the other, as often as it takes."""
    ids = decoder_ids(pipe, "\n\n".join(page.text for page in read_pages()))
    return (ids * -(-length // len(ids)))[:length]


def questions_of(count: int) -> list[str]:
    """The first questions of the demo's pages.

    Raises:
        ValueError: there are not so many.
    """
    questions = [question for page in read_pages() for question in page.questions]
    if count > len(questions):
        raise ValueError(f"--questions must be at most {len(questions)}, which the demo's pages have, got {count}")
    return questions[:count]


def fitting(pipe: Pipeline, length: int, questions: Sequence[str], new_tokens: int) -> int:
    """The length, or what the base's positions leave of it beside the longest prompt and the answer.

    Raises:
        ValueError: nothing is left.
    """
    config = pipe.model.config
    around = max(len(full_context_ids(config, pipe.tokenizer, [], question)) for question in questions)
    positions = config.decoder_config.max_position_embeddings
    if positions <= around + new_tokens:
        raise ValueError(f"the base has {positions} positions; prompt and answer alone need {around + new_tokens}")
    return min(length, positions - around - new_tokens)


def measure(pipe: Pipeline, page: Sequence[int], ratios: Sequence[int], arguments: argparse.Namespace) -> list[Any]:
    """Seconds of each step for one page, from the text and at each ratio; medians over the repeats.

    Args:
        pipe: the checkpoint.
        page: its token ids.
        ratios: of the memories.
        arguments: `questions`, `new_tokens` and `repeats`.
    """
    model, config, device = pipe.model, pipe.model.config, pipe.device
    questions = questions_of(arguments.questions)
    with_text = [full_context_ids(config, pipe.tokenizer, page, question) for question in questions]
    without = [question_ids(config, pipe.tokenizer, question) for question in questions]
    context = torch.tensor([page], device=device)
    rows = []
    for ratio in (None, *ratios):
        memory, found = None, []
        for _ in range(arguments.repeats):
            compression = 0.0
            if ratio is not None:
                made: list[CompressedContext] = []
                compression = seconds(
                    lambda ratio=ratio, made=made: made.append(_compress(model, context, ratio)), device
                )
                memory = made[0]
            reader = Reader(model, with_text if memory is None else without, memory)
            reading = seconds(reader.read, device)
            answers = [
                seconds(lambda index=index, reader=reader: reader.answer(index, arguments.new_tokens), device)
                for index in range(len(questions))
            ]
            found.append({"compression": compression, "reading": reading, "answers": answers})
        rows.append(
            {
                "num_tokens": len(page),
                "read_as": TEXT if ratio is None else f"{ratio}x",
                "places": len(page) if memory is None else int(memory.num_slots[0]),
                "kept_bytes": reader.num_bytes if memory is None else memory.nbytes,
                "cache_bytes": reader.num_bytes,
                **_times(found),
                "samples": found,
            }
        )
    return rows


@torch.no_grad()
def _compress(model: Any, context: torch.Tensor, ratio: int) -> CompressedContext:
    return model.compress(context, ratio=ratio)


def _times(found: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Medians over the repeats of what people wait for.

    The first answer waits for compressing and reading, the others do not. All answers from a memory that was kept
    earlier wait for reading alone.
    """

    def middle(time: Any) -> float:
        return median(time(sample) for sample in found)

    return {
        "compression_seconds": middle(lambda sample: sample["compression"]),
        "reading_seconds": middle(lambda sample: sample["reading"]),
        "first_answer_seconds": middle(lambda s: s["compression"] + s["reading"] + s["answers"][0]),
        "further_answer_seconds": middle(lambda s: median(s["answers"][1:] or s["answers"])),
        "total_seconds": middle(lambda s: s["compression"] + s["reading"] + sum(s["answers"])),
        "total_seconds_if_compressed_before": middle(lambda s: s["reading"] + sum(s["answers"])),
    }


def table(rows: Sequence[dict[str, Any]], num_questions: int) -> str:
    """The rows for people."""
    header = ["page, tokens", "read as", "tokens or slots", "compress, s", "read, s", "first answer, s"]
    header += ["each further, s", f"all {num_questions}, s", "if compressed before, s", "kept, MiB", "cache, MiB"]
    names = ["compression", "reading", "first_answer", "further_answer", "total"]
    body = []
    for row in rows:
        asked = row["asked_tokens"]
        length = f"{row['num_tokens']:,}" + (f" (of {asked:,})" if asked != row["num_tokens"] else "")
        times = [f"{row[f'{name}_seconds']:.2f}" for name in names]
        before = f"{row['total_seconds_if_compressed_before']:.2f}"
        if row["read_as"] == TEXT:
            times[0] = before = "-"
        sizes = [f"{row[name] / 2**20:.2f}" for name in ("kept_bytes", "cache_bytes")]
        body.append([length, row["read_as"], f"{row['places']:,}", *times, before, *sizes])
    return markdown_table(header, body)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--checkpoint", default=str(CHECKPOINT), metavar="FOLDER", help=f"default: checkpoints/{CHECKPOINT.name}")
    add("--lengths", nargs="+", type=positive_int, default=[512, 2048, 8192], metavar="N", help="tokens of a page")
    add("--ratios", nargs="+", type=positive_int, default=[4, 16], metavar="R", help="default: 4 16")
    add("--questions", type=positive_int, default=NUM_QUESTIONS, metavar="N", help=f"default: {NUM_QUESTIONS}")
    add("--new-tokens", type=positive_int, default=16, metavar="N", help="tokens of every answer (default: 16)")
    add("--repeats", type=positive_int, default=3, metavar="N", help="measurements of everything (default: 3)")
    add(
        "--dtype",
        choices=(_FASTEST, *DTYPES),
        default=_FASTEST,
        help="of the base's weights; by default bfloat16 or float32, whichever is faster here",
    )
    add("--device", help='such as "cpu" or "cuda" (default: a GPU when there is one)')
    add("--output", metavar="FILE", help="where the JSON goes, and the table beside it (default: benchmarks/results/)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    arguments = build_parser().parse_args(argv)
    logging.set_verbosity_error()
    device = device_of(arguments)
    if arguments.dtype == _FASTEST:
        arguments.dtype = str(fastest_dtype(device)).removeprefix("torch.")
    arguments.output = arguments.output or str(RESULTS / f"answer_ten_questions_{device.type}.json")
    rows: list[dict[str, Any]] = []
    try:
        pipe = load(arguments.checkpoint, getattr(torch, arguments.dtype), device)
        questions = questions_of(arguments.questions)
        asked = [(length, fitting(pipe, length, questions, arguments.new_tokens)) for length in arguments.lengths]
        # What is slow the first time is over before the clock runs.
        once = argparse.Namespace(**{**vars(arguments), "repeats": 1})
        measure(pipe, page_of(pipe, min(length for _, length in asked)), arguments.ratios, once)
        for length, fits in tqdm(asked, desc="pages", unit="page"):
            found = measure(pipe, page_of(pipe, fits), arguments.ratios, arguments)
            rows += [{"asked_tokens": length, **row} for row in found]
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    arguments.checkpoint = Path(arguments.checkpoint).name
    text = table(rows, arguments.questions)
    save_and_report("answer_ten_questions", arguments, rows, text)
    Path(arguments.output).with_suffix(".md").write_text(f"{_heading(arguments)}\n\n{text}\n", encoding="utf-8")
    return 0


def _heading(arguments: argparse.Namespace) -> str:
    facts = environment()
    place = ", ".join(facts["gpus"]) if device_of(arguments).type == "cuda" else facts["cpu"]
    return (
        f"# {arguments.questions} questions about a page\n\n"
        f"`{arguments.checkpoint}` in {arguments.dtype} on {place}, {facts['torch_threads']} threads, torch "
        f"{facts['versions']['torch']}; answers of {arguments.new_tokens} tokens, medians of {arguments.repeats} "
        "measurements. Reading is the first pass of the page's tokens or slots through the decoder; further answers "
        "go on from its keys and values (cache). Kept is what has to be stored to ask again later."
    )


if __name__ == "__main__":
    raise SystemExit(main())
