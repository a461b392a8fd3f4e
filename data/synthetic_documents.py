# SPDX-License-Identifier: Apache-2.0
"""Generated documents: plain-English records with questions whose answers stand in the text.

Real text needs hours of training before two compressors can be told apart; these documents need minutes. Each one
is a biography register, an inventory, a timetable or a ledger, made from a seed alone. Every value is unique inside
its document, so that a question has one answer, and names and values of the test split never occur in training.
They are a benchmark of their own, beside real text, never in its place.
"""

from __future__ import annotations

import itertools
import random
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .yaml_text import read_yaml

KINDS = ("biography", "inventory", "timetable", "ledger")
SPLITS = ("train", "test")
MIN_TOKENS, MAX_TOKENS = 32, 4096
_TEST_SHARE = 5  # one name or value in five belongs to the test split

_WORDS = {name: text.split() for name, text in read_yaml(Path(__file__).with_name("synthetic_words.yaml")).items()}


@dataclass(frozen=True)
class GeneratedQuestion:
    """A question, its one answer (which stands in the document word for word), and the number of facts it joins."""

    question: str
    answer: str
    hops: int


# The number of a record, and a fact about it.
_Fact = tuple[int, str]
_Record = tuple[dict[_Fact, str], list[tuple[list[_Fact], GeneratedQuestion]]]


@dataclass(frozen=True)
class GeneratedDocument:
    """A document and every question that it answers."""

    text: str
    questions: tuple[GeneratedQuestion, ...]
    kind: str
    split: str
    seed: int


class _Vocabulary:
    """Draws names and values of one split, each at most once in a document."""

    def __init__(self, rng: random.Random, split: str):
        self.rng = rng
        self.split = split
        self.used: set[str] = set()

    def value(self, draw: Callable[[], str]) -> str:
        """A value of this split; it may come twice in a document, so it can only be an answer."""
        while split_of(value := draw()) != self.split:
            pass
        return value

    def unique(self, draw: Callable[[], str]) -> str:
        """A value of this split that the document has not used: a question can point at it."""
        for _ in range(1000):
            value = self.value(draw)
            if value not in self.used:
                self.used.add(value)
                return value
        raise ValueError("a document of this length needs more distinct values than the generator has")

    def _syllables(self, *counts: int) -> str:
        choose = self.rng.choice
        return "".join(choose(_WORDS["onsets"]) + choose(_WORDS["vowels"]) for _ in range(choose(counts)))

    def person(self) -> str:
        """First and last name, each of this split, so that not even a part of a test name is seen in training."""
        choose = self.rng.choice
        first = self.value(lambda: (self._syllables(1, 2) + choose(_WORDS["codas"])).capitalize())
        last = self.value(
            lambda: (self._syllables(1) + choose(_WORDS["codas"]) + choose(("", "er", "en", "i"))).capitalize()
        )
        return f"{first} {last}"

    def unique_person(self) -> str:
        for _ in range(1000):
            if (person := self.person()) not in self.used:
                self.used.add(person)
                return person
        raise ValueError("a document of this length needs more distinct names than the generator has")

    def town(self) -> str:
        return self.unique(lambda: (self._syllables(1, 2) + self.rng.choice(_WORDS["town_endings"])).capitalize())

    def pet(self) -> str:
        return self.unique(lambda: (self._syllables(1) + self.rng.choice(_WORDS["codas"])).capitalize())

    def number(self, low: int, high: int) -> str:
        return self.unique(lambda: str(self.rng.randint(low, high)))

    def amount(self, low: int, high: int) -> str:
        return self.value(lambda: str(self.rng.randint(low, high)))

    def time(self) -> str:
        return self.value(lambda: f"{self.rng.randint(0, 23):02d}:{self.rng.randint(0, 59):02d}")

    def date(self) -> str:
        return self.value(lambda: f"{self.rng.randint(1, 28)} {self.rng.choice(_WORDS['months'])}")

    def word(self, words: list[str]) -> str:
        return self.value(lambda: self.rng.choice(words))

    def either(self, templates: Sequence[str]) -> str:
        return self.rng.choice(templates) if len(templates) > 1 else templates[0]


def split_of(value: str) -> str:
    """The split ("train" or "test") that a name or value belongs to, by its checksum."""
    return "test" if zlib.crc32(value.encode()) % _TEST_SHARE == 0 else "train"


