# SPDX-License-Identifier: Apache-2.0
"""The objective denoising: T5's span corruption through the slots (DeCAL, section 4.1)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...data.task_tokens import add_sentinel_tokens
from ..arguments import DataArguments, ModelArguments, TrainingConfig
from .compression import load, trainer_arguments
from .compression_collator import CompressionCollator
from .compression_trainer import Seq2SeqCompressionTrainer
from .packed_texts import PackedBlocks


@dataclass(frozen=True)
class SpanCorruption:
    """T5's span corruption: the share of tokens that are taken out, and the mean length of a span of them."""

    noise_density: float = 0.15
    mean_span_length: float = 3.0

    def counts(self, num_tokens: int) -> tuple[int, int]:
        """Number of noise tokens, and of spans that they fall into, in a text of at least 2 tokens."""
        noise = min(max(round(num_tokens * self.noise_density), 1), num_tokens - 1)
        # No more spans than there are gaps between them.
        spans = min(max(round(noise / self.mean_span_length), 1), num_tokens - noise)
        return noise, spans

    def lengths(self, num_tokens: int) -> tuple[int, int]:
        """Length of the encoder's input and of the target: a sentinel for each span and one EOS in both."""
        noise, spans = self.counts(num_tokens)
        return num_tokens - noise + spans + 1, noise + spans + 1

    def raw_length(self, inputs_length: int) -> int:
        """Longest text, of at least 2 tokens, whose encoder input has at most `inputs_length` tokens."""
        num_tokens = max(2, inputs_length // 2)
        while self.lengths(num_tokens + 1)[0] <= inputs_length:
            num_tokens += 1
        return num_tokens

    def noise_mask(self, num_tokens: int, rng: random.Random) -> list[bool]:
        """Draw the tokens that are taken out, in spans of random lengths behind kept ones."""
        noise, spans = self.counts(num_tokens)
        lengths = zip(_random_parts(num_tokens - noise, spans, rng), _random_parts(noise, spans, rng), strict=True)
        return [is_noise for kept, taken in lengths for is_noise in [False] * kept + [True] * taken]


def _random_parts(total: int, num_parts: int, rng: random.Random) -> list[int]:
    """Cut `total` into so many parts of at least 1, all such ways equally likely."""
    cuts = [0, *sorted(rng.sample(range(1, total), num_parts - 1)), total]
    return [after - before for before, after in itertools.pairwise(cuts)]


def corrupt(
    tokens: Sequence[int], noise_mask: Sequence[bool], sentinel_ids: Sequence[int], end_id: int
) -> tuple[list[int], list[int]]:
    """Return encoder input and target: a sentinel replaces each span of noise, and precedes it in the target."""
    inputs: list[int] = []
    targets: list[int] = []
    sentinels = iter(sentinel_ids)
    for is_noise, span in itertools.groupby(zip(tokens, noise_mask, strict=True), key=lambda pair: pair[1]):
        ids = [token for token, _ in span]
        if is_noise:
            sentinel = next(sentinels)
            inputs.append(sentinel)
            targets += [sentinel, *ids]
        else:
            inputs += ids
    return [*inputs, end_id], [*targets, end_id]


class DenoisingDataset(PackedBlocks):
    """Blocks of texts for `SpanCorruptionCollator`; `max_context_tokens` are left when spans of them are taken out."""

    ends_texts = False

    def _lengths(self) -> tuple[int, int]:
        num_tokens = SpanCorruption().raw_length(self.data.max_context_tokens)
        return num_tokens, num_tokens

    def _block_size(self) -> int:
        return self.longest


class SpanCorruptionCollator(CompressionCollator):
    """Corrupts texts of `DenoisingDataset` by index, text and seed; what is left of them is the context."""

    def __init__(self, *args: Any, sentinel_ids: Sequence[int], end_id: int, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.context_start_ids = []
        self.sentinel_ids, self.end_id = list(sentinel_ids), end_id

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return a batch; every tensor is `(batch_size, width)` of int64."""
        return super().__call__([self._corrupted(example) for example in examples])

    def _corrupted(self, example: Mapping[str, Any]) -> dict[str, Any]:
        tokens = example["token_ids"]
        rng = random.Random(f"{self.seed}/{example.get('id', '')}/{example.get('index', '')}/{tokens}")
        mask = SpanCorruption().noise_mask(len(tokens), rng)
        context, target = corrupt(tokens, mask, self.sentinel_ids, self.end_id)
        # The task only tells the token that the decoder starts with, which is the same for all.
        return {**example, "context_ids": context, "prompt_ids": [], "target_ids": target, "task": "reconstruction"}


def build(model_args: ModelArguments, data_args: DataArguments, args: TrainingConfig) -> Seq2SeqCompressionTrainer:
    """Return the trainer of a recipe; its tokenizer gets T5's sentinels."""
    model, tokenizer = load(model_args, args)
    collating = {"sentinel_ids": add_sentinel_tokens(tokenizer), "end_id": tokenizer.eos_token_id}
    recipe = (model, tokenizer, data_args, args, "compressed", DenoisingDataset, SpanCorruptionCollator)
    return Seq2SeqCompressionTrainer(**trainer_arguments(*recipe, **collating))
