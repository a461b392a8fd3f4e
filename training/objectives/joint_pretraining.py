# SPDX-License-Identifier: Apache-2.0
"""Examples of joint pretraining: the first half of a document is compressed, repeated, and continued with the rest."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from ...data.sources import DataSource
from ...data.synthetic_documents import MAX_TOKENS, generate_document
from ...data.tokenized_rows import FileSource
from ...modeling.parts.prompting import context_start_ids, encode
from .compression_dataset import MAX_ATTEMPTS, CompressionDataset

_TASKS = {"reconstruction", "continuation"}
# More tokens than a generated sentence has: a document so much longer is long enough after its last whole sentence.
_SPARE_TOKENS = 128


class JointDataset(CompressionDataset):
    """Examples for `CompressionCollator(mode="joint")`: `context_ids`, `reconstruction_ids`, `continuation_ids`, `id`.

    A document X is a window of |X| tokens of a text. Its first p = floor(|X| / 2) tokens are the context, the rest is
    the completion (EPL, section 3.1.1 and Appendix C). Both texts, the context once more and the completion, end with
    EOS. The tokens that every compressed context starts with, such as BOS, count in |X| and p, so that the encoder
    reads exactly p tokens; the collator puts them there, and in front of a reconstruction behind [AE].

    Args:
        sources: `DataSource` or recipe entries, each with the tasks reconstruction and continuation.
        tokenizer: makes the token ids.
        num_examples: length of the data set. `None` (not with generated documents): every row once, those of all
            sources mixed; with weights as many examples as there are rows, each of a source that is drawn by its
            weight.
        data_dir: folder that the sources' paths are relative to.
        min_document_tokens: shortest document; shorter texts are passed over.
        max_document_tokens: longest document; |X| is uniform between the two, as far as the text goes.
        length_schedule: (fraction of the examples, longest document) pairs, linear in between.
        group_size, batch_size: as in `CompressionDataset`.
        seed: everything is drawn from it.
        context_tokenizer: as in `CompressionDataset`.

    Raises:
        ValueError: a source or a limit that is not allowed, or another task.
    """

    def __init__(
        self,
        sources: Sequence[DataSource | Mapping[str, Any]],
        tokenizer: PreTrainedTokenizerBase,
        num_examples: int | None = None,
        *,
        data_dir: str | None = None,
        min_document_tokens: int = 510,
        max_document_tokens: int = 2040,
        length_schedule: Sequence[Sequence[float]] | None = None,
        group_size: int = 1,
        batch_size: int = 1,
        seed: int = 0,
        context_tokenizer: PreTrainedTokenizerBase | None = None,
    ):
        self.start_ids = context_start_ids(tokenizer)
        shortest = 2 * (len(self.start_ids) + 1)
        if not shortest <= min_document_tokens <= max_document_tokens:
            raise ValueError(
                f"min_document_tokens must be {shortest} to max_document_tokens ({max_document_tokens}), "
                f"got {min_document_tokens}"
            )
        entries = [entry if isinstance(entry, DataSource) else DataSource.from_mapping(entry) for entry in sources]
        for entry in entries:
            if set(entry.tasks) != _TASKS:
                raise ValueError(
                    f"joint pretraining does {sorted(_TASKS)} on every document: these must be the tasks of source "
                    f"{entry.label!r}, got {list(entry.tasks)}"
                )
            if entry.generated and max_document_tokens > MAX_TOKENS - _SPARE_TOKENS:
                raise ValueError(
                    f"max_document_tokens must be at most {MAX_TOKENS - _SPARE_TOKENS} with generated documents, "
                    f"got {max_document_tokens}"
                )
        super().__init__(
            entries,
            tokenizer,
            num_examples,
            data_dir=data_dir,
            max_context_tokens=max_document_tokens,
            min_context_tokens=min_document_tokens,
            length_schedule=length_schedule,
            group_size=group_size,
            batch_size=batch_size,
            seed=seed,
            context_tokenizer=context_tokenizer,
        )

    @staticmethod
    def num_tokens(example: Mapping[str, Any]) -> int:
        """Length of an example: context and both texts together."""
        return sum(len(example[f"{name}_ids"]) for name in ("context", "reconstruction", "continuation"))

    def _from_generated(
        self, source: DataSource, tasks: Sequence[str], limit: int, rng: random.Random
    ) -> dict[str, Any]:
        length = rng.randint(self.min_context_tokens, max(self.min_context_tokens, limit))
        for _ in range(MAX_ATTEMPTS):
            document = generate_document(
                rng.randrange(10**9),
                num_tokens=length + _SPARE_TOKENS,
                kind=source.kind,
                split=source.split,
                facts_per_record=source.facts_per_record,
                count_tokens=lambda text: len(encode(self.tokenizer, text)),
            )
            ids = encode(self.tokenizer, document.text)
            if len(ids) + len(self.start_ids) >= length:
                break
        else:
            raise ValueError(f"{MAX_ATTEMPTS} generated documents in a row were shorter than {length} tokens")
        return self._split(ids, length, f"generated/{document.kind}/{document.seed}", rng)

    def _from_file(
        self, source: FileSource, tasks: Sequence[str], position: int, turn: int, limit: int, rng: random.Random
    ) -> dict[str, Any]:
        row, texts = self._row(position, source.num_rows, turn), source.texts(tasks[0])
        for _ in range(MAX_ATTEMPTS):
            ids = texts[row]
            available = len(ids) + len(self.start_ids)
            if available >= self.min_context_tokens:
                break
            row = rng.randrange(source.num_rows)
        else:
            raise ValueError(
                f"source {source.source.label!r}: {MAX_ATTEMPTS} rows in a row were shorter than "
                f"{self.min_context_tokens} tokens (min_document_tokens)"
            )
        longest = max(self.min_context_tokens, min(limit, available))
        length = rng.randint(self.min_context_tokens, longest)
        return self._split(ids.tolist(), length, source.identifier(row), rng)

    def _split(self, ids: list[int], length: int, identifier: str, rng: random.Random) -> dict[str, Any]:
        """A document of `length` tokens from a random place of a text, cut in the middle."""
        num_text = length - len(self.start_ids)
        first = rng.randrange(len(ids) - num_text + 1)
        text = ids[first : first + num_text]
        split = length // 2 - len(self.start_ids)
        return {
            "context_ids": text[:split],
            "reconstruction_ids": [*text[:split], self.end],
            "continuation_ids": [*text[split:], self.end],
            "id": identifier,
            "num_cut": 0,
        }
