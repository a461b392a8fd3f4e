# SPDX-License-Identifier: Apache-2.0
"""T5's span corruption: spans of a text become sentinels, the target says what stood there (DeCAL, section 4.1)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .compression_collator import CompressionCollator


@dataclass(frozen=True)
class SpanCorruption:
    """How much of a text is corrupted, and how long everything then is.

    Args:
        noise_density: share of the tokens that are taken out.
        mean_span_length: mean length of a span of them.

    Raises:
        ValueError: a density that is not between 0 and 1, or a length below 1.
    """

    noise_density: float = 0.15
    mean_span_length: float = 3.0

    def __post_init__(self) -> None:
        if not 0 < self.noise_density < 1:
            raise ValueError(f"noise_density must be between 0 and 1, got {self.noise_density!r}")
        if self.mean_span_length < 1:
            raise ValueError(f"mean_span_length must be at least 1, got {self.mean_span_length!r}")

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
        """Longest text whose encoder input has at most `inputs_length` tokens.

        Raises:
            ValueError: not even a text of two tokens fits.
        """
        if self.lengths(2)[0] > inputs_length:
            raise ValueError(f"inputs_length must be at least {self.lengths(2)[0]}, got {inputs_length}")
        num_tokens = max(2, inputs_length // 2)
        while self.lengths(num_tokens + 1)[0] <= inputs_length:
            num_tokens += 1
        return num_tokens

    def noise_mask(self, num_tokens: int, rng: random.Random) -> list[bool]:
        """Which tokens are taken out: spans of random lengths, kept ones and noise in turn, a kept one first."""
        noise, spans = self.counts(num_tokens)
        kept_lengths = _random_parts(num_tokens - noise, spans, rng)
        noise_lengths = _random_parts(noise, spans, rng)
        mask: list[bool] = []
        for kept, taken in zip(kept_lengths, noise_lengths, strict=True):
            mask += [False] * kept + [True] * taken
        return mask


def _random_parts(total: int, num_parts: int, rng: random.Random) -> list[int]:
    """Cut `total` into so many parts of at least 1, all such ways equally likely."""
    cuts = [0, *sorted(rng.sample(range(1, total), num_parts - 1)), total]
    return [after - before for before, after in itertools.pairwise(cuts)]


def corrupt(
    tokens: Sequence[int], noise_mask: Sequence[bool], sentinel_ids: Sequence[int], end_id: int
) -> tuple[list[int], list[int]]:
    """Encoder input and target of a corrupted text.

    Args:
        tokens: the text.
        noise_mask: which tokens are taken out, the first one not.
        sentinel_ids: the sentinels in order.
        end_id: EOS, the last token of both.

    Returns:
        The text with a sentinel for each noise span, and each sentinel with the tokens of its span.

    Raises:
        ValueError: more spans than sentinels.
    """
    inputs: list[int] = []
    targets: list[int] = []
    spans = itertools.groupby(zip(tokens, noise_mask, strict=True), key=lambda pair: bool(pair[1]))
    used = 0
    for is_noise, span in spans:
        ids = [token for token, _ in span]
        if not is_noise:
            inputs += ids
            continue
        if used == len(sentinel_ids):
            raise ValueError(f"the text has more noise spans than there are sentinels, {len(sentinel_ids)}")
        inputs.append(sentinel_ids[used])
        targets += [sentinel_ids[used], *ids]
        used += 1
    return [*inputs, end_id], [*targets, end_id]


class SpanCorruptionCollator(CompressionCollator):
    """Corrupts texts of `DenoisingDataset` and makes a compressor's batch of them.

    The corrupted text is the context, in `context_input_ids`; `input_ids` are the decoder's start token and the
    target, and `labels` the target. The noise of an example depends on its index, its text and the seed only.

    Args:
        sentinel_ids: the sentinels in order.
        end_id: EOS.
        corruption: how much is corrupted.
        kwargs: as for `CompressionCollator`; no token is put in front of a context.

    Raises:
        ValueError: see `CompressionCollator`.
    """

    def __init__(
        self,
        *args: Any,
        sentinel_ids: Sequence[int],
        end_id: int,
        corruption: SpanCorruption | None = None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self.context_start_ids = []
        self.sentinel_ids, self.end_id = list(sentinel_ids), end_id
        self.corruption = corruption or SpanCorruption()

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return a batch; every tensor is `(batch_size, width)` of int64."""
        return super().__call__([self._corrupted(example) for example in examples])

    def _corrupted(self, example: Mapping[str, Any]) -> dict[str, Any]:
        tokens = example["token_ids"]
        rng = random.Random(f"{self.seed}/{example.get('id', '')}/{example.get('index', '')}/{tokens}")
        mask = self.corruption.noise_mask(len(tokens), rng)
        context, target = corrupt(tokens, mask, self.sentinel_ids, self.end_id)
        # The task only tells the token that the decoder starts with, which is the same for all.
        return {**example, "context_ids": context, "prompt_ids": [], "target_ids": target, "task": "reconstruction"}
