# SPDX-License-Identifier: Apache-2.0
"""Data and trainer of encoder-decoders: texts to denoise, questions in either place, and T5's decoder in the loss."""

from __future__ import annotations

import random
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...data.rows import draw_document
from ...data.sources import DataSource
from ...data.tokenized_rows import FileSource
from ...modeling.memory.compressed_context import CompressedContext
from ...modeling.parts.prompting import encode
from ..arguments import TrainingConfig
from .compression import CompressionTrainer
from .compression_collator import CompressionCollator
from .compression_dataset import MAX_ATTEMPTS, CompressionDataset

_TEXT_TASKS = {"reconstruction", "continuation"}
_SHORTEST_TEXT = 2


class DenoisingDataset(CompressionDataset):
    """Texts for `SpanCorruptionCollator`: `token_ids`, `id`, `num_cut`, `index`.

    A text that is shorter than `num_tokens` is followed by another one, so that every example is full, as T5 packs its
    texts; the window of each text starts at a random place.

    Args:
        sources: `DataSource` or recipe entries, whose tasks are reconstruction or continuation: plain text.
        tokenizer: makes the token ids.
        num_examples: length of the data set. `None` (not with generated documents): every row once as the first text
            of an example, those of all sources mixed; with weights as many examples as there are rows, each of a
            source that is drawn by its weight.
        num_tokens: length of a text before corruption, see `SpanCorruption.raw_length`.
        kwargs: `data_dir`, `group_size`, `batch_size` and `seed` as in `CompressionDataset`.

    Raises:
        ValueError: a source or a limit that is not allowed, or another task.
    """

    def __init__(
        self,
        sources: Sequence[DataSource | Mapping[str, Any]],
        tokenizer: PreTrainedTokenizerBase,
        num_examples: int | None = None,
        *,
        num_tokens: int,
        **kwargs: Any,
    ):
        if num_tokens < _SHORTEST_TEXT:
            raise ValueError(f"num_tokens must be at least {_SHORTEST_TEXT}, got {num_tokens}")
        entries = [entry if isinstance(entry, DataSource) else DataSource.from_mapping(entry) for entry in sources]
        for entry in entries:
            if not set(entry.tasks) <= _TEXT_TASKS:
                raise ValueError(
                    f"denoising reads plain text: the tasks of source {entry.label!r} must be among "
                    f"{sorted(_TEXT_TASKS)}, got {list(entry.tasks)}"
                )
        if unknown := sorted(set(kwargs) - {"data_dir", "group_size", "batch_size", "seed", "context_tokenizer"}):
            raise TypeError(f"DenoisingDataset has no {', '.join(unknown)}: its texts are all of one kind")
        limits = {"max_context_tokens": num_tokens, "min_context_tokens": num_tokens}
        super().__init__(entries, tokenizer, num_examples, **limits, **kwargs)

    @staticmethod
    def num_tokens(example: Mapping[str, Any]) -> int:
        """Length of an example."""
        return len(example["token_ids"])

    def _from_generated(
        self, source: DataSource, tasks: Sequence[str], limit: int, rng: random.Random
    ) -> dict[str, Any]:
        ids: list[int] = []
        while len(ids) < self.max_context_tokens:
            document = draw_document(source, self.max_context_tokens, rng, self.tokenizer)
            ids += encode(self.tokenizer, document.text)
        return self._text(ids, f"generated/{document.kind}/{document.seed}")

    def _from_file(
        self, source: FileSource, tasks: Sequence[str], position: int, turn: int, limit: int, rng: random.Random
    ) -> dict[str, Any]:
        row = first = self._row(position, source.num_rows, turn)
        texts = source.texts(tasks[0])
        ids: list[int] = []
        for _ in range(MAX_ATTEMPTS):
            text = texts[row]
            missing = self.max_context_tokens - len(ids)
            start = rng.randrange(max(1, len(text) - missing + 1))
            ids += text[start : start + missing].tolist()
            if len(ids) == self.max_context_tokens:
                break
            row = rng.randrange(source.num_rows)
        if len(ids) < _SHORTEST_TEXT:
            raise ValueError(f"source {source.source.label!r}: {MAX_ATTEMPTS} rows in a row were empty")
        return self._text(ids, source.identifier(first))

    def _text(self, ids: list[int], identifier: str) -> dict[str, Any]:
        return {"token_ids": ids[: self.max_context_tokens], "id": identifier, "num_cut": 0}


class Seq2SeqCollator(CompressionCollator):
    """`CompressionCollator` for encoder-decoders: questions go where the model's configuration places them.

    With `question_placement="encoder"` the prompt stands in front of the context in `context_input_ids`, and
    `input_ids` are the decoder's start token and the target alone.

    Args:
        question_placement: "decoder" or "encoder".
        context_end_ids: ids that a compressed context ends with, see `modeling.parts.prompting.context_end_ids`.
        kwargs: as for `CompressionCollator`; `task_start_ids` of the model's configuration name the decoder's start
            token, which in T5 is the pad, and not the tokenizer's BOS or EOS.
    """

    def __init__(
        self,
        *args: Any,
        question_placement: str = "decoder",
        context_end_ids: Sequence[int] = (),
        **kwargs: Any,
    ):
        super().__init__(*args, **{"restored_ids": (), **kwargs})
        self.question_placement, self.context_end_ids = question_placement, list(context_end_ids)

    def _encoder_context(self, example: Mapping[str, Any]) -> list[int]:
        question = example["prompt_ids"] if self.question_placement == "encoder" else []
        return [*question, *super()._encoder_context(example), *self.context_end_ids]

    def _row(self, example: Mapping[str, Any]) -> tuple[list[int], list[int]]:
        if self.question_placement == "encoder":
            if example.get("more_turns"):
                raise ValueError(
                    "a context that is compressed with its question has one question: questions_per_example must be 1"
                )
            example = {**example, "prompt_ids": []}
        return super()._row(example)


class Seq2SeqCompressionTrainer(CompressionTrainer):
    r"""`CompressionTrainer` for an encoder-decoder: the decoder reads the targets, and its cross-attention the slots.

    The log's `token_accuracy_ratio_C` over span-corrupted texts is Table 1's accuracy.

    Args:
        model: a [`DeCALForConditionalGeneration`].
        args ([`TrainingConfig`]): training arguments; `context_mode` is "compressed".
        kwargs: as for `CompressionTrainer`; batches come from `SpanCorruptionCollator` or `Seq2SeqCollator`.

    Raises:
        ValueError: another `context_mode`.
    """

    _name = "Encoder-decoder compression"
    _paper = {
        "title": "DeCAL Tokenwise Compression",
        "id": "2508.08514",
        "citation": textwrap.dedent("""\
            @misc{panwar2025decal,
                title         = {{DeCAL} Tokenwise Compression},
                author        = {Sameer Panwar},
                year          = 2025,
                eprint        = {2508.08514},
                archivePrefix = {arXiv},
            }"""),
    }

    def __init__(self, model: PreTrainedModel, args: TrainingConfig, **kwargs: Any):
        if args.context_mode != "compressed":
            raise ValueError(f"an encoder-decoder needs context_mode 'compressed', got {args.context_mode!r}")
        super().__init__(model=model, args=args, **kwargs)

    def _states(self, batch: dict[str, Tensor], memory: CompressedContext | None, prefix: str = "") -> Tensor:
        text = {name: batch[f"{prefix}{name}"] for name in ("input_ids", "attention_mask")}
        return self._unwrapped().text_states(**text, memory=memory, use_cache=False).last_hidden_state
