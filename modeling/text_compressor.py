# SPDX-License-Identifier: Apache-2.0
"""Compression of texts to texts: a token classifier keeps the words that any reader needs most."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForTokenClassification, AutoTokenizer, PreTrainedTokenizerBase

# Tokens that neighbouring windows of a long text share.
_OVERLAP = 64
_WINDOWS_AT_ONCE = 16
# Prices of a token lie between the greatest standardized scores; the last bisection tells a thousandth.
_STEEPEST, _BISECTIONS = 20.0, 16


class TextCompressor:
    """Shortens texts for any reader: each word gets a score, and the words with the highest stay in their order.

    Args:
        model: a token classifier with the labels drop and keep, or a function from `input_ids` and `attention_mask`,
            both `(batch_size, num_tokens)`, to its logits.
        tokenizer: the classifier's.
    """

    def __init__(self, model: Callable[..., Any], tokenizer: PreTrainedTokenizerBase):
        self.model, self.tokenizer = model, tokenizer

    @classmethod
    def from_pretrained(cls, name: str | Path, onnx_file: str | Path | None = None, **options: Any) -> TextCompressor:
        """Load a checkpoint such as `checkpoints/minilm-keep-drop`.

        Args:
            name: folder or Hub id.
            onnx_file: of `export_onnx`; `onnxruntime` runs it in place of the checkpoint's weights.
            options: for `AutoModelForTokenClassification.from_pretrained`, such as `revision`.
        """
        tokenizer = AutoTokenizer.from_pretrained(name)
        if onnx_file is None:
            options = {"dtype": torch.float32, **options}
            return cls(AutoModelForTokenClassification.from_pretrained(name, **options).eval(), tokenizer)
        from onnxruntime import InferenceSession

        session = InferenceSession(str(onnx_file))

        def logits(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            inputs = {"input_ids": input_ids.numpy(), "attention_mask": attention_mask.numpy()}
            return torch.from_numpy(session.run(["logits"], inputs)[0])

        return cls(logits, tokenizer)

    def compress_text(
        self,
        text: str,
        ratio: float = 2.0,
        *,
        max_tokens: int | None = None,
        keep: Collection[str] = (),
        gap_cost: float = 2.0,
        gap_mark: str = "...",
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> str:
        """Return the words of a text that are worth most together, in their order, with a mark for each gap.

        Args:
            text: of any length.
            ratio: tokens of the text for each token that stays.
            max_tokens: most tokens that stay, in place of a ratio.
            keep: "numbers" (words with a digit) and "names" (capitalized words inside a sentence) stay whatever their
                score is, even if they alone have more tokens than the ratio leaves.
            gap_cost: what each run of words behind a gap costs, in standard deviations of a word's score: readers,
                small ones above all, understand long runs better. 0 keeps the words of the highest scores.
            gap_mark: stands in place of the words of a gap in front of a run; "" for nothing. Its tokens count.
            tokenizer: the reader's, which counts tokens; the classifier's own by default.
        """
        if not 1 <= ratio < math.inf:
            raise ValueError(f"ratio must be a finite number of at least 1, got {ratio}")
        words = text.split()
        if not words:
            return ""
        counter = self.tokenizer if tokenizer is None else tokenizer
        texts = [f" {word}" for word in (gap_mark, *words)]
        mark, *costs = map(len, counter(texts, add_special_tokens=False)["input_ids"])
        mark *= bool(gap_mark)
        budget = math.ceil(sum(costs) / ratio) if max_tokens is None else max_tokens
        scores = self.word_scores(text)
        kept = best_runs(scores, costs, budget, gap_cost, mark, forced_words(words, keep))
        left = budget - sum(costs[place] for place in kept) - mark * len(_gaps(kept))
        kept = extended_runs(kept, scores, costs, left)
        gaps = _gaps(kept) if mark else ()
        return " ".join(f"{gap_mark} {words[place]}" if place in gaps else words[place] for place in kept)

    def word_scores(self, text: str) -> list[float]:
        """Return a score for each of `text.split()`: the mean log odds of its tokens, standardized within the text."""
        encoding = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        scores = self._token_scores(encoding["input_ids"])
        return standardized(pooled_scores(scores, encoding["offset_mapping"], word_spans(text))).tolist()

    @torch.inference_mode()
    def _token_scores(self, ids: Sequence[int]) -> Tensor:
        """The log odds of each token, the mean over windows of one length that share tokens."""
        start, end = self.tokenizer.cls_token_id, self.tokenizer.sep_token_id
        size = min(len(ids), self.tokenizer.model_max_length - 2)
        # The last window ends with the text, so that no window is padded.
        starts = [*range(0, len(ids) - size, max(1, size - _OVERLAP)), len(ids) - size]
        windows = torch.tensor([[start, *ids[first : first + size], end] for first in starts])
        device = getattr(self.model, "device", windows.device)
        totals, counts = torch.zeros(len(ids)), torch.zeros(len(ids))
        for first, part in zip(
            range(0, len(starts), _WINDOWS_AT_ONCE), windows.to(device).split(_WINDOWS_AT_ONCE), strict=True
        ):
            output = self.model(input_ids=part, attention_mask=torch.ones_like(part))
            logits = getattr(output, "logits", output)[:, 1:-1].float().cpu()
            for place, odds in zip(starts[first:], logits[..., 1] - logits[..., 0], strict=False):
                totals[place : place + size] += odds
                counts[place : place + size] += 1
        return totals / counts

    def export_onnx(self, file: str | Path) -> None:
        """Write the classifier as an ONNX model with `input_ids` and `attention_mask` of any sizes."""
        example = torch.tensor([self.tokenizer("one text")["input_ids"]])
        names = ["input_ids", "attention_mask"]
        sizes = {name: {0: "batch_size", 1: "num_tokens"} for name in [*names, "logits"]}
        torch.onnx.export(
            _Logits(self.model).eval(),
            (example, torch.ones_like(example)),
            str(file),
            input_names=names,
            output_names=["logits"],
            dynamic_axes=sizes,
            dynamo=False,
        )


class _Logits(torch.nn.Module):
    """A classifier that returns its logits alone."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask).logits


