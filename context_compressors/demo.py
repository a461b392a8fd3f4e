# SPDX-License-Identifier: Apache-2.0
"""The demo (`make demo`): a model answers questions about five pages from their text and from memories of it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import yaml
from datasets import disable_progress_bars
from torch.nn.functional import linear
from torch.utils.benchmark import Timer
from tqdm.auto import tqdm
from transformers import Pipeline, pipeline
from transformers.utils import logging

from .evaluation.metrics import holds_answer
from .modeling.checkpoint.pretrained_bases import pretrained_base
from .reporting.tables import markdown_table

CHECKPOINT = Path(__file__).resolve().parent.parent / "checkpoints" / "smollm2-135m-instruct-ranked-key-values"
PAGES = Path(__file__).resolve().parent / "demo_documents"
NEW_TOKENS = 16


@dataclass(frozen=True)
class Page:
    """A page of English, what is asked about it, and for each question the answers that count as right."""

    name: str
    title: str
    text: str
    questions: tuple[str, ...]
    answers: tuple[tuple[str, ...], ...]

    @property
    def example(self) -> dict[str, Any]:
        """Return the page as `create_app` takes it."""
        pairs = zip(self.questions, self.answers, strict=True)
        questions = [{"question": question, "answers": answers} for question, answers in pairs]
        return {"title": self.title, "text": self.text, "questions": questions}


@dataclass(frozen=True)
class Reading:
    """A page read as "full text" or at a ratio such as "4x", and asked: tokens or slots, bytes, and mean seconds."""

    name: str
    num_places: int
    num_bytes: int
    seconds: float
    answers: list[str]
    right: list[bool]


def read_pages(folder: Path = PAGES) -> list[Page]:
    """Return the pages of a folder, the shortest first: Markdown files that start with title and questions in YAML."""
    pages = []
    for path in sorted(folder.glob("*.md")):
        _, head, text = path.read_text(encoding="utf-8").split("---\n", 2)
        fields = yaml.safe_load(head)
        # Lines are broken for whoever reads the file; a page is paragraphs.
        paragraphs = [" ".join(paragraph.split()) for paragraph in text.strip().split("\n\n")]
        questions = tuple(entry["question"] for entry in fields["questions"])
        answers = tuple(tuple(entry["answers"]) for entry in fields["questions"])
        pages.append(Page(path.stem, fields["title"], "\n\n".join(paragraphs), questions, answers))
    return sorted(pages, key=lambda page: len(page.text))


def fetch_base(checkpoint: str | os.PathLike) -> None:
    """Fetch the base of a light checkpoint, if it is not on this machine."""
    file = Path(checkpoint).expanduser() / "config.json"
    if not file.is_file():
        raise ValueError(f"there is no checkpoint in {file.parent}: run the demo in a clone of the repository")
    config = json.loads(file.read_text(encoding="utf-8"))
    for base in (config.get("external_weights") or {}).values():
        if base["repo_id"] is not None:
            pretrained_base(base["repo_id"])


def fastest_dtype(device: torch.device | str) -> torch.dtype:
    """Return bfloat16 where matrix products are faster in it than in float32, and else float32."""
    times = {dtype: _seconds(dtype, torch.device(device)) for dtype in (torch.float32, torch.bfloat16)}
    return min(times, key=times.__getitem__)


def _seconds(dtype: torch.dtype, device: torch.device) -> float:
    """Return the seconds of a matrix product of a small language model's shape: tokens, widths."""
    left, right = (torch.ones(size, 576, dtype=dtype, device=device) for size in (256, 1536))
    timer = Timer("linear(left, right)", globals={"linear": linear, "left": left, "right": right})
    return timer.timeit(8).median


