# SPDX-License-Identifier: Apache-2.0
"""Compression of texts to texts: a token classifier keeps the sentences that answer a question, for any reader."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    TokenClassificationPipeline,
)

# Tokens that neighbouring windows of a long text share.
_OVERLAP = 64
_WINDOWS_AT_ONCE = 16
# Words of a cut sentence that say something.
_SHORTEST_RUN = 3
# What a question's words in a sentence count beside its log odds.
_WORD_WEIGHT = 0.5
# What a sentence at the end of a text counts less than the first one where there is no question.
_LEAD_WEIGHT = 2.0
_SENTENCE_END = re.compile(
    r"(?<!\b[A-Z]\.)(?<!\b(?:Mr|Ms|Dr|St|Jr|Sr|No|vs|cf)\.)(?<!\b(?:Mrs|Gen|Col|Rev|Hon)\.)(?<!\bProf\.)"
    r"(?<=[.!?])[\"'”’)\]]*(?=\s)|(?<=[。！？])[”’」』）]*(?![。！？”’」』）])|(?=\n)"
)


class TextCompressionPipeline(TokenClassificationPipeline):
    """A pipeline of token classification that compresses texts: `pipeline("text-compression", model=...)`."""

    def compress_text(self, text: str, ratio: float = 2.0, **options: Any) -> str:
        """Return the sentences of a text with the highest scores; see [`TextCompressor.compress_text`]."""
        return TextCompressor(self.model, self.tokenizer).compress_text(text, ratio, **options)


class TextCompressor:
    """Shortens texts for any reader: each word gets a score, and the sentences with the highest stay in their order.

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
        question: str | None = None,
        max_tokens: int | None = None,
        keep: Collection[str] = (),
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> str:
        """Return the sentences of a text with the highest scores, in their order; of the last one, a run of words.

        Args:
            text: of any length.
            ratio: tokens of the text for each token that stays.
            question: keeps what answers it; without one, what questions ask for most.
            max_tokens: most tokens that stay, in place of a ratio.
            keep: "numbers" (words with a digit) and "names" (capitalized words inside a sentence) stay whatever their
                score is, even if they alone have more tokens than the ratio leaves.
            tokenizer: the reader's, which counts tokens; the classifier's own by default.
        """
        if not 1 <= ratio < math.inf:
            raise ValueError(f"ratio must be a finite number of at least 1, got {ratio}")
        words = text.split()
        if not words:
            return ""
        counter = self.tokenizer if tokenizer is None else tokenizer
        costs = [len(ids) for ids in counter([f" {word}" for word in words], add_special_tokens=False)["input_ids"]]
        budget = math.ceil(sum(costs) / ratio) if max_tokens is None else max_tokens
        scores, sentences = self.word_scores(text, question), word_sentences(text)
        values = sentence_values(scores, words, sentences, question or "")
        kept = best_sentences(values, scores, sentences, costs, budget, forced_words(words, keep))
        return " ".join(words[place] for place in kept)

    def word_scores(self, text: str, question: str | None = None) -> list[float]:
        """Return a score for each of `text.split()`: the mean log odds of its tokens that it is kept."""
        encoding = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        asked = [] if question is None else self.tokenizer(question, add_special_tokens=False)["input_ids"]
        scores = self._token_scores(encoding["input_ids"], asked)
        return pooled_scores(scores, encoding["offset_mapping"], word_spans(text)).tolist()

    @torch.inference_mode()
    def _token_scores(self, ids: Sequence[int], question_ids: Sequence[int] = ()) -> Tensor:
        """The log odds of each token: the mean over windows of one length that share tokens, all with the question."""
        longest = self.tokenizer.model_max_length
        start = opening(self.tokenizer, question_ids[: longest // 4])
        size = min(len(ids), longest - len(start) - 1)
        # The last window ends with the text, so that no window is padded.
        starts = [*range(0, len(ids) - size, max(1, size - _OVERLAP)), len(ids) - size]
        end = self.tokenizer.sep_token_id
        windows = torch.tensor([[*start, *ids[first : first + size], end] for first in starts])
        device = getattr(self.model, "device", windows.device)
        totals, counts = torch.zeros(len(ids)), torch.zeros(len(ids))
        for first, part in zip(
            range(0, len(starts), _WINDOWS_AT_ONCE), windows.to(device).split(_WINDOWS_AT_ONCE), strict=True
        ):
            output = self.model(input_ids=part, attention_mask=torch.ones_like(part))
            logits = getattr(output, "logits", output)[:, len(start) : -1].float().cpu()
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
            cast(torch.nn.Module, self.model),
            (example, torch.ones_like(example)),
            str(file),
            input_names=names,
            output_names=["logits"],
            dynamic_axes=sizes,
            dynamo=False,
        )


def opening(tokenizer: PreTrainedTokenizerBase, question_ids: Sequence[int]) -> list[int]:
    """Return the ids in front of a text: the classifier reads `[CLS] question [SEP] text [SEP]`, or no question."""
    question = [*question_ids, tokenizer.sep_token_id] if question_ids else []
    return [tokenizer.cls_token_id, *question]


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


def split_sentences(text: str) -> list[str]:
    """Return the sentences of a text, each with the spaces in front of it; joined they are the text."""
    parts, start = [], 0
    for end in [*(match.end() for match in _SENTENCE_END.finditer(text)), len(text)]:
        if text[start:end].strip():
            parts.append(text[start:end])
            start = end
    if parts:
        # Spaces behind the last sentence.
        parts[-1] += text[start:]
    return parts


def word_sentences(text: str) -> list[int]:
    """Return the number of the sentence that each of `text.split()` begins in."""
    ends = list(accumulate(map(len, split_sentences(text))))
    return [bisect_right(ends, start) for start, _ in word_spans(text)]


def plain_words(text: str) -> list[str]:
    """Return `text.split()` in lower case and without punctuation."""
    return [re.sub(r"\W", "", word.lower()) for word in text.split()]


def sentence_values(
    scores: Sequence[float], words: Sequence[str], sentences: Sequence[int], question: str
) -> dict[int, float]:
    """Return each sentence's mean score, and a share of the BM25 weights of the question's words in it.

    Without a question, early sentences have more.
    """
    words = plain_words(" ".join(words))
    words_of = {sentence: set[str]() for sentence in sentences}
    scores_of: dict[int, list[float]] = {sentence: [] for sentence in sentences}
    for sentence, word, score in zip(sentences, words, scores, strict=True):
        words_of[sentence].add(word)
        scores_of[sentence].append(score)
    counts = Counter(word for of_sentence in words_of.values() for word in of_sentence)
    asked = set(plain_words(question)) - {""}
    weights = {word: math.log(1 + (len(words_of) - counts[word] + 0.5) / (counts[word] + 0.5)) for word in asked}
    values = {}
    for sentence, own in words_of.items():
        shared = _WORD_WEIGHT * sum(weights[word] for word in asked & own)
        late = 0.0 if question else _LEAD_WEIGHT * sentences.index(sentence) / len(words)
        values[sentence] = fmean(scores_of[sentence]) + shared - late
    return values


def best_sentences(
    values: Mapping[int, float],
    scores: Sequence[float],
    sentences: Sequence[int],
    costs: Sequence[int],
    budget: int,
    forced: Collection[int] = (),
) -> list[int]:
    """Return the places of the words that stay: whole sentences by their value, and a run of the next one, if it has
    more than a word or two.

    Each word has its score, the number of its sentence and its cost in tokens; `forced` are places of words that stay
    first, and at most `budget` tokens stay.
    """
    places_of: dict[int, list[int]] = {}
    for place, sentence in enumerate(sentences):
        places_of.setdefault(sentence, []).append(place)
    kept = set(forced)
    left = budget - sum(costs[place] for place in kept)
    for sentence in sorted(values, key=lambda sentence: -values[sentence]):
        places = places_of[sentence]
        added = best_run([place for place in places if place not in kept], scores, costs, left)
        keeps_all = kept.union(added).issuperset(places)
        if keeps_all or not kept or len(added) >= _SHORTEST_RUN:
            kept.update(added)
            left -= sum(costs[place] for place in added)
        if not keeps_all:
            break
    return sorted(kept)


def best_run(places: Sequence[int], scores: Sequence[float], costs: Sequence[int], budget: int) -> Sequence[int]:
    """Return the run of places within the budget whose scores above the lowest one add up to most."""
    lowest = min((scores[place] for place in places), default=0.0)
    start, cost, worth, most, best = 0, 0, 0.0, (0.0, 0), places[:0]
    for end, place in enumerate(places, 1):
        cost += costs[place]
        worth += scores[place] - lowest
        while cost > budget and start < end:
            cost -= costs[places[start]]
            worth -= scores[places[start]] - lowest
            start += 1
        if (worth, end - start) > most:
            most, best = (worth, end - start), places[start:end]
    return best


def forced_words(words: Sequence[str], kinds: Collection[str]) -> list[int]:
    """Return the places of the words of some kinds, see `TextCompressor.compress_text`."""
    starts_sentence = [True, *(word.rstrip("\"'”’)]").endswith((".", "!", "?")) for word in words[:-1])]
    is_kind: dict[str, Callable[[str, bool], bool]] = {
        "numbers": lambda word, _: any(map(str.isdigit, word)),
        "names": lambda word, is_first: not is_first and word.lstrip("\"'“‘([")[:1].isupper() and word != "I",
    }
    pairs = zip(words, starts_sentence, strict=True)
    return [place for place, pair in enumerate(pairs) if any(is_kind[kind](*pair) for kind in kinds)]
