# SPDX-License-Identifier: Apache-2.0
"""`context-compressors evaluate MODEL --data SOURCE ...`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..configuration.nearest_names import check_choice
from ..data.prompts import TASKS
from ..evaluation.settings import DEFAULT_TASKS, WRITTEN_TASKS, EvaluationSettings
from .command import LOADING, OVERWRITE, argument, check_outputs, command, config_argument, config_fields, positive_int

if TYPE_CHECKING:
    from ..data.document_ids import TrainingDocuments
    from ..evaluation.report import EvaluationReport
    from ..evaluation.samples import EvaluationDataset

# Tasks that make questions of texts, and the ranking of a corpus.
_OF_TEXTS, _RETRIEVAL = ("needles", "ruler"), "retrieval"
_LENGTHS = {"needles": (256, 512, 1024, 2048, 4096), "ruler": (4096,)}
_SOURCE = (
    "FILE (.parquet, .jsonl, .txt, .md), HUB_NAME[:CONFIG][@SPLIT], generated, generated:KIND, or a recipe's source "
    "as YAML; NAME=SOURCE names one, SOURCE#N draws N of its samples, FILE.yaml lists some"
)
_EXAMPLES = """
# 1,000 questions of one set and 300 of another, against a PEFT reader of the whole text, its beginning, and BM25's
# sentences; the same command resumes a stopped run:
context-compressors evaluate my-compressor --data squad=squad_dev.parquet#1000 --out-of-domain nq_test.parquet#300 \\
    --tasks question_answering --alternatives cut bm25 --teacher reader-lora \\
    --output results.json --keep-answers answers.jsonl --plots plots --resume

# Reconstruction and continuation of plain text, also with BLEU of what the model writes itself:
context-compressors evaluate my-compressor --data books.jsonl --tasks reconstruction continuation \\
    --config '{context_tokens: 256, reconstruction_bleu: true}'

# One fact in running text at two lengths; nDCG@10 at every ratio of a retrieval checkpoint and of BM25:
context-compressors evaluate my-compressor --tasks needles --data books.parquet --lengths 512 1024 --plots plots
context-compressors evaluate my-retriever --tasks retrieval --data mteb/scifact --alternatives bm25
"""


def settings_from_arguments(arguments: argparse.Namespace) -> EvaluationSettings:
    """Return the evaluation's settings from the parsed command line and its `--config`."""
    allowed = EvaluationSettings.__dataclass_fields__
    fields: dict[str, Any] = {name: value for name, value in vars(arguments).items() if name in allowed}
    if fields.pop("max_new_tokens") is not None:
        fields["max_new_tokens"] = dict.fromkeys(WRITTEN_TASKS, arguments.max_new_tokens)
    if set(arguments.tasks) & {*_OF_TEXTS, _RETRIEVAL}:
        fields["tasks"] = ["question_answering"]
    fields |= config_fields(arguments.config, allowed)
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    return EvaluationSettings(**fields)


def _datasets(arguments: argparse.Namespace, settings: EvaluationSettings, tokenizer: Any) -> list[EvaluationDataset]:
    from ..evaluation.data_sets import load_datasets, sources_of_task

    datasets = []
    of_texts = [task for task in arguments.tasks if task in _OF_TEXTS]
    for domain, sources in (("in", arguments.data), ("out", arguments.out_of_domain)):
        for task in of_texts if sources or domain == "in" else ():
            sources = sources_of_task(sources, task, arguments.lengths or _LENGTHS[task])
        read = {"domain": domain, "data_dir": arguments.data_dir, "seed": settings.seed}
        datasets += load_datasets(sources, tokenizer, **read)
    return datasets


def _records(
    arguments: argparse.Namespace, settings: EvaluationSettings, on_hub: bool
) -> dict[str, TrainingDocuments | None]:
    """Return the documents that trained and chose the models, and those of `--chosen-by` and the like."""
    from ..data.document_ids import TrainingDocuments
    from ..evaluation.evaluate import model_label
    from ..evaluation.held_out import add_record, reported_documents

    records: dict[str, TrainingDocuments | None] = {}
    for path in arguments.chosen_by:
        name = f"{model_label(arguments.model)}, by {Path(path).name}"
        add_record(records, name, TrainingDocuments(chose=reported_documents(path)))
    add_record(records, model_label(arguments.model), TrainingDocuments.of(arguments.model, on_hub))
    for name in filter(None, (settings.text_compressor, arguments.teacher)):
        add_record(records, model_label(name), TrainingDocuments.of(name))
    return records


