# SPDX-License-Identifier: Apache-2.0
"""`context-compressors evaluate MODEL --data SOURCE ...`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..configuration.nearest_names import check_choice
from ..data.prompts import TASKS
from ..evaluation.settings import DEFAULT_TASKS, MEMORY_DTYPES, NUM_RESAMPLES, WRITTEN_TASKS, EvaluationSettings
from .command import (
    ALLOW_TRAINED_DOCUMENTS,
    CHOSEN_BY,
    KEEP_ANSWERS,
    LOADING,
    MERGE_ADAPTERS,
    OVERWRITE,
    PROMPT_FORMAT,
    PROMPTS,
    RATIO_SCALE,
    TEACHER,
    TEACHER_BASE,
    argument,
    command,
    positive_int_or_auto,
)
from .loading import check_ratios, merge_adapters
from .records import add_model_records, records_of_reports
from .resuming import earlier_results, progress_path, say_if_done, writer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..evaluation.report import EvaluationReport

_SOURCE = (
    "FILE (.parquet, .jsonl, .txt, .md), HUB_NAME[:CONFIG][@SPLIT], generated, generated:KIND, or a recipe's source "
    "as YAML"
)
_NAMES = "NAME=SOURCE names one, SOURCE#N draws N of its samples, FILE.yaml lists some"
_EXAMPLES = """
# Generated documents and a file, at two ratios, ten samples each:
context-compressors evaluate my-compressor --data generated squad_dev.parquet --ratios 4 8 --max-samples 10

# Two groups of data sets against a fine-tuned teacher, with a result file and pictures:
context-compressors evaluate my-compressor --teacher my-teacher --data squad=rajpurkar/squad@validation \\
    --out-of-domain quail_dev.parquet --tasks question_answering --output results.json --plots plots

# Reconstruction and continuation of plain text, also with BLEU of what the model writes itself:
context-compressors evaluate my-compressor --data books.jsonl --tasks reconstruction continuation \\
    --context-tokens 256 --reconstruction-bleu

# Restoration as GMSA measures it: the original context beside the slots, at three lengths:
context-compressors evaluate my-compressor --data books.jsonl --tasks reconstruction --reconstruction-bleu \\
    --restoration-lengths 128 256 512 --bert-score-model scorers/roberta-large --bert-score-layer 17

# 1,000 questions of one set and 300 of another, beside a reader with an adapter of PEFT that reads the whole text,
# its beginning, or what BM25 picks; the report grows while it runs, and a second start goes on with it:
context-compressors evaluate my-compressor --data squad=squad_dev.parquet#1000 --out-of-domain nq_test.parquet#300 \\
    --tasks question_answering --alternatives cut bm25 --teacher reader-lora --teacher-base my-base \\
    --output results.json --keep-answers answers.jsonl --resume

# The twelve sets of MRQA, a row each; three tasks of RULER; LongBench as kvpress publishes it:
context-compressors evaluate my-compressor --data '{name: mrqa-workshop/mrqa, split: validation, by: subset}' \\
    --out-of-domain '{name: mrqa-workshop/mrqa, by: subset}' --tasks question_answering --max-samples 300
context-compressors evaluate my-compressor --data generated:vt generated:niah_single_1 \\
    '{path: books.parquet, kind: niah_multiquery}' --document-tokens 4096 --tasks question_answering
context-compressors evaluate my-compressor --data Xnhyacinth/LongBench:hotpotqa Xnhyacinth/LongBench:trec \\
    --tasks question_answering --truncate-context

