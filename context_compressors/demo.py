# SPDX-License-Identifier: Apache-2.0
"""The demo: a language model answers questions about five pages from their text and from memories of it.

    make demo
    context-compressors demo --checkpoint FOLDER --output outputs/demo --steps 20

Everything goes the way that a user of a checkpoint goes: the pipeline with remote code, and TRL's own trainer.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import textwrap
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import yaml
from datasets import disable_progress_bars
from tqdm.auto import tqdm
from transformers import Pipeline, pipeline
from transformers.utils import logging
from trl import SFTConfig, SFTTrainer

import context_compressors

from .data.prompts import default_prompts
from .data.task_tokens import text_starts
from .evaluation.metrics import normalize_answer
from .modeling.parts.cache_name import CACHE
from .modeling.parts.prompting import decoder_document_ids, full_context_ids
from .reporting.environment import environment
from .reporting.tables import markdown_table
from .training.fields import DataArguments
from .training.objectives.compression_collator import CompressionCollator
from .training.objectives.compression_dataset import CompressionDataset

CHECKPOINT = Path(__file__).resolve().parent.parent / "checkpoints" / "smollm2-135m-instruct-ranked-key-values"
PAGES = Path(__file__).resolve().parent / "demo_documents"
FULL_TEXT = "full text"
NEW_TOKENS = 16
_BATCH_SIZE = 1
_QUESTIONS_AT_ONCE = 4
_SEED = 0
_WIDTHS = (100, 160)
_FIRST_WIDTH = 26
_LINES = 4
# Tokens by width by feed-forward width of a small language model.
_PRODUCT_SHAPE = (256, 576, 1536)


@dataclass(frozen=True)
class Page:
    """A page of English, and what is asked about it.

    Args:
        name: its file's name.
        title: what it is.
        text: the whole text.
        questions: what is asked.
        answers: for each question the answers that count as right; the first one stands in the text.
    """

    name: str
    title: str
    text: str
    questions: tuple[str, ...]
    answers: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Reading:
    """A page read in one way, and asked.

    Args:
        name: "full text", or a ratio such as "4x".
        num_places: tokens or slots that stand for the page in the language model's context.
        num_bytes: what has to be kept of the page between questions: its tokens' keys and values, or its slots.
        read_seconds: time to read the page once.
        answer_seconds: mean time of an answer from what is kept.
        answers: one for each question.
        right: whether each holds an answer that counts as right.
    """

    name: str
    num_places: int
    num_bytes: int
    read_seconds: float
    answer_seconds: float
    answers: list[str]
    right: list[bool]


def read_pages(folder: Path = PAGES) -> list[Page]:
    """The pages of a folder, the shortest first: Markdown files that start with their title and questions in YAML."""
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


def is_right(answer: str, accepted: Sequence[str]) -> bool:
    """Whether an answer holds one of the accepted ones as whole words, both in SQuAD's normal form."""
    given = f" {normalize_answer(answer)} "
    return any(f" {normalize_answer(text)} " in given for text in accepted)


def fetch_base(checkpoint: str | os.PathLike) -> None:
    """Fetch the base of a light checkpoint, if it is not on this machine.

    Raises:
        ValueError: there is no checkpoint, or it answers from no memories.
        OSError: its base cannot be had.
    """
    folder = Path(checkpoint).expanduser()
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"there is no checkpoint in {folder}: run the demo in a clone of the repository, which has one in "
            f"checkpoints/{CHECKPOINT.name}, or name a folder with --checkpoint"
        )
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if "compression_ratios" not in config or config.get("is_encoder_decoder"):
        kind = (config.get("architectures") or [config.get("model_type", "something else")])[0]
        raise ValueError(f"{folder} holds a {kind}; the demo runs context compressors on decoder-only language models")
    for base in (config.get("external_weights") or {}).values():
        if base["repo_id"] is not None:
            context_compressors.pretrained_base(base["repo_id"])


