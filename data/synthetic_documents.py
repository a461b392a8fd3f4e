# SPDX-License-Identifier: Apache-2.0
"""Generated documents: registers, inventories, timetables and ledgers with questions that have one answer each.

Compressors differ on them after minutes of training. The splits share no name and no value.
"""

from __future__ import annotations

import itertools
import random
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .yaml_text import read_yaml

KINDS = ("biography", "inventory", "timetable", "ledger")
SPLITS = ("train", "test")
MIN_TOKENS, MAX_TOKENS = 32, 4096
_TEST_SHARE = 5  # one name or value in five belongs to the test split

_WORDS = {name: text.split() for name, text in read_yaml(Path(__file__).with_name("synthetic_words.yaml")).items()}
_ENDINGS = {**_WORDS, "person_endings": ["", "er", "en", "i"]}
_RECORDS: dict[str, Any] = read_yaml(Path(__file__).with_name("synthetic_records.yaml"))


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
        self.rng, self.split = rng, split
        self.used: set[str] = set()

    def record(self, draws: Mapping[str, Sequence[Any]]) -> dict[str, str]:
        """The values of a record: by name, how each is drawn."""
        choose, values = self.rng.choice, dict[str, str]()
        kinds: dict[str, Callable[..., str]] = {
            "unique_person": lambda: self.unique(self.person),
            "town": lambda: self.unique(lambda: self.value(self.name((1, 2), "town_endings"))),
            "pet": lambda: self.unique(lambda: self.value(self.name((1,), "codas"))),
            "number": lambda low, high: self.unique(lambda: self.value(lambda: str(self.rng.randint(low, high)))),
            "amount": lambda low, high: self.value(lambda: str(self.rng.randint(low, high))),
            "time": lambda: self.value(lambda: f"{self.rng.randint(0, 23):02d}:{self.rng.randint(0, 59):02d}"),
            "date": lambda: self.value(lambda: f"{self.rng.randint(1, 28)} {choose(_WORDS['months'])}"),
            "word": lambda words: self.value(lambda: choose(_WORDS[words])),
            "choice": lambda words: choose(_WORDS[words]),
            "text": lambda text: text.format(**values),
            "sentence_start": lambda text: text.format(**values).capitalize(),
        }
        for name, (kind, *arguments) in draws.items():
            values[name] = kinds[kind](*arguments)
        return values

    def value(self, draw: Callable[[], str]) -> str:
        """A value of this split; it may come twice in a document, so it can only be an answer."""
        while split_of(value := draw()) != self.split:
            pass
        return value

    def unique(self, draw: Callable[[], str]) -> str:
        """A value that the document has not used: a question can point at it."""
        for _ in range(1000):
            if (value := draw()) not in self.used:
                self.used.add(value)
                return value
        raise ValueError("a document of this length needs more distinct values than the generator has")

    def name(self, counts: Sequence[int], *endings: str) -> Callable[[], str]:
        """A draw of a name: syllables, and an ending of each list."""
        choose = self.rng.choice

        def draw() -> str:
            syllables = [choose(_WORDS["onsets"]) + choose(_WORDS["vowels"]) for _ in range(choose(counts))]
            return "".join([*syllables, *(choose(_ENDINGS[ending]) for ending in endings)]).capitalize()

        return draw

    def person(self) -> str:
        """First and last name, each of this split, so that not even a part of a test name is seen in training."""
        first = self.value(self.name((1, 2), "codas"))
        return f"{first} {self.value(self.name((1,), 'codas', 'person_endings'))}"


def split_of(value: str) -> str:
    """The split ("train" or "test") that a name or value belongs to, by its checksum."""
    return "test" if zlib.crc32(value.encode()) % _TEST_SHARE == 0 else "train"


def _records(kind: str, draw: _Vocabulary) -> Iterator[_Record]:
    """Records of a kind: sentences by fact, and questions with the record and fact of each sentence that they need."""
    form, teacher = _RECORDS[kind], None

    def either(texts: Sequence[str]) -> str:
        return draw.rng.choice(texts) if len(texts) > 1 else texts[0]

    for number in itertools.count():
        values = draw.record(form["draws"])
        sentences = {(number, fact): either(texts).format(**values) for fact, texts in form["sentences"].items()}
        asked = form["questions"]
        questions = [(needs, either(texts).format(**values), values[answer]) for needs, answer, texts in asked]
        if kind == "biography" and teacher is not None:
            values |= {"mentor": teacher["p"], "mentor_town": teacher["town"]}
            sentences[number, "mentor"] = form["mentor_sentence"].format(**values)
            asked = form["mentor_questions"]
            questions += [(needs, texts[0].format(**values), values[answer]) for needs, answer, texts in asked]
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
        raise ValueError(f"no sentence of kind {kind!r} fits into {num_tokens} tokens: take more")
    rng.shuffle(questions)
    return GeneratedDocument(" ".join(kept.values()), tuple(questions), kind, split, seed)