def _writer(arguments: argparse.Namespace, earlier: EvaluationReport | None) -> Callable[[EvaluationReport], None]:
    """Return a function that writes the growing report to `--output` and its answers to `--keep-answers`."""
    from ..evaluation.rows import AnswersFile

    done = set() if earlier is None else {(row.dataset, row.task) for row in earlier.rows}
    answers = AnswersFile(arguments.keep_answers, done) if arguments.keep_answers else None

    def write(report: EvaluationReport) -> None:
        # Answers first: what the results have, they have answers for.
        if answers is not None:
            answers.write_new(report.answers)
        if arguments.output:
            report.save(arguments.output)

    return write


def _evaluate(arguments: argparse.Namespace, settings: EvaluationSettings) -> list[Path]:
    """Load what the arguments name, score it, write the report while it grows, print it, and return the pictures."""
    from ..evaluation.evaluate import can_compress, evaluate_model, model_label
    from ..evaluation.plots import write_plots
    from ..evaluation.report import EvaluationReport
    from ..evaluation.report_tables import report_markdown
    from ..modeling.checkpoint.pretrained_bases import tokenizer_from_place
    from .loading import load_model

    earlier = None
    if arguments.resume and Path(arguments.output).exists():
        earlier = EvaluationReport.load(arguments.output)
    tokenizer = tokenizer_from_place(arguments.model)
    datasets = _datasets(arguments, settings, tokenizer)
    options = {"dtype": arguments.dtype, "device": arguments.device}
    model = load_model(arguments.model, base_model=arguments.base_model, **options)
    compresses = can_compress(model)
    if arguments.plots and (settings.bounds_only or not compresses):
        raise ValueError("--plots draws quality by ratio, and nothing is compressed here")
    num_parameters = model.num_parameters()
    if arguments.merge_adapters:
        if settings.zero_shot or "self_information" in settings.alternatives:
            raise ValueError("--merge-adapters: zero_shot and self_information read the base with the adapters off")
        if not compresses:
            raise ValueError(f"--merge-adapters is for a compressor, not for a {type(model).__name__}")
        model.merge_adapters()
    write = _writer(arguments, earlier)
    report = evaluate_model(
        model,
        tokenizer,
        datasets,
        settings,
        teacher=None if arguments.teacher is None else load_model(arguments.teacher, **options),
        model_name=model_label(arguments.model),
        num_parameters=num_parameters,
        records=_records(arguments, settings, on_hub=compresses),
        resume_from=earlier,
        on_result=write,
    )
    write(report)
    # Before anything is drawn, which may fail.
    print(report_markdown(report))
    if arguments.resume and not report.answers:
        print(f"{arguments.output} is done: nothing was left to score")
    return write_plots(report, arguments.plots) if arguments.plots else []


def _rank(arguments: argparse.Namespace, settings: EvaluationSettings) -> None:
    """Rank a corpus in BEIR's form, and write and print what came out."""
    from ..data.retrieval_sources import JudgedQueries, RetrievalSource
    from ..evaluation.report_tables import held_out_lines
    from ..evaluation.retrieval import evaluate_collection, retrieval_table
    from ..evaluation.rows import plain_json, write_answers
    from ..modeling.checkpoint.pretrained_bases import tokenizer_from_place
    from ..reporting.result_files import write_results
    from .loading import load_retriever

    if len(arguments.data) != 1:
        raise ValueError(f"--tasks retrieval ranks one corpus, PLACE[@SPLIT], got --data {arguments.data}")
    place, _, split = arguments.data[0].partition("@")
    folder, split = Path(arguments.data_dir or ".", place), split or "test"
    source = RetrievalSource.from_beir(folder if folder.is_dir() else place, split)
    name = folder.resolve().name if folder.is_dir() else place
    model = load_retriever(arguments.model, arguments.dtype, arguments.device)
    content, answers = evaluate_collection(
        model,
        tokenizer_from_place(arguments.model),
        JudgedQueries(source),
        f"{name}, {split}",
        settings,
        _records(arguments, settings, on_hub=True),
    )
    if arguments.keep_answers:
        write_answers(answers, arguments.keep_answers)
    if arguments.output:
        write_results(plain_json(content), arguments.output)
    print("\n".join([*held_out_lines(content["held_out"]), "", retrieval_table(content["rows"])]))