def fastest_dtype(device: torch.device | str) -> torch.dtype:
    """bfloat16 where matrix products are faster in it than in float32, else float32.

    Processors with instructions for bfloat16 take half as long or less; on all others it takes several times as long.

    Args:
        device: where the model runs; it is measured there, in some milliseconds.
    """
    times = {dtype: _seconds(dtype, torch.device(device)) for dtype in (torch.float32, torch.bfloat16)}
    return min(times, key=times.__getitem__)


def _seconds(dtype: torch.dtype, device: torch.device) -> float:
    """Seconds of a matrix product, the least of several, since other programs only add to it."""
    rows, inner, columns = _PRODUCT_SHAPE
    left = torch.ones(rows, inner, dtype=dtype, device=device)
    right = torch.ones(columns, inner, dtype=dtype, device=device)
    times = []
    for _ in range(8):
        start = time.perf_counter()
        torch.nn.functional.linear(left, right)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times)


def load(
    checkpoint: str | os.PathLike, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> Pipeline:
    """Load a checkpoint with the code in its own folder; its base is fetched first if need be.

    Args:
        checkpoint: its folder.
        dtype: the type that the base computes in; the device's fastest when `None`.
        device: where it runs; a GPU when `None` and there is one.

    Raises:
        ValueError, OSError: as `fetch_base`.
    """
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


def num_shared(rows: Sequence[Sequence[int]]) -> int:
    """How many token ids all rows start with, less than the shortest row has: something has to be left to read."""
    differ = (place for place, ids in enumerate(zip(*rows, strict=False)) if len(set(ids)) > 1)
    return min(next(differ, len(rows[0])), *(len(row) - 1 for row in rows))


@torch.no_grad()
def read_text(pipe: Pipeline, page: Page) -> Reading:
    """Ask a page's questions of the decoder that has the whole text, which it reads once."""
    model, tokenizer = pipe.model, pipe.tokenizer
    document = decoder_document_ids(model.config, tokenizer, page.text)
    rows = [full_context_ids(model.config, tokenizer, document, question) for question in page.questions]
    shared = num_shared(rows)
    start = time.perf_counter()
    cache = model(input_ids=_tensor(pipe, rows[0][:shared]), use_cache=True, logits_to_keep=1)[CACHE]
    read_seconds = time.perf_counter() - start
    num_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)

    def answer(index: int) -> str:
        ids = _tensor(pipe, rows[index])
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            cache=caches[index],
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=tokenizer.eos_token_id,
        )
        return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True).strip()

    # An answer is written into the cache that it is given.
    caches = [copy.deepcopy(cache) for _ in rows]
    return _asked(page, FULL_TEXT, len(document), num_bytes, read_seconds, answer)


def read_slots(pipe: Pipeline, page: Page) -> list[Reading]:
    """Ask a page's questions at every ratio of the checkpoint; one pass of the encoder gives all memories."""
    start = time.perf_counter()
    memories = pipe.compress(page.text, ratio=sorted(pipe.model.config.compression_ratios))
    read_seconds = time.perf_counter() - start
    readings = []
    for memory in memories:

        def answer(index: int, memory: Any = memory) -> str:
            return pipe(page.questions[index], memory=memory, max_new_tokens=NEW_TOKENS)["answer"]

        name, num_slots = f"{memory.ratio}x", int(memory.num_slots[0])
        readings.append(_asked(page, name, num_slots, memory.nbytes, read_seconds, answer))
    return readings


def _tensor(pipe: Pipeline, ids: Sequence[int]) -> torch.Tensor:
    return torch.tensor([ids], device=pipe.device)


def _asked(page: Page, name: str, num_places: int, num_bytes: int, read_seconds: float, answer: Any) -> Reading:
    """The answers to a page's questions, one after the other."""
    start = time.perf_counter()
    places = tqdm(range(len(page.questions)), desc=f"{page.name}, {name}", unit="question", leave=False)
    answers = [answer(index) for index in places]
    answer_seconds = (time.perf_counter() - start) / len(answers)
    right = [is_right(text, accepted) for text, accepted in zip(answers, page.answers, strict=True)]
    return Reading(name, num_places, num_bytes, read_seconds, answer_seconds, answers, right)