# The plain language model that a compressor stands on:
context-compressors evaluate my-base --data generated --max-samples 100 --output base.json
"""


def write_plots(report: EvaluationReport, folder: str | Path, others: Sequence[EvaluationReport] = ()) -> list[Path]:
    """Draw each task's main metric by ratio, the domain gap of two domains with both bounds, and by model size.

    Args:
        report: what to draw.
        folder: where the pictures go; made when it is not there.
        others: reports of other models; with any, quality by model size is drawn, too.

    Returns:
        The files, PNG.
    """
    from ..evaluation.plots import plot_domain_gap, plot_quality_by_model_size, plot_quality_by_ratio
    from ..evaluation.rows import FULL_CONTEXT, NO_CONTEXT

    folder = Path(folder)
    paths = []
    for task in report.tasks():
        metric = report.main_metric(task)
        paths.append(plot_quality_by_ratio([report], task, metric, folder / f"{task}_by_ratio.png"))
        has_bounds = {NO_CONTEXT, FULL_CONTEXT} <= set(report.conditions(task))
        if has_bounds and report.datasets(task, "in") and report.datasets(task, "out"):
            paths.append(plot_domain_gap([report], task, metric, folder / f"{task}_domain_gap.png"))
        if others:
            path = folder / f"{task}_by_model_size.png"
            paths.append(plot_quality_by_model_size([report, *others], task, metric, path))
    return paths


def settings_from_arguments(arguments: argparse.Namespace) -> EvaluationSettings:
    """The evaluation's options from the parsed command line; raises `ValueError` for a value that is not allowed."""
    fields: dict[str, Any] = {
        name: getattr(arguments, name) for name in EvaluationSettings.__dataclass_fields__ if name in arguments
    }
    fields["tasks"], fields["alternatives"] = tuple(arguments.tasks), tuple(arguments.alternatives)
    for name in ("ratios", "restoration_lengths"):
        values = getattr(arguments, name)
        fields[name] = None if values is None else tuple(values)
    fields["generation"] = generation_from_arguments(arguments.generation_config)
    fields["max_new_tokens"] = EvaluationSettings().max_new_tokens | max_new_tokens_from_arguments(
        arguments.max_new_tokens
    )
    return EvaluationSettings(**fields)


def max_new_tokens_from_arguments(values: Sequence[str]) -> dict[str, int]:
    """Most tokens of each task that is written, from values such as "24", which is of all, and "summarisation=64".

    Raises:
        ValueError: no number above 0, or a task that is not written.
    """
    found: dict[str, int] = {}
    for value in values:
        task, is_of_one, number = value.rpartition("=")
        if not number.isdecimal() or int(number) < 1:
            raise ValueError(f"--max-new-tokens takes numbers from 1 on, or TASK=N, got {value!r}")
        if is_of_one:
            check_choice("task of --max-new-tokens", task, WRITTEN_TASKS)
        found |= dict.fromkeys([task] if is_of_one else WRITTEN_TASKS, int(number))
    return found


def generation_from_arguments(values: Sequence[str]) -> dict[str, Any]:
    """Fields of a generation configuration from files, and from values such as "num_beams=4" over them.

    Raises:
        ValueError: a file that is not there, or holds no fields.
    """
    found: dict[str, Any] = {}
    given: dict[str, Any] = {}
    for value in values:
        name, is_field, text = value.partition("=")
        if is_field and name.isidentifier():
            try:
                given[name] = json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
            except ValueError:
                given[name] = text
            continue
        path = Path(value) / "generation_config.json" if Path(value).is_dir() else Path(value)
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        if not isinstance(content, dict):
            raise ValueError(f"--generation-config takes KEY=VALUE or a JSON file with fields, got {value!r}")
        found |= content
    return found | given


def _load(name: str, arguments: argparse.Namespace, base_model: str | None) -> PreTrainedModel:
    from .loading import load_model

    return load_model(
        name,
        base_model=base_model,
        dtype=arguments.dtype,
        device=arguments.device,
        trust_remote_code=arguments.trust_remote_code,
    )


