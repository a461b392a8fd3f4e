# SPDX-License-Identifier: Apache-2.0
"""The questions of the comparison, the same for all systems, and the steps that its budget of tokens comes to."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from transformers import PreTrainedTokenizerBase

from context_compressors.evaluation.samples import EvaluationDataset, SampleBuilder
from context_compressors.evaluation.settings import EvaluationSettings
from context_compressors.modeling.parts.text_ids import encode
from context_compressors.training.arguments import parse_recipe
from context_compressors.training.objectives.compression_dataset import CompressionDataset

_SEED = 0
# Of a step.
_GUESSED_TOKENS = 1200
# Windows of a text that is to be restored.
_WINDOW = 256


def write_sets(
    table: Mapping[str, Any], data: Path, tokenizer: PreTrainedTokenizerBase, folder: Path, limit: int | None = None
) -> None:
    """Write each set's rows as Parquet, for `evaluate`, and its questions as JSONL, for peers.

    Args:
        table: `systems.yaml`.
        data: folder with the data files.
        tokenizer: the base's, which counts tokens.
        folder: where the files go.
        limit: most questions of a set, to try things out.

    Raises:
        ValueError: a set has fewer questions than are wanted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, entry in table["sets"].items():
        wanted = entry["questions"] if limit is None else min(limit, entry["questions"])
        rows = _rows(entry, table["context_tokens"], data, tokenizer, wanted)
        if len({_document(row) for row in rows if entry["task"] == "summarization"} or rows) < wanted:
            raise ValueError(f"{name} has {len(rows)} questions about contexts of its length, and {wanted} are wanted")
        samples = _samples(name, entry["task"], rows, tokenizer, table["max_new_tokens"])
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{name}.parquet")
        lines = [json.dumps({"set": name, "task": entry["task"], **sample}) for sample in samples]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _document(row: Mapping[str, Any]) -> str:
    return row.get("context") or row["text"]


def _rows(
    entry: Mapping[str, Any], tokens: Sequence[int], data: Path, tokenizer: PreTrainedTokenizerBase, wanted: int
) -> list[dict[str, Any]]:
    """Rows of a set, drawn by its file's name; of a summary all rows of a dialogue that is drawn."""
    low, high = entry.get("tokens", tokens)
    rows = pyarrow.parquet.read_table(data / entry["path"]).to_pylist()
    if entry["task"] == "reconstruction":
        rows = [window for row in rows for window in _windows(row, tokenizer)]
    else:
        texts = list(dict.fromkeys(map(_document, rows)))
        lengths = {text: len(encode(tokenizer, text)) for text in texts}
        rows = [row for row in rows if low <= lengths[_document(row)] <= high]
    units: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        units.setdefault(_document(row) if entry["task"] == "summarization" else row["id"], []).append(row)
    # Shuffled, so that the first ones, which are timed, are a fair sample.
    order = random.Random(f"{_SEED}/{entry['path']}").sample(sorted(units), min(wanted, len(units)))
    return [row for unit in order for row in units[unit]]


def _windows(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    ids = encode(tokenizer, row["text"])
    starts = range(0, len(ids) - _WINDOW + 1, _WINDOW)
    texts = [tokenizer.decode(ids[start : start + _WINDOW]) for start in starts]
    # A window's document is what stands in front of the last #; by its text it is known where it was trained.
    return [
        {"id": f"{row['id']}#{number}", "text": text, "source_texts": [row["text"]]}
        for number, text in enumerate(texts)
    ]


def _samples(
    name: str,
    task: str,
    rows: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    max_new_tokens: Mapping[str, int],
) -> list[dict[str, Any]]:
    """The questions as token ids, in the order of the rows."""
    settings = EvaluationSettings(
        max_new_tokens=max_new_tokens, context_tokens=_WINDOW, prompts="chat", prompt_format="chat", seed=_SEED
    )
    builder = SampleBuilder(tokenizer, settings)
    return [
        {
            "id": sample.id,
            "question": sample.question,
            "references": sample.references,
            "context": tokenizer.decode(sample.context_ids),
            "head_ids": sample.head_ids,
            "context_ids": sample.context_ids,
            "prompt_ids": sample.prompt_ids,
            "eos_token_id": tokenizer.eos_token_id,
            "max_new_tokens": max_new_tokens[task],
        }
        for sample in builder.build(EvaluationDataset(name, list(rows)), task)
    ]


def training_examples(
    recipe: Sequence[str], data: Path, tokenizer: PreTrainedTokenizerBase, steps: int
) -> CompressionDataset:
    """Return the examples that a recipe trains on in so many steps of the optimizer, in their order."""
    _, of_data, args = parse_recipe([*recipe, "--output_dir", "unused", "--data_dir", str(data), "--use_cpu", "true"])
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps
    return CompressionDataset(
        of_data, tokenizer, steps * batch, seed=args.seed, batch_size=args.per_device_train_batch_size
    )


def counted(steps: int, recipe: Sequence[str], data: Path, tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Count the examples of a run, and their tokens of contexts and texts."""
    examples = training_examples(recipe, data, tokenizer, steps)
    tokens = sum(examples.num_tokens(examples[index]) for index in range(len(examples)))
    return {"steps": steps, "tokens": tokens, "examples": len(examples)}


def steps_for(tokens: int, recipe: Sequence[str], data: Path, tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return `counted` of a run that reads about so many tokens.

    The length of texts grows with the share of the run that is done, so that the number is found by counting twice.
    """
    first = counted(max(1, tokens // _GUESSED_TOKENS), recipe, data, tokenizer)
    return counted(max(1, round(tokens * first["steps"] / first["tokens"])), recipe, data, tokenizer)
