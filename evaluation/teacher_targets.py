# SPDX-License-Identifier: Apache-2.0
"""Targets for sequence-level distillation: what a language model writes that reads the whole context, as JSONL."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..configuration.nearest_names import check_choice
from ..data.columns import is_list
from ..data.prompts import format_prompt
from ..data.rows import PassageText, check_texts, read_rows
from ..data.sources import DataSource
from ..modeling.checkpoint.fingerprints import fingerprint
from ..modeling.parts.text_ids import start_token_id, text_tokenizer
from ..reporting.environment import environment
from ..reporting.result_files import write_json
from .data_sets import data_set_name, load_datasets
from .evaluate import can_compress, decoding_of, model_label
from .rows import FULL_CONTEXT
from .samples import EvaluationDataset, Sample, SampleBuilder
from .scoring import Condition, Scorer, end_ids
from .settings import EvaluationSettings

# Task -> the column that the teacher writes.
TARGET_COLUMNS = {"question_answering": "answers", "summarisation": "summary"}
# Rows that are sorted by length together, and written together.
_BATCHES_AT_ONCE = 16
# What is counted when all is written.
_COUNTS = ("rows", "unfinished", "empty", "truncated")


def write_targets(
    teacher: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[DataSource],
    output: str | os.PathLike[str],
    *,
    task: str = "question_answering",
    settings: EvaluationSettings | None = None,
    data_dir: str | None = None,
    num_documents: int = 100,
    document_tokens: int = 128,
    teacher_name: str | None = None,
    resume: bool = False,
    progress: bool = True,
) -> dict[str, Any]:
    """Let a language model answer, greedily and from the whole context, what a compressor shall learn to answer.

    Each row of the sources becomes one line, in their order: `id`, `source`, `context` as it was read, `question`,
    `source_texts` where the source has them, and as `answers` a list with what the teacher wrote, or `summary`;
    `finished` says whether the teacher ended it before the limit, and `truncated` whether it read a part of the
    context only. What it left empty is an empty list or text; contexts are lists of passages where any source's are.
    A recipe reads the file as any other source: no end is learned behind what did not come to one,
    `where: {finished: true}` leaves that out, and `skip_incomplete: true` leaves out what is empty.
    Training on it is sequence-level distillation (Kim and Rush, 2016), as PISCO does; the objective `distillation`
    compares every token's scores instead.

    Args:
        teacher: a causal language model.
        tokenizer: its tokenizer.
        sources: as in a recipe, see [`DataSource`]; answers and summaries of theirs are not read. Weights and tasks
            make no difference.
        output: the JSONL file; folders are made. Beside it, `<output>.json` records teacher, settings and counts.
        task: "question_answering" or "summarisation".
        settings: of an evaluation; of these `batch_size`, `max_new_tokens`, `prompts` (each task's first),
            `prompt_format`, `context_prefix`, `max_context_tokens`, `truncate_context`, `truncation_side` and `seed`.
        data_dir: folder that local paths are relative to.
        num_documents: documents of a source with `generated: true`.
        document_tokens: longest of these, where the source has no `document_tokens`.
        teacher_name: how the record calls the teacher; the last part of its Hub id or folder when `None`.
        resume: go on behind the last whole line of an `output` that was written with the same settings.
        progress: whether to show a progress bar.

    Returns:
        The record: "teacher", its weights' fingerprint, the settings, "sources", the "source" that a recipe takes,
        with the licences of all of them, and the counts "rows", "unfinished", "empty" and "truncated".

    Raises:
        TypeError: the teacher is a compressor, or no causal language model.
        ValueError: a task that is not allowed, sources without rows or columns, a context that does not fit and may
            not be cut, an `output` that is there, or one to resume that is of another run.
    """
    check_choice("task", task, TARGET_COLUMNS)
    if can_compress(teacher) or not teacher.can_generate() or teacher.config.is_encoder_decoder:
        raise TypeError(f"the teacher must be a causal language model, got {type(teacher).__name__}")
    if not sources:
        raise ValueError("there are no sources: name at least one")
    settings, path, tokenizer = settings or EvaluationSettings(), Path(output), text_tokenizer(tokenizer)
    record = _record(teacher, teacher_name, sources, path, task, settings, (num_documents, document_tokens))
    tables = [
        _asked_rows(source, task, tokenizer, data_dir, settings.seed, num_documents, document_tokens)
        for source in sources
    ]
    builder = SampleBuilder(
        tokenizer,
        getattr(teacher.config.get_text_config(decoder=True), "max_position_embeddings", None),
        settings.max_new_tokens,
        settings.context_tokens,
        settings.continuation_tokens,
        truncate_context=settings.truncate_context,
        max_context_tokens=settings.max_context_tokens,
        prompts=settings.prompts,
        context_prefix=settings.context_prefix,
        truncation_side=settings.truncation_side,
        prompt_format=settings.prompt_format,
    )
    # A file's column has one type.
    has_lists = any(is_list(table["context"].type) for table in tables)
    num_together = settings.batch_size * _BATCHES_AT_ONCE
    if not settings.truncate_context:
        # A context that does not fit is refused before hours of writing, not behind them.
        for group in _groups(tables, sources, num_together):
            _samples(group, task, builder)
    num_done = _begin(path, record, resume)
    reader = Condition(FULL_CONTEXT, teacher, with_context=True)
    scorer = Scorer(teacher, tokenizer, [reader], start_token_id(tokenizer))
    was_training = teacher.training
    teacher.eval()
    try:
        total = sum(table.num_rows for table in tables)
        with (
            path.open("a", encoding="utf-8") as file,
            tqdm(total=total, initial=num_done, desc=task, unit="row", disable=not progress) as bar,
        ):
            for group in _groups(tables, sources, num_together, num_done):
                for row in _written(group, task, builder, scorer, settings):
                    if has_lists and isinstance(row["context"], str):
                        row["context"] = [row["context"]]
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
                file.flush()
                bar.update(len(group))
    finally:
        teacher.train(was_training)
    record |= _counts(path, task)
    write_json(record, _record_path(path))
    return record


def _record(
    teacher: PreTrainedModel,
    name: str | None,
    sources: Sequence[DataSource],
    path: Path,
    task: str,
    settings: EvaluationSettings,
    generated: tuple[int, int],
) -> dict[str, Any]:
    """What a later run must have in common with this one, and what a recipe and a card need."""
    name = name or model_label(teacher.name_or_path or type(teacher).__name__)
    licences = dict.fromkeys(source.licence or ("Apache-2.0" if source.generated else None) for source in sources)
    titles = ", ".join(dict.fromkeys(map(data_set_name, sources)))
    entry = {"path": path.name, "tasks": [task], "title": f"{titles}, answered by {name}"}
    if all(licences):
        entry["licence"] = ", ".join(filter(None, licences))
    return {
        "teacher": name,
        "teacher_weights": fingerprint(teacher),
        "dtype": str(teacher.dtype),
        "task": task,
        "prompt": format_prompt(task, "{question}", path=settings.prompts),
        **{name: getattr(settings, name) for name in ("prompt_format", "context_prefix", "seed")},
        "generation": decoding_of(teacher, {}),
        "max_new_tokens": settings.max_new_tokens[task],
        **{name: getattr(settings, name) for name in ("max_context_tokens", "truncate_context", "truncation_side")},
        "sources": [_shown(source) for source in sources],
        "generated_documents": dict(zip(("number", "tokens"), generated, strict=True)),
        "source": entry,
        "versions": environment()["versions"],
    }


def _shown(source: DataSource) -> dict[str, Any]:
    """A source's fields that are given, as JSON has them; of a path on this machine the file's name alone."""
    given = {name: value for name, value in asdict(source).items() if value != getattr(DataSource, name)}
    if source.path is not None:
        given["path"] = Path(source.path).name
    return json.loads(json.dumps(given, default=str))


def _record_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _begin(path: Path, record: Mapping[str, Any], resume: bool) -> int:
    """Make the files, or go on with those that are there; returns how many rows are written."""
    if not path.exists():
        write_json(record, _record_path(path))
        return 0
    if not resume:
        raise ValueError(f"{path} is there: go on with it (--resume), or delete it")
    try:
        earlier = json.loads(_record_path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} cannot be gone on with: {_record_path(path)} does not say how it was made"
        ) from error
    differing = [name for name, value in record.items() if name != "versions" and earlier.get(name) != value]
    if differing:
        raise ValueError(f"{path} is of another run, which differs in {', '.join(differing)}: name another output")
    content = path.read_bytes()
    # A kill leaves an unfinished last line.
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)
    return content.count(b"\n")


def _asked_rows(
    source: DataSource,
    task: str,
    tokenizer: PreTrainedTokenizerBase,
    data_dir: str | None,
    seed: int,
    num_documents: int,
    document_tokens: int,
) -> pyarrow.Table:
    """What a source asks: contexts, and questions where the task has them."""
    if source.contexts_per_document > 1:
        raise ValueError(
            f"contexts_per_document of source {source.label!r}: contexts are joined when training draws them; give it "
            "to the source that reads the targets"
        )
    needed = ["context", "question"] if task == "question_answering" else ["context"]
    if source.generated:
        (data,) = load_datasets(
            [replace(source, tasks=())],
            tokenizer,
            seed=seed,
            num_documents=num_documents,
            document_tokens=document_tokens,
        )
        return pyarrow.Table.from_pylist(list(data.examples)).select(needed).slice(0, source.max_samples)
    # Without tasks nothing is asked of answers: the teacher writes them.
    table = read_rows(replace(source, tasks=()), data_dir, seed)
    for column in needed:
        if column not in table.column_names:
            raise ValueError(f"source {source.label!r} has no column {column!r}, which {task} needs")
        check_texts(table, column, source)
    return table.select([*needed, *(name for name in ("id", "source_texts") if name in table.column_names)])


def _groups(
    tables: Sequence[pyarrow.Table], sources: Sequence[DataSource], size: int, first: int = 0
) -> Iterator[list[dict[str, Any]]]:
    """The rows of all sources from `first` on, `size` at a time."""
    rows = islice(chain.from_iterable(map(_row_by_row, tables, sources)), first, None)
    while group := list(islice(rows, size)):
        yield group


def _row_by_row(table: pyarrow.Table, source: DataSource) -> Iterator[dict[str, Any]]:
    name, number = data_set_name(source), 0
    for batch in table.to_batches(max_chunksize=1024):
        for row in batch.to_pylist():
            own = row.pop("id", None)
            if not isinstance(row["context"], str):
                row["context"] = PassageText(row["context"])
            yield {"id": str(number if own is None else own), "source": name, **row}
            number += 1


def _samples(
    rows: Sequence[Mapping[str, Any]], task: str, builder: SampleBuilder
) -> dict[tuple[str, str], tuple[int, Sample]]:
    """What is asked of the rows, with its place: the same question about the same context is asked once."""
    asked = dict.fromkeys(map(_asked, rows))
    # No row may be without an answer.
    nothing = {"answers": ["-"], "summary": "-"}
    examples = [{"context": context, "question": question, **nothing} for context, question in asked]
    samples = builder.build(EvaluationDataset(rows[0]["source"], examples), task)
    return {key: (place, sample) for place, (key, sample) in enumerate(zip(asked, samples, strict=True))}


def _asked(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["context"], row.get("question", "")


def _written(
    rows: Sequence[Mapping[str, Any]],
    task: str,
    builder: SampleBuilder,
    scorer: Scorer,
    settings: EvaluationSettings,
) -> Iterator[dict[str, Any]]:
    """The rows with what the teacher writes."""
    samples, column = _samples(rows, task, builder), TARGET_COLUMNS[task]
    in_order = [sample for _, sample in samples.values()]
    (tally,) = scorer.tallies(task, in_order, settings.batch_size, settings.max_new_tokens[task]).values()
    for row in rows:
        place, sample = samples[_asked(row)]
        text, ids = tally.predictions[place], tally.written_ids[place]
        target = ([text] if text else []) if column == "answers" else text
        finished = bool(ids) and ids[-1] in end_ids(scorer.conditions[0].model, scorer.tokenizer)
        context = list(getattr(row["context"], "passages", ())) or row["context"]
        yield {**row, "context": context, column: target, "finished": finished, "truncated": sample.truncated}


def _counts(path: Path, task: str) -> dict[str, int]:
    """How many rows there are, and how many did not come out whole."""
    found = Counter(dict.fromkeys(_COUNTS, 0))
    with path.open(encoding="utf-8") as file:
        for row in map(json.loads, file):
            found.update(
                rows=1, unfinished=not row["finished"], empty=not row[TARGET_COLUMNS[task]], truncated=row["truncated"]
            )
    return dict(found)