def _evaluate(arguments: argparse.Namespace) -> EvaluationReport:
    """Load what the arguments name, score it, and write the report and the answers while they come."""
    from ..evaluation.data_sets import load_datasets
    from ..evaluation.evaluate import can_compress, evaluate_model, model_label
    from ..evaluation.report import EvaluationReport
    from ..modeling.checkpoint.pretrained_bases import tokenizer_from_place

    settings = settings_from_arguments(arguments)
    earlier = earlier_results(arguments, EvaluationReport.load)
    for path in arguments.compare_with:
        EvaluationReport.load(path)
    records = records_of_reports(arguments)
    progress_file = progress_path(arguments)
    tokenizer = tokenizer_from_place(arguments.model, trust_remote_code=arguments.trust_remote_code)
    datasets = [
        dataset
        for domain, sources in (("in", arguments.data), ("out", arguments.out_of_domain))
        for dataset in load_datasets(
            sources,
            tokenizer,
            domain=domain,
            data_dir=arguments.data_dir,
            seed=arguments.seed,
            num_documents=arguments.documents,
            document_tokens=arguments.document_tokens,
        )
    ]
    if arguments.plots and settings.bounds_only:
        raise ValueError("--plots draws quality by ratio, of which --bounds-only leaves none")
    if arguments.ratio_scale is not None:
        check_ratios(arguments.model, [], arguments)
    model = _load(arguments.model, arguments, arguments.base_model)
    if arguments.ratio_scale is not None:
        model.config.ratio_scale = arguments.ratio_scale
    num_parameters = model.num_parameters()
    if arguments.merge_adapters:
        if settings.zero_shot or "self_information" in settings.alternatives:
            raise ValueError("--merge-adapters: --zero-shot and self_information read the base with the adapters off")
        merge_adapters(model)
    if arguments.plots and not can_compress(model):
        raise ValueError(
            f"--plots draws quality by ratio, and {model_label(arguments.model)} is a plain language model"
        )
    add_model_records(records, arguments, on_hub=can_compress(model))
    teacher = None if arguments.teacher is None else _load(arguments.teacher, arguments, arguments.teacher_base)
    write = writer(arguments, [] if earlier is None else earlier.rows)
    report = evaluate_model(
        model,
        tokenizer,
        datasets,
        settings,
        teacher=teacher,
        model_name=model_label(arguments.model),
        num_parameters=num_parameters,
        # Scores on generated documents mean nothing without their length.
        notes={
            "document_tokens": arguments.document_tokens,
            "teacher": arguments.teacher and model_label(arguments.teacher),
        },
        records=records,
        resume_from=earlier,
        progress_file=progress_file,
        on_result=write,
    )
    write(report)
    return report


