# SPDX-License-Identifier: Apache-2.0
"""Training and test data of the small-scale benchmark: generated documents, and windows of real text."""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from transformers import PreTrainedTokenizerBase

from context_compressors.data.rows import read_rows
from context_compressors.data.sources import DataSource
from context_compressors.evaluation.data_sets import load_datasets
from context_compressors.evaluation.metrics import normalize_answer
from context_compressors.evaluation.samples import EvaluationDataset
from context_compressors.modeling.parts.text_ids import encode

# Everything is drawn once, whatever the seed of a run: all runs see the same documents.
_SEED = 0
_TRAINING_CONTEXTS = 3000
_TEST_CONTEXTS = 600
_TEST_SHARE = 4  # one NarrativeQA summary in four is for testing
GENERATED_DOCUMENTS = 100

SQUAD, NARRATIVEQA, OPENSTAX = "squad", "narrativeqa_summaries", "openstax"


def windows(text: str, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> list[str]:
    """Cut a text between sentences into windows of at most `max_tokens` tokens; longer sentences are left out."""
    found: list[list[str]] = [[]]
    length = 0
    for sentence in filter(None, re.split(r"(?<=[.!?])\s+", text.strip())):
        size = len(encode(tokenizer, " " + sentence))
        if length + size > max_tokens:
            found.append([])
            length = 0
        if size <= max_tokens:
            found[-1].append(sentence)
            length += size
    return [" ".join(sentences) for sentences in found if sentences]


def answerable(
    rows: Iterable[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, max_tokens: int
) -> list[dict[str, Any]]:
    """Give each question the window of its context that holds an answer; drop it when that is none, or more than one.

    Args:
        rows: mappings with `context`, `question` and `answers`.
        tokenizer: measures the windows.
        max_tokens: length limit of a window.
    """
    cut: dict[str, list[tuple[str, str]]] = {}
    kept = []
    for row in rows:
        context = row["context"]
        if context not in cut:
            cut[context] = [
                (window, f" {normalize_answer(window)} ") for window in windows(context, tokenizer, max_tokens)
            ]
        answers = [f" {answer} " for answer in map(normalize_answer, row["answers"]) if answer]
        holding = [window for window, normal in cut[context] if any(answer in normal for answer in answers)]
        if len(holding) == 1:
            kept.append({"context": holding[0], "question": row["question"], "answers": list(row["answers"])})
    return kept


def _rows_of_contexts(data: str, name: str, max_contexts: int) -> list[dict[str, Any]]:
    table = read_rows(DataSource(path=name, tasks=("question_answering",)), data)
    rows = table.select(["context", "question", "answers"]).to_pylist()
    contexts = list(dict.fromkeys(row["context"] for row in rows))
    kept = set(random.Random(f"{_SEED}/{name}").sample(contexts, min(max_contexts, len(contexts))))
    return [row for row in rows if row["context"] in kept]


def _texts(data: str, name: str, max_texts: int) -> list[dict[str, Any]]:
    source = DataSource(path=name, tasks=("reconstruction",), max_samples=max_texts)
    return read_rows(source, data, _SEED).select(["text"]).to_pylist()


def _is_test(row: dict[str, Any]) -> bool:
    return zlib.crc32(row["context"].encode()) % _TEST_SHARE == 0


def prepare(
    data: str | None, tokenizer: PreTrainedTokenizerBase, context_tokens: int, folder: Path
) -> tuple[list[dict[str, Any]], list[EvaluationDataset]]:
    """Write the training files to a folder, and make the test sets.

    Args:
        data: folder with the data files; `None` for generated documents alone.
        tokenizer: the base's.
        context_tokens: longest context.
        folder: where the training files go.

    Returns:
        The sources of a `CompressionDataset` with `data_dir=folder`, and the test sets. No context is in both.

    Raises:
        ValueError: a data file is missing, or none of its questions can be answered from a window.
    """
    sources: list[dict[str, Any]] = [
        {
            "generated": True,
            "tasks": ["question_answering", "question_answering", "reconstruction", "continuation"],
            "weight": 6.0,
        }
    ]
    tests = load_datasets(
        ["generated"],
        tokenizer,
        seed=_SEED,
        num_documents=GENERATED_DOCUMENTS,
        document_tokens=context_tokens,
    )
    if data is None:
        return sources, tests
    narrativeqa = _rows_of_contexts(data, "qa_narrativeqa_valid.parquet", _TRAINING_CONTEXTS)
    rows = {
        SQUAD: (
            _rows_of_contexts(data, "qa_squad_train.parquet", _TRAINING_CONTEXTS),
            _rows_of_contexts(data, "qa_squad_dev.parquet", _TEST_CONTEXTS),
        ),
        NARRATIVEQA: (
            [row for row in narrativeqa if not _is_test(row)],
            [row for row in narrativeqa if _is_test(row)],
        ),
    }
    for (name, parts), weight in zip(rows.items(), (3.0, 1.0), strict=True):
        train, test = (answerable(part, tokenizer, context_tokens) for part in parts)
        _write(train, folder / f"{name}.parquet", name)
        tasks = ["question_answering", "question_answering", "reconstruction", "continuation"]
        sources.append({"path": f"{name}.parquet", "tasks": tasks, "weight": weight})
        tests.append(EvaluationDataset(name, test))
    _write(_texts(data, "text_openstax_train.parquet", _TRAINING_CONTEXTS), folder / f"{OPENSTAX}.parquet", OPENSTAX)
    sources.append({"path": f"{OPENSTAX}.parquet", "tasks": ["reconstruction", "continuation"], "weight": 2.0})
    tests.append(EvaluationDataset(OPENSTAX, _texts(data, "text_openstax_valid.parquet", _TEST_CONTEXTS)))
    return sources, tests


def _write(rows: Sequence[dict[str, Any]], path: Path, name: str) -> None:
    if not rows:
        raise ValueError(f"no question of {name} can be answered from a window: allow more tokens for a context")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