@command(
    "evaluate",
    "Score a compressor without context, with full context, and at every ratio; or a plain language model without "
    "context and with full context.",
    argument("model", help="Hub id or folder of the compressor or plain language model"),
    argument("--data", nargs="+", default=[], metavar="SOURCE", help=f"in-domain data sets: {_SOURCE}"),
    argument("--out-of-domain", nargs="+", default=[], metavar="SOURCE", help="out-of-domain data sets, likewise"),
    argument("--data-dir", metavar="FOLDER", help="folder that the files are relative to"),
    argument(
        "--tasks",
        nargs="+",
        default=list(DEFAULT_TASKS),
        metavar="TASK",
        help=f"among {', '.join(TASKS)} (default: {' '.join(DEFAULT_TASKS)}); or needles, ruler, or retrieval (of a "
        "corpus in BEIR's form, PLACE[@SPLIT])",
    ),
    config_argument("any other fields of EvaluationSettings", "{zero_shot: true, truncate_context: true}"),
    argument("--ratios", nargs="+", type=positive_int, metavar="R", help="(default: the checkpoint's own)"),
    argument("--teacher", metavar="MODEL", help="language model or PEFT adapter of the bounds (default: the decoder)"),
    argument(
        "--alternatives",
        nargs="+",
        default=[],
        metavar="KIND",
        help="baselines with as many tokens of the text as a memory has slots: its beginning (cut), BM25's sentences "
        "(bm25), the least expected tokens (self_information), or what `text_compressor` keeps without the question "
        "(keep_drop) or with it (keep_drop_aware)",
    ),
    argument("--merge-adapters", action="store_true", help="merge the compressor's adapters first, which is faster"),
    argument("--max-samples", type=positive_int, metavar="N", help="samples per data set and task (default: all)"),
    argument("--batch-size", type=positive_int, default=8, metavar="B", help="samples per batch (default: 8)"),
    argument("--max-new-tokens", type=positive_int, metavar="N", help="(default: 32 of an answer, 128 of a summary)"),
    argument("--lengths", nargs="+", type=positive_int, metavar="N", help="tokens of contexts of needles and RULER"),
    argument("--chosen-by", nargs="+", default=[], metavar="FILE", help="results that chose the checkpoint"),
    argument("--output", metavar="FILE", help="write the report as JSON, anew after each task on each data set"),
    argument("--resume", action="store_true", help="go on where an evaluation with this --output stopped"),
    argument("--keep-answers", metavar="FILE", help="write what every sample got, as JSONL"),
    OVERWRITE,
    argument("--plots", metavar="FOLDER", help="write pictures of the report"),
    *LOADING,
    examples=_EXAMPLES,
)
def evaluate(arguments: argparse.Namespace) -> None:
    """Run `context-compressors evaluate`."""
    tasks = arguments.tasks
    for task in tasks:
        check_choice("task", task, (*TASKS, *_OF_TEXTS, _RETRIEVAL))
    if len(tasks) > 1 and set(tasks) & {*_OF_TEXTS, _RETRIEVAL}:
        raise ValueError(f"needles, ruler and retrieval are each evaluated alone, got {tasks}")
    if not (arguments.data or arguments.out_of_domain or "ruler" in tasks):
        raise ValueError("give at least one data set with --data or --out-of-domain")
    if arguments.resume and not arguments.output:
        raise ValueError("--resume goes on with what is in --output: name it")
    check_outputs((arguments.output, arguments.keep_answers), arguments.overwrite or arguments.resume)
    settings, pictures = settings_from_arguments(arguments), []
    if tasks == [_RETRIEVAL]:
        _rank(arguments, settings)
    else:
        pictures = _evaluate(arguments, settings)
    for path in [*filter(None, [arguments.output, arguments.keep_answers]), *pictures]:
        print(f"wrote {path}")