class _Biographies:
    sentences = {
        "born": ("{p} was born in {town}.", "{town} is where {p} was born."),
        "year": ("{p} came into the world in {year}.",),
        "job": ("{p} works as a {job}.", "By trade {p} is a {job}."),
        "home": ("{p} lives in {home}.", "The home of {p} is in {home}."),
        "pet": ("{p} keeps a {animal} named {pet}.",),
    }
    questions = (
        (("born",), "town", ("Where was {p} born?", "In which town was {p} born?")),
        (("year",), "year", ("In which year did {p} come into the world?",)),
        (("job",), "job", ("What does {p} work as?", "What is the trade of {p}?")),
        (("home",), "home", ("Where does {p} live?", "Where is the home of {p}?")),
        (("pet",), "pet", ("What is the name of the animal that {p} keeps?",)),
        (("pet",), "p", ("Who keeps the {animal} named {pet}?",)),
        (("born", "home"), "home", ("Where does the person who was born in {town} live?",)),
        (("pet", "job"), "job", ("What is the trade of the person whose {animal} is named {pet}?",)),
    )
    # Of everybody but the first.
    mentor_sentence = "{p} learned the trade from {mentor}."
    mentor_questions = (
        (("mentor",), "mentor", ("From whom did {p} learn the trade?",)),
        (("mentor", "mentor_born"), "mentor_town", ("Where was the person born from whom {p} learned the trade?",)),
    )

    @staticmethod
    def values(draw: _Vocabulary) -> dict[str, str]:
        person, town, home, year = draw.unique_person(), draw.town(), draw.town(), draw.amount(1700, 1999)
        job, animal, pet = draw.word(_WORDS["jobs"]), draw.word(_WORDS["animals"]), draw.pet()
        return {"p": person, "town": town, "home": home, "year": year, "job": job, "animal": animal, "pet": pet}


class _Inventories:
    sentences = {
        "content": ("The {c} holds {n} {thing}.", "There are {n} {thing} in the {c}."),
        "owner": ("The {c} belongs to {owner}.", "{owner} owns the {c}."),
        "room": ("The {c} stands in room {room}.",),
    }
    questions = (
        (("content",), "n", ("How many {thing} are in the {c}?",)),
        (("content",), "thing", ("What does the {c} hold?",)),
        (("owner",), "owner", ("Who owns the {c}?", "To whom does the {c} belong?")),
        (("room",), "room", ("In which room does the {c} stand?",)),
        (("room", "content"), "n", ("How many {thing} are kept in room {room}?",)),
        (("owner", "room"), "room", ("In which room does the property of {owner} stand?",)),
    )

    @staticmethod
    def values(draw: _Vocabulary) -> dict[str, str]:
        # The number makes the container unique, colour and material make it a phrase worth compressing.
        colour, material = draw.word(_WORDS["colours"]), draw.word(_WORDS["materials"])
        container = f"{colour} {material} {draw.rng.choice(_WORDS['containers'])} {draw.number(10, 999)}"
        thing, count = draw.word(_WORDS["things"]), draw.amount(2, 9999)
        owner, room = draw.unique_person(), draw.number(100, 9999)
        return {"c": container, "thing": thing, "n": count, "owner": owner, "room": room}


class _Timetables:
    sentences = {
        "start": ("{t} leaves {a} at {leaves}.", "At {leaves}, {t} leaves {a}."),
        "end": ("{t} reaches {b} at {arrives}.", "At {arrives}, {t} reaches {b}."),
        "platform": ("{t} departs from platform {platform}.",),
        "driver": ("The driver of {t} is {driver}.", "{driver} drives {t}."),
    }
    questions = (
        (("start",), "leaves", ("When does {t} leave?",)),
        (("start",), "a", ("Which town does {t} leave?",)),
        (("end",), "b", ("Which town does {t} reach?",)),
        (("end",), "arrives", ("When does {t} arrive?",)),
        (("platform",), "platform", ("From which platform does {t} depart?",)),
        (("driver",), "driver", ("Who drives {t}?", "Who is the driver of {t}?")),
        (("platform", "start"), "leaves", ("When does the {noun} from platform {platform} leave?",)),
        (("driver", "end"), "b", ("Which town does the {noun} driven by {driver} reach?",)),
    )

    @staticmethod
    def values(draw: _Vocabulary) -> dict[str, str]:
        kind = draw.rng.choice(("Train", "Ferry", "Bus"))
        vehicle = f"{kind} {draw.number(100, 9999)}"
        start, end, leaves, arrives = draw.town(), draw.town(), draw.time(), draw.time()
        values = {"t": vehicle, "noun": kind.lower(), "a": start, "b": end, "leaves": leaves, "arrives": arrives}
        return {**values, "platform": draw.number(1, 999), "driver": draw.unique_person()}


