# SPDX-License-Identifier: Apache-2.0
"""Targets for sequence-level distillation: what a language model writes that reads the whole context, as JSONL."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..configuration.nearest_names import check_choice
from ..data.columns import is_list
from ..data.prompts import format_prompt
from ..data.rows import PassageText, as_text, read_rows, with_values
from ..data.sources import DataSource, parse_sources
from ..modeling.checkpoint.fingerprints import weights_fingerprint
from ..modeling.parts.text_ids import text_tokenizer
from ..reporting.environment import environment
from ..reporting.result_files import write_json
from .data_sets import data_set_name, load_datasets, source_in_report
from .evaluate import can_compress, greedy_decoding, max_positions, model_label
from .rows import FULL_CONTEXT
from .samples import EvaluationDataset, SampleBuilder
from .scoring import Condition, Scorer, end_ids
from .settings import EvaluationSettings

# Task -> the column that the teacher writes.
TARGET_COLUMNS = {"question_answering": "answers", "summarization": "summary"}
# Rows that are sorted by length together, and written together.
_BATCHES_AT_ONCE = 16
_SETTINGS = ("prompt_format", "context_prefix", "max_context_tokens", "truncate_context", "truncation_side", "seed")


def write_targets(
    teacher: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[str | DataSource | Mapping[str, Any]],
    output: str | os.PathLike[str],
    *,
    task: str = "question_answering",
    settings: EvaluationSettings | None = None,
    data_dir: str | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Write what a language model answers, greedily and from the whole context, as a source of training.

    Lines have the teacher's `answers` or `summary`, whether it `finished` before the limit, and whether it read a
    `truncated` context. Training on them is sequence-level distillation (Kim and Rush, 2016), as PISCO does.

    Args:
        sources: in any form that `parse_sources` takes; their answers are not read.
        output: the JSONL file. Beside it, `<output>.json` has the record that is returned: teacher, settings and
            counts.
        task: "question_answering" or "summarization".
        settings: lengths, prompts, truncation and seed.
        data_dir: folder that local paths are relative to.
    """
    check_choice("task", task, TARGET_COLUMNS)
    if can_compress(teacher) or not teacher.can_generate() or teacher.config.is_encoder_decoder:
        raise TypeError(f"the teacher must be a causal language model, got {type(teacher).__name__}")
    settings, path, tokenizer = settings or EvaluationSettings(), Path(output), text_tokenizer(tokenizer)
    if path.exists():
        raise ValueError(f"{path} is there: name another file")
    parsed = parse_sources(sources, split="train")
    tables = [_asked_rows(source, task, tokenizer, data_dir, settings.seed) for source in parsed]
    builder = SampleBuilder(tokenizer, replace(settings, leave_out_long=False), max_positions([teacher.config]))
    # A file's column has one type.
    has_lists = any(is_list(table["context"].type) for table in tables)
    reader = Condition(FULL_CONTEXT, teacher.eval(), with_context=True)
    scorer = Scorer(teacher, tokenizer, [reader], settings)
    counts = Counter(rows=0, unfinished=0, empty=0, truncated=0)
    rows = (row for table, source in zip(tables, parsed, strict=True) for row in _row_by_row(table, source))
    path.parent.mkdir(parents=True, exist_ok=True)
    draft, total = path.with_name(f"{path.name}.part"), sum(table.num_rows for table in tables)
    with draft.open("w", encoding="utf-8") as file, tqdm(total=total, unit="row", disable=not progress) as bar:
        while group := list(islice(rows, settings.batch_size * _BATCHES_AT_ONCE)):
            for row in _written(group, task, builder, scorer):
                if has_lists and isinstance(row["context"], str):
                    row["context"] = [row["context"]]
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                is_empty = not row[TARGET_COLUMNS[task]]
                counts.update(rows=1, unfinished=not row["finished"], empty=is_empty, truncated=row["truncated"])
            bar.update(len(group))
    draft.replace(path)
    record = {
        "teacher": model_label(teacher.name_or_path or type(teacher).__name__),
        "teacher_weights": weights_fingerprint(teacher, of_answers=True),
        "dtype": str(teacher.dtype),
        "task": task,
        "prompt": format_prompt(task, "{question}", path=settings.prompts),
        **{name: vars(settings)[name] for name in _SETTINGS},
        "max_new_tokens": settings.max_new_tokens[task],
        "generation": greedy_decoding(teacher),
        "sources": [source_in_report(source) for source in parsed],
        "versions": environment()["versions"],
        **counts,
    }
    write_json(record, path.with_name(f"{path.name}.json"))
    return record


def _asked_rows(
    source: DataSource, task: str, tokenizer: PreTrainedTokenizerBase, data_dir: str | None, seed: int
) -> pyarrow.Table:
    """Read the contexts of a source, and the questions where the task has them."""
    needed = ["context", "question"] if task == "question_answering" else ["context"]
    if source.generated:
        (data,) = load_datasets([replace(source, tasks=())], tokenizer, seed=seed)
        return pyarrow.Table.from_pylist(list(data.examples)).select(needed).slice(0, source.max_samples)
    # Without tasks nothing is asked of answers: the teacher writes them.
    table = read_rows(replace(source, tasks=()), data_dir, seed)
    for column in needed:
        table = with_values(table, column, source)
    return table.select([*needed, *(name for name in ("id", "source_texts") if name in table.column_names)])


def _row_by_row(table: pyarrow.Table, source: DataSource) -> Iterator[dict[str, Any]]:
    name, batches = data_set_name(source), table.to_batches(max_chunksize=1024)
    for number, row in enumerate(row for batch in batches for row in batch.to_pylist()):
        own = row.pop("id", None)
        named = {"id": str(number if own is None else own), "source": name}
        yield {**named, **row, "context": as_text(row["context"])}


def _written(
    rows: Sequence[Mapping[str, Any]], task: str, builder: SampleBuilder, scorer: Scorer
) -> Iterator[dict[str, Any]]:
    """The rows with what the teacher writes; the same question about the same context is asked once."""
    pairs = dict.fromkeys((row["context"], row.get("question", "")) for row in rows)
    # No row may be without an answer.
    nothing = {"answers": ["-"], "summary": "-"}
    examples = [{"context": context, "question": question, **nothing} for context, question in pairs]
    samples = builder.build(EvaluationDataset(rows[0]["source"], examples), task)
    places = {pair: place for place, pair in enumerate(pairs)}
    (tally,) = scorer.tallies(task, samples).values()
    ends = end_ids(scorer.compressor, scorer.tokenizer)
    for row in rows:
        place, context = places[row["context"], row.get("question", "")], row["context"]
        text, ids = tally.predictions[place], tally.written_ids[place]
        yield {
            **row,
            "context": list(context.passages) if isinstance(context, PassageText) else context,
            TARGET_COLUMNS[task]: [text] * bool(text) if task == "question_answering" else text,
            "finished": bool(ids) and ids[-1] in ends,
            "truncated": samples[place].truncated,
        }
