# SPDX-License-Identifier: Apache-2.0
"""What the page asks of a model: answers as they are written, and what the slots of a document are made of."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList, TextIteratorStreamer

from ..evaluation.slot_origins import slot_origins
from ..modeling.compressor.context_compression_qa import ContextCompressionQAPipeline
from ..modeling.memory.compressed_context import CompressedContext
from ..modeling.memory.key_value_memory import cache_bytes
from ..modeling.parts.cache_name import CACHE
from ..modeling.parts.prompting import decoder_document_ids, full_context_ids, question_ids
from ..modeling.parts.text_ids import text_tokenizer

MAX_NEW_TOKENS = 64
_QUESTION_TOKENS = 256
# A chat template and what separates its parts.
_TEMPLATE_TOKENS = 64
# Longer texts are refused before they are tokenized.
_CHARACTERS_PER_TOKEN = 32
_TOKENS_OF_A_SLOT = 48


@dataclass(frozen=True)
class Answer:
    """An answer as far as it is written, and what it cost.

    Args:
        num_places: tokens or slots that stand for the document in the language model's context.
        num_bytes: what is kept of the document between questions: its tokens' keys and values, or its slots.
        read_seconds: time to read the document.
        text: the answer.
        answer_seconds: time since then.
        is_done: whether this is all of it.
    """

    num_places: int
    num_bytes: int
    read_seconds: float
    text: str = ""
    answer_seconds: float = 0.0
    is_done: bool = False


@dataclass(frozen=True)
class Inside:
    """What the slots of a document are made of.

    Args:
        pieces: the text of each token that was compressed.
        kind: see `SlotOrigins`; `None` where a method has no such weights.
        slots: of each slot its tokens and their weights, see `SlotOrigins.strongest`.
    """

    pieces: Sequence[str]
    kind: str | None
    slots: Sequence[Sequence[tuple[int, float]]]


class _Stop(StoppingCriteria):
    def __init__(self, event: threading.Event):
        self.event = event

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), self.event.is_set(), device=input_ids.device)


class PageModel:
    """Answers questions about documents, from their text and from slots."""

    def __init__(self, pipe: ContextCompressionQAPipeline, max_tokens: int):
        config = pipe.model.config
        if config.is_encoder_decoder:
            raise ValueError(
                f"the page compares slots with the full text, which the decoder of a {type(pipe.model).__name__} does "
                "not read: give a compressor of a decoder-only language model"
            )
        pipe.check_serves_memories("and the page asks memories: give another one")
        self.pipe = pipe
        self.model: Any = pipe.model
        self._tokenizer = text_tokenizer(pipe.tokenizer)
        positions = config.max_position_embeddings or 2**40
        self.max_tokens = max(1, min(max_tokens, positions - _QUESTION_TOKENS - _TEMPLATE_TOKENS - MAX_NEW_TOKENS))

    @property
    def ratios(self) -> list[int]:
        """Those of the checkpoint, ascending."""
        return sorted(self.model.config.compression_ratios)

    def num_tokens(self, document: str) -> int:
        """Tokens of a document; of one that is far too long an estimate, which is too low."""
        if len(document) > _CHARACTERS_PER_TOKEN * self.max_tokens:
            return len(document) // _CHARACTERS_PER_TOKEN
        return len(self._own_ids(document))

    def check(self, document: str, question: str) -> None:
        """Raise `ValueError` with a sentence for the user unless a question about a document can be asked."""
        if not document.strip():
            raise ValueError("There is no document: paste a text, load a file or choose an example.")
        if (number := self.num_tokens(document)) > self.max_tokens:
            raise ValueError(
                f"The document is too long: it has {number:,} tokens or more, and this page takes {self.max_tokens:,}."
            )
        if not question.strip():
            raise ValueError("There is no question: write one, or choose one of the example's.")
        if len(question) > _CHARACTERS_PER_TOKEN * _QUESTION_TOKENS or (
            len(self._tokenizer(question, add_special_tokens=False).input_ids) > _QUESTION_TOKENS
        ):
            raise ValueError(f"The question is too long: it may have {_QUESTION_TOKENS} tokens.")

    def compress(self, document: str, ratio: int) -> tuple[CompressedContext, Answer]:
        """The memory of a document, and what it costs."""
        start = time.perf_counter()
        # A single ratio gives a single memory.
        memory: CompressedContext = self.pipe.compress(document, ratio=ratio)  # type: ignore[assignment]
        return memory, Answer(int(memory.num_slots[0]), memory.nbytes, time.perf_counter() - start)

    def from_slots(self, memory: CompressedContext, cost: Answer, question: str) -> Generator[Answer, None, None]:
        """An answer from a memory; arguments as `compress` returns them."""
        ids = question_ids(self.model.config, self._tokenizer, question)
        yield from self._written(cost, ids, memory=memory)

    def from_text(self, document: str, question: str) -> Generator[Answer, None, None]:
        """An answer of the checkpoint's own decoder, which has the whole text in front of the question."""
        text = decoder_document_ids(self.model.config, self._tokenizer, document)
        ids = full_context_ids(self.model.config, self._tokenizer, text, question)
        first = next(start for start in range(len(ids)) if ids[start : start + len(text)] == text)
        start = time.perf_counter()
        with torch.no_grad():
            row = torch.tensor([ids[: min(first + len(text), len(ids) - 1)]], device=self.pipe.device)
            cache = self.model(input_ids=row, use_cache=True, logits_to_keep=1)[CACHE]
        num_bytes = cache_bytes(cache)
        cost = Answer(len(text), num_bytes, time.perf_counter() - start)
        yield from self._written(cost, ids, cache=cache)

    def inside(self, document: str, memory: CompressedContext) -> Inside:
        """What the slots of a document are made of; `memory` as `compress` gave it."""
        ids = self._own_ids(document)
        pieces = _pieces(self.model.encoder_tokenizer or self._tokenizer, ids, document)
        # One ratio for the whole memory.
        origins = slot_origins(self.model, ids, int(memory.ratio))
        if origins is None:
            return Inside(pieces, None, [])
        return Inside(pieces, origins.kind, origins.strongest(_TOKENS_OF_A_SLOT))

    def _own_ids(self, document: str) -> list[int]:
        """As the encoder reads it."""
        return self.pipe.document_ids(document)[0]

    def _written(self, cost: Answer, ids: Sequence[int], **inputs: Any) -> Generator[Answer, None, None]:
        """An answer behind token ids, piece by piece; nobody waits for what is no longer asked for."""
        row = torch.tensor([list(ids)], device=self.pipe.device)
        streamer = TextIteratorStreamer(self.pipe.tokenizer, skip_prompt=True, skip_special_tokens=True)
        gone = threading.Event()

        def write() -> None:
            try:
                self.model.generate(
                    input_ids=row,
                    attention_mask=torch.ones_like(row),
                    max_new_tokens=MAX_NEW_TOKENS,
                    do_sample=False,
                    pad_token_id=self.pipe.tokenizer.eos_token_id,
                    stopping_criteria=StoppingCriteriaList([_Stop(gone)]),
                    streamer=streamer,
                    **inputs,
                )
            finally:
                # A failure would otherwise leave the reader waiting.
                streamer.end()

        start, text = time.perf_counter(), ""
        with ThreadPoolExecutor(1) as thread:
            writing = thread.submit(write)
            try:
                for piece in streamer:
                    text += piece
                    yield replace(cost, text=text.strip(), answer_seconds=time.perf_counter() - start)
            finally:
                gone.set()
            writing.result()
        yield replace(cost, text=text.strip(), answer_seconds=time.perf_counter() - start, is_done=True)


def _pieces(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], text: str) -> list[str]:
    """The text of each token, in front those of `ids` that open it; a character of several tokens is that of one."""
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    ends = [0, *accumulate((end for _, end in offsets), max)]
    opening = ids[: max(0, len(ids) - len(offsets))]
    return [*(tokenizer.decode([token]) for token in opening), *(text[start:end] for start, end in pairwise(ends))]