class _Ledgers:
    sentences = {
        "amount": ("{b} paid {n} crowns for {t}.", "For {t}, {b} paid {n} crowns."),
        "seller": ("{b} bought {t} from {seller}.", "{seller} sold {t} to {b}."),
        "date": ("On {day}, {b} signed receipt {receipt}.",),
    }
    questions = (
        (("amount",), "n", ("How many crowns did {b} pay for {t}?",)),
        (("amount",), "t", ("What did {b} pay {n} crowns for?",)),
        (("seller",), "seller", ("From whom did {b} buy {t}?",)),
        (("date",), "day", ("When did {b} sign a receipt?",)),
        (("date",), "b", ("Who signed receipt {receipt}?",)),
        (("date", "amount"), "n", ("How many crowns did the signer of receipt {receipt} pay?",)),
        (("seller", "date"), "day", ("When did the person who bought from {seller} sign a receipt?",)),
    )

    @staticmethod
    def values(draw: _Vocabulary) -> dict[str, str]:
        buyer, seller, thing = draw.unique_person(), draw.unique_person(), draw.word(_WORDS["things"])
        amount, day, receipt = draw.amount(11, 9999), draw.date(), draw.number(1000, 9999)
        return {"b": buyer, "seller": seller, "t": thing, "n": amount, "day": day, "receipt": receipt}


_RECORDS: dict[str, Any] = dict(zip(KINDS, (_Biographies, _Inventories, _Timetables, _Ledgers), strict=True))


def _records(kind: str, draw: _Vocabulary) -> Iterator[_Record]:
    """Records of a kind: sentences by fact, and questions with the record and fact of each sentence that they need."""
    form, teacher = _RECORDS[kind], None
    for number in itertools.count():
        values = form.values(draw)
        sentences = {(number, fact): draw.either(forms).format(**values) for fact, forms in form.sentences.items()}
        asked = form.questions
        questions = [(needs, draw.either(forms).format(**values), values[answer]) for needs, answer, forms in asked]
        if form is _Biographies and teacher is not None:
            values |= {"mentor": teacher["p"], "mentor_town": teacher["town"]}
            sentences[number, "mentor"] = form.mentor_sentence.format(**values)
            asked = form.mentor_questions
            questions += [(needs, forms[0].format(**values), values[answer]) for needs, answer, forms in asked]
        teacher = values
        yield (
            sentences,
            [
                ([_place(number, need) for need in needs], GeneratedQuestion(question, answer, len(needs)))
                for needs, question, answer in questions
            ],
        )


def _place(number: int, fact: str) -> _Fact:
    """The record and fact that a question needs; a mentor is the person of the record before."""
    return (number - 1, "born") if fact == "mentor_born" else (number, fact)


def count_words(text: str) -> int:
    """Words and punctuation marks: the length measure where no tokenizer is given."""
    return len(re.findall(r"\w+|[^\w\s]", text))


def generate_document(
    seed: int,
    *,
    num_tokens: int = 128,
    kind: str | None = None,
    split: str = "train",
    count_tokens: Callable[[str], int] = count_words,
) -> GeneratedDocument:
    """Make one document of at most `num_tokens` tokens, with all one-hop and two-hop questions that it answers.

    Args:
        seed: the same seed and arguments give the same document, on every machine.
        num_tokens: length limit in tokens, 32 to 4,096.
        kind: "biography", "inventory", "timetable" or "ledger"; drawn from the seed when `None`.
        split: "train" or "test"; names and values of the two never meet.
        count_tokens: number of tokens of a text, e.g. `lambda text: len(tokenizer(text).input_ids)`.

    Raises:
        ValueError: a length that is not allowed, or in which no sentence fits.
    """
    if not MIN_TOKENS <= num_tokens <= MAX_TOKENS:
        raise ValueError(f"num_tokens must be {MIN_TOKENS} to {MAX_TOKENS}, got {num_tokens}")
    rng = random.Random(f"{seed}/{split}/{num_tokens}")
    drawn_kind = rng.choice(KINDS)
    kind = kind or drawn_kind

    kept: dict[_Fact, str] = {}
    questions: list[GeneratedQuestion] = []
    total, full = 0, False
    for sentences, asked in _records(kind, _Vocabulary(rng, split)):
        order = list(sentences)
        rng.shuffle(order)
        for fact in order:
            length = count_tokens(" " + sentences[fact])
            full = total + length > num_tokens
            if full:
                break
            kept[fact] = sentences[fact]
            total += length
        questions += [question for needs, question in asked if all(need in kept for need in needs)]
        if full:
            break
    if not kept:
        raise ValueError(
            f"no sentence of kind {kind!r} fits into {num_tokens} tokens; try another seed or more tokens"
        )
    rng.shuffle(questions)
    return GeneratedDocument(" ".join(kept.values()), tuple(questions), kind, split, seed)