def page_table(page: Page, readings: Sequence[Reading]) -> str:
    """A page's questions with all answers side by side, `+` before those that are right, and what each way costs."""
    rows = [["question", "right answer", *(reading.name for reading in readings)], []]
    for index, question in enumerate(page.questions):
        answers = [f"{'+' if reading.right[index] else '-'} {reading.answers[index]}" for reading in readings]
        rows.append([question, page.answers[index][0], *answers])
    rows += [[], *_costs(readings)]
    return _side_by_side(rows)


def _costs(readings: Sequence[Reading]) -> list[list[str]]:
    return [
        ["tokens or slots", "", *(str(reading.num_places) for reading in readings)],
        ["bytes kept", "", *(_bytes(reading.num_bytes) for reading in readings)],
        ["seconds to read it once", "", *(f"{reading.read_seconds:.2f}" for reading in readings)],
        ["seconds for an answer", "", *(f"{reading.answer_seconds:.2f}" for reading in readings)],
    ]


def _bytes(count: float) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"


def _side_by_side(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as the terminal has room for, with cells of several lines; an empty row is a rule."""
    least, most = _WIDTHS
    total = min(max(shutil.get_terminal_size((120, 40)).columns, least), most) - 2
    first = max(_FIRST_WIDTH, total // 5)
    widths = [first, *[(total - first) // (len(rows[0]) - 1)] * (len(rows[0]) - 1)]
    lines = []
    for row in rows:
        if not row:
            lines.append("-" * (sum(widths) - 2))
            continue
        cells = [_wrapped(cell, width - 2) for cell, width in zip(row, widths, strict=True)]
        for place in range(max(map(len, cells))):
            texts = [cell[place] if place < len(cell) else "" for cell in cells]
            line = "".join(text.ljust(width) for text, width in zip(texts, widths, strict=True))
            lines.append(line.rstrip())
    return textwrap.indent("\n".join(lines), "  ")


def _wrapped(text: str, width: int) -> list[str]:
    text = " ".join(text.split())
    indent = "  " if text[:2] in ("+ ", "- ") else ""
    return textwrap.wrap(text, width, subsequent_indent=indent, max_lines=_LINES, placeholder=" ...")


def summary_table(readings: Sequence[Sequence[Reading]]) -> str:
    """All pages together: answers right, and the mean of what a page costs.

    Args:
        readings: for each page its readings, in one order.
    """
    rows = []
    for column in zip(*readings, strict=True):
        right = [mark for reading in column for mark in reading.right]
        rows.append(
            [
                column[0].name,
                f"{sum(right)} of {len(right)} ({100 * sum(right) / len(right):.0f} %)",
                f"{fmean(reading.num_places for reading in column):.0f}",
                _bytes(fmean(reading.num_bytes for reading in column)),
                f"{fmean(reading.read_seconds for reading in column):.2f}",
                f"{fmean(reading.answer_seconds for reading in column):.2f}",
            ]
        )
    header = ["read as", "answers right", "tokens or slots", "bytes kept", "seconds to read", "seconds for an answer"]
    return markdown_table(header, rows)


def fine_tune(pipe: Pipeline, pages: Sequence[Page], steps: int, output: Path) -> None:
    """Train for some steps with TRL's own trainer: the model, tokenized examples, and this project's collator."""
    questions = output / "questions.jsonl"
    rows = [
        {"context": page.text, "question": question, "answers": list(accepted)}
        for page in pages
        for question, accepted in zip(page.questions, page.answers, strict=True)
    ]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    model, tokenizer, config = pipe.model, pipe.tokenizer, pipe.model.config
    data = DataArguments(
        sources=[{"path": str(questions), "tasks": ["question_answering"]}],
        # No page is cut.
        max_context_tokens=max(len(tokenizer(page.text).input_ids) for page in pages),
        max_target_tokens=NEW_TOKENS,
        questions_per_example=_QUESTIONS_AT_ONCE,
        canonical_prompts=True,
        first_answer=True,
        prompts=default_prompts(config),  # type: ignore[arg-type]  # those of a checkpoint are no file
        prompt_format=config.prompt_format,
        context_prefix=config.context_prefix,
    )
    examples = CompressionDataset(data, tokenizer, steps * _BATCH_SIZE, seed=_SEED)
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=str(output / "trainer"),
            max_steps=steps,
            per_device_train_batch_size=_BATCH_SIZE,
            learning_rate=2e-4,
            logging_steps=max(1, steps // 4),
            save_strategy="no",
            report_to="none",
            disable_tqdm=False,
            bf16=False,
            gradient_checkpointing=False,
            dataloader_pin_memory=torch.cuda.is_available(),
            dataset_kwargs={"skip_prepare_dataset": True},
            remove_unused_columns=False,
            seed=_SEED,
        ),
        train_dataset=examples.as_dataset(),
        data_collator=CompressionCollator.from_tokenizer(
            tokenizer, ratios=list(config.compression_ratios), **text_starts(config, tokenizer)
        ),
        processing_class=tokenizer,
    )
    trainer.train()
    model.eval()


def save_and_ask(pipe: Pipeline, folder: Path, page: Page) -> None:
    """Save what differs from the base, load it again, and ask both the same."""
    pipe.save_pretrained(folder)
    size = sum(path.stat().st_size for path in folder.iterdir())
    base = pipe.model.config.base_model_name_or_path if pipe.model.config.external_weights else None
    print(f"   {_bytes(size)}" + (f", without the weights of {base}" if base else ", with its base's weights"))
    again = load(folder)
    question = page.questions[0]
    print(f"\n   {page.title}: {question}  (right: {page.answers[0][0]})")
    for name, asked in (("as it was saved", pipe), ("loaded again", again)):
        answer = asked(question, context=page.text, max_new_tokens=NEW_TOKENS)["answer"]
        print(f"   {name + ':':<17}{answer}")


def run(checkpoint: Path, output: Path, steps: int, num_pages: int | None = None) -> None:
    """All steps of the demo, in order.

    Args:
        checkpoint: folder of the compressor.
        output: folder of the results.
        steps: of the fine-tuning.
        num_pages: only the shortest pages, so many; all if not given.
    """
    print(f"1. load {checkpoint.name}", flush=True)
    # With its progress bar; those of everything that is quick would only hide what the demo shows.
    fetch_base(checkpoint)
    logging.disable_progress_bar()
    disable_progress_bars()
    pipe = load(checkpoint)
    output.mkdir(parents=True, exist_ok=True)
    model, pages = pipe.model, read_pages()[:num_pages]
    ratios = ", ".join(map(str, sorted(model.config.compression_ratios)))
    dtype = str(model.dtype).removeprefix("torch.")
    print(f"   {model.num_parameters() / 1e6:.1f}M parameters in {dtype} on {pipe.device}; ratios {ratios}")
    print("\n2. ask about pages: from the full text, and from one slot for every 2, 4, ... of its tokens")
    print("   + right, - not right: an answer is right if it holds the expected words")
    readings, start, num_left = [], time.perf_counter(), sum(len(page.text) for page in pages)
    for page in pages:
        num_left -= len(page.text)
        readings.append([read_text(pipe, page), *read_slots(pipe, page)])
        print(f"\n{page.title} ({len(page.text.split())} words)\n")
        print(page_table(page, readings[-1]), flush=True)
        if page is pages[0] and num_left:
            seconds = (time.perf_counter() - start) * num_left / len(page.text)
            print(f"\n   the other pages take about {seconds:.0f} s; --pages N reads fewer", flush=True)
    results = {
        "environment": environment(),
        "dtype": dtype,
        "pages": [
            {"page": page.name, "questions": page.questions, "readings": [asdict(reading) for reading in found]}
            for page, found in zip(pages, readings, strict=True)
        ],
    }
    (output / "results.json").write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"\n3. fine-tune with trl.SFTTrainer: {steps} steps on these questions\n", flush=True)
    fine_tune(pipe, pages, steps, output)
    folder = output / "model"
    print(f"\n4. save it to {folder}, and load it again")
    save_and_ask(pipe, folder, pages[0])
    print("\n5. all pages, as the checkpoint was loaded (seconds and sizes: mean of a page)\n")
    print(summary_table(readings))
    print(f"\nwrote {output / 'results.json'}")