def word_spans(text: str) -> list[tuple[int, int]]:
    """Return where each of `text.split()` begins and ends."""
    return [match.span() for match in re.finditer(r"\S+", text)]


def word_places(offsets: Sequence[Sequence[int]], spans: Sequence[tuple[int, int]]) -> Tensor:
    """Return the word that each token ends in, `(num_tokens,)`."""
    ends = torch.tensor([end for _, end in spans])
    return torch.bucketize(torch.tensor([end for _, end in offsets]), ends).clamp(max=len(spans) - 1)


def pooled_scores(scores: Tensor, offsets: Sequence[Sequence[int]], spans: Sequence[tuple[int, int]]) -> Tensor:
    """Return each word's mean score of its tokens, `(num_words,)`; words without a token have the lowest of all."""
    lowest = scores.min().repeat(len(spans))
    return lowest.scatter_reduce(0, word_places(offsets, spans), scores, "mean", include_self=False)


def standardized(scores: Tensor) -> Tensor:
    """Return scores less their mean, in their standard deviations."""
    return (scores - scores.mean()) / scores.std(correction=0).clamp(min=1e-6)


def best_runs(
    scores: Sequence[float],
    costs: Sequence[int],
    budget: int,
    gap_cost: float,
    gap_tokens: int = 0,
    forced: Collection[int] = (),
) -> list[int]:
    """Return the places of the words whose scores, less a cost for each run behind a gap, add up to most.

    The words keep to the budget by a price of each token, which is found by bisection. At a price the best words are
    those of a path through two states, kept and dropped (Viterbi).
    """
    if sum(costs) <= budget:
        return list(range(len(scores)))
    low, high = -_STEEPEST, _STEEPEST
    kept = sorted(forced)
    for _ in range(_BISECTIONS):
        price = (low + high) / 2
        worth = [score - price * cost for score, cost in zip(scores, costs, strict=True)]
        for place in forced:
            worth[place] = math.inf
        found = _best_path(worth, gap_cost + price * gap_tokens)
        if sum(costs[place] for place in found) + gap_tokens * len(_gaps(found)) <= budget:
            kept, high = found, price
        else:
            low = price
    return kept


def extended_runs(kept: Sequence[int], scores: Sequence[float], costs: Sequence[int], left: int) -> list[int]:
    """Return `kept` and the neighbours of its words with the highest scores that take at most `left` more tokens."""
    places = set(kept)
    while True:
        near = {place + step for place in places for step in (-1, 1)} - places if places else {0}
        fitting = [place for place in near if 0 <= place < len(scores) and costs[place] <= left]
        if not fitting:
            return sorted(places)
        best = max(fitting, key=scores.__getitem__)
        places.add(best)
        left -= costs[best]


def _gaps(places: Sequence[int]) -> set[int]:
    """Places of the first words behind gaps."""
    return set(places) - {0, *(place + 1 for place in places)}


def _best_path(worth: Sequence[float], gap_cost: float) -> list[int]:
    """Places of the words that are worth most, where a run behind a gap costs `gap_cost`; infinite ones are kept."""
    dropped, kept = 0.0, -math.inf
    came_from_kept: list[tuple[bool, bool]] = []
    for place, value in enumerate(worth):
        is_forced, opened = value == math.inf, dropped - (gap_cost if place else 0.0)
        came_from_kept.append((kept > dropped, kept >= opened))
        best = max(kept, opened) + (0.0 if is_forced else value)
        dropped, kept = -math.inf if is_forced else max(dropped, kept), best
    is_kept, places = kept > dropped, []
    for place in reversed(range(len(worth))):
        if is_kept:
            places.append(place)
        is_kept = came_from_kept[place][is_kept]
    return places[::-1]


def forced_words(words: Sequence[str], kinds: Collection[str]) -> list[int]:
    """Return the places of the words of some kinds, see `TextCompressor.compress_text`."""
    starts_sentence = [True, *(word.rstrip("\"'”’)]").endswith((".", "!", "?")) for word in words[:-1])]
    is_kind: dict[str, Callable[[str, bool], bool]] = {
        "numbers": lambda word, _: any(map(str.isdigit, word)),
        "names": lambda word, is_first: not is_first and word.lstrip("\"'“‘([")[:1].isupper() and word != "I",
    }
    pairs = zip(words, starts_sentence, strict=True)
    return [place for place, pair in enumerate(pairs) if any(is_kind[kind](*pair) for kind in kinds)]
