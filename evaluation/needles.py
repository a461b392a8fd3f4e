# SPDX-License-Identifier: Apache-2.0
"""One fact in running text, asked for at several lengths of text: what a memory still knows of a single sentence.

The facts are about towns and people that are nowhere else: names of towns and last names are made up, and belong to
the test split of `data.synthetic_documents`, so that no generated training document says them.
"""

# ruff: noqa: SIM905 (word lists read better as text)

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..data.synthetic_documents import split_of
from ..modeling.parts.text_ids import encode
from .alternatives import split_sentences

NEEDLES = "needles"
KINDS = ("numbers", "names", "dates")

_TOWNS = (
    "Barocombe Belegrove Beleport Calafield Calagate Coringbourne Delawick Dunerstead Eldenwick Eldihaven Eldthorpe "
    "Farenhurst Fengate Feniminster Harworth Kelaby Kelehurst Kelenton Kendale Kenelleigh Lorenthorpe Marenstoke "
    "Moreford Moromere Ormeldale Ormelridge Pelfield Pelgate Quenelmere Quenimouth Radiby Radiridge Silingdale "
    "Tamahurst Tamenmere Torergrove Valiby Weningwick Winerby Yaromere"
).split()
_FIRST_NAMES = (
    "Agnes Alma Arthur Basil Clara Cora Edgar Edith Elsie Ernest Felix Fergus Flora Gilbert Greta Harold Hazel Hector "
    "Hilda Hugo Ida Irene Ivor Lionel Mabel Martha Miles Nora Oscar Owen Ralph Rosa Ruth Sidney Silas Stella Una Vera "
    "Walter Winifred"
).split()
_LAST_NAMES = (
    "Beloaster Bramelkin Brennell Calakirk Daringric Daroshaw Dunercroft Farafell Fenefell Fenerook Garenbury "
    "Garerwell Glenelquist Halestone Holisman Kelelwell Lorestone Loringfell Loroquist Maringwald Marisric Melogard "
    "Morisbright Quenandick Quenomore Seliden Silingrook Tamemore Tamewell Torelshaw Toriscroft Verenbury Verequist "
    "Weninglow Windyke Winwell Yarowright"
).split()
_MONTHS = "January February March April May June July August September October November December".split()
# Sentence and question, with {t} for the town and {v} for the answer.
_FACTS = {
    "numbers": (
        ("The bell of the church in {t} weighs {v} kilograms.", "How many kilograms does the bell in {t} weigh?"),
        ("The mill of {t} ground {v} sacks of flour that year.", "How many sacks of flour did the mill of {t} grind?"),
        ("The library of {t} owns {v} books.", "How many books does the library of {t} own?"),
        ("The key to the archive of {t} lies in box {v}.", "In which box does the key to the archive of {t} lie?"),
        ("The new roof of the school in {t} cost {v} pounds.", "How many pounds did the new roof in {t} cost?"),
    ),
    "names": (
        ("The lighthouse at {t} is kept by {v}.", "Who keeps the lighthouse at {t}?"),
        ("The mayor of {t} is {v}.", "Who is the mayor of {t}?"),
        ("The bridge at {t} was designed by {v}.", "Who designed the bridge at {t}?"),
        ("The only pharmacy in {t} belongs to {v}.", "To whom does the only pharmacy in {t} belong?"),
        ("The choir of {t} is led by {v}.", "Who leads the choir of {t}?"),
    ),
    "dates": (
        ("The market hall of {t} was opened on {v}.", "When was the market hall of {t} opened?"),
        ("The first train reached {t} on {v}.", "When did the first train reach {t}?"),
        ("The old town hall of {t} burned down on {v}.", "When did the old town hall of {t} burn down?"),
        ("The peace of {t} was signed on {v}.", "When was the peace of {t} signed?"),
        ("The observatory at {t} was finished on {v}.", "When was the observatory at {t} finished?"),
    ),
}


@dataclass(frozen=True)
class Needle:
    """A sentence with one fact, and the question that asks for it."""

    kind: str
    town: str
    sentence: str
    question: str
    answers: tuple[str, ...]


def draw_needle(kind: str, rng: random.Random) -> Needle:
    """Draw a fact."""
    sentence, question = rng.choice(_FACTS[kind])
    town = rng.choice(_TOWNS)
    if kind == "numbers":
        number = rng.randrange(1000, 100_000)
        while split_of(str(number)) != "test":
            number = rng.randrange(1000, 100_000)
        answers: tuple[str, ...] = (str(number),)
    elif kind == "names":
        answers = (f"{rng.choice(_FIRST_NAMES)} {rng.choice(_LAST_NAMES)}",)
    else:
        day, month, year = rng.randint(1, 28), rng.choice(_MONTHS), rng.randint(1801, 1999)
        answers = (f"{day} {month} {year}", f"{month} {day}, {year}")
    return Needle(kind, town, sentence.format(t=town, v=answers[0]), question.format(t=town), answers)


def needle_examples(
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    num_tokens: int,
    num_needles: int,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Contexts of running text with one needle each, at a place drawn uniformly between two sentences.

    A context has at most `num_tokens` tokens, of sentences that follow one another and go on in the next text. The
    kinds of needles take turns, and the same needles are hidden at every length.

    Returns:
        Rows with `id` (kind and number), `context`, `question`, `answers` and `source_texts`, those of `texts` that
        the context is taken from.
    """
    examples = []
    for number in range(num_needles):
        needle = draw_needle(KINDS[number % len(KINDS)], random.Random(f"{seed}/needle/{number}"))
        rng = random.Random(f"{seed}/{num_tokens}/{number}")
        context, sources = hidden_in_text(
            [needle.sentence], [needle.town, *needle.answers], texts, tokenizer, num_tokens, rng
        )
        row = {"id": f"{needle.kind}/{number}", "context": context, "question": needle.question}
        examples.append({**row, "answers": list(needle.answers), "source_texts": sources})
    return examples


def hidden_in_text(
    hidden: Sequence[str],
    avoided: Sequence[str],
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    num_tokens: int,
    rng: random.Random,
) -> tuple[str, list[str]]:
    """Running text with sentences in it, each at a place of its own, drawn uniformly between two others."""
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
