# SPDX-License-Identifier: Apache-2.0
"""Scoring of encoder-decoders: nothing of a context is read in words, and a question may be compressed with it."""

from collections.abc import Sequence
from typing import Any

from ..modeling.parts.text_ids import context_end_ids, context_start_ids
from .samples import Sample
from .scoring import Condition, Scorer


class Seq2SeqScorer(Scorer):
    """[`Scorer`] of a compressor that is an encoder-decoder.

    No context is a memory of no tokens, or of the question alone where the configuration places it in the encoder.
    """

    def _context_key(self, sample: Sample) -> Any:
        in_encoder = self.compressor.config.question_placement == "encoder"
        return super()._context_key(sample), tuple(sample.prompt_ids) if in_encoder else ()

    def _compress(self, batch: Sequence[Sample]) -> dict[int | str | None, Any]:
        in_encoder = self.compressor.config.question_placement == "encoder"
        questions = [sample.prompt_ids if in_encoder else [] for sample in batch]
        start, end = context_start_ids(self.tokenizer), context_end_ids(self.tokenizer)
        # A question stands in front of a whole context.
        passages = [
            [sample.context_ids] if in_encoder else sample.passages or [sample.context_ids] for sample in batch
        ]
        apart = [[[*start, *ids, *end] for ids in row] for row in passages]
        contexts = [
            [*question, *(token for ids in row for token in ids)]
            for question, row in zip(questions, apart, strict=True)
        ]
        given: dict[str, Any] = {}
        if any(len(row) > 1 for row in apart):
            given["chunk_lengths"] = [[len(ids) for ids in row] for row in apart]
        ratios = [condition.ratio for condition in self.conditions if condition.ratio is not None]
        memories: list[Any] = []
        if ratios:
            memories = self.compressor.compress(
                *self._pad(contexts, self.compressor.device),
                ratio=ratios,
                allow_untrained_ratio=self.allow_untrained_ratio,
                **given,
            )
        without_context = self.compressor.compress(*self._pad(questions, self.compressor.device))
        return {None: without_context, **dict(zip(ratios, memories, strict=True))}

    def _prompt(self, condition: Condition, task: str, sample: Sample) -> list[int]:
        in_encoder = self.compressor.config.question_placement == "encoder"
        return [self.task_start_ids[task], *([] if in_encoder else sample.prompt_ids)]
