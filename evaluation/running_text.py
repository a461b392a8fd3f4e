# SPDX-License-Identifier: Apache-2.0
"""Sentences hidden in running text of a given length."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from transformers import PreTrainedTokenizerBase

from ..modeling.parts.text_ids import encode
from .alternatives import split_sentences


def hidden_in_text(
    hidden: Sequence[str],
    avoided: Sequence[str],
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    num_tokens: int,
    rng: random.Random,
) -> tuple[str, list[str]]:
    """Running text with sentences in it, each at a place of its own, drawn uniformly between two others.

    Args:
        hidden: the sentences.
        avoided: words that no other sentence may have.
        texts: running text; sentences follow one another, and go on in the next text.
        tokenizer: measures the length.
        num_tokens: of all together; no more, and less by some tokens at most.
        rng: draws places and the start of the text.

    Returns:
        The text, and those of `texts` that it is taken from.

    Raises:
        ValueError: the texts have fewer tokens, or the hidden sentences more.
    """
    room = num_tokens - sum(len(encode(tokenizer, " " + sentence)) for sentence in hidden)
    if room < 1:
        raise ValueError(f"a context of {num_tokens} tokens has no room for {hidden[0]!r} and text around it")
    depths, start = [rng.random() for _ in hidden], rng.random()
    while True:
        sentences, ends, taken = _running_text(avoided, texts, tokenizer, room, start)
        parts, last = [], 0
        for depth, sentence in sorted(zip(depths, hidden, strict=True)):
            place = min(range(len(ends)), key=lambda index: abs(ends[index] - depth * room))
            parts += ["".join(sentences[last:place]).strip(), sentence]
            last = place
        context = " ".join(filter(None, [*parts, "".join(sentences[last:]).strip()]))
        # Joined, the parts may have a token more.
        surplus = len(encode(tokenizer, context)) - num_tokens
        if surplus <= 0:
            return context, [texts[index] for index in sorted(taken)]
        room -= surplus


def _running_text(
    avoided: Sequence[str], texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, num_tokens: int, start: float
) -> tuple[list[str], list[int], set[int]]:
    """Sentences of so many tokens, the last one cut, the tokens before each place where another could stand, and the
    texts that they are from.
    """
    sentences: list[str] = []
    ends, taken = [0], set()
    for index, sentence in _sentences_from(texts, start):
        if any(words in sentence for words in avoided):
            continue
        taken.add(index)
        ids = encode(tokenizer, sentence)
        left = num_tokens - ends[-1]
        if len(ids) >= left:
            return [*sentences, tokenizer.decode(ids[:left])], ends, taken
        sentences.append(sentence)
        ends.append(ends[-1] + len(ids))
    raise ValueError(f"the texts have {ends[-1]} tokens, and a context of running text takes {num_tokens}")


def _sentences_from(texts: Sequence[str], start: float) -> Iterator[tuple[int, str]]:
    """All sentences, each behind its text's number, from one on that `start` (0 to 1) of all letters stand before."""
    place, index = start * sum(map(len, texts)), 0
    while index < len(texts) - 1 and place >= len(texts[index]):
        place -= len(texts[index])
        index += 1
    # Behind the last text comes the first one, and at the very end what stands before the start.
    for turn in range(len(texts) + 1):
        letters, text = 0, (index + turn) % len(texts)
        for number, sentence in enumerate(split_sentences(texts[text])):
            letters += len(sentence)
            if (turn == 0 and letters < place) or (turn == len(texts) and letters >= place):
                continue
            yield text, "\n\n" + sentence.lstrip() if turn and number == 0 else sentence