@command(
    "evaluate",
    "Score a compressor without context, with full context, and at every ratio; or a plain language model without "
    "context and with full context.",
    argument("model", help="Hub id or folder of the compressor or plain language model"),
    argument("--data", nargs="+", default=[], metavar="SOURCE", help=f"in-domain data sets: {_SOURCE}; {_NAMES}"),
    argument("--out-of-domain", nargs="+", default=[], metavar="SOURCE", help="out-of-domain data sets, likewise"),
    argument("--data-dir", metavar="FOLDER", help="folder that the files are relative to"),
    argument(
        "--tasks",
        nargs="+",
        default=list(DEFAULT_TASKS),
        metavar="TASK",
        help=f"among {', '.join(TASKS)} (default: {' '.join(DEFAULT_TASKS)})",
    ),
    argument(
        "--ratios",
        nargs="+",
        type=positive_int_or_auto,
        metavar="R",
        help="compression ratios, and auto for a compressor that selects them (default: the checkpoint's own)",
    ),
    RATIO_SCALE,
    argument(
        "--memory-dtype",
        choices=MEMORY_DTYPES,
        help="round memories, such as to 4 bits a value (default: as the model makes them, in its --dtype)",
    ),
    TEACHER,
    TEACHER_BASE,
    argument(
        "--alternatives",
        nargs="+",
        default=[],
        metavar="KIND",
        help="beside each ratio, as many tokens of the text: its beginning (cut), BM25's sentences (bm25), or those "
        "that the base expects least (self_information)",
    ),
    argument("--zero-shot", action="store_true", help="also score the base language model with the adapters off"),
    MERGE_ADAPTERS,
    argument("--max-samples", type=int, metavar="N", help="samples per data set and task (default: all)"),
    argument(
        "--batch-size",
        type=int,
        default=8,
        metavar="B",
        help="samples per batch, of at most 16,384 tokens (default: 8)",
    ),
    argument(
        "--max-new-tokens",
        nargs="+",
        default=[],
        metavar="N",
        help="most tokens to write, of one task TASK=N (default: question_answering=32 summarisation=128)",
    ),
    argument(
        "--context-tokens",
        type=int,
        default=256,
        metavar="N",
        help="window of reconstruction and continuation (default: 256)",
    ),
    argument("--continuation-tokens", type=int, default=64, metavar="N", help="tokens to continue with (default: 64)"),
    argument("--documents", type=int, default=100, metavar="N", help="number of generated documents (default: 100)"),
    argument(
        "--document-tokens", type=int, default=128, metavar="N", help="length of generated documents (default: 128)"
    ),
    argument(
        "--reconstruction-bleu", action="store_true", help="also write reconstructions; BLEU, ROUGE, prefix match"
    ),
    argument(
        "--restoration-lengths", nargs="+", type=int, metavar="N", help="windows of exactly N tokens to reconstruct"
    ),
    argument("--bert-score-model", metavar="FOLDER", help="scorer model: what is written gets a BERTScore, too"),
    argument("--bert-score-layer", type=int, metavar="L", help="layer of the scorer model (default: its last)"),
    argument(
        "--repetition-penalty",
        type=float,
        metavar="P",
        help="penalty on tokens that were already written, those of the prompt apart, such as 1.3 (GMSA)",
    ),
    argument(
        "--generation-config",
        nargs="+",
        default=[],
        metavar="KEY=VALUE|FILE",
        help="how everything is written, fields of transformers' generation configuration, such as num_beams=4 or "
        "do_sample=true temperature=0.7, or a JSON file of them (default: the model's own, greedily)",
    ),
    argument(
        "--answer-perplexity", action="store_true", help="also score each question's first answer token by token"
    ),
    PROMPT_FORMAT,
    PROMPTS,
    argument(
        "--context-prefix", default="", metavar="TEXT", help="in front of the contexts of questions and summaries"
    ),
    argument(
        "--bounds-only", action="store_true", help="score a compressor without context and with full context only"
    ),
    argument("--ratios-only", action="store_true", help="leave out no context and full context"),
    argument(
        "--task-tokens-in-bounds", action="store_true", help="start texts of the bounds with the task token, too"
    ),
    argument("--max-context-tokens", type=int, metavar="N", help="longest context (default: what the model can read)"),
    argument(
        "--leave-out-long",
        action="store_true",
        help="leave out questions and summaries of contexts beyond --max-context-tokens, and count them",
    ),
    argument("--truncate-context", action="store_true", help="cut contexts that do not fit, and count them"),
    argument("--truncation-side", default="right", metavar="SIDE", help="cut on the right (default) or left"),
    argument("--allow-untrained-ratio", action="store_true", help="accept ratios the checkpoint was not trained for"),
    ALLOW_TRAINED_DOCUMENTS,
    CHOSEN_BY,
    argument("--output", metavar="FILE", help="write the report as JSON, anew after each task on each data set"),
    argument(
        "--resume",
        action="store_true",
        help="go on where an evaluation with this --output stopped, inside a data set, too",
    ),
    KEEP_ANSWERS,
    OVERWRITE,
    argument("--plots", metavar="FOLDER", help="write pictures of the report"),
    argument("--compare-with", nargs="+", default=[], metavar="FILE", help="reports for the picture by model size"),
    argument("--seed", type=int, default=0, help="draws samples, windows, documents and resamples (default: 0)"),
    argument(
        "--num-resamples", type=int, default=NUM_RESAMPLES, metavar="N", help="of the bootstrap (default: %(default)s)"
    ),
    *LOADING,
    examples=_EXAMPLES,
)
def main(arguments: argparse.Namespace) -> None:
    """Run `context-compressors evaluate`.

    Raises:
        ValueError, TypeError, OSError, ImportError: see `evaluate_model`, `load_model` and `load_datasets`.
    """
    if not arguments.data and not arguments.out_of_domain:
        raise ValueError("give at least one data set with --data or --out-of-domain")
    from ..evaluation.report_tables import report_markdown

    report, paths = _evaluate(arguments), []
    # Before anything is drawn, which may fail.
    print(report_markdown(report))
    if arguments.plots:
        from ..evaluation.report import EvaluationReport

        others = [EvaluationReport.load(path) for path in arguments.compare_with]
        paths = write_plots(report, arguments.plots, others)
    say_if_done(arguments, not report.answers)
    for path in [*filter(None, [arguments.output, arguments.keep_answers]), *paths]:
        print(f"wrote {path}")
