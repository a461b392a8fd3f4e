# SPDX-License-Identifier: Apache-2.0
"""`context-compressors evaluate-needles MODEL --text SOURCE ...`."""

from __future__ import annotations

import argparse
import hashlib
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .command import (
    ALLOW_TRAINED_DOCUMENTS,
    CHOSEN_BY,
    KEEP_ANSWERS,
    LOADING,
    MERGE_ADAPTERS,
    OVERWRITE,
    PROMPT_FORMAT,
    PROMPTS,
    TEACHER,
    TEACHER_BASE,
    argument,
    check_outputs,
    command,
    positive_int,
    positive_int_or_auto,
)
from .records import add_model_records, records_of_reports
from .resuming import earlier_results, progress_path, say_if_done, writer

if TYPE_CHECKING:
    from ..evaluation.samples import EvaluationDataset

_EXAMPLES = """
# 102 facts in running text, at 256 to 4,096 tokens and every ratio of the checkpoint:
context-compressors evaluate-needles my-compressor --text books.parquet --output needles.json --plot needles.png

# Two lengths and two ratios, beside a reader of the full text:
context-compressors evaluate-needles my-compressor --text books.parquet --lengths 512 1024 --ratios 4 8 \\
    --teacher reader-lora --teacher-base my-base

# Two compressors, needle by needle:
context-compressors evaluate-needles ours --text books.parquet --output ours.json --keep-answers ours.jsonl
context-compressors evaluate-needles theirs --text books.parquet --output theirs.json --keep-answers theirs.jsonl
context-compressors compare ours.jsonl theirs.jsonl --metric substring_accuracy
"""


@command(
    "evaluate-needles",
    "Ask for one fact in running text: without context, with the full text, and at every ratio, by length of the text "
    "and kind of fact.",
    argument("model", help="Hub id or folder of the compressor or plain language model"),
    argument(
        "--text",
        required=True,
        metavar="SOURCE",
        help="running text: FILE (.parquet, .jsonl) or HUB_NAME[:CONFIG][@SPLIT], with a column `text` or `context`",
    ),
    argument("--lengths", nargs="+", type=positive_int, metavar="N", help="tokens (default: 256 512 1024 2048 4096)"),
    argument(
        "--needles", type=positive_int, metavar="N", help="facts of each length, a third of each kind (default: 102)"
    ),
    argument(
        "--ratios", nargs="+", type=positive_int_or_auto, metavar="R", help="ratios (default: the checkpoint's own)"
    ),
    TEACHER,
    TEACHER_BASE,
    MERGE_ADAPTERS,
    ALLOW_TRAINED_DOCUMENTS,
    CHOSEN_BY,
    argument("--batch-size", type=positive_int, default=8, metavar="B", help="contexts per batch (default: 8)"),
    argument("--max-new-tokens", type=positive_int, default=32, metavar="N", help="of an answer (default: 32)"),
    PROMPT_FORMAT,
    PROMPTS,
    argument("--output", metavar="FILE", help="write the grid as JSON, anew after each length"),
    argument(
        "--resume",
        action="store_true",
        help="go on where a command with this --output stopped, inside a length, too",
    ),
    KEEP_ANSWERS,
    OVERWRITE,
    argument("--plot", metavar="PNG", help="draw heat maps"),
    argument("--seed", type=int, default=0, help="draws facts, texts and places (default: 0)"),
    *LOADING,
    examples=_EXAMPLES,
)
def main(arguments: argparse.Namespace) -> None:
    """Run `context-compressors evaluate-needles`.

    Raises:
        ValueError, OSError, ImportError: see `evaluate_needles`, `load_model` and `load_datasets`.
    """

    from ..evaluation.data_sets import load_datasets
    from ..evaluation.evaluate import can_compress, model_label
    from ..evaluation.needles import LENGTHS, NUM_NEEDLES, NeedleGrid, evaluate_needles
    from ..evaluation.plots import plot_needles
    from ..evaluation.settings import WRITTEN_TASKS, EvaluationSettings
    from ..modeling.checkpoint.pretrained_bases import tokenizer_from_place
    from .loading import load_model, merge_adapters

    settings = EvaluationSettings(
        ratios=arguments.ratios and tuple(arguments.ratios),
        batch_size=arguments.batch_size,
        seed=arguments.seed,
        max_new_tokens=dict.fromkeys(WRITTEN_TASKS, arguments.max_new_tokens),
        prompts=arguments.prompts,
        prompt_format=arguments.prompt_format,
        allow_trained_documents=arguments.allow_trained_documents,
    )
    earlier, records = earlier_results(arguments, NeedleGrid.load), records_of_reports(arguments)
    check_outputs((arguments.plot,), arguments.overwrite or arguments.resume)
    progress_file = progress_path(arguments)
    tokenizer = tokenizer_from_place(arguments.model, trust_remote_code=arguments.trust_remote_code)
    data_sets = load_datasets([arguments.text], tokenizer, seed=arguments.seed)
    rows = [row for data in data_sets for row in _drawn(data, arguments.seed)]
    if any(row.get("source_texts") for row in rows):
        raise ValueError("--text takes whole texts, and rows name source_texts that they are cut from: give those")
    how = {name: getattr(arguments, name) for name in ("dtype", "device", "trust_remote_code")}
    texts = [row.get("text") or row.get("context") or "" for row in rows]
    model = load_model(arguments.model, base_model=arguments.base_model, **how)
    if arguments.merge_adapters:
        merge_adapters(model)
    add_model_records(records, arguments, on_hub=can_compress(model))
    teacher = None
    if arguments.teacher is not None:
        teacher = load_model(arguments.teacher, base_model=arguments.teacher_base, **how)
    write = writer(arguments, [] if earlier is None else earlier.as_report().rows)
    grid = evaluate_needles(
        model,
        tokenizer,
        texts,
        lengths=arguments.lengths or LENGTHS,
        num_needles=arguments.needles or NUM_NEEDLES,
        settings=settings,
        teacher=teacher,
        model_name=model_label(arguments.model),
        notes={
            "teacher": arguments.teacher and model_label(arguments.teacher),
            "sources": {data.name: data.source for data in data_sets},
            "texts": hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16],
        },
        records=records,
        resume_from=earlier,
        progress_file=progress_file,
        on_result=write,
    )
    write(grid)
    written = [path for path in (arguments.output, arguments.keep_answers) if path]
    if arguments.plot:
        written.append(plot_needles(grid, arguments.plot))
    print(grid.to_markdown())
    say_if_done(arguments, not grid.answers)
    for path in written:
        print(f"wrote {path}")


def _drawn(data: EvaluationDataset, seed: int) -> list[Mapping[str, Any]]:
    """The rows of a source, or as many as it asks for, in their order."""
    rows = list(data.examples)
    if data.max_samples is None or data.max_samples >= len(rows):
        return rows
    kept = random.Random(f"{seed}/{data.name}").sample(range(len(rows)), data.max_samples)
    return [rows[index] for index in sorted(kept)]
