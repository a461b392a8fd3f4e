# SPDX-License-Identifier: Apache-2.0
"""The data sets of an evaluation, from the sources that name them."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.compute
from transformers import PreTrainedTokenizerBase

from ..configuration.nearest_names import check_choice
from ..data.columns import column_of, is_list
from ..data.rows import PassageText, distinct_texts, read_rows
from ..data.sources import COLUMNS, DataSource, parse_sources
from ..data.synthetic_documents import KINDS, GeneratedDocument, generate_document
from ..modeling.parts.text_ids import encode
from .evaluate import model_label
from .needles import NEEDLES, needle_examples
from .samples import EvaluationDataset

logger = logging.getLogger(__name__)

# Fields of a source that change no data set, or only its name.
_NOT_IN_REPORT = ("title", "tasks", "weight", "license")
_HOPS = {"one_hop": 1, "two_hop": 2}
_ATTEMPTS = 100
RULER = "simonjegou/ruler"


def load_datasets(
    sources: Sequence[str | DataSource | Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    domain: str = "in",
    data_dir: str | None = None,
    seed: int = 0,
    num_documents: int = 100,
    document_tokens: int = 128,
) -> list[EvaluationDataset]:
    """Read the data sets of an evaluation.

    Args:
        sources: in any form that `parse_sources` takes; a `max_samples` of theirs is drawn for each task, and a source
            with `by` becomes a data set for each value of that column. Of kind "needles", their running text becomes
            contexts of one length.
        tokenizer: measures the length of generated documents.
        domain: "in" or "out".
        data_dir: folder that files are relative to.
        seed: draws generated documents and needles.
        num_documents: number of generated documents, and of needles.
        document_tokens: length limit of these, where their source has none.

    Raises:
        ValueError: no such file, data set or kind of question, a column that is not there, or a data set without rows.
    """
    for place in sources:
        if isinstance(place, str) and (Path(data_dir or ".") / place).is_dir():
            raise ValueError(f"{place!r} is a folder: name its files, such as {place}/*.parquet")
    datasets: list[EvaluationDataset] = []
    for source in parse_sources(sources):
        length, number = source.document_tokens or document_tokens, source.max_samples or num_documents
        if source.kind == NEEDLES:
            of_source = [_needles(source, tokenizer, domain, data_dir, seed, number, length)]
        elif source.generated:
            examples = _generated_examples(source, tokenizer, seed, num_documents, length)
            of_source = [EvaluationDataset(data_set_name(source), examples, domain, source.max_samples, source.tasks)]
        else:
            of_source = _read(source, domain, data_dir, seed)
        datasets += [replace(data, source=source_in_report(source)) for data in of_source]
    return datasets


def sources_of_task(sources: Sequence[str], task: str, lengths: Sequence[int]) -> list[DataSource]:
    """The sources of "needles", contexts of each length, or of "ruler" as kvpress publishes it at each length."""
    if task == NEEDLES:
        return [
            replace(source, kind=NEEDLES, document_tokens=length)
            for source in parse_sources(sources)
            for length in lengths
        ]
    return [
        DataSource(name=name, config=str(length), split="test", by="task", title=f"RULER {length}")
        for name in sources or [RULER]
        for length in lengths
    ]


def source_in_report(source: DataSource) -> dict[str, Any]:
    """What a report says of a source, as JSON holds it: fields that are not the default, and a Hub data set's split.

    Of files and folders it is the last part of their names alone.
    """
    found = {
        field.name: value
        for field in fields(source)
        if field.name not in _NOT_IN_REPORT and (value := vars(source)[field.name]) != field.default
    }
    if source.path is not None:
        found["path"] = Path(source.path).name
        # A file has none.
        found.pop("split", None)
    if source.name is not None:
        found |= {"name": model_label(source.name), "split": source.split}
    return json.loads(json.dumps(found, default=str))


def data_set_name(source: DataSource) -> str:
    """What reports call the data set of a source: its title, or what names it, of folders the last part alone."""
    if source.title is not None:
        return source.title
    if source.path is not None:
        return Path(source.path).stem
    label = source.label if source.name is None else model_label(source.name)
    return ":".join(filter(None, [label, source.config, source.kind]))


def _read(source: DataSource, domain: str, data_dir: str | None, seed: int) -> list[EvaluationDataset]:
    table = read_rows(source if source.streaming else replace(source, max_samples=None), data_dir, seed)
    # The documents that rows are windows of, by which it is known whether they trained.
    wanted = table.select([name for name in (*COLUMNS, "source_texts") if name in table.column_names])
    max_samples = None if source.streaming and source.rows is None else source.max_samples

    def data_set(name: str, rows: pyarrow.Table) -> EvaluationDataset:
        examples = rows.to_pylist()
        if "context" in rows.column_names and is_list(rows["context"].type):
            examples = [{**example, "context": PassageText(example["context"])} for example in examples]
        return EvaluationDataset(name, examples, domain, max_samples, source.tasks)

    if source.by is None:
        return [data_set(data_set_name(source), wanted)]
    values = column_of(table, source.by, source)
    if values.null_count:
        logger.warning("source %r: %d rows have no %s, and are left out", source.label, values.null_count, source.by)
    return [
        data_set(f"{data_set_name(source)}/{value}", wanted.filter(pyarrow.compute.equal(values, value)))
        for value in values.unique()
        if value.is_valid
    ]


def _needles(
    source: DataSource,
    tokenizer: PreTrainedTokenizerBase,
    domain: str,
    data_dir: str | None,
    seed: int,
    number: int,
    num_tokens: int,
) -> EvaluationDataset:
    """Needles in running text, in contexts of one length."""
    # A stream needs an end.
    needs_samples = source.streaming and source.rows is None
    table = read_rows(source if needs_samples else replace(source, max_samples=None), data_dir, seed)
    examples = needle_examples(distinct_texts(table), tokenizer, num_tokens, number, seed)
    name = f"{source.title or NEEDLES}, {num_tokens} tokens"
    return EvaluationDataset(name, examples, domain, only=("question_answering",))


def _generated_examples(
    source: DataSource, tokenizer: PreTrainedTokenizerBase, seed: int, num_documents: int, num_tokens: int
) -> list[dict[str, Any]]:
    if source.config is not None:
        check_choice("kind of generated questions:", source.config, _HOPS)
    if source.kind is not None:
        check_choice("kind of generated documents:", source.kind, [*KINDS, *_HOPS])
    hops = _HOPS.get(source.config or "")
    rng = random.Random(f"{seed}/evaluation")
    examples = []
    for _ in range(num_documents):
        document = _draw_document(source, tokenizer, rng, num_tokens)
        examples += [
            {"context": document.text, "question": question.question, "answers": [question.answer]}
            for question in document.questions
            if hops in (None, question.hops)
        ]
    return examples


def _draw_document(
    source: DataSource, tokenizer: PreTrainedTokenizerBase, rng: random.Random, num_tokens: int
) -> GeneratedDocument:
    attempt = 0
    while True:
        attempt += 1
        try:
            return generate_document(
                rng.randrange(2**31),
                num_tokens=num_tokens,
                kind=source.kind,
                split=source.split,
                count_tokens=lambda text: len(encode(tokenizer, text)),
            )
        except ValueError:
            # With a short limit, the first sentence of some seeds does not fit; the next seed's may.
            if attempt == _ATTEMPTS:
                raise
