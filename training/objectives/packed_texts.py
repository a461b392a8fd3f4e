# SPDX-License-Identifier: Apache-2.0
"""Examples from one stream of texts, without pads."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from ...data.prompts import format_prompt
from ...data.rows import draw_document
from ...data.sources import DataSource
from ...modeling.parts.text_ids import encode
from ..fields import DataArguments
from .compression_dataset import CompressionDataset


class _Text(NamedTuple):
    """A whole text: its name, its ids as a document (none of a generated one), its tokens and EOS."""

    name: str
    documents: list[str]
    ids: list[int]


class PackedTexts(CompressionDataset):
    """Contexts of `max_context_tokens` from a stream of texts, each with the `max_target_tokens` that follow it.

    The texts of a source stand one behind the other, in another order in each round, with EOS behind each that is not
    cut from a longer one. Batches have no pads (ComprExIT, appendix A.2). Texts are tokenized in order: a run that is
    resumed reads once through those that it has behind it.
    """

    tasks = frozenset({"continuation"})
    # Whether EOS stands behind each text.
    ends_texts = True

    def __init__(
        self, data: DataArguments, tokenizer: PreTrainedTokenizerBase, num_examples: int | None = None, **kwargs: Any
    ):
        if num_examples is None:
            raise ValueError("packed texts have no rows of their own to count: give max_steps")
        # Of each source: the text (counted over all its rounds) and the place in it that an example starts at.
        self._starts: dict[int, list[tuple[int, int]]] = {}
        self._open: tuple[tuple[int, int] | None, _Text] = (None, _Text("", [], []))
        super().__init__(data, tokenizer, num_examples, **kwargs)

    def _example_at(self, index: int) -> dict[str, Any]:
        ids, texts = self._block(int(self.source_of[index]), int(self.turn_of[index]))
        names = " + ".join(text.name for text in texts)
        documents = [name for text in texts for name in text.documents]
        return {**self._example_of(ids, names), "index": index, "documents": documents}

    def _example_of(self, ids: list[int], name: str) -> dict[str, Any]:
        """The example of a block of the stream."""
        context, target = ids[: self.longest], ids[self.longest :]
        prompt = format_prompt("continuation", "", path=self.data.prompts)
        return self._finish("continuation", context, [(prompt, target, False)], self.longest, name)

    def _block_size(self) -> int:
        """Tokens of a block."""
        return self.data.max_context_tokens + self.data.max_target_tokens

    def _block(self, position: int, number: int) -> tuple[list[int], list[_Text]]:
        """The tokens of a source's example, and the texts that they are of."""
        starts = self._starts.setdefault(position, [(0, 0)])
        block = None
        while len(starts) < number + 2:
            block, end = self._read(position, *starts[-1])
            starts.append(end)
        return block or self._read(position, *starts[number])[0]

    def _read(self, position: int, turn: int, offset: int) -> tuple[tuple[list[int], list[_Text]], tuple[int, int]]:
        """Tokens of one example and their texts from a place of a stream on, and the place behind them."""
        size = self._block_size()
        ids: list[int] = []
        texts = []
        while len(ids) < size:
            text = self._text(position, turn)
            taken = text.ids[offset : offset + size - len(ids)]
            ids, offset = ids + taken, offset + len(taken)
            if taken:
                texts.append(text)
            if offset == len(text.ids):
                turn, offset = turn + 1, 0
        return (ids, texts), (turn, offset)

    def _text(self, position: int, turn: int) -> _Text:
        """A source's text, with EOS behind it; nothing of a blank one."""
        if self._open[0] != (position, turn):
            source = self.sources[position]
            if isinstance(source, DataSource):
                rng = random.Random(f"{self.seed}/{position}/{turn}")
                document = draw_document(source, self.longest, rng, self.tokenizer)
                ids = encode(self.tokenizer, document.text) + [self.end] * self.ends_texts
                text = _Text(f"generated/{document.kind}/{document.seed}", [], ids)
            else:
                row = self._row(position, source.num_rows, turn)
                ids = source.texts("continuation")[source.text_of("continuation", row)].tolist()
                ids += [self.end] * (bool(ids) and self.ends_texts and source.ends("continuation", row))
                text = _Text(source.identifier(row), source.document_ids("continuation", row), ids)
            self._open = ((position, turn), text)
        return self._open[1]


class PackedBlocks(PackedTexts):
    """Blocks of a stream of texts as they are: `token_ids`, `id`, `num_cut`, `index`, `documents`."""

    def _example_of(self, ids: list[int], name: str) -> dict[str, Any]:
        return {"token_ids": ids, "id": name, "num_cut": 0}

    @staticmethod
    def num_tokens(example: Mapping[str, Any]) -> int:
        """Return the length of an example."""
        return len(example["token_ids"])