def load(
    checkpoint: str | os.PathLike, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> Pipeline:
    """Load a checkpoint with the code in its own folder; its base is fetched first if need be."""
    fetch_base(checkpoint)
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return pipeline(
        "context-compression-qa",
        model=str(Path(checkpoint).expanduser()),
        # The tokenizer is a plain one, but its loader looks at the configuration, too, which is remote code.
        trust_remote_code=True,
        dtype=dtype or fastest_dtype(device),
        device=device,
    )


def read_page(pipe: Pipeline, page: Page) -> list[Reading]:
    """Ask a page's questions from its full text, and from a memory at every ratio of the checkpoint."""
    memories = pipe.compress(page.text, ratio=sorted(pipe.model.config.compression_ratios))
    full_text = {"context": page.text, "full_text": True}
    ways: list[Any] = [("full text", len(pipe.document_ids(page.text)[0]), len(page.text.encode()), full_text)]
    ways += [(f"{memory.ratio}x", int(memory.num_slots[0]), memory.nbytes, {"memory": memory}) for memory in memories]
    readings = []
    for name, num_places, num_bytes, source in ways:
        start = time.perf_counter()
        answers = [
            pipe(question, **source, max_new_tokens=NEW_TOKENS)["answer"]
            for question in tqdm(page.questions, desc=f"{page.name}, {name}", unit="question", leave=False)
        ]
        seconds = (time.perf_counter() - start) / len(answers)
        right = [holds_answer(text, accepted) for text, accepted in zip(answers, page.answers, strict=True)]
        readings.append(Reading(name, num_places, num_bytes, seconds, answers, right))
    return readings


def page_lines(page: Page, readings: Sequence[Reading]) -> str:
    """Return a page's questions with all answers below each other, `+` before those that are right."""
    width, lines = max(len(reading.name) for reading in readings), []
    for index, question in enumerate(page.questions):
        lines.append(f"{question}  (right: {page.answers[index][0]})")
        for reading in readings:
            mark, answer = "+" if reading.right[index] else "-", " ".join(reading.answers[index].split())
            lines.append(f"  {reading.name:<{width}}  {mark} {answer:.90}")
    return "\n".join(lines)


def summary_table(readings: Sequence[Sequence[Reading]]) -> str:
    """Return the table of all pages: answers right, and the mean of what a page costs."""
    rows = []
    for column in zip(*readings, strict=True):
        right = [mark for reading in column for mark in reading.right]
        share = f"{sum(right)} of {len(right)} ({100 * fmean(right):.0f} %)"
        names = ("num_places", "num_bytes", "seconds")
        places, sizes, seconds = (fmean(vars(reading)[name] for reading in column) for name in names)
        rows.append([column[0].name, share, f"{places:.0f}", f"{sizes / 1000:,.1f}", f"{seconds:.2f}"])
    header = ["read as", "answers right", "tokens or slots", "kB kept", "seconds for an answer"]
    return markdown_table(header, rows)


def run(checkpoint: Path = CHECKPOINT, num_pages: int | None = None) -> None:
    """Load a checkpoint, ask about each page, and print the answers and what they cost."""
    print(f"load {checkpoint.name}", flush=True)
    # With its progress bar; those of everything that is quick would only hide what the demo shows.
    fetch_base(checkpoint)
    logging.disable_progress_bar()
    disable_progress_bars()
    pipe = load(checkpoint)
    model, pages = pipe.model, read_pages()[:num_pages]
    ratios = ", ".join(map(str, sorted(model.config.compression_ratios)))
    dtype = str(model.dtype).removeprefix("torch.")
    print(f"{model.num_parameters() / 1e6:.1f}M parameters in {dtype} on {pipe.device}; ratios {ratios}")
    print("\n+ right, - not right: an answer is right if it holds the expected words")
    readings, start, num_left = [], time.perf_counter(), sum(len(page.text) for page in pages)
    for page in pages:
        num_left -= len(page.text)
        readings.append(read_page(pipe, page))
        print(f"\n{page.title} ({len(page.text.split())} words)\n")
        print(page_lines(page, readings[-1]), flush=True)
        if page is pages[0] and num_left:
            seconds = (time.perf_counter() - start) * num_left / len(page.text)
            print(f"\nthe other pages take about {seconds:.0f} s; --pages N reads fewer", flush=True)
    print("\nall pages (seconds and sizes: mean of a page)\n")
    print(summary_table(readings))
